"""Sessions on the testbed: the engines' contract, 24 sessions that are moved, suspended and evicted meanwhile, a burst.

sessions_inside.py is what runs there.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver import INSIDE

from ctxflow.observe.plots import draw
from ctxflow.observe.run_report import read_report

if TYPE_CHECKING:
    from conftest import Testbed


def inside(testbed: Testbed, *words: str, limit: float) -> str:
    """What the program in the testbed writes, run in a fresh directory."""
    command = f"cd $(mktemp -d) && python {INSIDE}/sessions_inside.py {' '.join(words)} 2>&1"
    done = testbed.command("run", "bash", "-c", command, check=False, limit=limit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.timeout(540)
def test_contract(testbed: Testbed) -> None:
    out = inside(testbed, "contract", limit=480)
    assert re.search(r"\d\d passed", out) and "skipped" not in out, out[-500:]


@pytest.mark.timeout(540)
def test_sessions_give_what_undisturbed_ones_do(testbed: Testbed) -> None:
    out = inside(testbed, "wander", "--site", "/checkout/site-configs/testbed.toml", limit=480)
    found = json.loads(out.splitlines()[-1])
    assert (found["right"], found["wrong"], found["errors"]) == (24, {}, []), found
    assert found["migrations"] and found["suspensions"] and found["evictions"], found


@pytest.mark.release
@pytest.mark.timeout(540)
def test_a_burst_of_sessions_gets_workers_that_are_given_back_after_it(testbed: Testbed, tmp_path: Path) -> None:
    out = inside(testbed, "burst", "--site", "/checkout/site-configs/testbed.toml", limit=480)
    found = json.loads(out.splitlines()[-1])
    print(found)
    numbers = [number for _, number in found["asked"]]
    highest = max(numbers)
    assert numbers[0] < highest and highest >= 4, found
    assert numbers[-1] < highest, found
    there = list(itertools.accumulate(change for _, change in found["joined"]))
    assert max(there) >= 4 and there[-1] <= numbers[-1] + 1, found
    changes = [
        (time, after - before)
        for (_, before), (time, after) in itertools.pairwise([(0.0, 0), *found["asked"]])
        if after != before
    ]
    turns = [time for (_, one), (time, other) in itertools.pairwise(changes) if (one > 0) != (other > 0)]
    assert all(later - sooner >= found["boot_seconds"] for sooner, later in itertools.pairwise(turns)), found
    log = testbed.run("cat", f"{found['directory']}/events.jsonl")
    (tmp_path / "events.jsonl").write_text(log + "\n")
    report = read_report(tmp_path)
    pictures = draw(tmp_path, report.history, report.transfers, report.trees)
    assert tmp_path / "workers_and_items.png" in pictures
