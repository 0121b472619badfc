"""What a person sees while a command works: a line a step, with its seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .settings import TestbedError

FENCE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""Namespaces around a step's program: what it mounts or leaves running is gone when it ends."""


class Step:
    """A step in progress: its line on the terminal counts seconds while it is worked on."""

    def __init__(self, text: str, out: TextIO) -> None:
        self.text, self.out, self.began = text, out, time.monotonic()
        self.show()

    def show(self, end: str = "") -> None:
        """Write the line anew; off a terminal only its end is written."""
        line = f"{self.text} ... {time.monotonic() - self.began:.0f} s"
        if self.out.isatty():
            self.out.write(f"\r{line}{end}")
        elif end:
            self.out.write(f"{line}{end}")
        self.out.flush()


@contextlib.contextmanager
def step(text: str) -> Iterator[Step]:
    """Show one step of a command on standard error."""
    current = Step(text, sys.stderr)
    try:
        yield current
    finally:
        current.show("\n")


def work(
    text: str, command: list[str], log: Path, limit: float, environment: dict[str, str], fenced: bool = True
) -> None:
    """Run a long program as one step, its output in `log`, ending with us or after `limit` seconds.

    :raises TestbedError: it failed, with the last line it wrote.
    """
    with step(text) as current, log.open("ab") as output:
        process = subprocess.Popen(
            ["nice", "-n", "10", "setpriv", "--pdeathsig", "KILL", *(FENCE if fenced else ()), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + limit
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TestbedError(f"{text} took more than {limit:.0f} s and was stopped; its log is {log}.")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                current.show()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        last = next((line for line in reversed(lines) if line.startswith(("E:", "ERROR"))), lines[-1] if lines else "")
        raise TestbedError(f"{text} failed (exit {process.returncode}): {last.strip()}; the whole log is {log}.")
