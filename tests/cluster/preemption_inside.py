"""Runs inside the testbed: low-priority work on every GPU, and urgent work that needs four GPUs close together.

It writes one JSON object a line: what goes on, twice a second, and at last what came of it (test_preemption.py).
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

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, finished


def tell(**what: object) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


def make_low(executions: str, seconds: float, batch: int, yields: bool):
    """Items of `seconds` each, that leave a line in a file that all hosts see."""

    @context(gpus=1)
    def small() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def one(item: int) -> int:
        time.sleep(seconds)
        with open(executions, "a") as file:
            file.write(f"{item}\n")
        return item * item

    if yields:

        @batch_app(small(), batch_size=batch)
        def low(gpu: str, items: list[int]) -> Iterator[int]:
            for item in items:
                yield one(item)
    else:

        @batch_app(small(), batch_size=batch)
        def low(gpu: str, items: list[int]) -> list[int]:
            return [one(item) for item in items]

    return low


@context(gpus=4, affinity="guaranteed", priority=10)
def wide() -> list[tuple[str, int, int]]:
    """Each GPU in the order in which the process sees them, with its socket and NUMA node by the kernel's word."""
    from ctxflow.topology import position
    from ctxflow.topology.machine import read_machine

    machine = read_machine()
    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    gpus = [machine.gpus[position(machine, name)] for name in names]
    return [(name, machine.socket_of(gpu.numa), gpu.numa) for name, gpu in zip(names, gpus, strict=True)]


@batch_app(wide())
def urgent(gpus: list[tuple[str, int, int]], items: list[int]) -> list[object]:
    return [[os.uname().nodename, gpus]] * len(items)


def items_until(path: str) -> Iterator[int]:
    """More and more of them until a file is there."""
    item = 0
    while not os.path.exists(path):
        yield item
        item += 1


class Notes(logging.Handler):
    """What the run tells a person."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def watch(executor: ContextExecutor, notes: Notes, ended: threading.Event) -> None:
    """Tell what is going on, twice a second."""
    while not ended.wait(0.5):
        status = executor.status()
        tell(
            time=status.time, there=status.workers, lost=status.workers_lost, done=status.items_done, notes=notes.texts
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="one that all hosts see, with site.toml")
    parser.add_argument("--seconds", type=float, default=0.2, help="that an item takes")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=100, help="items that are submitted and not answered")
    parser.add_argument("--whole", action="store_true", help="batches answer as a whole, not item by item")
    options = parser.parse_args()
    notes = Notes()
    logging.getLogger("ctxflow").addHandler(notes)
    logging.getLogger("ctxflow").setLevel(logging.INFO)
    logging.basicConfig(format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    os.chdir(tempfile.mkdtemp(prefix="preemption-", dir=os.path.expanduser("~")))
    folder = options.folder
    executions = os.path.join(folder, "executions")
    Path(executions).touch()
    low = make_low(executions, options.seconds, options.batch, not options.whole)
    executor = ContextExecutor(site=os.path.join(folder, "site.toml"))
    ended = threading.Event()
    answers: list[int] = []
    with executor:
        watcher = threading.Thread(target=watch, args=(executor, notes, ended), daemon=True)
        watcher.start()
        stream = low.map(items_until(os.path.join(folder, "enough")), window=options.window)
        runner = threading.Thread(target=lambda: answers.extend(stream), daemon=True)
        runner.start()
        eventually(Path(folder, "go").exists, within=600)
        asked = time.monotonic()
        futures = [urgent(item) for item in range(3)]
        got = [finished(future).result() for future in futures]
        tell(got=got, seconds=time.monotonic() - asked)
        runner.join()
        ended.set()
        watcher.join()
        status, directory = executor.status(), executor.calls.run.directory
    done = collections.Counter(Path(executions).read_text().split())
    os.system(f"cp -r {directory} {folder}/run")
    tell(
        items=len(answers),
        wrong=[item for item, answer in enumerate(answers) if answer != item * item],
        again=sum(times - 1 for times in done.values()),
        missing=[item for item in range(len(answers)) if not done[str(item)]],
        evicted=status.evictions, dead=status.items_dead, retried=status.retried_items, notes=notes.texts,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
