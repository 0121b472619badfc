"""What the tests of executors share: starting executors, and looking at processes."""

import itertools
import os
from collections import Counter

from ctxflow import ContextExecutor
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.ownership import lives


def started(directory, workers=2, patience=None, slots=1, **options):
    """An executor, whose engine is as patient as is said, and runs so many calls at a time."""
    executor = ContextExecutor(workers=workers, **options)
    if patience is not None:
        executor.engine = EmbeddedEngine(workers, slots=slots, patience=patience)
    executor.run_dir = str(directory)
    return executor


def mapped_tenfold(app, least, evictions):
    """Map numbers to ten times each, at least `least` and until a worker was evicted; return how many, each once."""
    numbers = itertools.takewhile(lambda n: n < least or not evictions.count, itertools.count())
    pairs = list(app.map(numbers, window=least, order="completed"))
    assert len(pairs) >= least
    assert Counter(index for index, _ in pairs) == Counter(range(len(pairs))), "nothing lost, nothing twice"
    assert all(result == 10 * index for index, result in pairs)
    return len(pairs)


def runs(pid):
    """Whether a process is there and no zombie."""
    return lives(int(pid), None)


def marked(mark):
    """The processes that have a variable MARK of that value, which children inherit."""
    wanted, found = f"MARK={mark}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and runs(entry):
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:
                continue
    return found


def first_free(pid):
    """The number of the next descriptor that a process would get: its limit, if it is to get none."""
    taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    return next(number for number in range(len(taken) + 1) if number not in taken)
