"""`ctxflow factory` beside serving: its help, the dry run, and cleaning up. Serving: tests/factory/test_service.py."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time

import pytest
from in_process import ctxflow

from ctxflow.cli import factory_commands as command_module
from ctxflow.factory import ProviderError, tier_providers
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.provider import FoundJob
from ctxflow.factory.run_files import Connection, PublishedRun, write_private
from ctxflow.sites import Site, load_site
from ctxflow.sites.site_model import Tier

CAMPUS = """
name = "campus"
engine = "taskvine"
acquire = "factory"

[taskvine]
port = 9123

[[tiers]]
name = "a10"
provider = "condor"
workers = 30
requirements = 'GPUs_DeviceName == "NVIDIA A10"'

[[tiers]]
name = "here"
provider = "local"
workers = 3
"""


def command(*arguments):
    return ctxflow("factory", *arguments)


@pytest.fixture(autouse=True)
def runtime(tmp_path, own_tmpdir, monkeypatch):
    place = tmp_path / "runtime"
    (place / "ctxflow").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("HOME", str(place / "home"))
    return place / "ctxflow"


@pytest.fixture
def campus(tmp_path):
    path = tmp_path / "campus.toml"
    path.write_text(CAMPUS)
    return str(path)


def run_of(tmp_path, name, **more):
    directory = tmp_path / name
    directory.mkdir()
    for file in ("ctxflow.pyz", "password"):
        write_private(str(directory / file), "")
    program, password = str(directory / "ctxflow.pyz"), str(directory / "password")
    where = (name, socket.gethostname(), os.getpid(), str(directory), "10.0.0.1", 9000, password, program)
    run = PublishedRun(*where, {"a10": ["python3"], "here": ["python3"]}, {"a10": [], "here": []}, acquire="factory")
    return dataclasses.replace(run, **more)


def test_help_teaches():
    told = command("--help").stdout
    for word in ("kill -HUP", "--dry-run", "--clean", "130 after Ctrl-C"):
        assert word in told


def test_a_dry_run_without_runs_makes_one_up(campus):
    told = command(campus, "--dry-run").stdout
    first, second = told.split("\n\n")[:2]
    assert first.startswith(
        "# tier a10, a run that wants all there may be (no live run has its workers from here): 20 "
    )
    assert 'requirements = (GPUs_DeviceName == "NVIDIA A10") && ' in first and first.endswith("\nqueue 20")
    assert "transfer_input_files = RUN/ctxflow.pyz, RUN/password" in first and "ADDRESS:9123" in first
    assert second.startswith("# tier here,") and '"tier": "here"' in second
    [a10, here] = json.loads(command(campus, "--dry-run", "--json").stdout)
    assert (a10["run"], a10["tier"], a10["count"]) == ("", "a10", 20)
    assert json.loads(here["description"])["command"][0] == "python3"


def test_a_dry_run_shows_no_secret(campus):
    with open(campus, "a") as file:
        file.write("env = {HF_TOKEN = 'hf_abc', LANG = 'C.UTF-8'}\n")
    told = command(campus, "--dry-run").stdout
    assert "hf_abc" not in told and '"HF_TOKEN": "..."' in told and "C.UTF-8" in told


def test_a_dry_run_says_what_each_run_would_get(campus, tmp_path):
    clients = []
    for name, wanted in (("one", 20), ("two", 40), ("another", 7)):
        Connection(run_of(tmp_path, name))
        client = FactoryClient(name, "elsewhere" if name == "another" else "campus", print)
        client.hold("a10", wanted)
        client.start()
        clients.append(client)
    told = json.loads(command(campus, "--dry-run", "--json").stdout)
    for client in clients:
        client.stop()
    assert {(each["run"], each["tier"], each["count"]) for each in told} == {
        ("one", "a10", 15), ("two", "a10", 15), ("one", "here", 0), ("two", "here", 0),
    }  # fmt: skip
    [submit] = [each["description"] for each in told if (each["run"], each["tier"]) == ("one", "a10")]
    assert "10.0.0.1:9000" in submit and f"{tmp_path}/one/taskvine/jobs/a10/htcondor.log" in submit
    assert '+CtxflowRun = "one"' in submit


def test_files_of_dead_runs_are_cleaned_up(campus, tmp_path, runtime):
    local = tmp_path / "local.toml"
    local.write_text(CAMPUS.replace('"condor"', '"local"').replace("requirements", "# requirements"))
    assert "Nothing is left" in command(str(local), "--clean").stdout
    Connection(run_of(tmp_path, "live"))
    Connection(run_of(tmp_path, "away", host="elsewhere.example"))
    Connection(run_of(tmp_path, "dead", pid=2**22 + 1))
    for name in ("live.wanted", "away.news", "dead.news", "lost.wanted", "young.news", "factory-lab@here.lock"):
        (runtime / name).write_text("")
        if name != "young.news":
            os.utime(runtime / name, times=(time.time() - 3600,) * 2)
    listed = command(str(local), "--clean")
    assert listed.returncode == 1 and "Say --yes to remove them" in listed.stdout
    assert set(os.listdir(runtime)) >= {"dead.json", "dead.news", "lost.wanted"}
    done = command(str(local), "--clean", "--yes", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["removed"], told["jobs"]) == (0, True, [])
    assert [os.path.basename(path) for path in told["files"]] == ["dead.json", "dead.news", "lost.wanted"]
    assert set(os.listdir(runtime)) == {
        "live.json", "live.wanted", "away.json", "away.news", "young.news", "factory-lab@here.lock",
    }  # fmt: skip
    assert json.loads(command(str(local), "--clean", "--json").stdout)["removed"] is False


def test_what_is_young_by_its_own_clock_stays(campus, runtime, clock_steps):
    """A run that is just beginning has no connection file yet; its file server's clock may be behind by anything."""
    (runtime / "young.wanted").write_text("")
    with clock_steps(3600):
        assert tier_providers.find_leftovers(load_site(campus)).files == []
    os.utime(runtime / "young.wanted", times=(time.time() - 3600,) * 2)
    assert tier_providers.find_leftovers(load_site(campus)).files == [str(runtime / "young.wanted")]
    assert os.listdir(runtime) == ["young.wanted"]


