"""Topology as JSON, as Kubernetes' resource and in HTCondor's machine ads: there and back, and from others' hands."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.topology import Topology, from_graph, to_graph
from ctxflow.topology.graph import draw
from ctxflow.topology.machine_ads import from_ads, parse_ads, parse_value, read_topologies, to_classad, write_value

sys.path.insert(0, str(Path(__file__).parent))
from played_machine import Nvml, cards, machine, topologies

from ctxflow.topology.machine import read_tree

QUICK = settings(max_examples=100, deadline=None)


@QUICK
@given(topologies())
def test_json_there_and_back(topology):
    assert from_graph(json.loads(json.dumps(to_graph(topology)))) == topology
    (found,) = read_topologies(json.dumps(to_graph(topology)), "f")
    assert found == topology


@QUICK
@given(topologies())
def test_a_resource_holds_the_same_graph(topology):
    found = from_graph({"metadata": {"name": topology.name}, "spec": to_graph(topology)})
    assert dataclasses.replace(found, problems=()) == dataclasses.replace(topology, problems=())


@QUICK
@given(topologies())
def test_a_machine_ad_there_and_back_but_for_users(topology):
    (found,) = from_ads([{"Machine": topology.name} | parse_ads(to_classad(topology))[0]])
    free = tuple(dataclasses.replace(gpu, used_by=None) for gpu in topology.gpus)
    groups = tuple(
        dataclasses.replace(group, cores=tuple(dataclasses.replace(core, used_by=None) for core in group.cores))
        for group in topology.groups
    )
    assert found == dataclasses.replace(topology, gpus=free, groups=groups)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.sampled_from([0.5, -2e9, 1e-7]) | st.text(max_size=9),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["Id", "numa", "a_1"]), each, max_size=3),
    max_leaves=8,
)


@QUICK
@given(JSON)
def test_values_of_ads_there_and_back(value):
    assert parse_value(write_value(value)) == value


@pytest.mark.parametrize("text", ["", "x", "1 +", "{ 1, 2", "[ a = 1", '"open', "a.b", "{ x }", "[ 1 ]", "=", "1 2"])
def test_what_is_no_literal_is_none(text):
    assert parse_value(text) is None


def test_expressions_inside_a_record_are_none_alone():
    assert parse_value('[ a = b + f({1, 2}, [c = 3]); d = 4; e = "x;]" ]') == {"a": None, "d": 4, "e": "x;]"}


def agents_resource():
    """The form of FlexTopo's agent: all edges "contains", cores used by pods, GPUs linked to nothing."""
    nodes = [{"id": f"socket-{n}", "type": "Socket", "attributes": {}} for n in range(2)]
    edges = []
    for numa in range(4):
        group = f"coregroup-{numa}-{numa}"
        nodes += [
            {"id": f"numa-{numa}", "type": "NUMANode", "attributes": {}},
            {"id": group, "type": "CoreGroup", "attributes": {"groupIndex": numa, "nodeID": numa}},
        ]
        edges += [(f"socket-{numa // 2}", f"numa-{numa}"), (f"numa-{numa}", group)]
        for core in range(2 * numa, 2 * numa + 2):
            used = {"status": "used", "usedBy": "pod-1"} if core in (2, 5) else {"status": "free"}
            nodes.append({"id": f"core-{core}", "type": "CPUCore", "attributes": used})
            edges.append((group, f"core-{core}"))
        about = {"uuid": f"GPU-{numa}", "name": "NVIDIA GeForce RTX 4090", "memoryTotal": 24564, "status": "free"}
        nodes.append({"id": f"gpu-{numa}", "type": "GPU", "attributes": about})
    nodes.reverse()
    spec = {"edges": [{"source": s, "target": t, "type": "contains"} for s, t in edges], "nodes": nodes}
    head = {"apiVersion": "flextopo.baichuan-inc.com/v1alpha1", "kind": "FlexTopo", "metadata": {"name": "10.0.0.1"}}
    return head | {"spec": spec}


