"""Measure CPU time of a process and everything that it starts."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path

_PREFIX = "ctxflow-tests-"


class Meter:
    """CPU seconds of this process and all that it has started since, whether they live, have ended or were orphaned.

    Where this process may make a control group (version 2; root), the group's account is exact. Elsewhere only
    descendants that have ended and were waited for count.
    """

    def __init__(self) -> None:
        self._before, self._group = _join(f"{_PREFIX}{os.getpid()}")

    @property
    def exact(self) -> bool:
        """Whether living and orphaned descendants count."""
        return self._group is not None

    def seconds(self) -> float:
        """Return the CPU seconds until now."""
        if self._group is not None:
            found = re.search(r"usage_usec (\d+)", (self._group / "cpu.stat").read_text())
            return int(found[1]) / 1e6 if found else 0.0
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    def close(self) -> None:
        """Leave the group; it is removed unless something that a test has started still lives."""
        if self._group is not None and self._before is not None:
            with contextlib.suppress(OSError):
                (self._before / "cgroup.procs").write_text(str(os.getpid()))
                self._group.rmdir()
            self._group = None


def _join(name: str) -> tuple[Path | None, Path | None]:
    """Move this process into a new group below its own; return its group before, and the new one."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        root = next(Path(line.split()[1]) for line in mounts if line.split()[2] == "cgroup2")
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        before = root / own[3:].strip("/")
        for left in before.glob(f"{_PREFIX}*"):  # Of processes that were killed; one that is in use stays.
            with contextlib.suppress(OSError):
                left.rmdir()
        group = before / name
        group.mkdir(exist_ok=True)
    except (OSError, StopIteration):
        return None, None
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        (group / "cpu.stat").read_text()
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        return None, None
    return before, group
