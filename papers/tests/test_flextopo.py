"""FlexTopo's experiments, small: what they are made of, and what has to come out whatever the chance."""

import json
import random
import sys
import types

import pytest

from ctxflow.cli.app import main
from ctxflow.policies.flextopo.cluster_json import cluster_from_json
from ctxflow.simulator.experiments import ExperimentRequest, quantile, report
from ctxflow_papers.flextopo.drawn import drawn, play
from ctxflow_papers.flextopo.experiments import WAYS, churn, crossing, independent, scaling, sequential
from ctxflow_papers.flextopo.reproduction import reproduce
from ctxflow_papers.flextopo.workloads import LAYOUTS, WORKLOADS, B, C, D, beside, cluster_to_json, saturated, without

WAY = {way.name: way for way in WAYS}


def counts(nodes):
    names = [instance.id[0] for node in nodes for instance in node.instances]
    return [names.count(workload.name) for workload in WORKLOADS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clusters_are_table_3_and_saturated(layout):
    nodes = saturated(100, layout, random.Random(3))
    assert counts(nodes) == [20, 40, 200, 80]
    assert all(node.idle == 0 for node in nodes)
    assert {(i.priority, len(i.gpus), i.preemptible) for node in nodes for i in node.instances} == {
        (1500, 8, False),
        (1000, 4, False),
        (500, 2, True),
        (200, 1, True),
    }
    assert cluster_from_json(cluster_to_json(nodes))[0] == tuple(nodes)


def test_layouts_are_what_they_say():
    chance = random.Random(4)
    assert crossing(saturated(100, "random", chance))
    assert not crossing(saturated(100, "aligned", chance))
    packed = saturated(100, "packed", chance)
    assert not crossing(packed)
    assert all(len({instance.id[0] for instance in node.instances}) == 1 for node in packed)
    with pytest.raises(ValueError, match="random, aligned, packed"):
        saturated(1, "tidy", chance)


def test_clusters_of_other_sizes_are_saturated_too():
    nodes = saturated(41, "aligned", random.Random(0))
    assert counts(nodes) == [8, 16, 82, 36]
    assert all(node.idle == 0 for node in nodes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_independent_evaluations_hit(layout):
    tallies = independent(40, layout, 30, seed=5)
    for way in WAYS:
        for workload in "BC":
            tally = tallies[way.name, workload]
            assert tally.asked == tally.placed == len(tally.seconds) == 15
            if way.name not in ("standard", "imp_best_effort"):
                assert tally.hits == 15, f"{way.name} missed for {workload}"
    assert tallies["exact", "B"].checks < tallies["imp", "B"].checks


def test_the_standard_selection_misses_some():
    tallies = independent(40, "random", 40, seed=6, ways=[WAY["standard"]])
    assert 0 < tallies["standard", "B"].hits + tallies["standard", "C"].hits < 40


def test_the_same_seed_gives_the_same():
    first, again, other = (independent(20, "random", 20, seed, [WAY["standard"], WAY["imp"]]) for seed in (1, 1, 2))

    def facts(tallies):
        return {key: (tally.hits, tally.checks) for key, tally in tallies.items()}

    assert facts(first) == facts(again) != facts(other)


def test_preemptions_one_after_the_other_take_effect():
    tallies = sequential(10, "random", 2, 20, seed=7)
    for way in WAYS:
        assert tallies[way.name, "B"].asked == tallies[way.name, "C"].asked == 20
        assert 0 < tallies[way.name, "B"].placed <= 20
    # 8 instances of D on 80 GPUs, whom C alone may preempt: they run out.
    assert tallies["imp", "C"].placed < 20
    for name in ("imp", "exact", "exhaustive"):
        tally = tallies[name, "B"]
        assert tally.hits == tally.placed, "guaranteed: a place is a hit"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_later_preemptors_find_places_that_are_aligned(layout):
    """On aligned machines one in five found none, where IMP, for which it is chance, leaves out one in 50."""
    tallies = sequential(100, layout, 1, 50, seed=0, ways=[WAY["imp"], WAY["exact"], WAY["exact_best_effort"]])
    for name in ("exact", "exact_best_effort"):
        assert [(tallies[name, kind].placed, tallies[name, kind].hits) for kind in "BC"] == [(25, 25), (25, 25)]
    assert sum(tallies["imp", kind].placed for kind in "BC") <= 50


@pytest.mark.parametrize("running", [(0, 1), (2,), (3,)], ids=["several kinds", "cores bind", "new workloads"])
def test_more_find_places_on_machines_of_many_kinds(running):
    """Fewer find none in all than if nobody looks ahead, and in no case do those placed have fewer GPUs."""
    ahead = blind = 0
    for seed in range(1000, 1040):
        if seed % 4 in running:
            case = drawn(seed)
            found = {method: play(case, method) for method in ("exact", "exhaustive")}
            assert found["exact"].gpus >= found["exhaustive"].gpus, f"case {seed}"
            ahead += found["exact"].without_place
            blind += found["exhaustive"].without_place
    assert ahead < blind


def test_drawn_cases_are_what_they_say():
    for seed in range(8):
        case = drawn(seed)
        assert case == drawn(seed)
        if seed % 4 == 3:
            names = {instance.id.rsplit("-", 1)[0] for node in case.nodes for instance in node.instances}
            assert names.isdisjoint(gang.name for gang in case.asked)
            assert all(len(instance.gpus) == 1 for node in case.nodes for instance in node.instances)
        if seed % 4 == 2:
            assert all(gang.cores >= 8 * gang.gpus for gang in case.asked)


def test_scaling_takes_from_the_lowest_priority():
    history = scaling(20, "random", 1, [(B, 3), (C, 2)], WAY["imp"])
    assert len(history) == 6
    assert history[3]["B"] == history[0]["B"] + 3
    assert history[-1]["D"] < history[0]["D"]
    assert all(running["A"] == history[0]["A"] for running in history[:4])


def test_churn_goes_across_sockets_without_topology_alone():
    start, end = churn(41, 10, 0, WAY["standard"])
    assert not crossing(start) and crossing(end)
    for way in ("imp", "exact"):
        assert not crossing(churn(41, 10, 0, WAY[way])[1])


def test_nodes_change_by_copies():
    (node,) = saturated(1, "packed", random.Random(0))
    fewer = without(node, (node.instances[0].id,))
    assert fewer.idle and not node.idle
    assert beside(fewer, D.instance(99, node.instances[0].gpus, 0.0)).idle == 0


def test_quick_figures_stand_beside_the_paper_s(tmp_path):
    told = []
    figures = reproduce(ExperimentRequest(quick=True, pictures=tmp_path, progress=lambda done, what: told.append(done)))
    assert figures["hit_rate_standard_random_independent"].paper == 44.5
    assert figures["latency_B_imp_p50"].paper == 180.0195
    assert figures["imp_saves_C_p90"].paper == 76.5
    assert figures["crossing_imp"].value == figures["crossing_imp"].paper == 0
    for name, figure in figures.items():
        if name.startswith(("hit_rate_imp_r", "hit_rate_exact")) and name.endswith("independent"):
            assert figure.value == 100.0
    assert told == sorted(told) and told[-1] == pytest.approx(1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"flextopo-figure{n}.png" for n in (10, 11, 8, 9)]
    assert set(report("flextopo", figures)) == {"benchmark", "machine", "versions", "figures"}


def test_a_quantile_of_nothing():
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


@pytest.fixture
def command(capsys, monkeypatch):
    """The command as from a shell, in this process: its output and its exit status."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ctxflow", "reproduce", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


def test_the_command_prints_json(command):
    run = command("flextopo", "--quick", "--seed", "3", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["benchmark"] == "reproduce-flextopo"
    assert set(found["figures"]["latency_B_exact_p50"]) == {"value", "unit", "better", "spread", "n", "paper"}


def test_the_command_knows_its_papers(command):
    run = command("flextop")
    assert run.returncode == 2
    assert "choose one of" in run.stderr and "flextopo" in run.stderr
