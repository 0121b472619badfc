"""Engines with several items in flight: workloads that have them, and what is fitted to runs of them."""

import numpy as np
import pytest
from test_fitting import recorded, site

from ctxflow.executors.simulated import SharedPace
from ctxflow.simulator.fitted_pace import FLYING, FlightLog, OverlappedCall, fit_pace
from ctxflow.simulator.recorded_run import fit
from ctxflow.simulator.scenario import Scenario, parse_change, recorded_scenario
from ctxflow.simulator.studies import play
from ctxflow.simulator.workload_file import WorkloadFile, problems
from suite.depth import some

TRUE = {"tokens_per_second": 2000.0, "knee": 24.0, "bend": 2.0}


def workload(**options):
    app = {"name": "ask", "items": 3000, "tokens": 160.0, "spread": 1.0, **TRUE, **options}
    return {"apps": [app], "contexts": [{"name": "llm", "load_seconds": 5.0}], "matching": {"seconds": 1.0}}


def test_how_long_a_call_was_in_flight_with_how_many():
    log = FlightLog()
    log.begin("w", "c", 1, 0.0)
    log.begin("w", "c", 2, 2.0)
    log.begin("other", "c", 3, 2.0)
    first, second = log.end("w", 1, 5.0), log.end("w", 2, 6.0)
    where = {int(FLYING[n]): n for n in (0, 4)}
    assert (first[where[1]], first[where[2]], first.sum()) == (2.0, 3.0, 5.0)
    assert (second[where[2]], second[where[1]], second.sum()) == (3.0, 1.0, 4.0)
    assert log.end("w", 1, 7.0) is None


@pytest.mark.parametrize(("knee", "bend"), [(8.0, 1.0), (64.0, 2.5), (0.5, 30.0)])
def test_a_known_curve_comes_back(knee, bend):
    calls = []
    for number in range(0, 40, 2):
        for kind, best in (("a", 1000.0), ("b", 500.0)):
            seconds = np.zeros(len(FLYING))
            seconds[number] = 3.0
            pace = SharedPace(best, knee, bend)
            calls.append(OverlappedCall(kind, 3.0 * pace.rate(FLYING[number]) / FLYING[number], seconds))
    found = fit_pace(calls)
    assert found.known
    for flying in (1, 10, 100, 1000):
        for kind, best in (("a", 1000.0), ("b", 500.0)):
            rate = SharedPace(found.best[kind], found.knee, found.bend).rate(flying)
            assert rate == pytest.approx(SharedPace(best, knee, bend).rate(flying), rel=0.02)


def test_a_run_that_tried_windows_says_what_others_would_have_done():
    lines, result = recorded(site(a10=2), workload())
    found = fit(lines)
    [app] = found.apps
    assert found.tokens == pytest.approx(result.tokens, rel=0.01)
    assert app.pace.known and not any("guess" in doubt for doubt in found.doubts)
    best = next(iter(app.pace.best.values()))
    for flying in (24, 64, 128, 256):
        fitted = SharedPace(best, app.pace.knee, app.pace.bend).rate(flying)
        assert fitted == pytest.approx(SharedPace(2000.0, 24.0, 2.0).rate(flying), rel=0.1)
    for window in some((32,), deeply=(32, 128)):
        change = parse_change(f"batching={{policy='fixed', window={window}}}")
        predicted = play(recorded_scenario(found, [change]), seed=1)
        true = play(Scenario(site({"policy": "fixed", "window": window}, a10=2), WorkloadFile(**workload())), seed=1)
        assert predicted.tokens_per_second == pytest.approx(true.tokens_per_second, rel=0.15)


def test_a_run_with_one_window_says_that_others_are_a_guess():
    lines, _ = recorded(
        site({"policy": "fixed", "window": 48, "share": False}, a10=1), workload(items=6000, spread=0.1)
    )
    assert any("what other windows would do is a guess" in doubt for doubt in fit(lines).doubts)


def test_tokens_per_second_need_a_figure_for_each_tier():
    bad = WorkloadFile(**workload(tokens_per_second={"h100": 9000.0}))
    assert "tokens_per_second of app ask has no figure for tier a10" in next(iter(problems(bad, {"a10": "a10"}))).text
