"""How a driver is said to HTCondor, and what becomes of its jobs: the schedd itself is in tests/cluster."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ctxflow.factory import ProviderError, WorkerJob, condor_driver
from ctxflow.factory.condor_driver import describe_driver
from ctxflow.factory.condor_jobs import describe
from ctxflow.factory.condor_process import NoAnswer
from ctxflow.factory.condor_survey import driver_refusal

TAG = "3-0a1b"


def described() -> dict[str, str]:
    return describe_driver("/jobs/3/driver.sh", "/home/ada/$work", "/jobs/3/events.log", "/jobs/3/shell.log", TAG)


@pytest.mark.parametrize(
    ("ended", "leaves"),
    [({"ExitCode": code}, code in (0, 1, 2, 3)) for code in (0, 1, 2, 3, 130, 137, 44)]
    + [({"ExitBySignal": True, "ExitSignal": 9}, False), ({"ExitBySignal": True, "ExitSignal": 15}, False)],
)
def test_only_a_job_that_is_over_leaves_the_queue(ended: dict[str, Any], leaves: bool) -> None:
    classad2 = pytest.importorskip("classad2")
    ad = classad2.ClassAd({"ExitBySignal": False, **ended})
    ad["OnExitRemove"] = classad2.ExprTree(described()["on_exit_remove"])
    assert ad.eval("OnExitRemove") is leaves


@pytest.mark.parametrize(("starts", "by_signal", "held"), [(1, True, False), (10, True, True), (50, False, False)])
def test_a_driver_that_is_killed_again_and_again_is_held(starts: int, by_signal: bool, held: bool) -> None:
    classad2 = pytest.importorskip("classad2")
    ad = classad2.ClassAd({"ExitBySignal": by_signal, "ExitSignal": 9, "NumJobStarts": starts})
    ad["OnExitHold"] = classad2.ExprTree(described()["on_exit_hold"])
    ad["Reason"] = classad2.ExprTree(described()["on_exit_hold_reason"])
    assert ad.eval("OnExitHold") is held
    assert "signal 9 at its start number" in ad.eval("Reason") and "ctxflow logs 3" in ad.eval("Reason")


def test_its_workers_are_removed_with_it() -> None:
    classad2 = pytest.importorskip("classad2")
    worker = describe(WorkerJob("a10", ["worker"]), "/run/7", "7", now=0, lease=600, batch=TAG)
    constraint = classad2.ExprTree(described()["+OtherJobRemoveRequirements"]).eval()
    for tag, removed in ((worker["+CtxflowBatch"].strip('"'), True), ("4-0a1b", False)):
        ad = classad2.ClassAd({"CtxflowBatch": tag})
        ad["Wanted"] = classad2.ExprTree(constraint)
        assert ad.eval("Wanted") is removed
    assert "+CtxflowBatch" not in describe(WorkerJob("a10", ["worker"]), "/run/7", "7", now=0, lease=600)


def test_paths_are_no_macros() -> None:
    assert described()["initialdir"] == "/home/ada/$(DOLLAR)work"


def test_without_a_schedd_a_sentence_says_where_there_is_one() -> None:
    def nowhere(kind: object) -> None:
        raise OSError("no collector")

    gone = SimpleNamespace(
        HTCondorException=RuntimeError,
        DaemonType=SimpleNamespace(Schedd=3),
        Collector=lambda: SimpleNamespace(locate=nowhere),
    )
    assert "no schedd" in str(driver_refusal(gone))


@pytest.fixture
def asked(monkeypatch: Any) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Have a schedd answer; gives what was asked of it."""

    def prepare(ads: list[dict[str, Any]]) -> list[Any]:
        heard: list[Any] = []

        def ask(*words: Any) -> list[dict[str, Any]]:
            heard.append(words)
            return ads

        monkeypatch.setattr(condor_driver, "_bindings", lambda: SimpleNamespace(ask=ask))
        return heard

    return prepare


def test_one_question_finds_drivers_and_their_workers(asked: Any) -> None:
    heard = asked(
        [
            {"ClusterId": 7, "ProcId": 0, "JobStatus": 2, "CtxflowDriver": "1-a"},
            {"ClusterId": 8, "ProcId": 1, "JobStatus": 3, "CtxflowBatch": "1-a"},
            {"ClusterId": 9, "ProcId": 0, "JobStatus": 4, "CtxflowDriver": "2-b"},
        ]
    )
    assert condor_driver.jobs_there(["1-a", "2-b"]) == {"1-a": {"7.0": 2, "8.1": 3}, "2-b": {}}
    assert len(heard) == 1
    assert condor_driver.jobs_there([]) == {} and len(heard) == 1


def test_what_is_being_removed_is_left_to_it(asked: Any) -> None:
    heard = asked([])
    condor_driver.end_jobs({"7.0": 2, "8.1": 3})
    condor_driver.end_jobs({"8.1": 3})
    assert [(words[0], words[2]) for words in heard] == [("remove", ["7.0"])]


def test_a_driver_cannot_be_submitted_without_the_bindings(monkeypatch: Any) -> None:
    def missing() -> None:
        raise ProviderError("HTCondor's Python bindings are missing")

    monkeypatch.setattr(condor_driver, "_bindings", missing)
    with pytest.raises(ProviderError, match="bindings"):
        condor_driver.submit_driver(described())


def test_a_driver_of_which_nobody_knows_whether_it_is_queued_can_be_found(monkeypatch: Any) -> None:
    def cut_off(*_: Any) -> None:
        raise NoAnswer("no answer within 30 s")

    monkeypatch.setattr(condor_driver, "_bindings", lambda: SimpleNamespace(ask=cut_off))
    with pytest.raises(ProviderError, match=f"does not answer: .* condor_rm -constraint 'CtxflowDriver == \"{TAG}\"'"):
        condor_driver.submit_driver(described())
