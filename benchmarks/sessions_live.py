"""The part of sessions.py that runs sessions: what coalescing gains, and what a migration costs.

`coalescing_speedup` is how many times the chunks a second 8 sessions of the streaming example's model make on one
worker in common steps, of what they make one at a time, in rounds that take turns on the same worker.

`migration_added_ms` is what ctxflow adds to a migration's transfer: the time from the end of the step that froze the
state to the end of the step that thawed it on another worker, less what that step took there itself, less the same time
between two steps of a session that stays. (Pickling and writing are in the first step's time, reading and opening in
the second's: that is the transfer.) `migration_added_share` is that in % of a chunk's time, here 0.2 s; `migration_ms`
is all that a migration costs, transfer of 1 MB included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from ctxflow import ContextExecutor, session_app
from ctxflow.policies.protocols import View
from ctxflow.policies.simple import LeastLoadedSessions
from ctxflow.sessions import SessionApp

SESSIONS = 8
CHUNK_SECONDS = 0.2
STATE_BYTES = 1_000_000
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "streaming"))


def chunks_per_second(app: SessionApp, seconds: float) -> float:
    """What some sessions make together."""
    sessions = [app.open(("the sea at night", 1_000_000)) for _ in range(SESSIONS)]
    for session in sessions:  # All have begun.
        for _ in range(4):
            session.take(120)
    began = time.perf_counter()
    before = sum(session.status.chunks for session in sessions if session.status)
    while time.perf_counter() < began + seconds:
        for session in sessions:
            session.take(120)
    made = sum(session.status.chunks for session in sessions if session.status) - before
    taken = time.perf_counter() - began
    for session in sessions:
        session.close()
    return made / taken


def coalescing(rounds: int, seconds: float) -> dict[str, common.Figure]:
    """Chunks a second in common steps, and one at a time."""
    import speaker

    context = speaker.speaker()
    together = session_app(context, ahead=8)(speaker.next_words)
    # No step meets such a target, so that each serves one session.
    alone = session_app(context, ahead=8, chunk_target=1e-9)(speaker.next_words)
    measurements = {
        "together": lambda: chunks_per_second(together, seconds),
        "alone": lambda: chunks_per_second(alone, seconds),
    }
    executor = ContextExecutor(workers=1)
    with tempfile.TemporaryDirectory() as folder:
        executor.run_dir = folder
        with executor:
            samples = common.interleaved(measurements, rounds, "sessions")
            assert executor.status().crashes == 0
    return {
        "coalescing_speedup": common.ratio(samples["together"], samples["alone"]),
        "chunks_per_second_together": common.figure(samples["together"], "chunks/s"),
        "chunks_per_second_alone": common.figure(samples["alone"], "chunks/s"),
    }


class ThereAndBack:
    """The one session goes to the other worker whenever it is asked about, and it has made a chunk or two there."""

    def __init__(self) -> None:
        self._home, self._moved_at = LeastLoadedSessions(), 0

    def place(self, view: View) -> Mapping[int, str | None]:
        """The move."""
        placed = dict(self._home.place(view))
        for session in view.sessions.values():
            others = [name for name in view.workers if name != session.worker]
            if session.state == "placed" and session.chunks > self._moved_at + 2 and others:
                self._moved_at = session.chunks
                placed[session.id] = others[0]
        return placed


def _slow(states: Sequence[Any], prompts: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
    time.sleep(CHUNK_SECONDS)
    for state in states:
        yield 0, state or os.urandom(STATE_BYTES)


def migrations(rounds: int) -> dict[str, common.Figure]:
    """What so many migrations of one session cost."""
    app = session_app(keep_every=None)(_slow)
    with tempfile.TemporaryDirectory() as folder:
        executor = ContextExecutor(workers=2, sessions=ThereAndBack())
        executor.run_dir = folder
        with executor, app.open() as session:
            done = 0
            while done < rounds:
                session.take(60)
                run = executor.run
                done = run._scheduler.state.counters.migrations if run is not None else 0
                common.progress(f"sessions: migration {done} of {rounds}")
        with open(os.path.join(folder, "ctxflow", "events.jsonl")) as file:
            gaps = list(_gaps(file))
    stays = common.figure([gap for moved, gap, _ in gaps if not moved], "s").value
    whole = common.figure([seconds for moved, _, seconds in gaps if not moved], "s").value
    added = [1000 * (gap - stays) for moved, gap, _ in gaps if moved]
    cost = [1000 * (gap - stays + seconds - whole) for moved, gap, seconds in gaps if moved]
    return {
        "migration_added_ms": common.figure(added, "ms", "lower"),
        "migration_added_share": common.figure([each / CHUNK_SECONDS / 10 for each in added], "%", "lower"),
        "migration_ms": common.figure(cost, "ms", "lower"),
    }


def _gaps(lines: Iterator[str]) -> Iterator[tuple[bool, float, float]]:
    """From one step to the next: whether the session moved, seconds in between, and seconds of the two steps.

    The first chunks on each worker are left out: its function is opened there.
    """
    last: dict[str, Any] | None = None
    seen: list[str] = []
    for line in lines:
        event = json.loads(line).get("event", {})
        if event.get("is") != "StepFinished":
            continue
        if last is not None and seen.count(event["worker"]) > 2:
            moved = event["worker"] != last["worker"]
            froze = any("frozen" in outcome for outcome in last["outcomes"])
            if moved == froze:
                gap = event["time"] - last["time"] - event["seconds"]
                yield moved, gap, last["seconds"] + event["seconds"]
        seen.append(event["worker"])
        last = event
