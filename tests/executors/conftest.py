"""What the tests of executors share: one running executor for those that do not end it, and a look at processes."""

import os
import time

import pytest

from ctxflow import ContextExecutor
from ctxflow.scheduler import Limits


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An executor of two workers for a whole module; a test that breaks it breaks those that follow."""
    executor = started(tmp_path_factory.mktemp("running"), limits=Limits(retry_seconds=0.1))
    with executor:
        yield executor


def started(directory, workers=2, **options):
    executor = ContextExecutor(workers=workers, **options)
    executor.run_dir = str(directory)
    return executor


def runs(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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


def eventually(condition, seconds=20.0):
    """Wait until something holds; gives whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
