"""TurboServe's experiments, small: what traces are made of, and what has to come out whatever the chance."""

import dataclasses
import json
import math
import sys

import pytest

from ctxflow.cli.app import main
from ctxflow.policies.turboserve.autoscaling import Levels, Parameters, constant
from ctxflow.policies.turboserve.scaling import ClosedLoop
from ctxflow.policies.turboserve.session_placement import TurboServe
from ctxflow.simulator.session_serving import Cluster, SessionTrace, serve
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.baselines import LoadAware, MemoryAware, RoundRobin
from ctxflow_papers.turboserve.experiments import bound, fewest_together, placement_gaps, shared
from ctxflow_papers.turboserve.matching import MATCH, OURS, PAPERS_LOOP, UNMOVED, Runs, Strategy
from ctxflow_papers.turboserve.traces import TEN_AVERAGE, TEN_MOST, burst, generate, of_counts, ten_windows
from suite.depth import for_release, some

CLUSTER = Cluster(16, 2, 5)
PAPERS = PAPERS_LOOP.options
SHORT = dataclasses.replace(printed.STUDY, name="short", window=some(30.0, deeply=60.0))


def scaled(utilization, cluster=CLUSTER, **options):
    return cluster.closed_loop(constant(Parameters(utilization, 0.05)), **options)


def fixed(gpus):
    return {"policy": "fixed", "workers": gpus}


