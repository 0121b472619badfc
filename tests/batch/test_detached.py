"""Jobs that are detached, without HTCondor: their folders, what the driver finds, how they stand by their events."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxflow.batch import detached, load_job
from ctxflow.batch.detached import (
    Standing,
    carried,
    detach,
    found_jobs,
    job_named,
    last_complaint,
    self_contained,
    site_for_detaching,
    standing_of,
    views,
)
from ctxflow.batch.driver import begin_job, run_job
from ctxflow.errors import CtxflowError
from ctxflow.factory import condor_provider
from ctxflow.sites import load_site
from waiting import patience

SITE = """
engine = "taskvine"
[[tiers]]
name = "a10"
provider = "{provider}"
"""


@pytest.fixture
def work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an input and sites, and a place of its own for jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    (folder / "in.csv").write_text("text\none\ntwo\nbad\n")
    for provider in ("condor", "slurm"):
        (folder / f"{provider}.toml").write_text(SITE.format(provider=provider))
    return folder


@pytest.fixture
def schedd(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A schedd that takes all: what it was given, the events that it wrote, and what is in its queue."""
    known: dict[str, Any] = {"submitted": [], "events": [], "gone": False}

    def submit(description: dict[str, str]) -> str:
        known["submitted"].append(description)
        return f"{len(known['submitted'])}.0"

    def there(tags: list[str]) -> dict[str, dict[str, int]]:
        return {tag: {} if known["gone"] else {f"{tag.partition('-')[0]}.0": 2} for tag in tags}

    monkeypatch.setattr(condor_provider, "why_no_driver", lambda: None)
    monkeypatch.setattr(condor_provider, "submit_driver", submit)
    monkeypatch.setattr(condor_provider, "driver_events", lambda log: known["events"])
    monkeypatch.setattr(condor_provider, "jobs_there", there)
    return known


def job(**more: Any) -> Any:
    flags = {"input": "in.csv", "output": "out.jsonl", "function": "batch_functions:upper", "site": "condor.toml"}
    return load_job(None, **{**flags, "column": ["text"], **more})


def event(kind: int, time: float, **more: Any) -> dict[str, Any]:
    return {"EventTypeNumber": kind, "Cluster": 1, "Proc": 0, "time": time, **more}


def interrupted(time: float, **how: Any) -> dict[str, Any]:
    return event(4, time, TerminatedAndRequeued=True, **how)


BEGIN = event(1, 1.0)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Standing("queued", 0.0)),
        ([event(0, 0.5)], Standing("queued", 0.0)),
        ([BEGIN], Standing("running", 1.0)),
        ([BEGIN, event(6, 2.0)], Standing("running", 1.0)),
        ([BEGIN, event(5, 9.0, ReturnValue=0)], Standing("done", 9.0, status=0)),
        ([BEGIN, event(5, 9.0, ReturnValue=3)], Standing("done", 9.0, status=3)),
        ([BEGIN, event(5, 9.0, ReturnValue=1)], Standing("failed", 9.0, 0, "it ended with status 1", 1)),
        ([BEGIN, event(4, 2.0)], Standing("queued", 2.0, 0, "it was vacated")),
        (
            [BEGIN, interrupted(2.0, TerminatedNormally=True, ReturnValue=130)],
            Standing("queued", 2.0, 0, "it was interrupted"),
        ),
        (
            [BEGIN, interrupted(2.0, TerminatedNormally=False, TerminatedBySignal=9), event(1, 3.0)],
            Standing("running", 3.0, restarts=1),
        ),
        ([BEGIN, event(12, 2.0, HoldReason="the disk is full")], Standing("held", 2.0, 0, "the disk is full")),
        ([BEGIN, event(12, 2.0, HoldReason="x"), event(13, 3.0)], Standing("queued", 3.0)),
        ([BEGIN, event(4, 2.0), event(9, 2.0, Reason="via condor_rm")], Standing("cancelled", 2.0, 0, "via condor_rm")),
    ],
)
def test_how_a_job_stands_by_its_events(events: list[dict[str, Any]], expected: Standing) -> None:
    assert standing_of(events, submitted=0.0) == expected


