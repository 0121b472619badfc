"""Games of sessions: users who open a stream, pause it and leave, and how long each waits for a chunk at worst."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.league.games import GameLost, GameOutcome, Steps, worker_seconds
from ctxflow.league.lower_bounds import Clock
from ctxflow.league.public_workloads import campus_steps, fits, flash, poisson, spot_nodes
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.experiments import quantile
from ctxflow.simulator.pools import MixedTimes

ENDLESS = 10**9
"""Chunks that a session's user wants: whatever comes."""
WARM = 90.0
"""Seconds after which sessions are measured that open: before, others have every worker load the model."""
END = 1200.0
CHUNK = {"fast": 0.1336, "slow": 0.2}
"""Seconds that each session adds to a step. Of the fast ones, TurboServe's: 668 ms with 5 (Table 9)."""
TARGET = 1.0
STATE_BYTES = 1_000_000_000
CARRY = 0.024
"""Seconds of a migration of a state of 1 GB (TurboServe's Table 4 has 23 to 30 ms)."""


@dataclasses.dataclass(frozen=True)
class UserSession:
    """What a user does: the stretches of time in which chunks are wanted, the first from the session's opening on."""

    stretches: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """For how long chunks are wanted."""
        return sum(end - begin for begin, end in self.stretches)


@dataclasses.dataclass(frozen=True)
class SessionDraw:
    """What a seed draws: the users, and when how many workers of each tier can be had."""

    users: Sequence[UserSession]
    workers: Mapping[str, Sequence[tuple[float, int]]]


def _user(chance: random.Random, begin: float, mean: float, pauses: bool) -> UserSession:
    end = min(END, begin + max(20.0, chance.expovariate(1 / mean)))
    stretches, time = [], begin
    while pauses and end - time > 60.0:
        on, off = chance.expovariate(1 / 120.0) + 10.0, chance.expovariate(1 / 60.0) + 5.0
        if time + on + off + 10.0 > end:
            break
        stretches.append((time, time + on))
        time += on + off
    return UserSession((*stretches, (time, end)))


def _always(fast: int, slow: int) -> dict[str, Sequence[tuple[float, int]]]:
    return {"fast": [(0.0, fast)], "slow": [(0.0, slow)]}


def steady_users(seed: int) -> SessionDraw:
    """Draw users who come at random times, stay some minutes, and pause, on ten workers of two speeds."""
    chance = random.Random(f"steady-users/{seed}")
    rate, mean = chance.uniform(0.05, 0.1), chance.uniform(240.0, 480.0)
    come = poisson(chance, rate, WARM, END - 60.0)
    return SessionDraw([_user(chance, time, mean, pauses=True) for time in come], _always(5, 5))


def flash_users(seed: int) -> SessionDraw:
    """Draw users who come four to eight times as often for some minutes, as many as the workers can bear."""
    chance = random.Random(f"flash-users/{seed}")
    rate, times = chance.uniform(0.02, 0.04), chance.uniform(4.0, 8.0)
    come = flash(chance, rate, times, chance.uniform(400.0, 600.0), chance.uniform(180.0, 300.0), END - 60.0)
    users = [_user(chance, time, 300.0, pauses=False) for time in come if time > WARM]
    return SessionDraw(users, _always(6, 4))


def campus_users(seed: int) -> SessionDraw:
    """Draw users on workers that their owners take back now and then, as a campus cluster's ten times as fast."""
    chance = random.Random(f"campus-users/{seed}")
    steps = campus_steps(chance, chance.uniform(22.0, 26.0) % 24, wave=0.2)
    workers = {
        tier: [(time / 10, max(2, min(8, count))) for time, count in steps[name]]
        for tier, name in (("fast", "a10"), ("slow", "titan"))
    }
    come = poisson(chance, chance.uniform(0.03, 0.06), WARM, END - 60.0)
    return SessionDraw([_user(chance, time, 400.0, pauses=True) for time in come], workers)


def spot_users(seed: int) -> SessionDraw:
    """Draw users on four fast workers that stay and on a spot market's slow nodes, ten times as fast as it was."""
    chance = random.Random(f"spot-users/{seed}")
    zone = fits()["spot"]["16-node_us-east-2b"]
    nodes = [(time / 10, min(8, count)) for time, count in spot_nodes(chance, zone, 10 * END)]
    come = poisson(chance, chance.uniform(0.03, 0.05), WARM, END - 60.0)
    users = [_user(chance, time, 400.0, pauses=False) for time in come]
    return SessionDraw(users, {"fast": [(0.0, 4)], "slow": nodes})


class Pauses:
    """A listener that measures how long each session waits for its next chunk while it wants one."""

    def __init__(self, users: Sequence[UserSession]) -> None:
        self._users = users
        self._since: dict[int, float] = {}
        self.longest = [0.0] * len(users)
        self.all: list[float] = []

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """See an event."""
        if isinstance(event, (ev.SessionOpened, ev.SessionResumed)) and event.session < len(self._users):
            self._since[event.session] = event.time
        for command in commands:
            if type(command) is cmd.DeliverChunk and command.session in self._since:
                self._note(command.session, event.time)
        if isinstance(event, (ev.SessionSuspended, ev.SessionClosed)) and event.session in self._since:
            self._note(event.session, event.time)
            del self._since[event.session]

    def _note(self, session: int, time: float) -> None:
        pause = time - self._since[session]
        self._since[session] = time
        self.longest[session] = max(self.longest[session], pause)
        self.all.append(pause)


