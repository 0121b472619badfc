"""What holds for all of ctxflow's own tests; how the suite is run is in tests/suite.

Not in pyproject.toml, because Parsl's own suite, which has warnings of its own, is run from here too.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from waiting import scale_timeouts

pytest_plugins = ["suite.shards", "suite.collecting", "suite.depth", "suite.distributions", "suite.times"]

_WAITING = 2
"""How many more tests than cores run side by side where no others do: some wait while others compute."""


def pytest_configure() -> None:
    """Set up this process, and through its environment all that tests start."""
    # Programs that tests interrupt must hear SIGINT: a shell's background commands start with it ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of interpreters are started: none need compile ctxflow anew, nor have threads that wait for each other.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the limits of tests, which end what hangs, be longer where CTXFLOW_TEST_PATIENCE asks for it."""
    scale_timeouts(items, float(config.getini("timeout")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` means; for `-n logical`, where tests do not wait, one for each core."""
    cores = len(os.sched_getaffinity(0))
    if config.option.numprocesses == "logical":
        return cores
    return cores + _WAITING


@pytest.fixture(scope="session", autouse=True)
def _own_artifacts(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Keep what builds make apart from what this user's runs have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CTXFLOW_ARTIFACTS", str(tmp_path_factory.mktemp("artifacts")))
        yield


@pytest.fixture
def own_tmpdir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a temporary directory, here and in programs, in which no other test leaves anything."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def clock_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], AbstractContextManager[None]]:
    """Set the machine's clock by so many seconds, for this process: Linux then tells of another boot's moment, too."""
    really, now = builtins.open, time.time

    @contextmanager
    def steps(seconds: float) -> Generator[None, None, None]:
        def stepped(file: Any, *given: Any, **named: Any) -> Any:
            if file != "/proc/stat":
                return really(file, *given, **named)
            with really(file, "rb") as real:
                text = re.sub(rb"btime (\d+)", lambda found: b"btime %d" % (int(found[1]) + seconds), real.read())
            mode = given[0] if given else named.get("mode", "r")
            return io.BytesIO(text) if "b" in mode else io.StringIO(text.decode())

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", stepped)
            patch.setattr(time, "time", lambda: now() + seconds)
            yield

    return steps
