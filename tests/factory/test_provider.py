"""What all providers share: checking a job, its command, the end of a file."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import CtxflowError
from ctxflow.factory import CondorProvider, ProviderError, WorkerJob
from ctxflow.factory.local import LocalProvider
from ctxflow.factory.parsl_provider import ParslProvider
from ctxflow.factory.provider import arguments, check_job, tail
from ctxflow.factory.served_run import GrantedProvider


def test_a_provider_error_is_one_of_ours() -> None:
    assert issubclass(ProviderError, CtxflowError)


def test_a_job_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "password").touch()
    twice = [str(tmp_path / folder / "password") for folder in ("a", "b")]
    check_job(WorkerJob("any", ["true"], files=[twice[0], twice[0]]))
    wrong = [
        (WorkerJob("any", []), "no command"),
        (WorkerJob("any", ["true"], files=[str(tmp_path / "none")]), "cannot be read"),
        (WorkerJob("any", ["true"], files=[str(tmp_path)]), "cannot be read"),
        (WorkerJob("any", ["true"], files=twice), "same base name"),
    ]
    for job, complaint in wrong:
        with pytest.raises(ProviderError, match=complaint):
            check_job(job)


def test_a_program_that_travels_is_found_in_the_scratch_directory() -> None:
    assert arguments(WorkerJob("any", ["python3", "worker"], files=["/srv/worker"])) == ["python3", "worker"]
    assert arguments(WorkerJob("any", ["worker", "worker"], files=["/srv/worker"])) == ["./worker", "worker"]


@given(st.binary(max_size=9000))
def test_a_tail_is_the_end_of_the_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "output"
    path.write_bytes(content)
    found = tail(str(path))
    assert len(found) <= 4096
    assert content.decode(errors="replace").strip().endswith(found)
    assert bool(found) == bool(content[-4096:].decode(errors="replace").strip())


def test_a_tail_begins_with_a_whole_line_and_needs_no_file(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_text("".join(f"line {number}\n" for number in range(2000)))
    lines = tail(str(path)).split("\n")
    assert lines[-1] == "line 1999" and all(line.startswith("line ") for line in lines)
    assert tail(str(tmp_path / "none")) == ""


@pytest.mark.parametrize("kind", [CondorProvider, LocalProvider, ParslProvider, GrantedProvider])
def test_pauses_are_by_a_clock_that_nobody_sets(kind: type) -> None:
    """By one that is set back an hour nothing would be asked for an hour, and leases that are not renewed run out."""
    assert inspect.signature(kind).parameters["clock"].default is time.monotonic
