"""Topology read from /sys and the driver, on machines of every kind: it is true, or one clear sentence says why not."""

import subprocess
import sys
from pathlib import Path

import pytest

from ctxflow.topology.hardware import changes
from ctxflow.topology.machine import read_machine, read_tree

sys.path.insert(0, str(Path(__file__).parent))
from played_machine import BUSES, Nvml, cards, machine, put


def read(root, nvml=None, query=None, group_size=8):
    return read_tree(root, "m", group_size, nvml, query)


def test_two_sockets_eight_numa_nodes_eight_gpus(tmp_path):
    nvml = Nvml(cards(8))
    found = read(machine(tmp_path, buses=BUSES), nvml)
    assert found.sockets == (0, 1)
    assert [(node.id, node.socket) for node in found.numa_nodes] == [(n, n // 4) for n in range(8)]
    assert [(each.socket, each.numa, len(each.cores)) for each in found.groups] == [(n // 4, n, 8) for n in range(8)]
    assert [core.id for core in found.groups[3].cores] == list(range(24, 32))
    assert [(gpu.index, gpu.numa, gpu.bus, gpu.memory) for gpu in found.gpus] == [
        (n, n, BUSES[n], 24564) for n in range(8)
    ]
    assert {gpu.model for gpu in found.gpus} == {"NVIDIA GeForce RTX 4090"}
    assert found.problems == ()
    assert nvml.open == 0, "NVML is closed again"


def test_threads_of_a_core_are_in_one_group(tmp_path):
    found = read(machine(tmp_path, sockets=1, numa=1, cores=8, threads=2), group_size=4)
    assert [core.id for core in found.groups[0].cores] == [0, 8, 1, 9]
    assert len(found.groups) == 4


def test_the_group_size_is_settable(tmp_path):
    root = machine(tmp_path, sockets=2, numa=2, cores=12)
    assert [len(group.cores) for group in read(root, group_size=4).groups] == [4, 2, 4, 2]
    with pytest.raises(ValueError, match="give a size of 1 or more"):
        read(root, group_size=0)


def test_a_machine_without_numa_is_one_numa_node(tmp_path):
    root = machine(tmp_path, sockets=1, numa=0, cores=4, buses=BUSES[:1], numa_nodes_of_buses=[-1])
    found = read(root, Nvml(cards(1)))
    assert [(node.id, node.socket) for node in found.numa_nodes] == [(0, 0)]
    assert found.gpus[0].numa == 0
    assert found.problems == ()


def test_numa_turned_off_over_two_sockets_hides_where_things_are(tmp_path):
    root = machine(tmp_path, sockets=2, numa=0, cores=4, buses=BUSES[:1], numa_nodes_of_buses=[-1])
    found = read(root, Nvml(cards(1)))
    assert [(node.id, node.socket) for node in found.numa_nodes] == [(0, None)]
    assert [group.socket for group in found.groups] == [0, 1]


def test_a_machine_that_tells_no_sockets_has_one(tmp_path):
    assert read(machine(tmp_path, sockets=0, numa=1, cores=2)).sockets == (0,)


def test_a_machine_without_gpus(tmp_path):
    for nvml in (None, Nvml([]), Nvml([], starts=False)):
        found = read(machine(tmp_path, numa=2), nvml)
        assert (found.gpus, found.problems) == ((), ()), "no GPU on the bus: nothing is wrong"


def test_a_gpu_whose_place_the_firmware_does_not_tell(tmp_path):
    found = read(machine(tmp_path, numa=2, buses=BUSES[:2], numa_nodes_of_buses=[1, -1]), Nvml(cards(2)))
    assert [gpu.numa for gpu in found.gpus] == [1, None]
    assert found.problems == (f"the kernel does not say which NUMA node GPU 1 ({BUSES[1]}) is near",)


def smi(text):
    return lambda words: text


def failing(error):
    def query(words):
        raise error

    return query


LINE = "0, GPU-1, NVIDIA A10, 23028, 00000000:11:00.0\n"


def test_nvidia_smi_where_there_is_no_nvml(tmp_path):
    root = machine(tmp_path, buses=BUSES[:1], numa_nodes_of_buses=[3])
    (gpu,) = read(root, query=smi(LINE)).gpus
    assert (gpu.uuid, gpu.model, gpu.memory, gpu.numa) == ("GPU-1", "NVIDIA A10", 23028, 3)
    (gpu,) = read(root, Nvml([], starts=False), smi(LINE)).gpus
    assert gpu.uuid == "GPU-1"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (failing(subprocess.CalledProcessError(9, "nvidia-smi", "", "couldn't talk to it\n")), "couldn't talk"),
        (failing(subprocess.CalledProcessError(255, "nvidia-smi")), "exit status 255"),
        (failing(subprocess.TimeoutExpired("nvidia-smi", 20)), "timed out after 20 seconds"),
        (failing(PermissionError(13, "Permission denied")), "Permission denied"),
        (failing(FileNotFoundError("nvidia-smi is not installed")), "no driver is loaded"),
        (smi("Segmentation fault\n"), "says what is no GPU: Segmentation fault"),
        (smi("No devices were found\n"), "no driver is loaded"),
    ],
)
def test_a_broken_nvidia_smi_is_one_clear_sentence(tmp_path, query, says):
    found = read(machine(tmp_path, numa=2, buses=BUSES[:2]), query=query)
    assert found.gpus == ()
    assert len(found.numa_nodes) == 2, "the rest is true all the same"
    (problem,) = found.problems
    assert problem.startswith("2 NVIDIA GPUs are on the PCI bus") and says in problem
    assert "\n" not in problem


def test_the_driver_s_own_files_where_no_tool_answers(tmp_path):
    root = machine(tmp_path, buses=BUSES[:2])
    for number, uuid in enumerate(("GPU-00-1", "GPU-????????-????")):
        text = f"Model: \t\t NVIDIA A40\nGPU UUID: \t {uuid}\nBus Location: \t x\nDevice Minor: \t {number}"
        put(root, f"proc/driver/nvidia/gpus/{BUSES[number]}/information", text)
    found = read(root, query=failing(FileNotFoundError("no")))
    assert [(gpu.index, gpu.uuid, gpu.model, gpu.numa) for gpu in found.gpus] == [
        (0, "GPU-00-1", "NVIDIA A40", 0),
        (1, None, "NVIDIA A40", 1),
    ]
    assert found.problems == ()


def test_gpus_of_two_models(tmp_path):
    mixed = [*cards(1, "NVIDIA A10"), *cards(2, "NVIDIA A40")[1:]]
    found = read(machine(tmp_path, buses=BUSES[:2]), Nvml(mixed))
    assert [gpu.model for gpu in found.gpus] == ["NVIDIA A10", "NVIDIA A40"]


def test_a_gpu_that_disappears_between_two_checks(tmp_path):
    root = machine(tmp_path, buses=BUSES[:3])
    before = read(root, Nvml(cards(3)))
    gone = read(root, Nvml(cards(2)))
    assert changes(before, gone) == ["GPU 2 (NVIDIA GeForce RTX 4090, GPU-00000002-aaaa) is gone"]
    assert changes(gone, before) == ["GPU 2 (NVIDIA GeForce RTX 4090, GPU-00000002-aaaa) is new"]
    lost = read(root, Nvml([*cards(3)[:1], None, cards(3)[2]]))
    assert [gpu.index for gpu in lost.gpus] == [0, 2]
    assert lost.problems == ("GPU 1 does not answer and is left out: GPU is lost",)
    assert len(changes(before, lost)) == 2, "that it is gone, and what it says"
    assert changes(before, before) == []


def test_what_changes_beside_gpus(tmp_path):
    one = machine(tmp_path / "a", sockets=1, numa=1, cores=4)
    other = machine(tmp_path / "b", sockets=2, numa=2, cores=8)
    found = changes(read(one), read(other))
    assert "the sockets have changed: 1 before and 2 now" in found
    assert "the NUMA nodes have changed: 1 before and 2 now" in found
    assert "the cores have changed: 4 before and 8 now" in found


def test_a_folder_that_is_no_machine(tmp_path):
    with pytest.raises(ValueError, match="topology is read from Linux's /sys"):
        read(tmp_path)


def test_this_machine():
    found = read_machine()
    assert found.sockets and found.numa_nodes and found.groups
