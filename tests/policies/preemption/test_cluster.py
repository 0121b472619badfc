"""The cluster as data: what it says comes back, and what is wrong with it is said."""

import copy
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from ctxflow.policies.flextopo.cluster import Hardware, Instance, Node, Preemptor
from ctxflow.policies.flextopo.cluster_json import cluster_from_json
from ctxflow.topology import Core, CoreGroup, Gpu, NumaNode, Topology, to_graph
from ctxflow_papers.flextopo.workloads import cluster_to_json

sys.path.insert(0, str(Path(__file__).parent))
import preemption_reference as reference

FIGURE_3 = json.loads((Path(__file__).parent / "data" / "figure3.json").read_text())


@settings(max_examples=100, deadline=None)
@given(reference.nodes(), reference.requests())
def test_there_and_back(node, want):
    data = json.loads(json.dumps(cluster_to_json([node], want)))
    assert cluster_from_json(data) == ((node,), want)


def test_a_node_may_be_given_by_its_topology():
    groups = tuple(CoreGroup(n, n, n, tuple(Core(core) for core in range(4 * n, 4 * n + 4))) for n in range(2))
    gpus = tuple(Gpu(n, numa=n // 2) for n in range(4))
    topology = Topology("m", (0, 1), (NumaNode(0, 0), NumaNode(1, 1)), groups, gpus)
    (node,), preemptor = cluster_from_json({"nodes": [{"name": "m", "topology": to_graph(topology)}]})
    assert preemptor is None
    assert node.hardware == Hardware.regular(sockets=2, numa_nodes=2, gpus=4, cores=8, group_size=4)


def changed(path, value):
    data = copy.deepcopy(FIGURE_3)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["nodes"], None, "the cluster has no 'nodes'"),
        (["nodes"], {}, "list"),
        (["node"], [], "no use for 'node'"),
        (["nodes", 0, "hardware"], "5090", "of hardware '5090', which the cluster does not describe"),
        (["nodes", 0, "hardware"], None, "node 0 needs either hardware or a topology"),
        (["nodes", 1, "name"], "machine-1", "two nodes are named 'machine-1'"),
        (["nodes", 0, "instances", 0, "gpus"], [8], "c-1 on machine-1: there is no GPU 8 on a node with 8 of them"),
        (["nodes", 0, "instances", 0, "gpus"], ["0"], "list of numbers"),
        (["nodes", 0, "instances", 0, "gpus"], [1], "holds a GPU or core group that another instance holds"),
        (["nodes", 0, "instances", 0, "priority"], "high", "the priority of an instance of node 0 is a whole number"),
        (["nodes", 0, "instances", 0, "priority"], None, "an instance of node 0 has no 'priority'"),
        (["hardware", "4090", "sockets"], 0, "hardware '4090': hardware needs a socket"),
        (["hardware", "4090"], {"gpus": [0]}, "GPUs as [socket, NUMA node]"),
        (["preemptor", "affinity"], "strict", "there is no affinity 'strict'"),
        (["preemptor", "gpus"], -1, "ask for one or more"),
        (["preemptor", "gpus"], 1.5, "the gpus of the preemptor is a whole number"),
    ],
)
def test_what_is_wrong_is_said(path, value, says):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        cluster_from_json(changed(path, value))
    assert says in str(raised.value)


def test_nodes_with_cores_that_nobody_knows_are_judged_by_their_gpus():
    kind = Hardware.regular(sockets=1, numa_nodes=1, gpus=2)
    assert Node("n", kind, (Instance("i", 1, (0,)),)).idle == 0b10
    assert kind.cores(kind.everything) == 0


def test_hardware_whose_sizes_do_not_match():
    with pytest.raises(ValueError, match="sizes of 1"):
        Hardware((), (), (8,))


def test_a_request_for_nothing():
    with pytest.raises(ValueError, match="ask for one or more"):
        Preemptor("p", 1, 0)


def _changed(path, value):
    data = {
        "hardware": {"kind": {"sockets": 1, "numa_nodes": 1, "gpus": 2}},
        "nodes": [{"name": "a", "hardware": "kind", "instances": [{"id": "x", "priority": 1, "gpus": [0]}]}],
        "preemptor": {"id": "p", "priority": 2, "gpus": 1},
    }
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return data


INSTANCE = ["nodes", 0, "instances", 0]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["hardware"], 3, "the cluster's hardware is an object"),
        (["hardware", "kind", "gpus"], float("inf"), "the gpus of hardware 'kind' is a whole number"),
        (["hardware", "kind", "gpus"], 10**30, "the gpus of hardware 'kind' is a whole number up to"),
        (["hardware", "kind", "sockets"], "1", "the sockets of hardware 'kind' is a whole number"),
        (["hardware", "kind"], {"gpus": [["a", 0]]}, "in whole numbers"),
        (["nodes", 0, "name"], float("nan"), "the name of node 0 is a text"),
        ([*INSTANCE, "id"], None, "the id of an instance of node 0 is a text"),
        ([*INSTANCE, "started"], "now", "the start of an instance of node 0 is a number of seconds"),
        ([*INSTANCE, "started"], float("nan"), "the start of an instance of node 0 is a number of seconds"),
        ([*INSTANCE, "preemptible"], "no", "preemptible of an instance of node 0 is true or false"),
        ([*INSTANCE, "gpus"], [0, 0], "each once"),
        ([*INSTANCE, "gpus"], [True], "a list of numbers"),
        (["nodes", 0, "instances"], [{"id": "x", "priority": 1}] * 2, "have the same id"),
    ],
)
def test_data_that_makes_no_sense_is_refused_in_a_sentence(path, value, said):
    with pytest.raises(ValueError, match=said):
        cluster_from_json(_changed(path, value))
