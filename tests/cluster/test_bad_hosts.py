"""Batch jobs with a bad host on the testbed: what the benchmark of bad hosts plays there, with fewer rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from suite.depth import for_release

if TYPE_CHECKING:
    from conftest import Testbed

PROGRAM = "/checkout/benchmarks/bad_hosts_inside.py"
ROWS = 2000
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def play(testbed: Testbed, scenario: str, *words: str) -> dict[str, Any]:
    """What came of a scenario."""
    command = ["python", PROGRAM, scenario, "--rows", str(ROWS), "--build", "5", "--batch-size", "2", *words]
    done = testbed.command("run", *command, check=False, limit=380)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["twice"], found["wrong"]) == (0, 0, 0), found
    return found


@pytest.mark.parametrize(
    "scenario",
    [
        "black_hole_midway",
        *for_release("black_hole", "black_hole_at_first", "slow", "slow_without_peers", "flaky", "contexts"),
    ],
)
def test_a_bad_host_is_named_and_costs_no_row(testbed: Testbed, scenario: str) -> None:
    found = play(testbed, scenario)
    assert (found["status"], found["answered"], found["dead"]) == (0, ROWS, 0), found
    assert list(found["quarantined"]) == found["bad"] and found["reported"], found
    # Once for a GPU that shows it first, or for the host, and then for the rest.
    assert found["told"] and all(f"host {found['bad'][0]} " in line for line in found["told"]), found["told"]
    if scenario == "contexts":  # No GPU of the host can show that it is another's fault.
        assert found["excluded"] == ["host2"] and len(found["told"]) == 1, found


def test_a_factory_is_told_on_which_hosts_no_worker_is_wanted(testbed: Testbed) -> None:
    found = play(testbed, "contexts", "--acquire", "factory")
    assert (found["status"], found["answered"], found["excluded"]) == (0, ROWS, ["host2"]), found
    assert any("not on host2.testbed" in line for line in found["factory"]), found["factory"]


@pytest.mark.release
def test_neither_poisoned_rows_nor_evictions_make_a_host_bad(testbed: Testbed) -> None:
    found = play(testbed, "alarms", "--seconds", "0.1")
    assert found["evictions"] > 0 and found["quarantined"] == {} and found["told"] == [], found
    assert found["dead_unearned"] == 0 and found["dead"] == ROWS // 97, found
