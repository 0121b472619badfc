"""TurboServe's experiments, small: what traces are made of, and what has to come out whatever the chance."""

import dataclasses
import json
import sys

import pytest

from ctxflow.cli.app import main
from ctxflow.policies.turboserve.autoscaling import Parameters, constant
from ctxflow.simulator.session_serving import Cluster, SessionTrace, Strategy, serve
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.experiments import bound, fewest_together, placement_gaps
from ctxflow_papers.turboserve.reproduction import SMALL
from ctxflow_papers.turboserve.traces import TEN_AVERAGE, TEN_MOST, burst, generate, of_counts, ten_windows

CLUSTER = Cluster(16, 2, 5)
PAPERS = {"anticipates": False, "spare": None}


def scaled(utilization, **given):
    return Strategy(levels=(constant(Parameters(utilization, 0.05)),), **given)


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
    seen = [max(serve(burst(n), CLUSTER, Strategy(gpus=16)).volatilities[20:]) for n in range(1, 11)]
    assert seen == pytest.approx(printed.VOLATILITIES, rel=0.25)


def test_the_ten_windows_are_table_7_s():
    trace = ten_windows(0)
    assert trace.active() == pytest.approx(TEN_AVERAGE, abs=0.1)
    lowest, highest = trace.counts(5.0)
    assert lowest.min() >= 0
    for number, most in enumerate(TEN_MOST):
        # What ends when a window begins is still there at that moment.
        assert highest[24 * number + 1 : 24 * (number + 1)].max() == most


def test_a_fixed_strategy_costs_its_gpus():
    trace = generate(SMALL, 0)
    found = serve(trace, CLUSTER, Strategy("round-robin", False, gpus=7))
    assert found.gpu_seconds == pytest.approx(7 * trace.seconds)
    assert found.migrations == 0 and found.history == [(0.0, 7)]
    assert found.worst == CLUSTER.curve(found.together)


@pytest.mark.parametrize("gpus", [5, 8, 12])
def test_migration_makes_every_instant_even(gpus):
    trace = generate(SMALL, 1)
    peak = trace.counts(1.0)[1].max()
    found = serve(trace, CLUSTER, Strategy(gpus=gpus))
    assert found.together == -(-peak // gpus)
    for placing in ("round-robin", "load-aware", "memory-aware"):
        assert serve(trace, CLUSTER, Strategy(placing, False, gpus=gpus)).together >= found.together


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("migrates", [True, False])
def test_no_run_beats_the_bound_for_its_own_longest_chunk(seed, migrates):
    trace = generate(SMALL, seed)
    for utilization in (0.5, 0.8, 1.1):
        found = serve(trace, CLUSTER, scaled(utilization, migrates=migrates))
        assert found.gpu_seconds >= bound(trace, CLUSTER, found.together) - 1e-6
        # Seconds are all that a schedule that knows the future does not look into.
        assert found.together >= fewest_together(trace, CLUSTER, 1.02 * found.gpu_seconds)
        assert all(CLUSTER.least <= gpus <= CLUSTER.most for _, gpus in found.history) or not migrates


def test_what_is_booting_is_billed_and_not_used():
    trace = of_counts("step", [1] * 10 + [20] * 10, 10.0, 1)
    late = serve(trace, dataclasses.replace(CLUSTER, boot_seconds=50.0), scaled(0.8, **PAPERS), initial=2)
    at_once = serve(trace, dataclasses.replace(CLUSTER, boot_seconds=0.0), scaled(0.8, **PAPERS), initial=2)
    assert late.together == 10 and at_once.together < 10
    assert late.gpu_seconds == pytest.approx(at_once.gpu_seconds, rel=0.15)


def test_growth_is_anticipated_and_gpus_are_kept_for_a_few_more():
    trace = of_counts("rise", [2 + n for n in range(36)], 10.0, 1)
    ours, paper = (serve(trace, CLUSTER, scaled(1.0, **how), initial=2) for how in ({}, PAPERS))
    assert ours.together <= 5 < paper.together
    plain, spared = (serve(generate(SMALL, 3), CLUSTER, scaled(0.8, spare=part)) for part in (0.0, 1.5))
    assert len(spared.history) < len(plain.history) and spared.gpu_seconds > plain.gpu_seconds


def test_idle_sessions_that_may_come_back_are_anticipated():
    come = [(6.0 * n, n, True) for n in range(40)]
    idle = [(300.0 + 2 * n, n, False) for n in range(35)]
    back = [(420.0 + n / 2, n, True) for n in range(35)]
    trace = SessionTrace("storm", 600.0, 1, come + idle + back, [1e9] * 40, [40], [40], ends=[600.0] * 40)
    late, early = (
        serve(each, CLUSTER, scaled(0.8), initial=8) for each in (dataclasses.replace(trace, ends=()), trace)
    )
    assert early.together < late.together and early.gpu_seconds > late.gpu_seconds


def test_sessions_that_have_departed_are_not():
    events = [(float(n), n, True) for n in range(40)] + [(50.0 + n, n, False) for n in range(35)]
    events += [(200.0 + n / 2, 40 + n, True) for n in range(35)]
    trace = SessionTrace("storm", 300.0, 1, events, [1e9] * 75, [75], [35])
    ends = [50.0 + n for n in range(35)] + [300.0] * 40
    found = [serve(dataclasses.replace(trace, ends=each), CLUSTER, scaled(0.8), initial=8) for each in ((), ends)]
    assert found[0] == found[1]


def test_a_gpu_without_migration_is_released_when_it_is_empty():
    trace = of_counts("down", [12] * 10 + [4] * 20 + [1] * 10 + [0] * 10, 10.0, 1)
    found = serve(trace, CLUSTER, scaled(0.8, migrates=False, **PAPERS), initial=4)
    assert found.migrations == 0
    # The one session that is left at 300 s is on a GPU that is to go.
    assert dict(found.history)[300.0] == 3 and found.history[-1] == (400.0, 2)


def test_nothing_is_given_back_sooner_than_a_boot_after_more_was_asked_for():
    trace = generate(SMALL, 2)
    found = serve(trace, CLUSTER, scaled(0.8))
    changes = [(time, b - a) for (_, a), (time, b) in zip(found.history, found.history[1:], strict=False) if a != b]
    assert {change > 0 for _, change in changes} == {True, False}
    last = float("-inf")
    for time, change in changes:
        assert change > 0 or time - last >= CLUSTER.boot_seconds
        last = time if change > 0 else last


def test_the_plateau_aware_rule_is_the_optimum_and_the_printed_one_is_not():
    assert max(placement_gaps(20, 1, "plateau-aware")) == 0.0
    assert max(placement_gaps(20, 1, "printed")) > 0.0


@pytest.mark.long
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
    assert figures["latency_saved"]["value"] > 0 and figures["cost_saved"]["value"] > 0
    assert figures["latency_saved_foreseen"]["value"] >= figures["latency_saved"]["value"] - 1
    assert figures["study_at_once_autoscaling_cost"]["value"] > figures["study_autoscaling_cost"]["value"]
    assert [figures[f"w{n}_oracle_gpus"]["value"] for n in range(1, 11)] == list(printed.ORACLE_GPUS)
    assert all(figure["paper"] is None for figure in figures.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "turboserve-figure4.png",
        "turboserve-figure7.png",
        "turboserve-figure8.png",
        "turboserve-gpus.png",
    ]