@dataclasses.dataclass(frozen=True)
class SessionArena:
    """Users and workers on which a session policy decides."""

    drawn: SessionDraw
    seed: int

    def play(self, choice: Any, steps: int) -> GameOutcome:
        """Let a policy decide."""
        machines = _machines(self.drawn.workers)
        kinds: dict[tuple[str, str | None], GpuTimes] = {
            (tier, tier): GpuTimes({"": seconds}, 0.0, Drawn(0.02)) for tier, seconds in CHUNK.items()
        }
        loads: dict[tuple[str, str | None], Drawn] = {(tier, tier): Drawn(20.0) for tier in CHUNK}
        times = MixedTimes({"talk": kinds}, {"model": loads}, {tier: Drawn(10.0) for tier in CHUNK})
        engine = SimulatedEngine(machines, times, seed=self.seed, state_bytes=STATE_BYTES, carry_seconds=CARRY)
        app = ev.AppSpec("talk", "talk", "model", batch=False, sessions=True, keep_every=8, chunk_target=TARGET)
        pauses = Pauses(self.drawn.users)
        simulation = Simulation(
            engine,
            Policies.chosen({"sessions": choice}),
            Workload([ev.ContextSpec("model", "model", gpus=1)], [app], []),
            [ev.TierSpec(tier, 0, _most(each), gpus=1, price=1.0) for tier, each in self.drawn.workers.items()],
            seed=self.seed,
            listener=Steps(steps, [pauses]),
            others=_events(self.drawn.users, warming=3 * len(machines)),
        )
        outcome = simulation.run(END)
        if not pauses.all:
            raise GameLost("no session got a chunk")
        there = worker_seconds(outcome.presence, END)
        beside = {
            "pause_p99_s": quantile(pauses.all, 0.99),
            "pause_longest_s": max(pauses.all),
            "chunks": float(len(pauses.all)),
            "moves": float(simulation.scheduler.state.counters.migrations),
            "worker_hours": sum(there.values()) / 3600,
        }
        return GameOutcome(sum(pauses.longest) / len(pauses.longest), self.bound(), beside)

    def bound(self) -> float:
        """Return what the mean of users' longest waits is at least.

        A user who wants chunks for a seconds in m stretches and gets n of them waits for a / (n + m) seconds once at
        least. All get no more chunks than all workers make that do nothing else; and by Cauchy and Schwarz the sum of
        these is least where chunks are in proportion to the roots of a.
        """
        users = self.drawn.users
        changes = [
            (time, (count - before) / CHUNK[tier])
            for tier, steps in self.drawn.workers.items()
            for (_, before), (time, count) in zip([(0.0, 0), *steps], steps, strict=False)
        ]
        rates = [(0.0, 0.0)]
        for time, change in sorted(changes):
            rates.append((time, max(0.0, rates[-1][1] + change)))
        chunks = Clock(rates).work(WARM, END) + sum(len(user.stretches) for user in users)
        return sum(math.sqrt(user.seconds) for user in users) ** 2 / chunks / len(users)


def _most(steps: Sequence[tuple[float, int]]) -> int:
    return max(count for _, count in steps)


def _machines(workers: Mapping[str, Sequence[tuple[float, int]]]) -> list[SimulatedMachine]:
    return [
        machine
        for tier, steps in workers.items()
        for machine in pools.with_counts(
            [SimulatedMachine(f"{tier}-{n}", tier, tier, gpus=1) for n in range(_most(steps))], steps
        )
    ]


def _events(users: Sequence[UserSession], warming: int) -> list[ev.Event]:
    """Return what users do, and sessions of nobody before them, for which workers load the model."""
    events: list[ev.Event] = []
    for number in range(len(users), len(users) + warming):
        events += [ev.SessionOpened(WARM - 60.0, number, "talk", ENDLESS), ev.SessionClosed(WARM - 5.0, number)]
    for number, user in enumerate(users):
        begin, end = user.stretches[0][0], user.stretches[-1][1]
        events.append(ev.SessionOpened(begin, number, "talk", ENDLESS))
        for (_, until), (since, _) in zip(user.stretches, user.stretches[1:], strict=False):
            events += [ev.SessionSuspended(until, number), ev.SessionResumed(since, number)]
        events.append(ev.SessionClosed(end, number))
    return sorted(events, key=lambda event: event.time)


SESSION_DRAWS: tuple[Callable[[int], SessionDraw], ...] = (steady_users, flash_users, campus_users, spot_users)


def session_arena(draw: Callable[[int], SessionDraw], seed: int) -> SessionArena:
    """Return the game of a seed."""
    return SessionArena(draw(seed), seed)