@pytest.mark.parametrize(
    ("standing", "status"),
    [
        (Standing("done", 0, status=0), 0),
        (Standing("done", 0, status=3), 3),
        (Standing("failed", 0, status=1), 1),
        (Standing("failed", 0), 1),
        (Standing("cancelled", 0), 130),
    ],
)
def test_waiting_ends_as_the_job_did(standing: Standing, status: int) -> None:
    assert standing.exit_status == status


def test_a_job_is_kept_in_a_folder_of_its_users_alone(work: Path, schedd: dict[str, Any]) -> None:
    first, second = (detach(job(output=f"{n}.jsonl"), load_site("condor.toml")) for n in range(2))
    assert (first.id, second.id, first.cluster) == (1, 2, "1.0")
    assert found_jobs() == [first, second] and job_named("2") == second
    assert first.folder == work / "state/ctxflow/jobs/1" and first.output == str(work / "0.jsonl")
    for path in (first.folder, first.folder.parent, *first.folder.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    with pytest.raises(ValueError, match="there is no job '7': there are 1, 2"):
        job_named("7")


def test_a_refused_job_leaves_nothing(work: Path, schedd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(description: dict[str, str]) -> str:
        raise CtxflowError("HTCondor did not take the driver")

    monkeypatch.setattr(condor_provider, "submit_driver", refuse)
    with pytest.raises(CtxflowError, match="did not take"):
        detach(job(), load_site("condor.toml"))
    assert found_jobs() == [] and os.listdir(work / "state/ctxflow/jobs") == []


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, condor_provider.OutcomeUnknown, OSError])
def test_a_driver_that_was_being_submitted_is_known(
    work: Path, schedd: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException], taken: bool
) -> None:
    """Whatever ends the submission: it is taken out of the queue again, or found by its tag."""
    ended: list[str] = []

    def submit(description: dict[str, str]) -> str:
        assert [each.cluster for each in found_jobs()] == [""]
        raise error("no answer")

    monkeypatch.setattr(condor_provider, "submit_driver", submit)
    monkeypatch.setattr(condor_provider, "end_jobs", ended.extend)
    schedd["gone"] = not taken
    with pytest.raises(error):
        detach(job(), load_site("condor.toml"))
    late = error is condor_provider.OutcomeUnknown and not taken  # It may be queued after all.
    assert len(found_jobs()) == late and ended == ["1.0"] * taken