@pytest.mark.parametrize("wanted", printed.TRACES[:4], ids=lambda each: each.name)
def test_traces_have_appendix_b_s_statistics(wanted):
    trace = generate(wanted, 3)
    assert trace.active() == pytest.approx(wanted.active, rel=0.03)
    assert len(trace.state_bytes) == sum(wanted.arrivals)
    state = {}
    for time, session, on in trace.events:
        assert 0.0 <= time <= trace.seconds and state.get(session, False) != on
        state[session] = on
    first = {session: time for time, session, on in reversed(trace.events)}
    come = [0] * 5
    for time in first.values():
        come[int(time // wanted.window)] += 1
    assert tuple(come) == wanted.arrivals
    assert generate(wanted, 3).events == trace.events != generate(wanted, 4).events


def test_bursts_are_table_5_s():
    for level, (arrivals, peak) in enumerate(zip(printed.ARRIVALS, printed.PEAKS, strict=True), 1):
        trace = burst(level)
        assert sum(on and time > 0 for time, _, on in trace.events) == arrivals
        assert trace.counts(10.0)[1].max() == peak
    seen = [max(burst(n).volatilities()[20:]) for n in range(1, 11)]
    assert seen == pytest.approx(printed.VOLATILITIES, rel=0.25)


def test_the_ten_windows_are_table_7_s():
    trace = ten_windows(0)
    assert trace.active() == pytest.approx(TEN_AVERAGE, abs=0.1)
    lowest, highest = trace.counts(5.0)
    assert lowest.min() >= 0
    for number, most in enumerate(TEN_MOST):
        # What ends when a window begins is still there at that moment.
        assert highest[24 * number + 1 : 24 * (number + 1)].max() == most


def test_what_runs_is_what_a_site_file_loads(monkeypatch):
    asked = []

    def noting(kind, method):
        shipped = getattr(kind, method)

        def asks(self, view):
            asked.append(type(self))
            return shipped(self, view)

        monkeypatch.setattr(kind, method, asks)

    noting(ClosedLoop, "target")
    noting(TurboServe, "place")
    trace = generate(SHORT, 0)
    found = Runs(trace, CLUSTER).at(OURS, 0.8)
    assert asked.count(ClosedLoop) > trace.seconds - 5 and asked.count(TurboServe) > trace.seconds - 5
    assert found.chunks > 1000 and found.migrations > 0


def test_shares_and_bounds_of_levels_are_in_sessions():
    rows = Levels((1.6, 3.2), (Parameters(0.8), Parameters(0.65), Parameters(0.5)))
    policy = ClosedLoop(**{name: each for name, each in CLUSTER.closed_loop(rows).items() if name != "policy"})
    shares = [policy.levels.at(volatility / CLUSTER.capacity).utilization for volatility in (1.0, 2.0, 4.0)]
    assert shares == [0.8, 0.65, 0.5]


@pytest.mark.parametrize("placing", [RoundRobin, LoadAware, MemoryAware])
def test_a_fixed_strategy_costs_its_gpus(placing):
    trace = generate(SHORT, 0)
    found = serve(trace, CLUSTER, fixed(7), placing())
    assert found.gpu_seconds == pytest.approx(7 * trace.seconds)
    assert found.history == [(0.0, 7), (trace.seconds, 0)] and found.migrations == 0
    assert set(found.least_ready) == {7}
    assert found.together >= math.ceil(trace.counts(5.0)[0].max() / 7)
    assert 0 < found.mean <= found.worst <= found.longest_wait


def test_turns_are_taken_and_memory_is_heeded():
    events = [(float(n), n, True) for n in range(8)]
    trace = SessionTrace("sizes", 60.0, 1, events, [8e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9], [8], [0])
    spread = {each: serve(trace, CLUSTER, fixed(2), each()).together for each in (RoundRobin, LoadAware, MemoryAware)}
    assert spread == {RoundRobin: 4, LoadAware: 4, MemoryAware: 7}  # The large one is alone.


@pytest.mark.parametrize("gpus", [5, 8])
def test_moved_sessions_are_as_even_as_chunk_boundaries_let_them(gpus):
    trace = generate(SHORT, 1)
    peak = int(trace.counts(1.0)[1].max())
    found = serve(trace, CLUSTER, fixed(gpus))
    assert found.together <= math.ceil(peak / gpus) + 2
    assert found.together <= serve(trace, CLUSTER, fixed(gpus), RoundRobin()).together


@pytest.mark.parametrize("seed", [0, *for_release(1, 2)])
@pytest.mark.parametrize("strategy", [OURS, UNMOVED, PAPERS_LOOP])
def test_no_run_beats_the_bounds(seed, strategy):
    trace = generate(SHORT, seed)
    for utilization in some([0.5 if strategy is UNMOVED else 1.1], deeply=[0.5, 1.1]):
        found = Runs(trace, CLUSTER).at(strategy, utilization)
        each = shared(trace, found)
        assert found.gpu_seconds >= bound(trace, CLUSTER, each) - 1e-6
        assert each >= fewest_together(trace, CLUSTER, found.gpu_seconds)
        assert max(gpus for _, gpus in found.history) <= CLUSTER.most
        assert found.gpu_seconds == pytest.approx(sum(row[1] for row in found.by_stretch))


def test_stretches_add_up_and_the_longest_chunk_is_in_one():
    trace = generate(dataclasses.replace(SHORT, window=15.0), 0)
    whole, cut = serve(trace, CLUSTER, scaled(0.8)), serve(trace, CLUSTER, scaled(0.8), stretch=15.0)
    assert len(cut.by_stretch) == 5
    assert sum(cost for _, cost in cut.by_stretch) == pytest.approx(whole.gpu_seconds)
    assert max(worst for worst, _ in cut.by_stretch) == whole.worst


def test_what_is_booting_is_billed_and_not_used():
    trace = of_counts("step", [1] * 10 + [20] * 10, 10.0, 1)
    late, at_once = (
        serve(trace, each, scaled(0.8, each, **PAPERS), initial=2)
        for each in (dataclasses.replace(CLUSTER, boot_seconds=seconds) for seconds in (50.0, 0.0))
    )
    assert late.together == 10 and late.mean > 1.2 * at_once.mean
    assert late.gpu_seconds == pytest.approx(at_once.gpu_seconds, rel=0.15)
    held = dict(late.history)
    asked = min(time for time, gpus in held.items() if gpus > 2)
    assert late.least_ready[math.ceil(asked) + 49] == 2 < late.least_ready[math.ceil(asked) + 51]


def test_growth_is_anticipated_and_without_that_it_is_not():
    trace = of_counts("rise", [2 + n for n in range(24)], 10.0, 1)
    ours, paper = (serve(trace, CLUSTER, scaled(1.0, **how), initial=2) for how in ({}, PAPERS))
    assert ours.together < paper.together and ours.gpu_seconds > paper.gpu_seconds


def test_idle_sessions_that_may_come_back_are_anticipated():
    come = [(3.0 * n, n, True) for n in range(40)]
    idle = [(130.0 + 2 * n, n, False) for n in range(35)]
    back = [(250.0 + n / 2, n, True) for n in range(35)]
    events = sorted(come + idle + back)
    there = SessionTrace("storm", 330.0, 1, events, [1e9] * 40, [40], [40], ends=[330.0] * 40)
    # The same, but those who come back are others.
    others = [(time, n + 40 if time >= 250.0 and on else n, on) for time, n, on in events]
    gone = dataclasses.replace(there, events=others, state_bytes=[1e9] * 80, ends=())
    early, late = (serve(each, CLUSTER, scaled(0.8), initial=8) for each in (there, gone))
    assert early.together < late.together and early.gpu_seconds > late.gpu_seconds


def test_a_gpu_without_migration_is_released_when_it_is_empty():
    trace = of_counts("down", [12] * 10 + [4] * 20 + [1] * 10 + [0] * 10, 10.0, 1)
    found = serve(trace, CLUSTER, scaled(0.8, **PAPERS), LoadAware(), initial=4)
    held = [gpus for time, gpus in found.history if time < trace.seconds]
    assert found.migrations == 0 and held[-1] == 2 and held == sorted(held, reverse=True)


@pytest.mark.release
def test_the_searches_find_what_they_say():
    runs = Runs(generate(SHORT, 2), CLUSTER)
    least = runs.fewest(UNMOVED, 0.668)
    gpus = round(least.gpu_seconds / runs.trace.seconds)
    assert least.worst <= 0.668 * (1 + MATCH) < runs.fixed(UNMOVED, gpus - 1).worst
    target = runs.at(OURS, 0.8).gpu_seconds
    assert runs.of_cost(OURS, target, 1.2).gpu_seconds == pytest.approx(target, rel=0.05)
    assert runs.of_latency(OURS, 1.2).worst <= 1.2 * (1 + MATCH)
    assert runs.fixed(Strategy(LoadAware), gpus).worst == least.worst  # The same again is the same.


def test_the_plateau_aware_rule_is_the_optimum_and_the_printed_one_is_not():
    assert max(placement_gaps(20, 1, "plateau-aware")) == 0.0
    assert max(placement_gaps(20, 1, "printed")) > 0.0


@pytest.mark.release
def test_the_command_prints_quick_figures_and_draws(capsys, monkeypatch, tmp_path):
    arguments = ["reproduce", "turboserve", "--quick", "--json", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ctxflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "reproduce-turboserve"
    figures = found["figures"]
    assert set(figures["latency_saved"]) == {"value", "unit", "better", "spread", "n", "paper"}
    assert figures["above_unbeatable_least"]["value"] >= 0
    assert figures["placement_gap_plateau_aware"]["value"] == 0 < figures["placement_gap_printed"]["value"]
    assert figures["latency_saved_foreseen"]["value"] >= figures["latency_saved"]["value"] > 0
    assert figures["study_at_once_autoscaling_cost"]["value"] >= figures["study_autoscaling_cost"]["value"]
    assert all(figure["paper"] is None for figure in figures.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "turboserve-figure4.png",
        "turboserve-figure7.png",
        "turboserve-figure8.png",
        "turboserve-gpus.png",
    ]
