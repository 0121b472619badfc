"""The paper's experiments: what is printed or derived is met within 15 %, but for pv2; the orderings hold."""

import dataclasses

import pytest

from ctxflow.simulator.figures import Request
from ctxflow.simulator.pervasive_context import DIRECT, EXPERIMENTS, POOL_FLUID_SECONDS, Settings, play, rows
from ctxflow.simulator.pervasive_context.reproduction import reproduce

BY_NAME = {settings.name: settings for settings in EXPERIMENTS}
EXPLAINED = {"pv2", "pv3_100"}
"""See docs/simulator.md: Table 2's task times leave 1.5k s of their 5.3k unaccounted for."""


@pytest.fixture(scope="module")
def found():
    # pv3_1's 150,000 loads would take ten seconds: it is run with a twentieth of its items.
    small = dataclasses.replace(BY_NAME["pv3_1"], items=7_500, paper=7_055.0)
    return {row.name: row for row in rows([small if s.name == "pv3_1" else s for s in EXPERIMENTS])}


def test_there_are_all_21(found):
    assert len(found) == len(EXPERIMENTS) == 21
    assert pytest.approx(2393, abs=1) == POOL_FLUID_SECONDS


def test_what_the_paper_prints_is_met(found):
    for name, row in found.items():
        if row.ratio is not None and name not in EXPLAINED:
            assert 0.85 <= row.ratio <= 1.15, (name, row.ratio)


def test_the_orderings_hold(found):
    seconds = {name: row.seconds for name, row in found.items()}
    assert seconds["pv0"] > seconds["pv1"] > seconds["pv2"] > seconds["pv3_1k"] > seconds["pv4_100"]
    assert 20 * seconds["pv3_1"] > 3 * seconds["pv0"]  # It had a twentieth of its items.
    for size in ("1", "100", "1k", "3k"):
        assert seconds[f"pv3_{size}"] > seconds[f"pv4_{size}"] * 0.99
    assert min(seconds[f"pv4_{s}"] for s in ("1", "100", "1k", "3k", "7.5k")) == seconds["pv4_100"]
    assert seconds["pv3_7.5k"] > seconds["pv3_3k"], "the slowest GPU holds the tail"
    assert seconds["pv6"] < seconds["pv6_2p"] < seconds["pv6_10a"] < seconds["pv6_6p"] < seconds["pv6_11p"]


def test_batches_from_1_to_1000_cost_no_more_than_the_paper_says(found):
    seconds = [found[f"pv4_{size}"].seconds for size in ("1", "100", "1k")]
    assert max(seconds) / min(seconds) <= 1.123


def test_a_busy_cluster_loses_ten_times_less_with_retention(found):
    assert found["pv5p"].lost_items == 20 * 1000
    assert found["pv5s"].lost_items == 20 * 100
    assert found["pv5s"].done > 1.15 * found["pv5p"].done


def test_opportunistic_batches_come_close_to_the_fluid_bound():
    outcome = play(Settings("direct", batching="opportunistic", kept=DIRECT))
    assert outcome.seconds <= 1.06 * POOL_FLUID_SECONDS


def test_reproduce_has_a_figure_for_each_and_the_papers_only_of_whole_runs():
    figures = reproduce(Request(quick=True))
    assert len(figures) == 21
    assert all(figure.value > 0 and figure.paper is None for figure in figures.values())
