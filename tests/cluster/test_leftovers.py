"""What runs leave on a driver's host and in the queues, however they end; leftovers_inside.py is run there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suite.depth import for_release

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path("/checkout") / Path(__file__).parent.relative_to(ROOT) / "leftovers_inside.py"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("kind", "runs"), [("condor", 4), *for_release(("slurm", 4), ("local", 4))])
def test_runs_of_all_endings_leave_nothing_that_the_next_or_clean_does_not_remove(
    testbed: Testbed, kind: str, runs: int
) -> None:
    folder = testbed.run("mktemp", "--directory", "/shared/leftovers.XXXXXX")
    words = ["--directory", folder, "python", str(PROGRAM), kind, "--runs", str(runs)]
    done = testbed.command("run", *words, check=False, limit=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"secrets": [], "cleaned": [], "runs": []}
    testbed.run("rm", "-r", folder)