def check_agents(topology):
    assert topology.name == "10.0.0.1"
    assert [(group.id, group.socket, group.numa, group.used_by) for group in topology.groups] == [
        (0, 0, 0, None),
        (1, 0, 1, "pod-1"),
        (2, 1, 2, "pod-1"),
        (3, 1, 3, None),
    ]
    assert [(gpu.index, gpu.uuid, gpu.memory, gpu.numa) for gpu in topology.gpus] == [
        (n, f"GPU-{n}", 24564, None) for n in range(4)
    ]
    assert topology.problems == (
        "the NUMA node of GPU 0, 1, 2, 3 of 10.0.0.1 is not known: no edge leads from it to one",
    )


def test_the_agent_s_resource():
    check_agents(from_graph(agents_resource()))


def test_resources_in_files_of_all_kinds():
    yaml = pytest.importorskip("yaml")
    one = agents_resource()
    listed = {"apiVersion": "v1", "kind": "List", "items": [one, one]}
    for text, count in (
        (json.dumps(one), 1),
        (yaml.safe_dump(one), 1),
        (json.dumps(listed), 2),
        (yaml.safe_dump(listed), 2),
    ):
        found = read_topologies(text, "f")
        assert len(found) == count
        check_agents(found[0])


def broken(change):
    data = copy.deepcopy(agents_resource())
    change(data["spec"])
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there are no machine ads"),
        ("{", "Expecting"),
        ("[]", "no topology"),
        ("[1]", "no topology"),
        ("hello world", "line 1 is no attribute of a machine ad"),
        ("apiVersion: [", "no YAML"),
        (json.dumps({"nodes": []}), "a topology has nodes and edges"),
        (broken(lambda spec: spec["nodes"][0].update(type="TPU")), "is of type 'TPU'"),
        (broken(lambda spec: spec["nodes"][0].update(id="gpu")), "gpu has no number"),
        (broken(lambda spec: spec["nodes"].append(spec["nodes"][0])), "two nodes of the topology are called"),
        (broken(lambda spec: spec["nodes"].append({})), "has an id and a type"),
        (broken(lambda spec: spec["edges"][0].update(target="numa-9")), "leads nowhere: there is no numa-9"),
        (broken(lambda spec: spec["edges"][0].update(type="near")), "is of type 'near'"),
        (broken(lambda spec: spec["edges"].append({})), "has a source, a target and a type"),
        (broken(lambda spec: spec["edges"].pop(2)), "is in no core group"),
        ("CtxflowGpus = { 1 }\n", "tell a topology that cannot be read"),
    ],
    ids=range(16),
)
def test_what_is_wrong_in_a_file_is_one_sentence(text, says):
    with pytest.raises(ValueError, match=r"^f: [^\n]+$") as raised:
        read_topologies(text, "f")
    assert says in str(raised.value)


POOL = """
MyType = "Machine"
Name = "slot1@gpu1"
Machine = "gpu1"
PartitionableSlot = true
State = "Unclaimed"
Start = (Owner != "mallory") || false
AvailableGPUs = { GPUs_GPU_bbbbbbbb }
GPUs_GPU_aaaaaaaa = [ Id = "GPU-aaaaaaaa"; DeviceUuid = "aaaaaaaa-1"; DeviceName = "NVIDIA A10"; $A ]
GPUs_GPU_bbbbbbbb = [ Id = "GPU-bbbbbbbb"; DeviceUuid = "bbbbbbbb-2"; DeviceName = "NVIDIA A40"; $B ]

Name = "slot1_1@gpu1"
Machine = "gpu1"
DynamicSlot = true
State = "Claimed"
JobId = "12.0"
RemoteOwner = "alice@pool"
AssignedGPUs = "GPU-aaaaaaaa"

Name = "slot1@cpu1"
Machine = "cpu1"
State = "Unclaimed"
"""
POOL = POOL.replace("$A", 'DevicePciBusId = "0000:21:00.0"; GlobalMemoryMb = 22731; NumaNode = 1; Socket = 0')
POOL = POOL.replace("$B", 'DevicePciBusId = "0000:11:00.0"; Capability = 8.6')


