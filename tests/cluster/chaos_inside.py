"""Runs inside the testbed: a run of many items, whose workers test_chaos.py takes away meanwhile.

It writes one JSON object a line: first where the run can be found, then what is going on, at last what came of it.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.factory.run_files import live_runs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import patience

BATCH = 25
FILE_BYTES = 2**20
LIMIT_SECONDS = 600


def tell(**what: object) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


def write_file() -> tuple[str, int]:
    """A file that contexts need, and its checksum, which every result depends on."""
    content = random.Random(7).randbytes(FILE_BYTES)
    path = os.path.abspath("weights.bin")
    with open(path, "wb") as file:
        file.write(content)
    return path, zlib.crc32(content)


def right(item: int, salt: int) -> int:
    """The answer of an item."""
    return item * 2_654_435_761 % 2**32 ^ salt


def make_app(path: str, seconds: float):
    """The app: a batch takes `seconds` an item."""

    @context(gpus=1, files={"weights": path})
    def checksum(weights: str) -> int:
        with open(weights, "rb") as file:
            return zlib.crc32(file.read())

    @batch_app(checksum(), batch_size=BATCH)
    def answer(salt: int, items: list[int]) -> list[int]:
        time.sleep(seconds * len(items))
        return [item * 2_654_435_761 % 2**32 ^ salt for item in items]

    return answer


class Answers:
    """All results, as they came: how often each item's, and which were wrong."""

    def __init__(self, salt: int) -> None:
        self.times = collections.Counter[int]()
        self.wrong: list[tuple[int, str]] = []
        self._salt = salt
        self._lock = threading.Lock()

    def take(self, item: int, result: object) -> None:
        """A result."""
        with self._lock:
            self.times[item] += 1
            if result != right(item, self._salt):
                self.wrong.append((item, repr(result)[:500]))


def single_items(
    app, executor: ContextExecutor, items: range, losses: int, answers: Answers, until: str | None
) -> Iterator[Future]:
    """One future an item, most of them only as workers are lost, so that there is work until enough were.

    The last waits for a file, if one is named.
    """

    def answered(item: int, future: Future) -> None:
        answers.take(item, future.exception() or future.result())

    for done, item in enumerate(items):
        while done * losses > len(items) * (executor.status().workers_lost + 1):
            time.sleep(0.1)
        while item == items[-1] and until is not None and not os.path.exists(until):
            time.sleep(0.1)
        future = app(item)
        future.add_done_callback(lambda future, item=item: answered(item, future))
        yield future


def run_items(app, executor: ContextExecutor, count: int, losses: int, answers: Answers, until: str | None) -> None:
    """Answer all items: two fifths by a map in order, two fifths by one as completed, the rest by futures."""
    first, second = count * 2 // 5, count * 4 // 5

    def in_order() -> None:
        # The place in the stream says whose result it is.
        for item, result in enumerate(app.map(range(first), on_error="return")):
            answers.take(item, result)

    def as_completed() -> None:
        for index, result in app.map(range(first, second), order="completed", on_error="return"):
            answers.take(first + index, result)

    maps = [threading.Thread(target=each, daemon=True) for each in (in_order, as_completed)]
    for each in maps:
        each.start()
    futures = list(single_items(app, executor, range(second, count), losses, answers, until))
    for each in maps:
        each.join()
    for future in futures:
        future.exception()


def watch(executor: ContextExecutor, ended: threading.Event) -> None:
    """Tell what is going on, twice a second; end the program if the run does not end."""
    deadline = time.monotonic() + patience(LIMIT_SECONDS)
    while not ended.wait(0.5):
        status = executor.status()
        tell(lost=status.workers_lost, done=status.items_done, there=status.workers)
        if time.monotonic() > deadline:
            sys.stderr.write(f"it does not end: {status}\n")
            faulthandler.dump_traceback()
            os._exit(3)


def losses_of(directory: str) -> list[dict[str, object]]:
    """What the run knew of its workers: when each joined and was lost, in seconds since 1970."""
    with open(os.path.join(directory, "taskvine", "staging.jsonl")) as file:
        origin = next(line["unix"] for line in map(json.loads, file) if line["is"] == "origin")
    workers: dict[str, dict[str, object]] = {}
    with open(os.path.join(directory, "events.jsonl")) as file:
        next(file)  # Which says how the run decides.
        for line in map(json.loads, file):
            event = line["event"]
            if event["is"] == "WorkerJoined":
                workers[event["worker"]["id"]] = {"host": event["worker"]["host"], "joined": origin + event["time"]}
            elif event["is"] == "WorkerLost":
                workers[event["worker"]].update(lost=origin + event["time"], evicted=event["evicted"])
    return [{"worker": name, **facts} for name, facts in workers.items()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", required=True)
    parser.add_argument("--workers", type=int, default=8, help="at most, of a site with one tier; 0: as it says")
    parser.add_argument("--items", type=int, default=14_000)
    parser.add_argument("--losses", type=int, default=46, help="how many workers will be lost, so that items last")
    parser.add_argument("--until", help="the file for which the last item waits")
    parser.add_argument("--seconds", type=float, default=0.018, help="that an item takes")
    options = parser.parse_args()
    logging.basicConfig(format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    directory = tempfile.mkdtemp(prefix="chaos-", dir=os.path.expanduser("~"))
    os.chdir(directory)
    path, salt = write_file()
    answers = Answers(salt)
    app = make_app(path, options.seconds)
    ended = threading.Event()
    executor = ContextExecutor(site=options.site, workers=options.workers or None)
    watcher = threading.Thread(target=watch, args=(executor, ended), daemon=True)
    with executor:
        run = next(run for run in live_runs() if run.id == executor.calls.run.id)
        tell(run=run.id, port=run.port, directory=directory)
        watcher.start()
        begun = time.monotonic()
        run_items(app, executor, options.items, options.losses, answers, options.until)
        seconds, status, kept = time.monotonic() - begun, executor.status(), executor.calls.run.directory
        begun = time.monotonic()
    ended.set()
    watcher.join()
    tell(
        seconds=seconds,
        end_seconds=time.monotonic() - begun,
        missing=[item for item in range(options.items) if not answers.times[item]][:20],
        repeated=[item for item, times in answers.times.items() if times > 1][:20],
        wrong=answers.wrong[:20],
        status={
            "submitted": status.items_submitted,
            "done": status.items_done,
            "dead": status.items_dead,
            "cancelled": status.items_cancelled,
            "retried": status.retried_items,
            "joined": status.workers_joined,
            "lost": status.workers_lost,
            "evictions": status.evictions,
            "crashes": status.crashes,
        },
        workers=losses_of(kept),
        manager=Path(kept, "taskvine", "manager.log").read_text(errors="replace")[-4000:],
    )
    if not os.environ.get("CHAOS_KEEP"):
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
