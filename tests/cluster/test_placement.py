"""A plan on a real pool: workers by tier and contexts on them are those planned, and follow a change of demand.

placement_inside.py is the program whose models are placed, on the testbed.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver import INSIDE, ROOT, TESTBED, Driver, left

sys.path.append(str(ROOT / "tests/policies/placement"))
from placement_inside import DEMAND, ITEM_SECONDS
from placement_run import Moment, moments, placed, stood_in_vain

if TYPE_CHECKING:
    from conftest import Testbed

PERIOD = 12.0
SITE = """
engine = "taskvine"
python_environment = "/opt/ctxflow"
placement = {policy = "agh", period = 12, clear = 12}
"""
# The large model needs two GPUs: the smallest workers have one.
TIERS = """
[[tiers]]
name = "single"
workers = 3
gpus = 1
price = 1.0
cores = 1
memory_gb = 2
disk_gb = 2
requirements = 'Machine == "host1.testbed"'

[[tiers]]
name = "pair"
workers = 2
gpus = 2
price = 2.5
cores = 2
memory_gb = 4
disk_gb = 2
requirements = 'regexp("^host[23]", Machine)'

[[tiers]]
name = "whole"
workers = 1
gpus = 3
price = 4.0
cores = 3
memory_gb = 6
disk_gb = 2
requirements = 'Machine == "host4.testbed"'
"""


def can_do(moment: Moment, model: str) -> float:
    """How many items of a model a second the workers that hold it answer."""
    return sum(n / ITEM_SECONDS[model][tier] for (held, tier), n in moment.held.items() if held == model)


BEFORE, AFTER = 24.0, 34.0


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_plan_is_followed_and_follows_demand(testbed: Testbed, tmp_path: Path) -> None:
    folder = testbed.shared / f"placement-{time.time_ns()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "site.toml").write_text(SITE + TIERS)
    inside = f"/shared/{folder.name}"
    options = ["--site", f"{inside}/site.toml", "--log", f"{inside}/events.jsonl"]
    command = ["python", "-u", str(INSIDE / "placement_inside.py"), *options, "--seconds", str(BEFORE), str(AFTER)]
    driver = Driver(TESTBED / "run", command)
    try:
        begin = driver.until(lambda line: line.get("part") == 0, 120)["time"]
        change = driver.until(lambda line: line.get("part") == 1, 120)["time"]
        result = driver.result()
    finally:
        driver.close()
    assert result["items"] == result["done"] and not result["wrong"] and not result["dead"], result
    log = Path(shutil.copy(folder / "events.jsonl", tmp_path))  # The shared folder ends with the testbed.
    lines = log.read_text().splitlines(keepends=True)
    found = moments(lines)
    first = placed(found, begin, change)
    assert can_do(first, "small") >= DEMAND["small"][0] and can_do(first, "large") >= DEMAND["large"][0], first
    second = next(
        each
        for each in found
        if each.time > change
        and each.as_planned
        and each.held != first.held
        and can_do(each, "large") >= DEMAND["large"][1]
    )
    planned = next(each.time for each in found if each.plan == second.plan and each.time > change)
    print(
        f"{first}\n{planned - change:.1f} s after the change planned, {second.time - change:.1f} s in place: {second}"
    )
    assert planned <= change + AFTER, "while there is work for it: how soon says how busy the machine is"
    assert second.workers != first.workers and can_do(second, "small") >= DEMAND["small"][1]
    assert stood_in_vain(found, 2 * PERIOD) == [], "a plan that stood for two periods was never in place"
    testbed.eventually(lambda: not left(testbed))