def test_a_driver_of_which_nobody_says_whether_it_was_taken_stays_known(
    work: Path, schedd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> Any:
        raise condor_provider.OutcomeUnknown("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(condor_provider, "submit_driver", unknown)
        patch.setattr(condor_provider, "jobs_there", unknown)
        with pytest.raises(CtxflowError, match="no answer"):
            detach(job(), load_site("condor.toml"))
    [known] = found_jobs()
    assert views([known])[0].standing.state == "queued", "as the schedd has it"
    schedd["gone"] = True
    standing = views([known])[0].standing
    assert standing.state == "lost" and "never came to HTCondor" in standing.reason


def test_sites_from_which_no_driver_can_be_submitted(
    work: Path, schedd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CtxflowError, match="tiers are HTCondor's"):
        site_for_detaching(job(site="local"))
    with pytest.raises(CtxflowError, match=r"the tier a10 of slurm\.toml is slurm's"):
        site_for_detaching(job(site="slurm.toml"))
    detach(job(), site_for_detaching(job()))
    with pytest.raises(CtxflowError, match=r"job 1 writes out.jsonl and is queued: .* `ctxflow cancel 1`"):
        site_for_detaching(job())
    monkeypatch.setattr(condor_provider, "why_no_driver", lambda: "this machine has no schedd")
    with pytest.raises(CtxflowError, match="cannot be detached: this machine has no schedd"):
        site_for_detaching(job(output="other.jsonl"))


def test_a_job_that_the_queue_has_no_more_is_lost_unless_it_has_ended(work: Path, schedd: dict[str, Any]) -> None:
    made = detach(job(), load_site("condor.toml"))
    schedd["events"] = [BEGIN]
    assert views([made])[0].standing.state == "running"
    schedd["gone"] = True
    assert views([made])[0].standing.state == "lost"
    schedd["events"] = [BEGIN, event(5, 2.0, ReturnValue=0)]
    assert views([made])[0].standing.state == "done"


def test_what_it_said_last_is_why_it_failed(work: Path, schedd: dict[str, Any]) -> None:
    made = detach(job(), load_site("condor.toml"))
    made.log.write_text("--- it starts\n10 of 20 rows\nctxflow: the disk is full\n")
    schedd["events"] = [BEGIN, event(5, 2.0, ReturnValue=1)]
    assert views([made])[0].standing.reason == last_complaint(made) == "the disk is full"


def test_the_status_file_of_an_earlier_run_is_not_this_jobs(work: Path, schedd: dict[str, Any]) -> None:
    run_job(job(site="local"))
    made = detach(job(), load_site("condor.toml"))
    assert views([made])[0].status is None


def test_the_job_means_the_same_wherever_it_is_read(work: Path) -> None:
    (work / "prompt.j2").write_text("Is {{ text }} true?")
    flags = {
        "model": "lm",
        "function": None,
        "column": None,
        "template": "@prompt.j2",
        "stop": ["\n"],
        "seed": 3,
        "keep": ["text"],
    }
    given = job(**flags)
    (work / "job.json").write_text(json.dumps(self_contained(given)))
    (work / "prompt.j2").unlink()
    read = load_job(work / "job.json")
    assert (read.output, read.site, read.template) == (
        work / "out.jsonl", str(work / "condor.toml"), "Is {{ text }} true?",
    )  # fmt: skip
    (work / "prompt.j2").write_text("Is {{ text }} true?")
    assert read.identity() == given.identity()


def test_what_is_of_the_login_is_not_carried() -> None:
    login = {"SSH_AUTH_SOCK": "/tmp/x", "XDG_RUNTIME_DIR": "/run/user/7", "_CONDOR_SLOT": "1", "BASH_FUNC_x%%": "()"}
    assert carried({**login, "HF_TOKEN": "a secret", "PYTHONPATH": "src"}) == {
        "HF_TOKEN": "a secret",
        "PYTHONPATH": "src",
    }
    assert carried(login, keep_runtime=True) == {"XDG_RUNTIME_DIR": "/run/user/7"}


def test_the_script_becomes_the_driver(
    work: Path, schedd: dict[str, Any], functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run as HTCondor runs it, elsewhere and in another environment; but for the site, which is this machine."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(functions), *filter(None, sys.path)]))
    monkeypatch.setenv("QUOTED", "it's a 'quoted'\n$HOME value")
    made = detach(job(), load_site("condor.toml"), ["--json"])
    values = json.loads((made.folder / "job.json").read_text())
    (made.folder / "job.json").write_text(json.dumps({**values, "site": "local", "workers": 1}))
    script = made.folder / "driver.sh"
    assert str(script) in schedd["submitted"][0]["arguments"] and "quoted" not in str(schedd["submitted"])
    done = subprocess.run(
        ["/bin/sh", str(script)], cwd="/", env={"TMPDIR": "/nowhere"}, check=False, timeout=patience()
    )
    said = made.log.read_text()
    assert done.returncode == 3, said
    assert said.startswith("--- ") and '"dead": 1' in said
    assert [json.loads(line)["result"] for line in (work / "out.jsonl").read_text().splitlines()] == ["ONE", "TWO"]


def test_beginning_a_job_says_what_is_wrong_and_keeps_what_is_asked_once(work: Path) -> None:
    local = job(site="local")
    with pytest.raises(ValueError, match=r"nowhere\.csv"):
        begin_job(job(input="nowhere.csv", site="local"))
    assert begin_job(local) is True
    assert run_job(local).dead == 1
    assert begin_job(local) is False, "nothing is missing"
    assert begin_job(local, retry_errors=True) is True
    again = run_job(local)
    assert (again.done_now, again.dead_now, again.already) == (0, 1, False)
    assert begin_job(local, fresh=True) is True
    assert (work / "out.jsonl").read_text() == ""
    assert run_job(local).done_now == 2


def test_jobs_are_kept_where_states_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert detached.jobs_directory() == Path("/home/ada/.local/state/ctxflow/jobs")
