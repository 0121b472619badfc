"""`ctxflow jobs`, `logs`, `cancel` and `batch --detach` as a person meets them; HTCondor itself is in tests/cluster."""

import dataclasses
import io
import json
import os

import pytest
import typer
from in_process import ctxflow
from rich.console import Console

from ctxflow.batch.detached import Detached, DetachedView, Standing
from ctxflow.cli import detached_commands as verbs
from ctxflow.factory import condor_provider

NOW = 1_790_000_000.0


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(number, **more):
    about = {"tag": f"{number}-af", "cluster": f"{number}0.0", "host": os.uname().nodename, "directory": "/w"}
    files = {"input": "/w/in.csv", "output": f"/w/out{number}.jsonl", "site": "/w/campus.toml"}
    job = Detached(id=number, **about, **files, submitted=NOW, does="embed with package:minilm")
    return dataclasses.replace(job, **more)


def remember(job, said=""):
    job.folder.mkdir(parents=True)
    (job.folder / "about.json").write_text(json.dumps(dataclasses.asdict(job)))
    job.log.write_text(said)
    return job


def shown(views, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(verbs.jobs_table(views, NOW))
    return stream.getvalue()


def test_the_table_says_how_jobs_stand_in_80_columns():
    status = {"done": 1234567, "dead": 12, "total": 10_000_000, "guessed": True, "rate": 1234.0}
    held = Standing("held", NOW - 60, 3, "the driver was killed by signal 9 at its start number 10: see ctxflow logs 2")
    text = shown(
        [
            DetachedView(made(1), Standing("running", NOW - 60), status),
            DetachedView(made(2), held, {**status, "guessed": False}),
            DetachedView(made(3), Standing("done", NOW - 90_000, status=0), None),
        ]
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    joined = " ".join(text.split())
    assert "1 running" in joined and "1,234,567 of ~10,000,000 12 1,234" in joined
    assert "2 held" in joined and "number 10: see ctxflow logs 2" in joined and "/w/out3.jsonl" in joined
    assert len(shown([DetachedView(made(3), held, None)], 200).splitlines()) == 3


@pytest.fixture
def schedd(home, monkeypatch):
    """A queue in which jobs end when they are removed; what was asked of it."""
    known = {"there": {"1-af": {"10.0": 2, "11.0": 2, "11.1": 1}}, "ended": [], "events": []}

    def end(jobs):
        known["ended"].append(dict(jobs))
        known["there"]["1-af"] = dict.fromkeys(list(jobs)[1:], 3) if len(known["ended"]) == 1 else {}
        known["events"] = [{"EventTypeNumber": 9, "Cluster": 10, "Proc": 0, "time": NOW, "Reason": "ctxflow cancel"}]

    monkeypatch.setattr(condor_provider, "jobs_there", lambda tags: {tag: known["there"].get(tag, {}) for tag in tags})
    monkeypatch.setattr(condor_provider, "end_jobs", end)
    monkeypatch.setattr(condor_provider, "driver_events", lambda log: known["events"])
    monkeypatch.setattr(verbs, "_AGAIN_SECONDS", 0.0)
    return known


def test_cancel_ends_the_driver_and_its_workers_and_asks_again(schedd, capsys):
    remember(made(1))
    verbs.cancel("1")
    assert schedd["ended"] == [{"10.0": 2, "11.0": 2, "11.1": 1}, {"11.0": 3, "11.1": 3}]
    assert "job 1 is cancelled" in capsys.readouterr().err
    verbs.cancel("1")
    assert "had ended before: it is cancelled" in capsys.readouterr().err


def test_cancel_says_what_does_not_leave(schedd, capsys, monkeypatch):
    remember(made(1))
    monkeypatch.setattr(condor_provider, "end_jobs", lambda jobs: None)
    monkeypatch.setattr(verbs, "_CANCEL_SECONDS", 0.6)
    with pytest.raises(typer.Exit) as ended:
        verbs.cancel("1")
    assert ended.value.exit_code == 1 and "3 of job 1's jobs do not leave" in capsys.readouterr().err


def test_a_job_of_another_machine_is_cancelled_there(schedd, capsys):
    remember(made(1, host="login7"))
    with pytest.raises(typer.Exit) as ended:
        verbs.cancel("1")
    assert ended.value.exit_code == 1 and "cancel it there" in capsys.readouterr().err and schedd["ended"] == []


@pytest.mark.parametrize(("kind", "status", "code"), [(5, 0, 0), (5, 3, 3), (5, 1, 1), (9, None, 130)])
def test_following_ends_as_the_job_did(schedd, capsys, kind, status, code):
    remember(made(1), "--- the driver starts\n10 of 20 rows\n")
    schedd["events"] = [{"EventTypeNumber": kind, "Cluster": 10, "Proc": 0, "time": NOW, "ReturnValue": status}]
    with pytest.raises(typer.Exit) as ended:
        verbs.logs("1", follow=True)
    assert ended.value.exit_code == code
    assert capsys.readouterr().out == "--- the driver starts\n10 of 20 rows\n"


def test_following_prints_what_comes_once(schedd, capsys, monkeypatch):
    job = remember(made(1), "one\ntw")
    schedd["events"] = [{"EventTypeNumber": 1, "Cluster": 10, "Proc": 0, "time": NOW}]

    def later(seconds):
        job.log.write_text("one\ntwo\nthree\n")
        schedd["events"].append({"EventTypeNumber": 5, "Cluster": 10, "Proc": 0, "time": NOW, "ReturnValue": 0})

    monkeypatch.setattr(verbs.time, "sleep", later)
    with pytest.raises(typer.Exit):
        verbs.logs("1", follow=True)
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_jobs_as_json(schedd, capsys):
    remember(made(1))
    remember(made(2))
    schedd["there"]["2-af"] = {"20.0": 2}
    verbs.jobs(every=False, as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["id"], first["state"], first["htcondor"], first["done"]) == (1, "queued", "10.0", None)
    assert second["output"] == "/w/out2.jsonl"


def test_only_the_last_of_those_that_ended_are_listed(schedd, capsys, monkeypatch):
    monkeypatch.setattr(verbs, "_SHOWN_ENDED", 2)
    for number in range(1, 6):
        remember(made(number))
    verbs.jobs(every=False, as_json=False)
    out = capsys.readouterr().out
    assert "out1" in out and "out2.jsonl" not in out and "out3.jsonl" not in out and "out5.jsonl" in out
    assert "2 jobs that ended earlier" in out


def test_ids_are_completed_with_what_they_are(home):
    for number in (1, 2, 12):
        remember(made(number))
    assert [each for each, _ in verbs._complete("1")] == ["12", "1"]
    assert verbs._complete("2") == [("2", "embed with package:minilm: /w/out2.jsonl")]


def test_from_a_shell(home):
    (home / "in.csv").write_text("text\none\n")
    refused = ctxflow("batch", "in.csv", "-o", "out.jsonl", "--function", "copy:copy", "--column", "text", "--detach")
    assert refused.returncode == 2 and refused.stdout == "" and "give --site with a site file" in refused.stderr
    assert not (home / "out.jsonl").exists()
    unknown = ctxflow("logs", "7")
    assert unknown.returncode == 2 and "there is none yet" in unknown.stderr
    empty = ctxflow("jobs")
    assert (empty.returncode, empty.stdout) == (0, "") and "ctxflow batch --detach" in empty.stderr


def test_jobs_that_are_piped_are_whole(schedd, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    output = f"/w/{'long/' * 60}out.jsonl"
    remember(made(1, output=output))
    verbs.jobs(every=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].strip() == output and all(line == line.rstrip() for line in lines)
