"""Workers of a real run that come when there is work and go when there is none, and a run that waits for them."""

import logging
import os

import pytest

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors import live_run
from ctxflow.executors.local_workers import share
from waiting import eventually


@context
def nothing():
    return None


@batch_app(nothing(), batch_size=1)
def host(nothing, folders):
    """The worker's process, once two workers have come to each folder."""
    import os

    for folder in folders:
        open(os.path.join(folder, str(os.getppid())), "w").close()
        eventually(lambda folder=folder: len(os.listdir(folder)) >= 2)
    return [os.getppid() for _ in folders]


def test_bursts_make_workers_come_and_idleness_gives_them_back(tmp_path):
    scaling = {"policy": "queue-proportional", "calls_per_worker": 2, "linger": 0.5}
    executor = ContextExecutor(workers=2, scaling=scaling)
    executor.run_dir = str(tmp_path / "run")
    hosts = []
    with executor:
        for burst in range(2):
            assert executor.connected_workers == 0, "nobody has asked for anything"
            folder = tmp_path / str(burst)
            folder.mkdir()
            hosts.append(set(host.map([str(folder)] * 8)))
            eventually(lambda: executor.connected_workers == 0)
        status = executor.status()
    assert [len(each) for each in hosts] == [2, 2], "both workers took part in each burst"
    assert not hosts[0] & hosts[1], "the second burst had new workers"
    assert (status.workers_joined, status.workers_lost, status.evictions) == (4, 4, 0)


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site.toml").write_text("workers = 2\nstart_when = 1.0\n")
    return str(tmp_path / "site.toml")


def test_the_first_call_waits_for_all_and_says_so(site, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(live_run, "_AWAITING_SECONDS", 0.0)
    caplog.set_level(logging.WARNING, "ctxflow")
    executor = ContextExecutor(site=site)
    executor.run_dir = str(tmp_path / "run")
    spawn, held = executor.engine._local.spawn, []

    def one_is_late():
        if executor.engine._local._begun == 1 and not held:
            held.append(spawn)
            executor.engine._local._begun += 1
        else:
            spawn()

    monkeypatch.setattr(executor.engine._local, "spawn", one_is_late)
    with executor:
        eventually(lambda: executor.connected_workers == 1)
        future = host(str(tmp_path))
        eventually(lambda: caplog.messages)
        assert not future.done()
        status = executor.status()
        assert (status.workers, status.items_running, status.batches) == (1, 0, 0)
        with executor.engine._lock:
            held[0]()
        executor.engine.wake()
        assert future.result() != os.getpid()
        said = len(caplog.messages)
    assert caplog.messages[0] == (
        "waiting for 2 of 2 workers before the first call (start_when = 1), 1 here: "
        "lower start_when if so many do not come"
    )
    assert len(caplog.messages) == said, "it is said no more"


def test_threads_are_a_share_of_the_cores_but_as_many_as_the_user_said(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    own = share([], False, workers=4)
    assert {own["OMP_NUM_THREADS"], own["MKL_NUM_THREADS"], own["OPENBLAS_NUM_THREADS"]} == {"2"}
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    own = share([], False, workers=4)
    assert "MKL_NUM_THREADS" not in own and own["OPENBLAS_NUM_THREADS"] == "2"
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not any("NUM_THREADS" in name for name in share([], False, workers=4))
