"""The paper's experiments: what is printed or derived is met within 15 %, but for pv2; the orderings hold; pictures."""

import dataclasses
import statistics

import pytest

from ctxflow.scheduler import events as ev
from ctxflow.simulator.experiments import ExperimentRequest
from ctxflow_papers.pervasive_context.experiments import play
from ctxflow_papers.pervasive_context.reproduction import reproduce, run, table_2, times_of
from ctxflow_papers.pervasive_context.settings import (
    CALIBRATED,
    DIRECT,
    EXPERIMENTS,
    POOL_FLUID_SECONDS,
    Settings,
    pool_of_20,
)
from ctxflow_papers.pervasive_context.tasks import TABLE_2, TaskTimes, statistics_of
from suite.depth import some

BY_NAME = {settings.name: settings for settings in EXPERIMENTS}
PART = some(40, deeply=20)
"""Of experiments with one item a call, only every PART-th of the 150,000 items is simulated."""
EXPLAINED = {"pv2", "pv3_100"}
"""See docs/simulator.md: Table 2's task times leave 1.5k s of their 5.3k unaccounted for."""


@pytest.fixture(scope="module")
def found():
    small = {
        "pv3_1": dataclasses.replace(BY_NAME["pv3_1"], items=150_000 // PART, paper=141_100.0 / PART),
        "pv4_1": dataclasses.replace(BY_NAME["pv4_1"], items=150_000 // PART, paper=None),
    }
    return {s.name: run(small.get(s.name, s), seed=0, draws=1) for s in EXPERIMENTS}


def test_there_are_all_21(found):
    assert len(found) == len(EXPERIMENTS) == 21
    assert pytest.approx(2393, abs=1) == POOL_FLUID_SECONDS


def test_what_the_paper_prints_is_met(found):
    for name, each in found.items():
        ratio = 1.0
        if each.settings.paper is not None:
            ratio = each.seconds / each.settings.paper
        elif each.settings.paper_done is not None:
            ratio = done(each) / each.settings.paper_done
        if name not in EXPLAINED:
            assert 0.85 <= ratio <= 1.15, (name, ratio)


def test_what_parameters_were_derived_from_stands_beside_no_figure(found):
    beside = {name: figure.paper for each in found.values() for name, figure in times_of(each)}
    assert {name for name in CALIBRATED if beside[f"{name}_s"] is not None} == set()
    assert (beside["pv1_s"], beside["pv6_s"], beside["pv5p_done"]) == (10_400.0, 783.0, 46_050)
    beside = {name: figure.paper for name, figure in table_2(found, quick=False)}
    assert all(beside[f"table2_{name}_mean"] is None for name in TABLE_2)
    assert (beside["table2_pv3_1_deviation"], beside["table2_pv4_100_deviation"]) == (None, 9.3)


def test_the_orderings_hold(found):
    seconds = {name: each.seconds for name, each in found.items()}
    assert seconds["pv0"] > seconds["pv1"] > seconds["pv2"] > seconds["pv3_1k"] > seconds["pv4_100"]
    assert PART * seconds["pv3_1"] > 3 * seconds["pv0"]
    for size in ("1", "100", "1k", "3k", "7.5k"):
        assert seconds[f"pv3_{size}"] > seconds[f"pv4_{size}"] * 0.99
    assert min(seconds[f"pv4_{s}"] for s in ("100", "1k", "3k", "7.5k")) == seconds["pv4_100"]
    assert min(seconds[f"pv3_{s}"] for s in ("100", "1k", "3k", "7.5k")) == seconds["pv3_1k"], "the parabola's minimum"
    assert seconds["pv3_7.5k"] > seconds["pv3_3k"], "the slowest GPU holds the tail"
    assert seconds["pv6"] < seconds["pv6_2p"] < seconds["pv6_10a"] < seconds["pv6_6p"] < seconds["pv6_11p"]


@pytest.mark.release
def test_batches_from_1_to_1000_cost_no_more_than_the_paper_says(found):
    one = run(BY_NAME["pv4_1"], seed=0, draws=1)
    seconds = [one.seconds, *(found[f"pv4_{size}"].seconds for size in ("100", "1k"))]
    assert max(seconds) / min(seconds) <= 1.123
    assert min(seconds) == found["pv4_100"].seconds
    assert 0.85 <= one.seconds / one.settings.paper <= 1.15
    assert statistics_of(one.tasks)[0] == pytest.approx(TABLE_2["pv4_1"][0], rel=0.05)


def test_a_busy_cluster_loses_ten_times_less_with_retention(found):
    for each in found["pv5p"].outcomes:
        # A worker that stages or loads has nothing to lose.
        assert 15_000 < each.account.lost_items <= 1000 * each.account.evicted
    # The two of 20 that were lost from the beginning had nothing to lose.
    assert {each.account.lost_items for each in found["pv5s"].outcomes} == {18 * 100}
    assert done(found["pv5s"]) > done(found["pv5p"])


def done(run):
    return statistics.median(each.done for each in run.outcomes)


def test_tasks_take_as_long_as_in_table_2(found):
    for name in ("pv3_1", "pv3_100", "pv4_100"):
        assert statistics_of(found[name].tasks)[0] == pytest.approx(TABLE_2[name][0], rel=0.05)
    assert len(found["pv4_100"].tasks) == 1500


def test_a_task_that_keeps_nothing_includes_the_building():
    kept, not_kept = TaskTimes("pervasive"), TaskTimes("partial")
    for times in (kept, not_kept):
        times(ev.ContextReady(1.0, "w", "c", 15.0), [])
        times(ev.BatchFinished(2.0, "w", 1, 0.5), [])
        times(ev.BatchFinished(3.0, "w", 2, 0.25), [])
    assert list(kept.seconds) == [0.5, 0.25]
    assert list(not_kept.seconds) == [15.5, 0.25]


def test_opportunistic_batches_come_close_to_the_fluid_bound():
    outcome = play(Settings("direct", batching="opportunistic", machines=pool_of_20, kept=DIRECT))
    assert outcome.seconds <= 1.06 * POOL_FLUID_SECONDS


def test_reproduce_has_a_figure_for_each_and_the_papers_only_of_whole_runs(tmp_path):
    pytest.importorskip("matplotlib")
    figures = reproduce(ExperimentRequest(quick=True, pictures=tmp_path))
    experiments = {name for name in figures if not name.startswith("table2_")}
    assert len(experiments) == 21
    assert {"pv0_s", "pv3_7.5k_s", "pv4_7.5k_s", "pv5p_done", "pv5s_done", "pv6_11p_s", "pv6_s"} < experiments
    assert len(figures) == 21 + 16
    assert all(figure.value > 0 and figure.paper is None for figure in figures.values())
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == [f"pervasive-context-figure{n}.png" for n in (4, 5, 6, 7)]
