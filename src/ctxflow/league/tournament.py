"""All games of a contest, each in a process of its own, on all cores: what a policy does there, it does to no other."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ctxflow.errors import UsageError
from ctxflow.league.contests import Contest, contest_of
from ctxflow.league.games import STEPS, GameLost, GameOutcome
from ctxflow.policies import registry
from ctxflow.simulator.scenario import parse_sweep

SECONDS = 120
"""Of processor time that a game may take: many times what any of ctxflow's own policies does."""
PATIENCE = 10
"""How many times as long it may take on the clock."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A policy that plays; `choice`: as in a site file, or `FILE.py:CLASS` in place of a name."""

    name: str
    choice: Any


@dataclasses.dataclass(frozen=True)
class Game:
    """One policy on one workload with one seed."""

    entrant: Entrant
    family: str
    workload: str
    seed: int


@dataclasses.dataclass(frozen=True)
class GameResult:
    """What came of a game: its outcome, or why there is none, in a sentence; `seconds` of processor time."""

    game: Game
    outcome: GameOutcome | None
    failure: str
    seconds: float


def entrants(family: str, text: str | None) -> list[Entrant]:
    """Return the policies that play: all that are installed, or those of a text as `--sweep` has it.

    :raises UsageError: for one that there is not.

    >>> [each.name for each in entrants("batching", "opportunistic,{policy='fixed', size=10}")]
    ['opportunistic', "{policy='fixed', size=10}"]
    """
    if text is None:
        return [Entrant(name, name) for name in registry.names(family)]
    found = []
    for change in parse_sweep(f"{family}={text}"):
        choice = change.value
        name = choice.get("policy") if isinstance(choice, dict) else choice
        if not isinstance(name, str) or not name:
            raise UsageError(f"{change.text.partition('=')[2]} is no policy: write a name, FILE.py:CLASS or a table")
        file, colon, _ = name.rpartition(":")
        if colon and not Path(file).is_file():
            raise UsageError(f"there is no file {file}: give FILE.py:CLASS, or a policy's name")
        if not colon and name not in registry.names(family):
            known = ", ".join(registry.names(family))
            raise UsageError(f"there is no {family} policy {name!r}: choose from {known}, or give FILE.py:CLASS")
        found.append(Entrant(change.text.partition("=")[2], choice))
    if len({each.name for each in found}) < len(found):
        raise UsageError("a policy is named twice: name each once")
    return found


def games_of(
    contest: Contest, players: Sequence[Entrant], workloads: Sequence[str], seeds: Sequence[int]
) -> list[Game]:
    """Return all games: those of a seed one after the other, so that what is interrupted has whole rounds."""
    return [Game(each, contest.family, name, seed) for seed in seeds for name in workloads for each in players]


def play(game: Game, steps: int = STEPS) -> GameOutcome:
    """Play a game in this process; what a policy raises goes on."""
    return contest_of(game.family).workload(game.workload).arena(game.seed).play(_made(game), steps)


def _made(game: Game) -> Any:
    """Return what a policy is chosen by: an object where it is in a file."""
    choice = game.entrant.choice
    options = dict(choice) if isinstance(choice, dict) else {"policy": choice}
    file, colon, name = options.pop("policy").rpartition(":")
    if not colon:
        return choice
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise GameLost(f"{file} cannot be imported: its name has to end in .py")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)(**options)


def play_all(games: Sequence[Game], steps: int = STEPS, seconds: int = SECONDS) -> Generator[GameResult, None, None]:
    """Play games on all cores, and yield their results as they come; a policy that lost one plays no more.

    Closing it ends all processes.

    :param steps: the events that a game may take. :param seconds: of processor time, likewise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ctxflow.league.contests", "ctxflow.league.tournament"])
    waiting, lost = list(reversed(games)), set[str]()
    running: dict[Connection, _Playing] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                game = waiting.pop()
                if game.entrant.name not in lost:
                    playing = _Playing.begin(context, game, steps, seconds)
                    running[playing.inbox] = playing
            if not running:
                continue
            first = min(each.begun for each in running.values()) + PATIENCE * seconds
            ready = wait(list(running), max(0.0, first - time.monotonic()))
            for inbox, playing in list(running.items()):
                late = time.monotonic() >= playing.begun + PATIENCE * seconds
                if inbox in ready or late:
                    del running[inbox]
                    result = playing.ended("" if inbox in ready else f"it was not done after {PATIENCE * seconds} s")
                    if result.failure:
                        lost.add(result.game.entrant.name)
                    yield result
    finally:
        for playing in running.values():
            playing.ended("it was interrupted")


@dataclasses.dataclass(frozen=True)
class _Playing:
    """A process that plays a game."""

    game: Game
    process: Any
    inbox: Connection
    begun: float

    @classmethod
    def begin(cls, context: Any, game: Game, steps: int, seconds: int) -> _Playing:
        inbox, outbox = context.Pipe(duplex=False)
        process = context.Process(target=_play_alone, args=(game, steps, seconds, outbox), daemon=True)
        # The server of forks, and what it forks, is started with Ctrl-C blocked: this process ends them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        outbox.close()
        return cls(game, process, inbox, time.monotonic())

    def ended(self, why: str) -> GameResult:
        """Return what came of it, or why it is ended."""
        outcome, failure, seconds = None, why, 0.0
        if not why:
            try:
                outcome, failure, seconds = self.inbox.recv()
            except EOFError:  # It died.
                self.process.join()
                failure = _death(self.process.exitcode)
        else:
            self.process.kill()
        self.process.join()
        self.inbox.close()
        return GameResult(self.game, outcome, failure, seconds)


def _death(status: int | None) -> str:
    if status == -signal.SIGXCPU:
        return "it took more processor time than a game may"
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _play_alone(game: Game, steps: int, seconds: int, outbox: Connection) -> None:
    """Play a game in a process of its own; what it prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.dup2(2, 1)
    found: tuple[GameOutcome | None, str]
    try:
        found = play(game, steps), ""
    except GameLost as error:
        found = None, str(error)
    except Exception as error:
        found = None, _raised(error)
    with contextlib.suppress(BrokenPipeError):
        outbox.send((*found, time.process_time()))


def _raised(error: Exception) -> str:
    """Return what was raised and where, in a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"it raised {type(error).__name__}{': ' if text else ''}{text[:300]}{place}"


def ratios_of(results: Sequence[GameResult]) -> tuple[dict[str, dict[tuple[str, int], float]], dict[str, str]]:
    """Return each policy's score over the bound by game, and why policies lost, for `standings`."""
    ratios: dict[str, dict[tuple[str, int], float]] = {}
    failures: dict[str, str] = {}
    for each in results:
        name = each.game.entrant.name
        if each.outcome is None:
            failures.setdefault(name, f"on {each.game.workload}, seed {each.game.seed}, {each.failure}")
        else:
            game = each.game.workload, each.game.seed
            ratios.setdefault(name, {})[game] = each.outcome.score / each.outcome.bound
    return ratios, failures
