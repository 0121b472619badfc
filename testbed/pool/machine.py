"""This machine as the testbed sees it: its tools, its running hosts (found in /proc, no file is trusted),
a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import tools
from .settings import NAME, STATE, CannotBuild, TestbedError

MARK = f"{NAME}:".encode()
SWITCH = "switch"
LOCK = STATE.with_suffix(".lock")
BUILDING = Path("/run/ctxflow-testbed.building")
"""The lock of what all testbeds share: the root, and this machine's packages."""


def check() -> None:
    """Say in one sentence why no testbed can run on this machine, if none can.

    :raises CannotBuild: it cannot.
    """
    check_root()
    if lacking := tools.missing(to_build=False):
        tool, package = next(iter(lacking.items()))
        raise CannotBuild(f"The testbed needs the program {tool}: install the package {package}.")
    trial = "mount -t tmpfs tmpfs /mnt && ip link add ctxflow-br0 type bridge"
    tried = run(["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "sh", "-c", trial], check=False)
    if tried.returncode:
        why = tried.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise CannotBuild(
            f"This machine lets root make no namespaces, mounts or bridges ({why[0]}): run it privileged."
        )


def check_root() -> None:
    """Refuse to work anywhere but on Linux, as root.

    :raises CannotBuild: where we are not.
    """
    if not sys.platform.startswith("linux"):
        raise CannotBuild("The testbed needs Linux (or a Linux container built from testbed/Dockerfile).")
    if os.geteuid():
        raise CannotBuild("The testbed needs root, for namespaces, mounts and HTCondor's daemons: run it with sudo.")


def run(
    command: list[str], check: bool = True, limit: float = 30, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a short program to its end and return what it wrote.

    :raises TestbedError: it failed (where `check` is set) or took more than `limit` seconds.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit,
            input=text or "",
        )
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{' '.join(command[-4:])} did not end within {limit:g} s.") from None
    if check and done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it wrote nothing"]
        raise TestbedError(f"{' '.join(command)} failed (exit {done.returncode}): {last[0]}.")
    return done


def inits() -> list[tuple[str, int]]:
    """The first processes of all testbed namespaces that run on this machine: names and process ids.

    Each is PID 1 of its own process namespace, so its end is the end of everything in there.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            first = (entry / "cmdline").read_bytes().split(b"\0")[0]
            if first.startswith(MARK) and _is_init(entry):
                found.append((first.removeprefix(MARK).decode(), int(entry.name)))
        except OSError:
            continue  # it ended while we looked
    return found


def _is_init(entry: Path) -> bool:
    status = (entry / "status").read_text()
    ids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    return len(ids) > 1 and ids[-1] == "1"


def find(name: str) -> int | None:
    """The process id of a host's first process, or None where the host does not run."""
    return next((pid for found, pid in inits() if found == name), None)


def kill(pids: list[int], limit: float = 20) -> None:
    """End whole namespaces by their first processes, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        limit,
        "The testbed's processes did not end",
    )


def until(condition: object, limit: float, complaint: str, pause: float = 0.05) -> None:
    """Wait for a condition, a callable without arguments.

    :raises TestbedError: it did not come true within `limit` seconds, times CTXFLOW_TEST_PATIENCE where that is set.
    """
    assert callable(condition)
    limit *= float(os.environ.get("CTXFLOW_TEST_PATIENCE") or 1.0)
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TestbedError(f"{complaint} within {limit:g} s.")
        time.sleep(pause)


def enter(pid: int, *namespaces: str) -> list[str]:
    """The words that run a command in namespaces of a process; with none named, as if on that host."""
    chosen = namespaces or ("mount", "pid", "net", "uts", "ipc", "root", "wdns=/")
    return ["nsenter", "--target", str(pid), *(f"--{namespace}" for namespace in chosen), "--"]


@contextlib.contextmanager
def locked(lock: Path = LOCK, limit: float = 1200) -> Iterator[None]:
    """Hold the testbed, or what all of them share: commands that change it take turns."""
    lock.touch()
    with lock.open("r+") as handle:
        deadline = time.monotonic() + limit
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TestbedError(
                        f"Another testbed command has been at work for {limit:g} s: end it first."
                    ) from None
                if not told:
                    sys.stderr.write("Waiting for another testbed command to end ...\n")
                    told = True
                time.sleep(0.1)
        yield
