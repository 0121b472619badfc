"""The offline profiler of the closed loop, on small workloads."""

import pytest

from ctxflow.policies.turboserve.autoscaling import Parameters
from ctxflow.simulator.scaling_profile import profiled, replayed, windows_of
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.workload_file import WorkloadFile
from ctxflow.sites import Site

CALM = [[10 * n, 20] for n in range(12)]
WILD = [[1000.0, 600], [1100.0, 30]]


def scenario(arrivals, **app):
    made = {"arrivals": arrivals, "item_seconds": 1.0, "spread": 0.0, "batch_size": 20, **app}
    tiers = [{"name": "a", "workers": 30, "boot_seconds": 20.0, "gpus": 0, "provider": "condor"}]
    workload = WorkloadFile(apps=[made], contexts=[{"gpus": 0, "load_spread": 0}], matching={"spread": 0})
    return Scenario(Site(engine="taskvine", tiers=tiers), workload)


def test_windows_hold_everything_once_and_tell_calm_from_wild():
    windows = windows_of(scenario(CALM + WILD), 500.0)
    assert [(window.begin, window.items) for window in windows] == [(0.0, 240), (1000.0, 630)]
    assert windows[0].volatility < windows[1].volatility
    assert windows[1].scenario.workload.apps[0].arrivals[0] == (0.0, 600)


def test_a_lower_share_costs_more_and_waits_less():
    given = scenario(WILD)
    spare, tight = replayed(given, Parameters(0.25)), replayed(given, Parameters(1.0))
    assert spare.cost > tight.cost
    assert spare.worst < tight.worst


def test_the_longest_wait_is_counted_from_the_submission():
    alone = scenario([[500.0, 1]], batch_size=1)
    # 20 s to boot, 15 s to load, 1 s for the item, 10 ms on the way; the workload's time begins with the window.
    assert replayed(windows_of(alone, 400.0)[0].scenario, Parameters()).worst == pytest.approx(36.01, abs=1.5)


def test_the_cheapest_share_that_keeps_the_target_is_taken():
    windows = windows_of(scenario(CALM + WILD), 500.0)
    told = []
    easy = profiled(windows, 1e6, (0.25, 1.0), tell=told.append)
    assert [row.parameters.utilization for row in easy] == [1.0, 1.0]
    assert all(row.valid for row in easy)
    assert told == [0.25, 0.5, 0.75, 1.0]
    impossible = profiled(windows, 1.0, (0.25, 1.0))
    assert not any(row.valid for row in impossible)
    for window, row in zip(sorted(windows, key=lambda each: each.volatility), impossible, strict=True):
        each = [replayed(window.scenario, Parameters(share), target=1.0) for share in (0.25, 1.0)]
        assert (row.replayed.worst, row.replayed.over) == min((one.worst, one.over) for one in each)
    with pytest.raises(ValueError, match="nothing to profile"):
        profiled([], 1.0)
