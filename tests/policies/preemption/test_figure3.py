"""The snapshot of FlexTopo's Figure 3: three machines, one instance of workload A, six of B, eight of C."""

import dataclasses
import json
from pathlib import Path

import pytest

from ctxflow.policies.flextopo.candidates import Fits, minimal_sets
from ctxflow.policies.flextopo.cluster import Preemptor
from ctxflow.policies.flextopo.cluster_json import cluster_from_json
from ctxflow.policies.flextopo.preemption import decide

DATA = json.loads((Path(__file__).parent / "data" / "figure3.json").read_text())
NODES, A = cluster_from_json(DATA)
B = Preemptor("b-7", 1000, gpus=2, cores=16, affinity="guaranteed")


def test_the_snapshot_is_the_paper_s():
    held = [instance for node in NODES for instance in node.instances]
    kinds = {kind: sum(each.id.startswith(kind) for each in held) for kind in "abc"}
    assert kinds == {"a": 1, "b": 6, "c": 8}
    assert all(node.idle == 0 for node in NODES)


def test_b_has_twelve_options_of_which_four_miss():
    best_effort = dataclasses.replace(B, affinity="best-effort")
    options = []
    for node in NODES:
        fit = Fits(best_effort)[node]
        options += [(node.name, level == fit.target) for _, level in minimal_sets(node, best_effort, fit)[0]]
    assert len(options) == 12
    assert sum(not hit for _, hit in options) == 4
    assert {name for name, hit in options if not hit} == {"machine-2"}
    guaranteed = [chosen for node in NODES for chosen in minimal_sets(node, B, Fits(B)[node])[0]]
    assert len(guaranteed) == 8


@pytest.mark.parametrize("affinity", ["guaranteed", "best-effort"])
@pytest.mark.parametrize("method", ["imp", "exhaustive", "exact"])
def test_a_takes_machine_1(method, affinity):
    decision = decide(NODES, dataclasses.replace(A, affinity=affinity), method)
    assert decision.node == "machine-1"
    assert decision.victims == ("c-1", "c-2", "c-3", "c-4")
    assert decision.gpus == (0, 1, 2, 3) and decision.core_groups == (0, 1, 2, 3)
    assert decision.hit


def test_the_standard_selection_cannot_tell_the_machines_apart():
    assert decide(NODES, A, "standard").node == "machine-1", "the first of equals"
    turned = decide(NODES[1::-1], A, "standard")
    assert turned.node == "machine-2" and not turned.hit
