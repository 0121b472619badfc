"""Items in flight on a real pool: what routing and scaling policies make of workers whose windows have room.

windows_inside.py is the run, on the testbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from driver import INSIDE, TESTBED, Driver, left
from windows_inside import WINDOW

from ctxflow.policies.registry import names
from suite.depth import for_release

if TYPE_CHECKING:
    from conftest import Testbed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
AWARE = ("context-affinity", "torta")
"""Routing policies that heed contexts."""
OTHERS = [name for name in names("routing") if name != "torta"]


def ran(testbed: Testbed, **options: object) -> dict[str, Any]:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    driver = Driver(TESTBED / "run", ["python", "-u", str(INSIDE / "windows_inside.py"), *words])
    try:
        result = driver.result()
    finally:
        driver.close()
    print(f"{options}: {result}")
    assert (result["wrong"], result["dead"]) == (0, 0)
    assert result["most"] <= WINDOW
    testbed.eventually(lambda: not left(testbed))
    return result


@pytest.mark.release
@pytest.mark.parametrize("scaling", ["closed-loop", "activation", "queue-proportional"])
def test_no_more_workers_are_asked_for_than_windows_are_filled(testbed: Testbed, scaling: str) -> None:
    result = ran(testbed, scaling=scaling, burst=2 * WINDOW)
    assert result["asked"] <= 2, "two windows take them all"
    assert result["most"] > WINDOW / 2, "items were answered one after the other"


@pytest.mark.parametrize("routing", ["torta", *for_release(*OTHERS)])
def test_two_streams_of_items_are_answered(testbed: Testbed, routing: str) -> None:
    result = ran(testbed, routing=routing, stream=160)
    if routing in AWARE:
        assert result["late"] <= 1, "an item that comes has its context loaded, where a window has room for it"
