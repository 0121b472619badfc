"""Workers from a real Slurm, on the testbed; slurm_inside.py and slurm_run_inside.py are run there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from suite.depth import for_release
from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(ROOT)
PROGRAM = f"{INSIDE}/slurm_run_inside.py"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture
def folder(testbed: Testbed) -> Iterator[str]:
    """A directory that all hosts see; nothing is left in Slurm at the end."""
    path = testbed.run("mktemp", "--directory", "/shared/slurm.XXXXXX")
    yield path
    try:
        testbed.eventually(lambda: not testbed.run("squeue", "--noheader", "--format=%i %u %j %T"))
    finally:
        for user in ("alice", "bob"):
            testbed.run("scancel", f"--user={user}", user=user)
        testbed.run("rm", "-r", path)


def run(testbed: Testbed, folder: str, *words: str) -> dict[str, Any]:
    """What the program says in its last line."""
    done = testbed.command("run", "--directory", folder, "python", PROGRAM, *words, check=False, limit=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_provider_holds_its_promises_on_a_real_slurm(testbed: Testbed, folder: str) -> None:
    # Neither pyproject.toml nor conftest.py holds inside: both need what only the checkout's environment has.
    words = [
        "python",
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--timeout",
        f"{patience(300)}",
    ]
    command = ["--directory", folder, *words, "-q", f"{INSIDE}/slurm_inside.py"]
    done = testbed.command("run", *command, check=False, limit=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["slurm", *for_release("condor", "hand")])
def test_one_program_runs_the_same_way_however_its_workers_come(testbed: Testbed, folder: str, kind: str) -> None:
    found = run(testbed, folder, kind)
    assert found["right"] and not found["missing"] and found["twice"] == found["lost"] == 0
    assert found["status"] == {"items_done": 60, "items_dead": 0, "evictions": 0, "crashes": 0}
    for _, devices, model in found["places"]:
        assert devices and "," not in devices and model.startswith("NVIDIA")


def test_workers_that_slurm_takes_lose_nothing_that_was_finished(testbed: Testbed, folder: str) -> None:
    command = [sys.executable, str(ROOT / "testbed" / "run"), "--directory", folder, "python", "-u", PROGRAM]
    with subprocess.Popen([*command, "slurm", "--take"], cwd="/", stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout and program.stdout.readline() == "ready\n"
            # The owner takes all nodes, so that Slurm preempts each of the workers, with notice.
            words = ("sbatch", "--partition=owners", "--nodes=4", "--exclusive", "--wrap", "sleep 2")
            testbed.run(*words, f"--chdir={folder}", "--output=/dev/null", user="bob")
            found = json.loads(program.stdout.read())
        finally:
            program.terminate()
    assert found["right"] and not found["missing"]
    counts = {"items_done": found["items"], "items_dead": 0, "evictions": found["lost"], "crashes": 0}
    assert found["items"] >= 600 and found["status"] == counts
    assert found["lost"] == 6
    # Only the two workers that were killed at once, by scancel and requeue, had a batch in flight.
    assert found["twice"] <= 2 * 5


def test_workers_of_a_killed_driver_leave(testbed: Testbed, folder: str) -> None:
    found = run(testbed, folder, "--die")
    assert found["status"] == -9
    assert found["found"] == ["running"] * 3
