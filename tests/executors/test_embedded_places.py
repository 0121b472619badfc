"""Workers of several GPUs of this machine, for which others give way; the devices are pretended."""

import dataclasses
import logging
import os
import time

import pytest

from ctxflow import ContextExecutor, batch_app, context, last, session_app
from ctxflow.executors import embedded, local_workers
from ctxflow.scheduler.log import replay
from ctxflow.topology import Gpu, NumaNode, Topology, used_by
from ctxflow.topology.machine import Device
from waiting import eventually, finished

DEVICES = 8
SOCKETS = {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}  # Neighbours are not neighbours by number.


@context(gpus=1)
def small():
    import os

    return os.environ["CUDA_VISIBLE_DEVICES"]


@context(gpus=4, affinity="guaranteed", priority=10)
def wide():
    import os

    return os.environ["CUDA_VISIBLE_DEVICES"]


@batch_app(small(), batch_size=4)
def low(devices, folders):
    """Slow work that begins once all workers have some, answers item by item, and notes each item that it has done."""
    import os

    for folder in folders:
        open(os.path.join(folder, devices), "w").close()
        eventually(lambda folder=folder: sum(each.startswith("GPU-") for each in os.listdir(folder)) == DEVICES)
        time.sleep(0.05)
        with open(os.path.join(folder, "done"), "a") as file:
            file.write("x")
        yield devices


@batch_app(wide())
def urgent(devices, items):
    return [devices for _ in items]


@session_app(small(), keep_every=1)
def count(device, states, prompts):
    """Numbers up to 5; the GPU that was to make the third of them is broken from then on."""
    import os

    for state, new in zip(states, prompts, strict=True):
        folder, number = state or (new[0], 0)
        broken = os.path.join(folder, "broken")
        if number == 3:
            with open(broken, "a" if os.path.exists(broken) else "w") as file:
                file.write(device + "\n")
            with open(broken) as file:
                if file.readline().strip() == device:
                    raise OSError(5, "Input/output error")
        yield (last(number) if number == 5 else number), (folder, number + 1)


@pytest.fixture
def pretended(monkeypatch):
    """Eight GPUs on two sockets."""
    nodes = tuple(NumaNode(number, number % 2) for number in range(DEVICES))
    machine = Topology("here", (0, 1), nodes, gpus=tuple(Gpu(n, f"GPU-{n}", numa=n) for n in range(DEVICES)))
    monkeypatch.setattr(local_workers, "read_machine", lambda: machine)
    monkeypatch.setattr(embedded, "cuda_devices", lambda: [Device(f"GPU-{n}", "pretended") for n in range(DEVICES)])


def executor(tmp_path, **preemption):
    made = ContextExecutor(workers=DEVICES, preemption={"policy": "exact", "idle": 0.5, **preemption})
    made.run_dir = str(tmp_path / "run")
    return made


def events(made):
    return os.path.join(made.calls.run.directory, "events.jsonl")


def test_it_gets_gpus_of_one_socket_in_order_and_nobody_loses_anything(pretended, tmp_path, caplog):
    caplog.set_level(logging.INFO, "ctxflow")
    made = executor(tmp_path)
    with made:
        stream = low.map([str(tmp_path)] * 400, window=400)
        first = [next(stream) for _ in range(20)]
        got = finished(urgent("now")).result()
        numbers = tuple(int(name.removeprefix("GPU-")) for name in got.split(","))
        assert numbers in SOCKETS.values(), "one socket, neighbours beside each other"
        results = first + list(stream)
        eventually(lambda: made.connected_workers == DEVICES, what="the eight workers are back")
        status = made.status()
        log = events(made)
    assert len(results) == 400 and set(results) == {f"GPU-{n}" for n in range(DEVICES)}
    assert (tmp_path / "done").read_text() == "x" * 400, "what was answered was not computed again"
    assert (status.evictions, status.items_dead) == (0, 0)
    told = [record.getMessage() for record in caplog.records]
    assert any("are kept for the context wide: the workers local-" in text for text in told)
    assert any("the context wide has a worker of its own on" in text for text in told)
    with open(log) as file:
        assert replay(file) > 100


def test_where_nobody_makes_room_it_is_refused(pretended, tmp_path):
    made = ContextExecutor(workers=DEVICES)
    made.run_dir = str(tmp_path / "run")
    with made, pytest.raises(ValueError, match=r'needs 4 GPUs, but a worker here has 1: set preemption = "exact"'):
        urgent("now").result()


def test_devices_that_no_driver_knows_are_a_topology_too():
    found = local_workers.topology_of([Device("0"), Device("GPU-x")])
    assert [(gpu.index, gpu.uuid, gpu.numa) for gpu in found.gpus] == [(0, None, None), (1, "GPU-x", None)]
    used = used_by(found, {"GPU-x": "local-1"})
    assert [gpu.used_by for gpu in used.gpus] == [None, "local-1"]
    assert local_workers.topology_of([]).gpus == ()


def test_an_app_may_be_more_urgent_than_its_context():
    assert urgent.priority == 10 and urgent.using(priority=3).priority == 3 and low.priority == 0
    assert dataclasses.replace(wide(), priority=5) == wide(), "it is the same recipe"


def test_neighbours_are_dealt_out_together(pretended):
    engine = embedded.EmbeddedEngine(workers=2, gpus_per_worker=4)
    dealt = [[int(device.id.removeprefix("GPU-")) for device in engine._local.shares.take()] for _ in range(2)]
    assert dealt == [list(SOCKETS[0]), list(SOCKETS[1])]
    assert [tier.machine_gpus for tier in engine.tiers()] == [8]
    assert embedded.EmbeddedEngine(workers=2, gpus_per_worker=0).tiers()[0].machine_gpus == 0


def test_a_session_goes_on_where_no_gpu_is_broken(pretended, tmp_path):
    made = ContextExecutor(workers=2)
    made.run_dir = str(tmp_path / "run")
    with made:
        eventually(lambda: made.status().workers_joined == 2)  # Else there may be no other GPU to go to.
        with count.open(str(tmp_path)) as session:
            assert list(session) == [0, 1, 2, 3, 4, 5]
    first, second = (tmp_path / "broken").read_text().split()
    assert first != second
