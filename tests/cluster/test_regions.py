"""Two regions with a slow link between them, and two contexts: who loads what where, and what a region's loss costs.

regions_inside.py is the run, on the testbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driver import INSIDE, TESTBED, Driver

if TYPE_CHECKING:
    from conftest import Testbed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.xdist_group("regions")]

MBIT = "40"
FAR = ["host3", "host4"]


@pytest.fixture
def two_regions(any_testbed: Testbed) -> Iterator[Testbed]:
    """Four hosts of two GPUs each, two of them behind one slow link."""
    any_testbed.command("up", "--gpus", "2", "--far", str(len(FAR)), "--far-link", MBIT, limit=600)
    yield any_testbed
    any_testbed.clear()


def started(routing: str, *words: str) -> Driver:
    return Driver(TESTBED / "run", ["python", "-u", str(INSIDE / "regions_inside.py"), "--routing", routing,
                                    "--mbit", MBIT, *words])  # fmt: skip


def ran(routing: str) -> dict[str, Any]:
    driver = started(routing)
    try:
        result = driver.result()
    finally:
        driver.close()
    assert (result["wrong"], result["dead"], result["done"]) == (0, 0, result["submitted"])
    assert result["regions"] == ["far"] * 4 + ["near"] * 4, "workers are told apart by their machines' names"
    return result


@pytest.mark.release
def test_affinity_and_torta_load_each_context_on_fewer_workers_than_round_robin(two_regions: Testbed) -> None:
    before = two_regions.status()["far"]
    assert before["mbit"] == float(MBIT)
    found = {routing: ran(routing) for routing in ("round-robin", "context-affinity", "torta")}
    after = two_regions.status()["far"]
    megabytes = (after["received"] - before["received"]) / 1e6
    for routing, result in found.items():
        print(f"{routing}: {result['loads']} loads on {result['workers']} workers, {result['seconds']:.1f} s")
    print(f"{megabytes:.0f} MB went to the far region in all")
    assert megabytes > 3 * 2 * 6, "files went over the slow link"
    for routing in ("context-affinity", "torta"):
        assert sum(found[routing]["workers"]) < sum(found["round-robin"]["workers"]), found
        assert sum(found[routing]["loads"]) < sum(found["round-robin"]["loads"]), found


@pytest.mark.release
def test_a_region_that_is_cut_off_half_way_loses_nothing(two_regions: Testbed) -> None:
    driver = started("torta", "--items", "700")
    try:
        driver.until(lambda line: line.get("done", 0) >= 500)
        for host in FAR:
            two_regions.command("host", "cut", host)
        cut = driver.until(lambda line: line.get("lost", 0) >= 4)
        for host in FAR:
            two_regions.command("host", "restore", host)
        result = driver.result()
    finally:
        driver.close()
    assert cut["done"] < result["submitted"], "there was work left that the far region had"
    assert (result["wrong"], result["dead"], result["done"]) == (0, 0, result["submitted"])
