"""A full table of file descriptors, a driver's or a worker's, costs no row and is told with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path("/checkout") / Path(__file__).parent.relative_to(ROOT) / "descriptors_inside.py"
WHAT_TO_DO = "raise `ulimit -n`"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.release
def test_runs_with_few_descriptors_or_none_for_a_while(testbed: Testbed) -> None:
    folder = testbed.run("mktemp", "--directory", "/shared/descriptors.XXXXXX")
    done = testbed.command("run", "--directory", folder, "python", str(PROGRAM), check=False, limit=200)
    assert done.returncode == 0, done.stdout + done.stderr
    few, none, filled = json.loads(done.stdout.splitlines()[-1]).values()
    # Those workers for whom there are none wait, and nobody who is there is lost for that.
    assert few["right"] and not few["error"], few
    told = [each for each in few["said"] if WHAT_TO_DO in each]  # None if so many never came before all was done.
    assert len(told) <= 1 and all("connections of workers have to wait" in each for each in told), few
    assert not any("manager ended" in each or " is gone" in each for each in few["said"]), few
    # Where there are none for any worker, the run does not begin.
    assert "does not start" in none["error"] and WHAT_TO_DO in none["error"], none
    # The program takes all for a while, and so does a call on a worker; a worker is lost meanwhile.
    assert filled["right"] and not filled["error"], filled
    assert any(WHAT_TO_DO in each for each in filled["said"]), filled
    testbed.run("rm", "-r", folder)
