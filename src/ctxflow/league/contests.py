"""The league's contests: for each family what is measured, and on which workloads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import UsageError, closest
from ctxflow.league import public_workloads as drawn
from ctxflow.league.games import Arena, Measure, ScenarioArena, cost, mean_response, time_per_answer
from ctxflow.league.place_games import PLACE_DRAWS, place_arena
from ctxflow.league.session_games import SESSION_DRAWS, session_arena
from ctxflow.simulator.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class LeagueWorkload:
    """A workload of a contest.

    :ivar about: what it is like and what it is fitted to, a sentence.
    :ivar arena: what a seed draws of it.
    """

    name: str
    about: str
    arena: Callable[[int], Arena]


@dataclasses.dataclass(frozen=True)
class Contest:
    """A family's contest.

    :ivar measure: what is measured, of which less is better, and what the bound is, in words.
    :ivar unit: of the measure.
    :ivar beside: the figures that are shown beside it: the keys of `GameOutcome.beside`.
    """

    family: str
    measure: str
    unit: str
    beside: Sequence[str]
    workloads: Sequence[LeagueWorkload]

    def workload(self, name: str) -> LeagueWorkload:
        """Return the workload of a name; a UsageError if there is none."""
        for each in self.workloads:
            if each.name == name:
                return each
        names = [each.name for each in self.workloads]
        near = closest(name, names)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise UsageError(f"{self.family} has no workload {name!r}{hint}: choose from {', '.join(names)}")


def _workload(
    family: str,
    draw: Callable[[int], Scenario],
    measure: Measure,
    others: Mapping[str, Any],
    name: str = "",
    hours: float = 48.0,
    complete: bool = True,
) -> LeagueWorkload:
    def arena(seed: int) -> Arena:
        return ScenarioArena(draw(seed), seed, family, measure, others, hours, complete)

    return LeagueWorkload(name or _name(draw), _about(draw), arena)


def _name(draw: Any) -> str:
    return str(draw.__name__).replace("_", "-")


def _about(draw: Any) -> str:
    """Return what a workload is like: what its generator's docstring says that it draws."""
    function = draw.func if isinstance(draw, functools.partial) else draw
    about = " ".join(str(function.__doc__).split()).removeprefix("Draw ")
    return about[:1].upper() + about[1:]


_BATCHES = {"batching": {"policy": "fixed", "size": 16}}
_STREAMS: tuple[tuple[Callable[[int], Scenario], float, float], ...] = (
    (drawn.azure_code, 30.0, 4.0),
    (drawn.flash_crowd, 30.0, 4.0),
    (drawn.many_models, 120.0, 4.0),
    (drawn.campus_day, 1800.0, 48.0),
    (drawn.spot_market, 600.0, 24.0),
)
"""Workloads over time, with the seconds of waiting that cost as much as the mean item's work, and the hours of virtual
time after which a game is lost."""

_POOLED = "all workers as one that is never idle and serves the shortest first"
_COST = (
    "dollars for workers and for waiting, where an item that waits as long as its workload's patience (half a minute "
    "to half an hour) costs as much as the mean item's work on the cheapest workers; the bound: all work on the "
    f"cheapest workers, and the waiting that {_POOLED} would leave"
)


def _routing() -> Contest:
    return Contest(
        "routing",
        f"the mean time from an item's arrival to its answer; the bound: {_POOLED}, or each item alone",
        "s",
        ("response_p99_s", "makespan_s", "loads", "dollars"),
        [_workload("routing", draw, mean_response, _BATCHES, hours=hours) for draw, _, hours in _STREAMS],
    )


def _batching() -> Contest:
    jobs = (
        drawn.spot_job, drawn.campus_job, drawn.drained_job, drawn.owners_return, drawn.few_long_items,
        drawn.azure_in_flight,
    )  # fmt: skip
    return Contest(
        "batching",
        "the time of a job for each item; the bound: all workers, never idle, whenever they can be had",
        "s",
        ("makespan_s", "lost_share", "loads", "duplicates"),
        [_workload("batching", draw, time_per_answer, {}) for draw in jobs],
    )


def _costs(family: str, others: Mapping[str, Any]) -> Contest:
    return Contest(
        family,
        _COST,
        "$",
        ("dollars", "response_mean_s", "response_p99_s", "worker_hours"),
        [
            _workload(family, draw, cost(patience), {**_BATCHES, **others}, hours=hours)
            for draw, patience, hours in _STREAMS
        ],
    )


def _health() -> Contest:
    kinds = ("black-hole", "slow", "flaky-gpu", "no-builds")
    return Contest(
        "health",
        "the time of a job for each item that was answered (one that is given up is not); the bound: all workers, bad "
        "or not, at full speed and never idle",
        "s",
        ("makespan_s", "given_up", "lost_share", "loads"),
        [
            _workload("health", functools.partial(drawn.bad_hosts, kind=kind), time_per_answer, _BATCHES, kind,
                   complete=False)
            for kind in kinds
        ],
    )  # fmt: skip


def _own(draws: Sequence[Callable[[int], Any]], arena: Callable[[Any, int], Arena]) -> list[LeagueWorkload]:
    return [LeagueWorkload(_name(draw), _about(draw), functools.partial(arena, draw)) for draw in draws]


def _preemption() -> Contest:
    return Contest(
        "preemption",
        "GPU-hours: those in which GPUs did nothing useful (idle, loading, kept free, work that was lost), and those "
        "for which urgent bursts of work waited, times the GPUs that they need; the bound: each GPU's first load, and "
        "each context's bursts on a worker that is always there, shortest first",
        "GPU-h",
        ("burst_mean_s", "unserved", "useful_share", "lost_hours"),
        _own(PLACE_DRAWS, place_arena),
    )


def _sessions() -> Contest:
    return Contest(
        "sessions",
        "how long a user waits for a chunk at worst, the mean over all users, on the same workers; the bound: all "
        "workers make chunks all the time, dealt out among the users in the best way",
        "s",
        ("pause_p99_s", "pause_longest_s", "chunks", "moves"),
        _own(SESSION_DRAWS, session_arena),
    )


def contests() -> Iterator[Contest]:
    """Yield the contests of all families."""
    yield _routing()
    yield _batching()
    yield _costs("placement", {"scaling": "queue-proportional"})
    yield _costs("scaling", {})
    yield _preemption()
    yield _sessions()
    yield _health()


def contest_of(family: str) -> Contest:
    """Return a family's contest; a UsageError if there is none."""
    for each in contests():
        if each.family == family:
            return each
    names = ", ".join(each.family for each in contests())
    raise UsageError(f"there is no family {family!r}: choose one of {names}")
