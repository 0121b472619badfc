"""Which GPUs a worker tells of, where they are, and in which order its library processes see them."""

import pytest

from ctxflow.host.vine_library import worker_facts
from ctxflow.topology import Gpu, NumaNode, Topology, from_graph
from ctxflow.topology import machine as devices

# Eight GPUs whose neighbours are not neighbours by number.
NODES = tuple(NumaNode(number, number % 2) for number in range(8))
MACHINE = Topology("m", (0, 1), NODES, gpus=tuple(Gpu(n, f"GPU-{n}000-full", numa=n) for n in range(8)))


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(devices, "read_machine", lambda: MACHINE)


def test_neighbours_come_beside_each_other(machine):
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-3000,GPU-0000, GPU-1000,GPU-2000"}
    devices.order_devices(devices.machine_of(["GPU-3000"]), environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0000,GPU-2000,GPU-1000,GPU-3000"


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "GPU-3000"}])
def test_nothing_to_order(machine, given):
    environment = dict(given)
    devices.order_devices(MACHINE, environment)
    assert environment == given


def test_a_machine_that_tells_nothing(monkeypatch):
    def broken():
        raise ValueError("no /sys")

    monkeypatch.setattr(devices, "read_machine", broken)
    assert devices.machine_of(["0"]) is None and devices.machine_of([]) is None
    environment = {"CUDA_VISIBLE_DEVICES": "1,0"}
    devices.order_devices(None, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_what_a_worker_tells(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_from_nvidia_smi", lambda query: ([], []))
    (tmp_path / "ad").write_text('Cpus = 4\nMachine = "n1.pool"\nMachineResources = "Cpus"\n')
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "GPU-1000,GPU-0000", "CTXFLOW_PIN": "7",
        "_CONDOR_MACHINE_AD": str(tmp_path / "ad"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    told = worker_facts(1, 1, str(tmp_path / "cache"))
    assert (told.machine, told.devices, told.pin) == ("n1.pool", ["GPU-0000", "GPU-1000"], 7)
    assert [gpu.numa for gpu in from_graph(told.topology).gpus] == list(range(8))
    for name in ("CUDA_VISIBLE_DEVICES", "CTXFLOW_PIN", "_CONDOR_MACHINE_AD"):
        monkeypatch.delenv(name)
    told = worker_facts(1, 1, str(tmp_path / "cache"))
    assert (told.machine, told.devices, told.topology, told.pin) == (None, [], None, None)
    for variable in ("SLURMD_NODENAME", "CTXFLOW_MACHINE"):  # What Slurm calls a node, and where a pod's host is told.
        monkeypatch.setenv(variable, f"by {variable}")
        assert worker_facts(1, 1, str(tmp_path / "cache")).machine == f"by {variable}"


@pytest.mark.parametrize(
    ("visible", "models"),
    [
        (None, ["A10", "L40S"]), ("1,0", ["L40S", "A10"]), ("GPU-1100aa,GPU-2200bb", ["A10", "L40S"]),
        ("GPU-22", ["L40S"]), ("GPU-", [None]), ("7", [None]), ("MIG-5", [None]), ("", []), ("-1", []), ("10000", []),
    ],
)  # fmt: skip
def test_which_cards_a_process_may_use(monkeypatch, visible, models):
    """As numbers (Slurm), UUIDs, beginnings of them, or 10000 for none (HTCondor)."""
    cards = [Gpu(0, "GPU-1100aa", "A10", memory=24_576), Gpu(1, "GPU-2200bb", "L40S", memory=46_068)]
    monkeypatch.setattr(devices, "_from_nvidia_smi", lambda query: (cards, []))
    found = devices.cuda_devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [device.model for device in found] == models
    assert [device.id for device in found] == (
        [gpu.uuid for gpu in cards] if visible is None else visible.split(",")[: len(models)]
    )
    assert all((device.memory or 0) > 1 << 34 for device in found if device.model)
