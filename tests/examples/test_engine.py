"""The example engine: selected by a site file, and all that an engine must do."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors.contract import EngineFailed
from ctxflow.host.linux import descendants
from ctxflow.sites import load_site
from ctxflow.testing.contract_hooks import ContractRun
from ctxflow.testing.engines import EngineContract
from ctxflow.testing.item_contract import ItemContract
from ctxflow.testing.parking_contract import ParkingContract
from ctxflow.testing.session_contract import SessionContract
from ctxflow.testing.thread_contract import ThreadContract
from waiting import finished

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine"
ENTRIES = "[ctxflow.engines]\nsubprocesses = subprocess_engine:SubprocessEngine\n"


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """The example as pip leaves it in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "subprocess_engine.py").write_text((EXAMPLE / "subprocess_engine.py").read_text())
    info = folder / "subprocess_engine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: subprocess-engine\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("subprocess_engine", None)


class TestSubprocesses(EngineContract):
    def make(self):
        from subprocess_engine import SubprocessEngine

        return SubprocessEngine(workers=2)

    def evict(self, engine, worker):
        engine.evict(worker)

    def notify(self, engine, worker):
        os.kill(engine.processes()[worker], signal.SIGTERM)

    def processes(self, engine):
        hosts = list(engine.processes().values())
        return hosts + [pid for host in hosts for pid in descendants(host)]


class TestSessions(SessionContract):
    make = TestSubprocesses.make
    notify = TestSubprocesses.notify


class TestItems(ItemContract):
    make = TestSubprocesses.make
    notify = TestSubprocesses.notify


class TestThreads(ThreadContract):
    make = TestSubprocesses.make
    notify = TestSubprocesses.notify


class TestParking(ParkingContract):
    make = TestSubprocesses.make


@context
def ten():
    return 10


@batch_app(ten(), batch_size=3)
def added(model, numbers):
    return [model + number for number in numbers]


def test_a_site_file_selects_it(tmp_path):
    executor = ContextExecutor(site=str(EXAMPLE / "site.toml"))
    executor.run_dir = str(tmp_path)
    with executor:
        assert list(added.map(range(20))) == [10 + n for n in range(20)]
        assert executor.submit(divmod, {}, 17, 5).result() == (3, 2)
    assert type(executor.engine).__name__ == "SubprocessEngine"


def test_the_entry_point_is_the_one_of_its_pyproject():
    text = (EXAMPLE / "pyproject.toml").read_text()
    name, place = ENTRIES.splitlines()[1].split(" = ")
    assert f'[project.entry-points."ctxflow.engines"]\n{name} = "{place}"\n' in text
    assert load_site(EXAMPLE / "site.toml").options.nice == 5


def test_workers_that_never_start_end_the_run_with_what_they_say(tmp_path, monkeypatch):
    """A prefix that does not work there, say: the calls fail, and processes are not started for ever."""
    broken = tmp_path / "bin" / "nice"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no such queue >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    executor = ContextExecutor(site=str(EXAMPLE / "site.toml"))
    executor.run_dir = str(tmp_path)
    with executor, pytest.raises(EngineFailed, match="before they have started: no such queue"):
        finished(executor.submit(divmod, {}, 17, 5)).result()


def test_many_wakes_do_not_wait_for_a_poll():
    from subprocess_engine import SubprocessEngine

    engine = SubprocessEngine(workers=1)
    with tempfile.TemporaryDirectory() as folder:
        engine.start(ContractRun(engine, folder, "local"))
        for _ in range(10_000):
            engine.wake()
        assert engine.poll(30.0) == []
        engine.stop()
