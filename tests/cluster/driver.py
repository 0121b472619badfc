"""What tests of whole runs share: a driver program in the testbed that tells what goes on, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from waiting import SECONDS, DeadlinePassed, eventually, exited, joined, patience, report

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "testbed"
INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(ROOT)
HOSTS = ["host1", "host2", "host3", "host4"]

# What runs on a host as root. A worker's processes, and only they, have the job's name in their environment.
ON_HOST = """
import json, os, signal, sys, time

def read(pid, what):
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read().decode(errors="replace").split("\\0")
    except OSError:
        return []

def variable(pid, name):
    return next((each.partition("=")[2] for each in read(pid, "environ") if each.startswith(name + "=")), None)

processes = {int(name): read(name, "cmdline") for name in os.listdir("/proc") if name.isdigit()}
processes = {pid: words for pid, words in processes.items() if words and words[0]}
"""
# Those of vine_workers whose parent is none: a worker's transfer server has the same words.
WORKERS = (
    ON_HOST
    + """
how, port, luck = sys.argv[1], sys.argv[2], float(sys.argv[3])
ours = [pid for pid, words in processes.items()
        if words[0].endswith("vine_worker") and words[-2].endswith(":" + port) and os.getsid(pid) == pid]
if how != "list":
    ours = ours[int(luck * len(ours)):][:1]
told = [{"worker": variable(pid, "CTXFLOW_WORKER_NAME"), "job": variable(pid, "CTXFLOW_JOB")} for pid in ours]
now = time.time()
for pid, each in zip(ours, told):
    tree = [other for other in processes if variable(other, "CTXFLOW_JOB") == each["job"]]
    now = time.time()
    for victim in {"list": [], "pid": [pid], "tree": tree, "stop": tree}[how]:
        try:
            os.kill(victim, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        except ProcessLookupError:
            pass
print(json.dumps([now, told]))
"""
)
LEFT = (
    ON_HOST
    + """
marks = ("vine_worker", "ctxflow.pyz", "ctxflow.host")
left = {pid: " ".join(words) for pid, words in processes.items() if pid != os.getpid()
        and (variable(pid, "CTXFLOW_JOB") or any(mark in word for word in words[:3] for mark in marks))}
print(json.dumps(left))
"""
)


class Driver:
    """A program in the testbed that tells what goes on, a JSON object a line."""

    def __init__(self, testbed_run: Path, command: list[str]) -> None:
        words = [sys.executable, str(testbed_run), *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(words, cwd="/", text=True, **pipes)  # type: ignore[call-overload]
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[str] = []
        self.last: dict[str, Any] = {}
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self._process.stdout, self._lines.put), (self._process.stderr, self.errors.append))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: IO[str], put: Callable[[str], None]) -> None:
        with pipe:
            for line in pipe:
                put(line)
        put("")

    def line(self) -> dict[str, Any] | None:
        """The next, None at the end of its output."""
        try:
            text = self._lines.get(timeout=patience())
        except queue.Empty:
            what = f"a line of the run after {self.last}; {self.said()}"
            raise DeadlinePassed(report(what, patience())) from None
        if text:
            self.last = json.loads(text)
        return self.last if text else None

    def until(self, condition: Callable[[dict[str, Any]], object], within: float = 180.0) -> dict[str, Any]:
        """The first line of which something holds."""

        def found() -> dict[str, Any] | None:
            line = self.line()
            assert line is not None, f"the run ended before it happened: {self.last}; {self.said()}"
            return line if condition(line) else None

        what = lambda: f"a line after {self.last}; {self.said()}"  # noqa: E731
        line = eventually(found, within=within, what=what, pause=0.001)
        assert line is not None
        return line

    def until_said(self, text: str, within: float = SECONDS, since: int = 0) -> str:
        """What it logged after so many lines, once a text is there."""
        return eventually(
            lambda: text in (said := "".join(self.errors[since:])) and said,
            within=within, what=lambda: f"{text!r}: {self.newest()}; {self.said()}",
        )  # fmt: skip

    def newest(self) -> dict[str, Any]:
        """What it told last, whatever was read of it so far."""
        with contextlib.suppress(queue.Empty):
            while text := self._lines.get_nowait():
                self.last = json.loads(text)
            self._lines.put("")  # Its end, for who reads on.
        return self.last

    def result(self) -> dict[str, Any]:
        """Its last line, once it has ended by itself and well."""
        while self.line() is not None:
            pass
        status = self.status()
        assert status == 0, f"the run ended with {status}: {self.said()}"
        return self.last

    def status(self) -> int:
        """Its exit status."""
        return exited(self._process)

    def said(self) -> str:
        """What it logged."""
        return "".join(self.errors)[-6000:]

    def close(self) -> None:
        """End it, if it has not ended."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience(60))
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            joined(reader)


def processes_left(testbed: Testbed, hosts: Sequence[str] = HOSTS) -> dict[str, Any]:
    """The workers' processes that there are, by host."""
    found = {host: json.loads(testbed.run("python", "-c", LEFT, user="root", host=host)) for host in ["submit", *hosts]}
    return {name: those for name, those in found.items() if those}


def left(testbed: Testbed, hosts: Sequence[str] = HOSTS) -> dict[str, Any]:
    """What there still is of workers: processes on each host, and jobs."""
    jobs = testbed.jobs()
    return {**processes_left(testbed, hosts), **({"jobs": jobs} if jobs else {})}
