"""Runs inside the testbed: an administrator holds two of three workers' jobs, one that waits and one of those that run.

They are released after a while.

    python hold_inside.py condor|slurm

Writes as JSON which jobs there were at each time, what the run said of it, and whether all rows were answered.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, joined

ROWS = 800
HELD_SECONDS = 15.0
LIMIT_SECONDS = 120.0


@context()
def place():
    return 1


@batch_app(place(), batch_size=2)
def slow(one, items):
    time.sleep(0.1 * len(items))
    return items


def jobs(kind: str) -> dict[str, str]:
    """The workers' jobs that are in the queue -> "R" or "H", or another state."""
    if kind == "condor":
        command, states = ["condor_q", "-af:j", "JobStatus"], {"1": "W", "2": "R", "5": "H"}
    else:
        command, states = ["squeue", "--me", "--noheader", "--format=%i %T,%r"], {"RUNNING,None": "R"}
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = dict(line.split(maxsplit=1) for line in said.splitlines())
    return {job: states.get(state.strip(), "H" if "held" in state.lower() else "W") for job, state in found.items()}


def until(kind: str, states: list[str]) -> dict[str, str]:
    """Wait until the jobs are in these states."""

    def found() -> dict[str, str] | None:
        there = jobs(kind)
        return there if sorted(there.values()) == states else None

    return eventually(found, what=lambda: f"{states} among {jobs(kind)}") or {}


def main() -> None:
    kind = sys.argv[1]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ctxflow").addHandler(handler)
    one_host: dict[str, Any] = {  # On which two have room, so that the third waits.
        "condor": {"requirements": 'Machine == "host1.testbed"'},
        "slurm": {"options": {"scheduler_options": "#SBATCH --nodelist=host1"}},
    }[kind]
    tier = Tier(name="small", provider=kind, workers=3, cores=3, memory_gb=1, gpus=0, disk_gb=1, **one_host)
    site = Site(name=kind, engine="taskvine", python_environment="/opt/ctxflow", tiers=(tier,), start_when=0.6)
    hold_waiting, hold, release = {
        "condor": (["condor_hold"], ["condor_hold"], ["condor_release"]),
        "slurm": (["scontrol", "hold"], ["scontrol", "requeuehold"], ["scontrol", "release"]),
    }[kind]
    with ContextExecutor(site=site) as executor:
        results: list[int] = []
        reader = threading.Thread(target=lambda: results.extend(slow.map(range(ROWS))))
        reader.start()
        there = until(kind, ["R", "R", "W"])
        held = sorted(there, key=lambda job: there[job] == "R")[:2]  # The one that waits is the first.
        eventually(lambda: executor.status().items_done)
        for command, job in ((hold_waiting, held[0]), (hold, held[1])):
            subprocess.run([*command, job], check=True, stdout=subprocess.DEVNULL)
        until(kind, ["H", "H", "R"])
        over, during = time.monotonic() + HELD_SECONDS, []
        while time.monotonic() < over:
            during.append(jobs(kind))
            time.sleep(1.0)
        reason = executor.status().tiers["small"].reason
        for job in held:
            subprocess.run([*release, job], check=True, stdout=subprocess.DEVNULL)
        after = until(kind, ["R", "R", "W"])
        joined(reader)
        right = results == list(range(ROWS))
    print(json.dumps({
        "held": held, "during": during, "after": after, "reason": reason, "right": right,
        "said": [line for line in said if "on hold" in line],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
