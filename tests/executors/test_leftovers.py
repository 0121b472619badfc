"""After runs of all endings nothing is left but documented folders, which the next run or `ctxflow clean` removes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from executor_helpers import runs

import forked
from ctxflow.executors.channel_host import HOSTS_OF, start_host
from ctxflow.host.linux import python_path
from waiting import exited, line, nothing_left, output

PROGRAM = """
import os, time
from ctxflow import ContextExecutor, batch_app, context

@context()
def place():
    if os.environ["ENDING"] == "failed":
        raise ValueError("it cannot be built")
    return 1

@batch_app(place(), batch_size=2)
def slow(one, items):
    time.sleep(0.05)
    return items

with ContextExecutor(workers=2) as executor:
    for done, _ in enumerate(slow.map(range(20))):
        if done == 5 and os.environ["ENDING"] in ("interrupted", "killed"):
            if "FORKS" in os.environ and not os.fork():
                time.sleep(600)
                os._exit(0)
            print("goes on", flush=True)
            while True:
                time.sleep(0.1)  # A signal that comes just before a sleep does not end it.
"""
ENDINGS = {"done": 0, "failed": 1, "interrupted": -signal.SIGINT, "killed": -signal.SIGKILL}


def begin(folder: Path, ending: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a program that ends so."""
    variables = {**os.environ, **python_path(), "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"), **more}
    variables["ENDING"] = ending
    variables.pop("XDG_RUNTIME_DIR", None)
    return forked.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def run(folder: Path, ending: str, count: int = 1) -> None:
    """Have programs end so, at the same time."""
    programs = [begin(folder, ending) for _ in range(count)]
    for program in programs:
        assert program.stdout
        if ending in ("interrupted", "killed"):
            assert line(program.stdout) == b"goes on\n"
            (interrupt if ending == "interrupted" else kill_all)(program)
        output(program)
        assert program.returncode == ENDINGS[ending]


def interrupt(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGINT)


def kill_all(program: subprocess.Popen[bytes]) -> None:
    """End a program and its workers at once: workers that outlive their driver remove what it left."""
    tree = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)


def clean(folder: Path) -> None:
    variables = {**os.environ, **python_path(), "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home")}
    words = [sys.executable, "-m", "ctxflow", "clean", "--older-than", "0", "--yes"]
    forked.run(words, check=True, cwd=folder, env=variables, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_the_next_run_removes_what_a_killed_one_left(folder: Path) -> None:
    run(folder, "killed")
    [left] = (folder / "tmp").iterdir()
    assert left.name.startswith("ctxflow-") and "`ctxflow clean`" in (left / ".ctxflow-owned").read_text()
    run(folder, "done")
    assert not any((folder / "tmp").iterdir())


def of_hosts(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of a program's workers."""
    found = []
    for process in psutil.Process(program.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if HOSTS_OF in process.environ():
                found.append(process)
    return found


@pytest.mark.parametrize("forks", [{}, {"FORKS": "1"}], ids=["alone", "with a child that lives on"])
def test_workers_that_are_stopped_do_not_outlive_a_driver_that_is_killed(folder: Path, forks: dict[str, str]) -> None:
    """What they have on a GPU would be there for ever."""
    program = begin(folder, "killed", **forks)
    assert program.stdout and line(program.stdout) == b"goes on\n"
    stopped = of_hosts(program)
    own = [each for each in psutil.Process(program.pid).children() if each not in stopped]
    children = [each for each in own if "ctxflow-guard" not in each.cmdline()]
    assert len(stopped) >= 4 and len(children) == len(forks)
    for process in stopped:
        process.suspend()
    program.kill()
    exited(program)
    nothing_left(lambda: [each for each in stopped if runs(each.pid)])
    nothing_left(lambda: list((folder / "tmp").iterdir()))
    for child in children:
        child.kill()
    program.stdout.close()


def test_a_host_that_starts_after_its_run_was_killed_leaves_nothing(tmp_path: Path) -> None:
    """The run's other hosts have removed its folder by then."""
    with (tmp_path / "log").open("wb") as log:
        process, channel = start_host(str(tmp_path / "ctxflow-run" / "local-1"), str(tmp_path), log)
    with contextlib.closing(channel):
        assert exited(process) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["log"] and not (tmp_path / "log").read_text()


def test_runs_of_all_endings_leave_documented_folders_that_clean_removes(folder: Path) -> None:
    for ending in ENDINGS:
        run(folder, ending, 2)
        if ending != "killed":
            assert not any((folder / "tmp").iterdir()), ending
    assert sorted(path.name for path in folder.iterdir()) == ["home", "program.py", "runs", "tmp"]
    assert len(list((folder / "runs").iterdir())) == 2 * len(ENDINGS)
    assert not any((folder / "home").iterdir())

    def left() -> list[Path]:
        clean(folder)
        return list((folder / "runs").iterdir())

    nothing_left(left)  # A driver is dead 3 s after it wrote.
    assert sorted(path.name for path in folder.rglob("*")) == ["home", "program.py", "runs", "tmp"]
