"""What HTCondor is told of a worker. That it understands it so is tested in the testbed (tests/cluster)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.factory import ProviderError, WorkerJob
from ctxflow.factory.condor_jobs import describe, quoted, variables_text

_SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def told(directory: str = "/run/7", run: str = "7", **job: Any) -> dict[str, str]:
    return describe(WorkerJob(**{"tier": "any", "command": ["true"], **job}), directory, run, now=12.7, lease=600)


def test_amounts_are_in_htcondors_units_and_never_less_than_asked_for() -> None:
    text = told(cores=2, memory=10 * 10**9, disk=1025, gpus=0)
    assert (text["request_cpus"], text["request_memory"], text["request_disk"]) == ("2", "9537", "2")
    assert "request_gpus" not in text
    assert told(gpus=2)["request_gpus"] == "2"


def test_a_site_may_set_any_key_but_ours() -> None:
    keys = {"+ProjectName": '"physics"', "Request_Memory": "4GB", "want_io_proxy": True, "priority": 5}
    text = told(options={"submit": keys, "requirements": "OpSysMajorVer >= 9"})
    assert text["+ProjectName"] == '"physics"' and text["priority"] == "5" and text["want_io_proxy"] == "true"
    assert [key for key in text if key.lower() == "request_memory"] == ["Request_Memory"]
    assert text["requirements"].startswith("(OpSysMajorVer >= 9) && ")
    for key in ("log", "Arguments", "+CtxflowRun", "leave_in_queue"):
        with pytest.raises(ProviderError, match="leave it out"):
            told(options={"submit": {key: "x"}})


def test_a_site_may_remove_jobs_besides_those_that_are_abandoned() -> None:
    ours = told()["periodic_remove"]
    assert told(options={"submit": {"Periodic_Remove": "NumJobStarts > 9"}})["periodic_remove"] == (
        f"{ours} || (NumJobStarts > 9)"
    )


def test_a_job_is_kept_from_machines_by_an_attribute_beside_what_the_site_requires() -> None:
    """Which a job that waits can be given another value of, without its requirements being written anew."""
    anywhere = told()
    assert anywhere["+CtxflowExcluded"] == '""'
    text = told(excluded=("n1.pool", "n2.pool"), options={"submit": {"Requirements": "Rack == 1 || Rack == 2"}})
    assert text["+CtxflowExcluded"] == '"n1.pool,n2.pool"'
    assert text["requirements"] == f"(Rack == 1 || Rack == 2) && {anywhere['requirements']}"
    with pytest.raises(ProviderError, match="leave it out"):
        told(options={"submit": {"+CtxflowExcluded": '""'}})


def test_an_image_makes_a_container_job() -> None:
    assert told()["universe"] == "vanilla"
    text = told(options={"image": "docker://ctxflow:1"})
    assert (text["universe"], text["container_image"]) == ("container", "docker://ctxflow:1")


def test_files_travel_and_what_only_the_user_may_read_is_encrypted(tmp_path: Path) -> None:
    for name, mode in (("worker", 0o755), ("password", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    text = told(files=[str(tmp_path / "worker"), str(tmp_path / "password")])
    assert text["transfer_input_files"] == f"{tmp_path}/worker, {tmp_path}/password"
    assert text["encrypt_input_files"] == f"{tmp_path}/password"
    assert "encrypt_input_files" not in told(files=[str(tmp_path / "worker")])
    (tmp_path / "one,two").touch()
    with pytest.raises(ProviderError, match="without commas"):
        told(files=[str(tmp_path / "one,two")])


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        ({"command": ["two\nlines"]}, "more than one line"),
        ({"environment": {"A=B": "c"}}, "name of an environment variable"),
        ({"environment": {"A;B": "c"}}, "name of an environment variable"),
        ({"options": {"requirements": "true\nexecutable = /bin/false"}}, "more than one line"),
        ({"options": {"submit": {"priority": "1\nqueue 100"}}}, "more than one line"),
        ({"options": {"submit": {"a = b": "1"}}}, "key 'a = b'"),
        ({"options": {"submit": "priority = 1"}}, "a table of submit keys"),
        ({"options": {"requirement": "true"}}, "did you mean 'requirements'"),
        ({"options": {"xyz": "true"}}, "its options are"),
        ({"run": "a b"}, "tagged with the run"),
    ],
)
def test_what_cannot_be_said_is_refused(job: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProviderError, match=complaint):
        told(**job)


def test_the_job_knows_its_id_whatever_else_it_is_given() -> None:
    assert told(environment={"A": "b c", "CTXFLOW_JOB": "mine"})["environment"] == '"CTXFLOW_JOB=$(Cluster).$(Process)"'
    assert told(environment={"CTXFLOW_JOB": "mine"}) == told()


def test_a_jobs_ad_has_none_of_its_variables(tmp_path: Path) -> None:
    """Everybody who may read the queue reads ads: `condor_q -l`."""
    (tmp_path / "worker").touch()
    text = told(files=[str(tmp_path / "worker")], environment={"HF_TOKEN": "hf_abc"})
    assert not [key for key, value in text.items() if "hf_abc" in value or "HF_TOKEN" in value]
    assert text["transfer_input_files"] == f"{tmp_path}/worker, /run/7/variables"
    assert text["encrypt_input_files"] == "/run/7/variables"


def test_a_jobs_shell_takes_its_variables_in_and_leaves_no_file_of_them(tmp_path: Path) -> None:
    values = {
        "HF_TOKEN": 'it\'s $HOME "quoted" `id` \\',
        "LINES": "two\nlines",
        "EMPTY": "",
    }
    job = WorkerJob("a10", [sys.executable, "-c", _SHOW, "one word", "$1"], environment=values)
    text = describe(job, "/run/7", "7", now=0, lease=600, variables=str(tmp_path / "variables-1a"))
    (tmp_path / "variables-1a").write_text(variables_text(job))
    inner = text["arguments"][1:-1].replace('""', '"').replace("$(DOLLAR)", "$")
    run = subprocess.run([text["executable"], *split(inner)], cwd=tmp_path, env={}, capture_output=True, check=False)
    assert run.stderr == b""
    words, environment = json.loads(run.stdout)
    assert words == ["one word", "$1"] and environment.items() >= values.items()
    assert os.listdir(tmp_path) == []
    again = subprocess.run([text["executable"], *split(inner)], cwd=tmp_path, env={}, capture_output=True, check=False)
    assert again.returncode and b"variables-1a" in again.stdout, "what is missing is said among the output"


@given(st.lists(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"))))
def test_quoted_words_can_be_told_apart_again(words: list[str]) -> None:
    text = quoted(words)
    assert text[0] == text[-1] == '"' and '"' not in text[1:-1].replace('""', "")
    inner = text[1:-1].replace('""', '"').replace("$$(DOLLARDOLLAR)", "$$").replace("$(DOLLAR)", "$")
    assert split(inner) == words


def split(text: str) -> list[str]:
    """Words as HTCondor splits them: at spaces outside single quotes, a doubled one being one."""
    words, word, within, place = [], None, False, 0
    while place < len(text):
        letter = text[place]
        if letter == "'" and within and text[place + 1 : place + 2] == "'":
            word, place = (word or "") + "'", place + 1
        elif letter == "'":
            within, word = not within, word or ""
        elif letter == " " and not within:
            words, word = [*words, word] if word is not None else words, None
        else:
            word = (word or "") + letter
        place += 1
    return [*words, word] if word is not None else words


def test_the_jobs_of_a_run_have_one_name_and_each_says_its_tier():
    descriptions = [
        describe(WorkerJob(tier, ["true"]), "/run/7", "run-7", now=0, lease=600) for tier in ("a10", "preemptible")
    ]
    assert [each["batch_name"] for each in descriptions] == ["ctxflow run-7"] * 2
    assert [each["+CtxflowTier"] for each in descriptions] == ['"a10"', '"preemptible"']


def test_variables_arrive_also_from_a_directory_with_a_comma_in_its_name() -> None:
    job = WorkerJob("a10", ["true"], environment={"HF_TOKEN": "hf"})
    text = describe(job, "/run, 7", "7", now=0, lease=600, variables="/run, 7/variables-1f")
    assert (text["initialdir"], text["transfer_input_files"], text["encrypt_input_files"]) == (
        "/run, 7", "variables-1f", "variables-1f",
    )  # fmt: skip
    plain = describe(job, "/run/7", "7", now=0, lease=600, variables="/run/7/variables-1f")
    assert plain["transfer_input_files"] == "/run/7/variables-1f" and "initialdir" not in plain
