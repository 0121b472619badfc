"""An administrator's hold counts: the job stays held, nobody else is asked for in its place, and it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suite.depth import for_release

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path("/checkout") / Path(__file__).parent.relative_to(ROOT) / "hold_inside.py"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["condor", *for_release("slurm")])
def test_jobs_that_are_put_on_hold_stay_so_until_they_are_released(testbed: Testbed, kind: str) -> None:
    folder = testbed.run("mktemp", "--directory", "/shared/hold.XXXXXX")
    done = testbed.command("run", "--directory", folder, "python", str(PROGRAM), kind, check=False, limit=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    held = found["held"]
    # In all that time both jobs were there, the one that waited and the one that ran, and no fourth.
    assert all(len(jobs) == 3 and {jobs[each] for each in held} == {"H"} for jobs in found["during"]), found
    assert {*held} < {*found["after"]} and len(found["after"]) == 3
    assert "2 jobs are put on hold" in found["reason"], found
    # Told once for each way in which jobs were held: Slurm has two words for it.
    assert len(found["said"]) == {"condor": 1, "slurm": 2}[kind], found
    assert all(any(each in line for each in held) for line in found["said"]), found
    assert found["right"]
    testbed.run("rm", "-r", folder)
