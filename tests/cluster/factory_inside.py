"""Runs inside the testbed: a program whose workers a site's tiers lend, and what test_factory.py asks of it.

It writes one JSON object a line: first where the run can be found, then what is going on, at last what came of it.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors.taskvine import vine_workers
from ctxflow.factory.run_files import live_runs
from ctxflow.observe.run_report import as_data, read_report

AHEAD = 120  # Items on their way, so that a program that may end does so soon.


def tell(**what: object) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


def make_app(executions: str, seconds: float, batch: int, gpus: int):
    """The app: an item takes `seconds`, and leaves a line in a file that all hosts see."""

    @context(gpus=gpus)
    def place() -> tuple[str, str]:
        import socket

        return socket.gethostname(), os.environ.get("CTXFLOW_TIER", "")

    @batch_app(place(), batch_size=batch)
    def answer(place: tuple[str, str], items: list[int]) -> list[tuple[int, str, str]]:
        answers = []
        for item in items:
            time.sleep(seconds)
            with open(executions, "a") as file:
                file.write(f"{item}\n")
            answers.append((item * item, *place))
        return answers

    return answer


def items_until(path: str | None, count: int) -> Iterator[int]:
    """So many items, and more of them until a file is there."""
    item = 0
    while item < count or (path is not None and not os.path.exists(path)):
        yield item
        item += 1


def watch(executor: ContextExecutor, ended: threading.Event) -> None:
    """Tell what is going on, twice a second."""
    while not ended.wait(0.5):
        status = executor.status()
        jobs = {worker: job for worker, (_, job) in executor.engine.worker_jobs().items()}
        tell(
            time=status.time, there=status.workers, lost=status.workers_lost, evicted=status.evictions,
            done=status.items_done, jobs=sorted(jobs.values()), counts=executor.engine._acquirer.counts(),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", required=True)
    parser.add_argument("--folder", required=True, help="where executions are noted: one that all hosts see")
    parser.add_argument("--items", type=int, default=0)
    parser.add_argument("--until", help="go on until this file is there")
    parser.add_argument("--seconds", type=float, default=0.1, help="that an item takes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--explained-within", type=float, help="that HTCondor may take to explain a loss, in seconds")
    options = parser.parse_args()
    if options.explained_within:
        vine_workers._REASON_SECONDS = options.explained_within
    logging.basicConfig(format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    os.chdir(tempfile.mkdtemp(prefix="factory-", dir=os.path.expanduser("~")))
    executions = os.path.join(options.folder, "executions")
    Path(executions).touch()
    app = make_app(executions, options.seconds, options.batch, options.gpus)
    executor = ContextExecutor(site=options.site)
    ended = threading.Event()
    with executor:
        run = next(run for run in live_runs() if run.id == executor.calls.run.id)
        tell(run=run.id, port=run.port, pid=os.getpid(), directory=run.directory)
        watcher = threading.Thread(target=watch, args=(executor, ended), daemon=True)
        watcher.start()
        answers = list(app.map(items_until(options.until, options.items), window=AHEAD))
        ended.set()
        watcher.join()
        counts, status, directory = executor.engine._acquirer.counts(), executor.status(), executor.calls.run.directory
    done = collections.Counter(Path(executions).read_text().split())
    tell(
        items=len(answers),
        wrong=[item for item, answer in enumerate(answers) if answer[0] != item * item],
        again=sum(times - 1 for times in done.values()),
        missing=[item for item in range(len(answers)) if not done[str(item)]],
        hosts=collections.Counter(answer[1] for answer in answers),
        tiers=collections.Counter(answer[2] for answer in answers),
        retried=status.retried_items, evicted=status.evictions, lost=status.workers_lost, joined=status.workers_joined,
        counts=counts, seconds=status.time, directory=os.path.abspath(directory),
        report=as_data(read_report(Path(directory)))["history"],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
