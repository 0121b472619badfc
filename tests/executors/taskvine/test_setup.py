"""What a run on TaskVine needs of its machine: files that nobody else has put there, and a port."""

import socket
import stat
import time
from types import SimpleNamespace

import pytest

from ctxflow.errors import CtxflowError
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.executors.taskvine.manager_process import ManagerLink, Setup
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import TaskVineOptions
from ctxflow.sites.site_model import Tier

SITE = Site(name="lab", engine="taskvine", tiers=(Tier(provider="local"),))


def test_a_folder_that_others_made_ready_is_refused(tmp_path):
    """Whoever may write there could put another program in the place of the workers' own."""
    run = SimpleNamespace(directory=str(tmp_path), id="7", clock=time.monotonic)
    (tmp_path / "taskvine").mkdir()
    (tmp_path / "taskvine").chmod(0o777)
    with pytest.raises(CtxflowError, match="others may write to"):
        Setup(SITE, run)
    (tmp_path / "taskvine").rmdir()
    setup = Setup(SITE, run)
    assert stat.S_IMODE((tmp_path / "taskvine").stat().st_mode) == 0o700
    setup.close()


def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("ctxflow.executors.taskvine.engine.require_ndcctools", lambda: None)
    run = SimpleNamespace(directory=str(tmp_path), id="7", clock=time.monotonic)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for written in (port, (port, port)):
            engine = TaskVineEngine(SITE.model_copy(update={"taskvine": TaskVineOptions(port=written)}))
            with pytest.raises(CtxflowError, match=f"^port = {port} is taken on this machine: write another, or 0"):
                engine.start(run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ended", [True, False])
def test_a_port_that_is_taken_meanwhile_is_told_unless_it_may_be_the_manager_that_has_it(tmp_path, monkeypatch, ended):
    monkeypatch.setattr("ctxflow.executors.taskvine.engine.require_ndcctools", lambda: None)
    taken = []

    def started(link, seconds):
        taken.append(socket.create_server(("", port)))
        raise EngineFailed("TaskVine's manager does not start: run_info_path: (path)")

    monkeypatch.setattr(ManagerLink, "started", started)
    monkeypatch.setattr(ManagerLink, "_spawn", lambda link: None)
    monkeypatch.setattr(ManagerLink, "channel", SimpleNamespace(fileno=lambda: 0, closed=ended), raising=False)
    monkeypatch.setattr(ManagerLink, "end", lambda link, seconds: None)
    with socket.create_server(("", 0)) as found:
        port = found.getsockname()[1]
    run = SimpleNamespace(directory=str(tmp_path), id="7", clock=time.monotonic)
    engine = TaskVineEngine(SITE.model_copy(update={"taskvine": TaskVineOptions(port=port)}))
    told = f"^port = {port} is taken on this machine" if ended else "^TaskVine's manager does not start: run_info_path"
    with pytest.raises(CtxflowError, match=told):
        engine.start(run)
    taken[0].close()
