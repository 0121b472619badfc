"""Sessions that are moved, suspended and evicted all the time, and whether each made its chunks in order, once.

python -m ctxflow.testing.wandering --sessions 200 --workers 8 --moves 500 --suspensions 50 --evictions 20
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.context import context
from ctxflow.policies.protocols import View
from ctxflow.policies.simple import LeastLoadedSessions
from ctxflow.sessions import Session, SessionApp, session_app
from ctxflow.testing.evictions import patience

PATIENCE = patience(60.0)  # Seconds that a session may take for a chunk.


class Wandering:
    """A placement under which sessions move to random workers, so many times a second in all.

    :param at_most: no more moves than these. :ivar moves: requested so far.
    """

    def __init__(self, per_second: float, at_most: int, seed: int = 0) -> None:
        self.moves = 0
        self._per_second, self._at_most = per_second, at_most
        self._random = random.Random(seed)
        self._home = LeastLoadedSessions()
        self._since: float | None = None

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return workers for those that need one, and moves for as many as are due."""
        placed = dict(self._home.place(view))
        if self._since is None:
            self._since = view.now
        due = min(self._at_most, int((view.now - self._since) * self._per_second)) - self.moves
        names = [worker.id for worker in view.workers.values() if worker.noticed is None and not worker.draining]
        settled = [each for each in view.sessions.values() if each.state == "placed" and each.target is None]
        free = [session for session in settled if session.chunks and session.id not in placed]
        for session in self._random.sample(free, max(0, min(due, len(free)))):
            others = [name for name in names if name != session.worker]
            if others:
                placed[session.id] = self._random.choice(others)
                self.moves += 1
        return placed


@context
def _nothing() -> int:
    return 0


def walk(seconds: float, keep_every: int = 8, ahead: int = 8) -> SessionApp:
    """Return an app whose nth chunk depends on all prompts before it: a step takes `seconds`."""

    def walked(_: int, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
        time.sleep(seconds)
        made = [_next(state, new) for state, new in zip(states, prompts, strict=True)]
        return [(each, each) for each in made]

    app: SessionApp = session_app(_nothing(), keep_every=keep_every, ahead=ahead)(walked)
    return app


def _next(state: tuple[int, str] | None, prompts: Sequence[Any]) -> tuple[int, str]:
    count, digest = state or (0, "")
    return count + 1, hashlib.sha256(f"{digest} {count} {list(prompts)}".encode()).hexdigest()[:16]


def undisturbed(prompt: Any, chunks: int) -> list[tuple[int, str]]:
    """Return the chunks of an undisturbed session."""
    state, made = None, []
    for number in range(chunks):
        state = _next(state, [] if number else [prompt])
        made.append(state)
    return made


@dataclasses.dataclass
class Walked:
    """The result of a walk; `wrong`: the right chunks of sessions with others than those of an undisturbed run."""

    right: int = 0
    wrong: dict[int, int] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)
    suspensions: int = 0
    seconds: float = 0.0


def take_all(
    app: SessionApp,
    sessions: int,
    chunks: int,
    suspensions: int = 0,
    idling: float = 0.02,
    seed: int = 0,
    suspended: float = 0.3,
) -> Walked:
    """Take chunks of sessions, each in a thread, with suspensions and pauses (after a share `idling`) at random.

    :param suspended: for how long a session is suspended at most, in seconds.
    """
    began, walked, lock = time.monotonic(), Walked(), threading.Lock()
    luck = random.Random(seed)
    pauses = [luck.randrange(sessions) for _ in range(suspensions)]

    def take(number: int, session: Session) -> None:
        mine = random.Random(f"{seed} {number}")
        stops = {mine.randrange(1, chunks) for _ in range(pauses.count(number))}
        given: list[Any] = []
        try:
            while len(given) < chunks:
                given.append(session.take(PATIENCE))
                if len(given) in stops:
                    session.suspend()
                    time.sleep(mine.uniform(0.0, suspended))
                    session.resume()
                elif mine.random() < idling:
                    time.sleep(mine.uniform(0.0, 0.2))
        except Exception as error:
            with lock:
                walked.errors.append(f"session {number}, chunk {len(given)}: {type(error).__name__}: {error}")
        session.close()
        expected = undisturbed(number, chunks)
        with lock:
            walked.suspensions += len(stops)
            if given == expected:
                walked.right += 1
            else:
                walked.wrong[number] = sum(a == b for a, b in zip(given, expected, strict=False))

    opened = [(number, app.open(number)) for number in range(sessions)]
    threads = [threading.Thread(target=take, args=each, daemon=True) for each in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    walked.seconds = time.monotonic() - began
    return walked


def main() -> int:
    """Have sessions wander over workers of this machine; write the result, and fail if a chunk is not right."""
    from ctxflow.executors import ContextExecutor
    from ctxflow.testing.evictions import Evictions

    parser = argparse.ArgumentParser(description="Sessions that are moved, suspended and evicted.")
    for name, default in (("sessions", 20), ("workers", 2), ("chunks", 100), ("moves", 50), ("suspensions", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--evictions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="in which moves and evictions are to happen")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step")
    given = parser.parse_args()
    placement = Wandering(given.moves / given.seconds, given.moves)
    executor = ContextExecutor(workers=given.workers, sessions=placement)
    rate = 60 * given.evictions / given.seconds
    with tempfile.TemporaryDirectory() as folder:
        executor.run_dir = folder
        with executor, Evictions(executor, rate, seed=0, rejoin_seconds=0.5, at_most=given.evictions) as evictions:
            walked = take_all(walk(given.step), given.sessions, given.chunks, given.suspensions)
            state = executor.calls.run._scheduler.state
            executor.calls.run.validate()
    counters = dataclasses.asdict(state.counters)
    found = {
        **dataclasses.asdict(walked),
        "moves": placement.moves,
        "evictions": evictions.count,
        **{name: counters[name] for name in ("migrations", "chunks", "steps", "lost", "crashes")},
        "frozen_for_suspension": counters["suspensions"],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if walked.right == given.sessions else 1


if __name__ == "__main__":
    # The app must be importable under its own name, not `__main__`.
    from ctxflow.testing import wandering  # noqa: PLW0406 - see above

    raise SystemExit(wandering.main())
