"""Runs of `ctxflow batch`, as they are typed, and of engines alone (engine_peers.py); each in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER.parent / "src"
LIMIT_SECONDS = 3600.0
LEAVE_SECONDS = 10.0


class Missing(Exception):
    """Something cannot be measured here; the message is a sentence that says why."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run, from the first request to the last answer, with the engine started.

    :ivar tokens: that were written, or rows that were read where nothing is.
    :ivar texts: the answers, in the order of the rows.
    :ivar window: the most items that were in flight at a time in the second half of the run, before the queue was
        empty; 0 if nobody counted.
    """

    seconds: float
    tokens: int
    texts: Sequence[str] = ()
    window: int = 0

    @property
    def rate(self) -> float:
        """Tokens, or rows, a second."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Place:
    """Where runs take place.

    :ivar python: the Python that has the engine; `sources`: which ctxflow it imports.
    :ivar variables: of its environment, besides this process's.
    """

    python: str
    variables: Mapping[str, str]
    sources: Path = SOURCES

    def run(self, words: Sequence[str], folder: Path) -> str:
        """Run a command of that Python to its end, with all that it starts; return what it printed.

        :raises Missing: if it fails.
        """
        environment = {**os.environ, **self.variables, "PYTHONPATH": str(self.sources)}
        log = folder / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [self.python, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                raise Missing(f"{_called(words)} did not end within {LIMIT_SECONDS:.0f} s.") from None
            finally:
                _end(process)
        if process.returncode:
            raise Missing(f"{_called(words)} ended with {process.returncode}: {_why(log)}")
        return printed.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it started, which may first remove what it shared: engines leave that to others."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is not None:
            until = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _called(words: Sequence[str]) -> str:
    named = [Path(word).name for word in words if not word.startswith("-")]
    return " ".join(named[:2])


def _why(log: Path) -> str:
    """The last line of a log that says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line or line.startswith("ctxflow")]
    return (told or lines or ["it printed nothing"])[-1][:400]


def alone(place: Place, kind: str, model: Path, rows: Path, *options: str) -> Measured:
    """An engine alone, given all requests at once.

    :raises Missing: if it does not run.
    """
    with tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-") as scratch:
        words = [str(FOLDER / "engine_peers.py"), kind, str(model), str(rows), *options]
        printed = place.run(words, Path(scratch)).splitlines()
    # An engine's processes may say something at their end.
    found = json.loads(next(line for line in reversed(printed) if line.startswith('{"seconds"')))
    return Measured(found["seconds"], found["tokens"], found["texts"])


def batch(place: Place, model: str, rows: Path, options: Sequence[str], site: str = "") -> Measured:
    """`ctxflow batch` on one worker of this machine, its time by the event log of its run.

    It begins with the first command to run rows, which follows when the worker's context is ready, and ends with the
    last rows that were answered.

    :param options: of the command line; `site`: the text of a site file, "" for none.
    :raises Missing: if it fails, or leaves rows out.
    """
    with tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-") as scratch:
        folder = Path(scratch)
        shutil.copy(rows, folder / "rows.jsonl")
        words = ["-m", "ctxflow", "batch", "rows.jsonl", "-o", "answers.jsonl", "-m", model, "--workers", "1"]
        if site:
            (folder / "site.toml").write_text(site)
            words += ["--site", "site.toml"]
        place.run([*words, *options], folder)
        answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        count = len(rows.read_text().splitlines())
        if len(answers) != count:
            raise Missing(f"ctxflow batch answered {len(answers)} of {count} rows.")
        answers.sort(key=lambda answer: answer["row"])
        [log] = folder.glob("runs/*/ctxflow/events.jsonl")
        seconds, window = timed(log)
    if "embedding" in answers[0]:
        return Measured(seconds, count)
    tokens = sum(answer["completion_tokens"] for answer in answers)
    return Measured(seconds, tokens, [answer["text"] for answer in answers], window)


def timed(log: Path) -> tuple[float, int]:
    """Seconds from the first command to run rows to the last answer, and the window, by a run's event log.

    The window is the most rows in flight at a time in the second half of the time in which rows were given.
    """
    given: list[tuple[float, int]] = []  # When, and how many were in flight then.
    attempts: dict[int, int] = {}
    ended = 0.0
    with log.open() as lines:
        next(lines)
        for line in lines:
            entry: dict[str, Any] = json.loads(line)
            event = entry["event"]
            if event["is"] in ("BatchFinished", "BatchEnded"):
                attempts.pop(event["attempt"], None)
            if event["is"] in ("BatchFinished", "ItemsFinished"):
                ended = event["time"]
            for command in entry["commands"]:
                if command["is"] == "Run":
                    attempts[command["attempt"]] = sum(end - first for first, end in command["items"])
                    given.append((event["time"], sum(attempts.values())))
    if not given or not ended:
        raise Missing(f"The event log {log} has no rows that were run.")
    half = (given[0][0] + given[-1][0]) / 2
    return ended - given[0][0], max(count for at, count in given if at >= half)


def this_python() -> str:
    """The Python that runs this."""
    return sys.executable
