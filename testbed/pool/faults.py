"""What can be wrong with a host beside its power and its link: its clock, its disk, and how many jobs its queue takes.

Where hosts have clocks of their own (`testbed/up --clocks`), each program there reads the time through libfaketime,
which looks into a file of the host's once a second. When files were changed is by the true clock, as on a file server
with a clock of its own; so are Slurm's daemons.
"""

from __future__ import annotations

from pathlib import Path

from .machine import enter, run
from .settings import STATE, Settings, TestbedError

CLOCK = "/run/testbed/clock"
"""How far a host's clock is off, as libfaketime reads it; job-wrapper looks for it too."""
SCRATCH = "/var/lib/condor"
_LIMITS = "config.d/limits"
_ROOM = 16
"""KiB that stay free on a full disk: what HTCondor itself must write."""


def clock(settings: Settings) -> dict[str, str]:
    """The variables with which a program has its host's clock."""
    if not settings.clocks:
        return {}
    return {
        "LD_PRELOAD": "/usr/$LIB/faketime/libfaketimeMT.so.1",
        "FAKETIME_TIMESTAMP_FILE": CLOCK,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
        "NO_FAKE_STAT": "1",
    }


def set_clock(pid: int, seconds: float, settings: Settings) -> None:
    """Set a host's clock: so many seconds ahead of the true one, or behind it; at once, for all that runs there.

    :raises TestbedError: if hosts have no clocks of their own.
    """
    if not settings.clocks:
        raise TestbedError("Hosts have no clocks of their own: bring the testbed up with --clocks.")
    new = Path(f"/proc/{pid}/root{CLOCK}.new")
    new.write_text(f"{seconds:+g}\n")
    new.rename(new.with_suffix(""))


def fill(pid: int) -> None:
    """Have a host's scratch space be full: it ends where it is used now."""
    used = run([*enter(pid), "df", "--output=used", "--block-size=1K", SCRATCH]).stdout.split()[-1]
    run([*enter(pid), "mount", "-o", f"remount,size={int(used) + _ROOM}k", SCRATCH])


def limit(pid: int, name: str, jobs: int | None) -> None:
    """Have the queue take no more than so many jobs of a user at once; None: as many as it likes."""
    path = STATE / "hosts" / name / _LIMITS
    if jobs is None and not path.exists():
        return
    path.write_text("" if jobs is None else f"MAX_JOBS_PER_OWNER = {jobs}\nMAX_JOBS_PER_SUBMISSION = {jobs}\n")
    run([*enter(pid), "condor_reconfig"])


def mend(pid: int, name: str, settings: Settings) -> None:
    """Undo all of it."""
    if settings.clocks:
        set_clock(pid, 0, settings)
    run([*enter(pid), "mount", "-o", f"remount,size={settings.disk_gb}g", SCRATCH])
    limit(pid, name, None)