class Queue:
    """A batch system's queue."""

    def __init__(self, *jobs: FoundJob, down: bool = False) -> None:
        self.jobs = {job.job: job for job in jobs}
        self.down = down

    def find(self):
        if self.down:
            raise ProviderError("the schedd does not answer")
        return list(self.jobs.values())

    def discard(self, jobs):
        if self.down:
            raise ProviderError("the schedd does not answer")
        for job in jobs:
            del self.jobs[job]


@pytest.fixture
def queues(monkeypatch, tmp_path):
    """Two schedds; of the tiers of the first, both have the same queue."""
    Connection(run_of(tmp_path, "live"))
    Connection(run_of(tmp_path, "away", host="elsewhere.example"))
    names = ("live", "dead", "away")
    one = Queue(*(FoundJob(f"1.{number}", run, "queued") for number, run in enumerate(names)))
    two = Queue(FoundJob("1.0", "dead", "running", "n1"))
    found = {"one": one, "two": two}
    monkeypatch.setattr(tier_providers, "provider_of", lambda tier, run: found[tier.schedd])
    return found


TIERS = tuple(Tier(name=name, schedd=schedd) for name, schedd in (("a10", "one"), ("a40", "one"), ("h100", "two")))


def test_jobs_of_dead_runs_are_found_once_and_removed(queues, capsys):
    site = Site(engine="taskvine", tiers=TIERS)
    found = tier_providers.find_leftovers(site)
    assert {(tier.name, job.job) for tier, job in found.jobs} == {("a10", "1.1"), ("h100", "1.0")}
    assert (found.elsewhere, found.troubles) == (1, [])
    assert command_module._clean(site, as_json=False, yes=True) == 0
    told = capsys.readouterr().out
    assert "Removed: 2 jobs and 0 files" in told and "Runs of other machines that share your home have 1 job" in told
    assert (set(queues["one"].jobs), set(queues["two"].jobs)) == ({"1.0", "1.2"}, set())


def test_a_batch_system_that_is_down_does_not_keep_others_dirty(queues, capsys):
    queues["one"].down = True
    assert command_module._clean(Site(engine="taskvine", tiers=TIERS), as_json=False, yes=True) == 1
    told = capsys.readouterr()
    assert "Removed: 1 job and" in told.out and "ctxflow: the schedd does not answer" in told.err
    assert queues["two"].jobs == {}