def test_ads_of_a_pool_that_publishes_nothing():
    gpu, cpu = read_topologies(POOL, "pool")
    assert [(each.uuid, each.model, each.memory, each.numa, each.used_by) for each in gpu.gpus] == [
        ("GPU-bbbbbbbb-2", "NVIDIA A40", None, None, None),
        ("GPU-aaaaaaaa-1", "NVIDIA A10", 22731, 1, "alice@pool 12.0"),
    ]
    assert gpu.socket_of(1) == 0
    assert gpu.problems == (
        "the ads of gpu1 tell nothing of its cores: publish them with `ctxflow topo --classad`",
        "the ads of gpu1 do not say which NUMA node GPU 0 is near",
    )
    assert (cpu.name, cpu.gpus) == ("cpu1", ())


def test_ads_as_condor_status_json_has_them():
    ads = parse_ads(POOL)
    ads[0]["Start"] = "/Expr(Owner)/"
    ads[0]["GPUs_GPU_aaaaaaaa"] = f"/Expr({write_value(ads[0]['GPUs_GPU_aaaaaaaa'])})/"
    assert read_topologies(json.dumps(ads), "pool") == read_topologies(POOL, "pool")


def test_what_was_published_goes_before_what_was_discovered(tmp_path):
    topology = read_tree(machine(tmp_path, buses=[cards(1)[0][2]]), "gpu1", 8, Nvml(cards(1)), None)
    slots = parse_ads(POOL)[:2]
    slots[1]["AssignedGPUs"] = "GPU-00000000"
    (found,) = from_ads([slots[0] | parse_ads(to_classad(topology))[0], slots[1]])
    assert found.numa_nodes == topology.numa_nodes and found.problems == ()
    assert [gpu.used_by for gpu in found.gpus] == ["alice@pool 12.0"]


def test_what_an_ad_cannot_hold():
    with pytest.raises(TypeError, match="cannot hold"):
        write_value({1, 2})


def test_a_drawing_shows_everything_in_80_columns(tmp_path):
    topology = read_tree(machine(tmp_path, buses=[each[2] for each in cards(8)]), "m", 8, Nvml(cards(8)), None)
    drawing = draw(topology).splitlines()
    assert drawing[0] == "m: 2 sockets, 8 NUMA nodes, 64 cores, 8 GPUs (NVIDIA GeForce RTX 4090)"
    assert [line for line in drawing if "socket " in line] == ["├─ socket 0", "└─ socket 1"]
    assert "   └─ NUMA 7" in drawing
    assert "      └─ GPU 7  NVIDIA GeForce RTX 4090, 24.0 GiB, free" in drawing
    assert "│  │  ├─ core group 0  cores 0-7, free" in drawing
    assert all(len(line) <= 80 for line in drawing)


@QUICK
@given(topologies())
def test_drawings_leave_nothing_out(topology):
    drawing = draw(topology)
    for gpu in topology.gpus:
        assert drawing.count(f"GPU {gpu.index}  ") == 1
    for group in topology.groups:
        assert drawing.count(f"core group {group.id}  ") == 1
    for problem in topology.problems:
        assert f"! {problem}" in drawing


def test_an_empty_machine_is_drawn():
    assert draw(Topology("m")) == "m: 0 sockets, 0 NUMA nodes, 0 cores, 0 GPUs"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("nodes",), True, "the nodes of a topology are a list"),
        (("edges",), 3, "the edges of a topology are a list"),
        (("problems",), 3, "the problems of a topology are a list"),
        (("nodes", 0, "id"), [], r"\[\] has no number|leads nowhere"),
        (("nodes", 0, "attributes"), 3, "the attributes of socket-0 are an object"),
        (("nodes", 2, "attributes"), {"groupIndex": []}, "an attribute of group-0 is to be a whole number"),
    ],
)
def test_a_graph_with_a_wrong_type_in_it_is_refused_in_a_sentence(path, value, said):
    graph = {
        "nodes": [{"id": f"{name}-0", "type": kind} for name, kind in (
            ("socket", "Socket"), ("numa", "NUMANode"), ("group", "CoreGroup"))],
        "edges": [{"source": "socket-0", "target": "numa-0", "type": "contain"}],
        "problems": [],
    }  # fmt: skip
    part = graph
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        from_graph(graph)


def test_a_file_that_is_nested_too_deep_is_refused():
    with pytest.raises(ValueError, match=r"pool\.json: it is nested too deep"):
        read_topologies("[" * 100_000, "pool.json")
