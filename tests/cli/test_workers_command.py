"""`ctxflow workers`: what it lists, and whose log it prints."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest
from typer.testing import CliRunner

from ctxflow.causes import ShortfallCause
from ctxflow.cli.app import app
from ctxflow.errors import counted
from ctxflow.observe.progress import VERSION, owner, write_status


def worker(name, host, job=None, **facts):
    told = {
        "worker": name, "host": host, "gpus": 1, "gpu_model": "NVIDIA A10", "tier": "gpu", "job": job,
        "state": "working", "joined": time.time() - 3690, "ended": None, "done": 1200, "failed": 0, "error": "",
        "log": "",
    }  # fmt: skip
    return {**told, **facts}


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "1" / "ctxflow"
    folder.mkdir(parents=True)

    def write(*workers, **told):
        facts = {"version": VERSION, "output": "", "run": str(folder), "state": "running", **owner()}
        write_status(folder / "status.json", {**facts, "updated": time.time(), **told})
        (folder / "workers.json").write_text(json.dumps({"version": 1, "updated": time.time(), "workers": workers}))
        return folder

    return write


def run(*words):
    return CliRunner().invoke(app, ["workers", *words], env={"COLUMNS": "200"})


def test_it_lists_where_each_is_and_what_it_did(make):
    bad = worker("4711.gpu2.a1", "gpu2", "4711", failed=3, error="CUDA error: \x1b[2Juncorrectable ECC error", gpus=4)
    make(worker("4710.gpu1.b2", "gpu1", "4710"), bad)
    told = run()
    assert told.exit_code == 0
    head, first, second = (" ".join(line.split()) for line in told.stdout.splitlines())
    assert head == "host GPU tier job state age done failed last error"
    assert first == "gpu1 NVIDIA A10 gpu 4710 working 1 h 01 min 1,200 0"
    assert second.startswith("gpu2 4 x NVIDIA A10 gpu 4711 working 1 h 01 min 1,200 3 CUDA error: [2Junc")
    assert json.loads(run("--json").stdout)["workers"][1]["failed"] == 3


def test_a_worker_s_log_is_found_by_its_name_its_job_or_its_host(make, tmp_path):
    log = tmp_path / "4710.out"
    log.write_text("one\n\x1b[2Jtwo\n")
    folder = make(worker("4710.gpu1.b2", "gpu1", "4710", log=str(log)), worker("4711.gpu2.a1", "gpu2", "4711"))
    for name in ("4710.gpu1.b2", "4710", "gpu1"):
        assert run("--log", name).stdout == f"== {log}\none\n[2Jtwo\n"
    by_factory = folder / "taskvine" / "jobs" / "gpu"
    by_factory.mkdir(parents=True)
    (by_factory / "4711.out").write_text("three\n")
    assert "three" in run("--log", "gpu2").stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [("host9", "has no worker host9"), ("gpu", "2 workers are called so: name one of 4710, hand"), ("hand", "by hand")],
)
def test_what_cannot_be_printed_is_said_with_what_to_do(make, name, says):
    make(worker("4710.gpu1", "gpu1", "4710"), worker("hand", "gpu2"))
    refused = run("--log", name)
    assert refused.exit_code != 0 and says in str(refused.exception or refused.output)


def test_one_that_lives_is_meant_where_another_of_its_host_is_gone(make, tmp_path):
    (tmp_path / "new.out").write_text("new\n")
    gone = worker("1.gpu1", "gpu1", "1", state="lost", ended=time.time())
    make(gone, worker("2.gpu1", "gpu1", "2", log=str(tmp_path / "new.out")))
    assert "new" in run("--log", "gpu1").stdout


def test_a_run_without_workers_says_where_to_look(make):
    make()
    assert "`ctxflow status` says why" in run().stdout


def test_what_is_piped_has_all_of_every_name_and_error(make, monkeypatch):
    """As `ctxflow workers | grep` needs it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered " + "x" * 200
    hosts = [f"gpu-node-{n:03}.hpc.example.org" for n in range(200)]
    make(*(worker(f"{host}.a1", host, f"4821{n}.0", error=error * (n == 123)) for n, host in enumerate(hosts)))
    lines = CliRunner().invoke(app, ["workers"]).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == hosts
    assert [error in line for line in lines[1:]] == [n == 123 for n in range(200)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 1}', '{"version": 1, "workers": 7}', '{"version": 1, "workers": ["a", {"host": "b"}]}'],
)
def test_a_malformed_list_of_workers_is_none(make, text):
    folder = make(worker("4710.gpu1", "gpu1", "4710"))
    (folder / "workers.json").write_text(text)
    assert run().stdout == "the run has no workers yet: `ctxflow status` says why\n"


@pytest.mark.parametrize("workers", [[], [worker("4710.gpu1.b2", "gpu1", "4710")]], ids=["none", "one"])
def test_why_there_are_no_more_workers_is_told_below_them_and_in_the_status(make, workers):
    gpu = {"joined": len(workers), "asked": 3, "cost": None, "gpu_hours": 0.0, "worker_hours": 0.0, "reason": "words"}
    left = time.time() + 541.0
    causes = [
        ShortfallCause("hold", "2 jobs are put on hold until they are released", "ask ops (by user root)", "gpu"),
        ShortfallCause("back-off", "nothing more is asked for", tier="gpu", until=left),
        ShortfallCause("quarantine", "host host3 gets no work", "CUDA error: \x1b[2JECC", host="host3", until=left),
    ]
    make(*workers, tiers={"gpu": gpu}, causes=[dataclasses.asdict(each) for each in causes], workers=len(workers))
    lacks = counted(3 - len(workers), "worker")
    hold = f"gpu lacks {lacks}: 2 jobs are put on hold until they are released: ask ops (by user root)"
    for told in (run().stdout, CliRunner().invoke(app, ["status"], env={"COLUMNS": "400"}).stdout):
        assert re.search(rf"{re.escape(hold)}; nothing more is asked for, 9 min \d\d s left", told)
        assert re.search(r"host host3 gets no work, 9 min \d\d s left: CUDA error: \[2JECC", told)
    assert json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["causes"][2]["until"] == left
