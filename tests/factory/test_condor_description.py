"""What HTCondor is told of a worker. That it understands it so is tested in the testbed (tests/cluster)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.factory import ProviderError, WorkerJob
from ctxflow.factory.condor_description import describe, quoted


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
    assert text["requirements"] == "OpSysMajorVer >= 9"
    for key in ("log", "Arguments", "+CtxflowRun", "leave_in_queue"):
        with pytest.raises(ProviderError, match="leave it out"):
            told(options={"submit": {key: "x"}})


def test_a_site_may_remove_jobs_besides_those_that_are_abandoned() -> None:
    ours = told()["periodic_remove"]
    assert told(options={"submit": {"Periodic_Remove": "NumJobStarts > 9"}})["periodic_remove"] == (
        f"{ours} || (NumJobStarts > 9)"
    )


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
        ({"environment": {"A": "two\nlines"}}, "more than one line"),
        ({"environment": {"A=B": "c"}}, "name of an environment variable"),
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
    assert told(environment={"A": "b c", "CTXFLOW_JOB": "mine"})["environment"] == (
        "\"'A=b c' CTXFLOW_JOB=$(Cluster).$(Process)\""
    )


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
