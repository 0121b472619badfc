"""What HTCondor's events mean, and what is said where it is missing. The provider itself: tests/cluster."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxflow.factory import (
    CondorProvider,
    JobChange,
    ProviderError,
    WorkerJob,
    condor_jobs,
    condor_process,
    condor_provider,
)
from ctxflow.factory.condor_jobs import change_of, describe, describe_driver
from ctxflow.factory.condor_process import NoAnswer
from ctxflow.factory.condor_survey import driver_refusal
from waiting import FOREVER, eventually, gone, nothing_left

ADDRESS = "<10.77.0.12:9618?addrs=10.77.0.12-9618&alias=host2.testbed&noUDP&sock=startd_33_871e>"


@pytest.mark.parametrize(
    ("event", "state", "reason", "host"),
    [
        ({"EventTypeNumber": 1, "SlotName": "slot1_1@host2.testbed"}, "running", "", "host2.testbed"),
        ({"EventTypeNumber": 1, "SlotName": "slot1@pilot_7@node.site"}, "running", "", "node.site"),
        ({"EventTypeNumber": 1, "ExecuteHost": ADDRESS}, "running", "", "host2.testbed"),
        ({"EventTypeNumber": 1, "ExecuteHost": "<10.77.0.12:9618>"}, "running", "", "10.77.0.12"),
        ({"EventTypeNumber": 1, "ExecuteHost": "<[fd00::1]:9618?noUDP>"}, "running", "", "fd00::1"),
        ({"EventTypeNumber": 1}, "running", "", None),
        ({"EventTypeNumber": 4, "Reason": "Job vacated by schedd"}, "evicted", "Job vacated by schedd", None),
        ({"EventTypeNumber": 5, "TerminatedNormally": True, "ReturnValue": 3}, "ended", "it ended with status 3", None),
        (
            {"EventTypeNumber": 5, "TerminatedNormally": False, "TerminatedBySignal": 11},
            "ended",
            "it was killed by SIGSEGV",
            None,
        ),
        (
            {"EventTypeNumber": 5, "TerminatedNormally": False, "TerminatedBySignal": 40},
            "ended",
            "it was killed by signal 40",
            None,
        ),
        ({"EventTypeNumber": 7, "Message": "Error from slot1\n"}, "evicted", "Error from slot1", None),
        ({"EventTypeNumber": 9}, "ended", "it was removed", None),
        ({"EventTypeNumber": 9, "Reason": "via condor_rm"}, "ended", "via condor_rm", None),
        ({"EventTypeNumber": 12, "HoldReason": "disk full"}, "held", "disk full", None),
        ({"EventTypeNumber": 12}, "held", "it was put on hold", None),
        (
            {"EventTypeNumber": 12, "HoldReason": "Error from slot1_2@host2.testbed: No space left on device"},
            "held",
            "Error from slot1_2@host2.testbed: No space left on device",
            "host2.testbed",
        ),
        ({"EventTypeNumber": 13, "Reason": "via condor_release"}, "queued", "via condor_release", None),
        (
            {"EventTypeNumber": 22, "DisconnectReason": "Socket closed", "StartdName": "slot1@host2.testbed"},
            "evicted",
            "HTCondor lost its connection: Socket closed",
            None,
        ),
        ({"EventTypeNumber": 22}, "evicted", "HTCondor lost its connection", None),
        (
            {"EventTypeNumber": 23, "StartdName": "slot1@host2.testbed"},
            "running",
            "HTCondor found it again",
            "host2.testbed",
        ),
        ({"EventTypeNumber": 24, "Reason": "lease is over"}, "evicted", "lease is over", None),
    ],
)
def test_what_events_mean(event: dict[str, Any], state: Any, reason: str, host: str | None) -> None:
    resumed = event["EventTypeNumber"] == 23
    assert change_of({"Cluster": 12, "Proc": 3, **event}) == JobChange("12.3", state, reason, host, resumed=resumed)


@pytest.mark.parametrize("number", [0, 6, 10, 11, 28, 36, 40])
def test_other_events_are_no_changes(number: int) -> None:
    assert change_of({"EventTypeNumber": number, "Cluster": 12, "Proc": 3}) is None


@pytest.mark.parametrize(("code", "by_hand"), [(1, True), (3, False), (26, False), (None, False)])
def test_what_a_person_put_on_hold_is_told_from_what_the_pool_did(code, by_hand):
    event = {"EventTypeNumber": 12, "Cluster": 1, "Proc": 0, "HoldReason": "words"}
    assert change_of({**event, **({} if code is None else {"HoldReasonCode": code})}).by_hand is by_hand


@pytest.mark.parametrize(
    ("reason", "by_hand"),
    [
        ("via condor_rm (by user root)", True),
        ("owner must stop, ask ops (by user condor)", True),
        ("via condor_rm (by user ada)", False),
        ("via condor_rm (by user ada@site)", False),
        ("ctxflow gave the worker back (by user somebody-else)", False),
        ("The system macro SYSTEM_PERIODIC_REMOVE expression 'x' evaluated to TRUE", False),
        ("", False),
    ],
)
def test_what_somebody_else_removes_is_told_from_what_its_user_does(monkeypatch, reason, by_hand):
    monkeypatch.setattr(condor_jobs.getpass, "getuser", lambda: "ada")
    assert change_of({"EventTypeNumber": 9, "Cluster": 1, "Proc": 0, "Reason": reason}).by_hand is by_hand


JOB = WorkerJob("a10", ["true"])
PLAYED = str(Path(__file__).parent / "played")
FEW_SECONDS = 3


class Played:
    """What stands for HTCondor: what it was told, and what it does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        empty: dict[str, Any] = {"asked": [], "how": {}, "room": 1000, "submitted": [], "edited": [], "jobs": []}
        self._path.write_text(json.dumps({**empty, "time": 1_600_000_000}))

    def __getattr__(self, name: str) -> Any:
        return json.loads(self._path.read_text())[name]

    def set(self, **values: Any) -> None:
        self._path.write_text(json.dumps({**json.loads(self._path.read_text()), **values}))

    def does(self, **how: str) -> None:
        """What it does instead, once, by what it is asked: "hang", "crash"; "done, hang" if after that."""
        self.set(how=how)


@pytest.fixture
def schedd(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> Played:
    path = tmp_path_factory.mktemp("played") / "state.json"
    monkeypatch.setenv("PLAYED_HTCONDOR", str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLAYED, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(PLAYED)
    monkeypatch.setattr(condor_process, "_processes", weakref.WeakValueDictionary())
    return Played(path)


@pytest.fixture
def provider(tmp_path: Path, schedd: Played) -> Iterator[CondorProvider]:
    found = CondorProvider(patience=1.0)
    found.start(str(tmp_path))
    yield found
    found.stop()


@pytest.fixture
def short(provider: CondorProvider) -> Callable[[], None]:
    """Give every request few seconds from now on, in which a busy machine answers too."""

    def shortened() -> None:
        condor_process.condor_process().limit = FEW_SECONDS

    return shortened


def processes() -> list[int]:
    """The processes of this one that hold the bindings."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if b"condor_process" in words and parent == os.getpid():
            found.append(int(entry))
    return found


def test_without_the_bindings_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "htcondor2", None)  # So that importing it fails.
    with pytest.raises(ProviderError, match=r"pip install .*\[htcondor\]'?"):
        CondorProvider().start(str(tmp_path))
    CondorProvider().stop()


def test_bindings_that_cannot_be_loaded_are_missing(tmp_path: Path, schedd: Played, monkeypatch: Any) -> None:
    monkeypatch.setenv("PLAYED_HTCONDOR", "/missing")
    provider = CondorProvider()
    provider.start(str(tmp_path))
    with pytest.raises(ProviderError, match=r"pip install .*\[htcondor\]'?"):
        provider.submit(JOB, 1)


def test_this_process_never_loads_them_and_keeps_one_that_does(tmp_path: Path, schedd: Played) -> None:
    providers = [CondorProvider(), CondorProvider()]
    for number, each in enumerate(providers):
        (tmp_path / str(number)).mkdir()
        each.start(str(tmp_path / str(number)))
        each.submit(JOB, 1)
    assert "htcondor2" not in sys.modules or sys.modules["htcondor2"].__file__ != f"{PLAYED}/htcondor2.py"
    assert len(processes()) == 1, "for one schedd"
    providers[0].stop()
    assert [change.state for change in providers[1].changes()] == ["running"]
    providers[1].stop()
    gc.collect()
    nothing_left(processes)


def test_a_driver_with_many_open_files_has_them_as_well(tmp_path: Path, schedd: Played) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1100):
                files.enter_context(open(os.devnull))
            provider = CondorProvider(patience=1.0)
            provider.start(str(tmp_path))
            assert provider.submit(JOB, 1) == ["1.0"]
            provider.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_lease_is_counted_by_the_schedds_clock_and_renewed_whatever_ours_does(
    tmp_path: Path, schedd: Played, clock_steps: Any
) -> None:
    provider = CondorProvider(lease=0, patience=1.0)
    provider.start(str(tmp_path))
    provider.submit(JOB, 1)
    provider._states["1.0"] = "queued"
    provider.changes()
    provider._states["1.0"] = "queued"
    with clock_steps(-3600):
        provider.changes()
    assert schedd.edited == [["CtxflowSeen", 1_600_000_000]] * 2
    assert provider._clock is time.monotonic, "which no step changes"


def test_a_queue_that_takes_fewer_gets_fewer_and_says_why_it_takes_none(
    provider: CondorProvider, schedd: Played
) -> None:
    schedd.set(room=2)
    assert provider.submit(JOB, 6) == ["1.0", "1.1"]
    with pytest.raises(ProviderError, match="no more jobs of this user now, by its limit MAX_JOBS_PER_OWNER: the"):
        provider.submit(JOB, 4)
    assert len(schedd.submitted) == 1


def test_variables_are_in_a_file_of_the_users_alone_until_the_provider_stops(
    tmp_path: Path, provider: CondorProvider, schedd: Played
) -> None:
    with_token = WorkerJob("a10", ["true"], environment={"HF_TOKEN": "hf_abc"})
    provider.submit(with_token, 2)
    provider.submit(with_token, 1)
    provider.submit(JOB, 1)
    first, second, third = schedd.submitted
    path = Path(first["transfer_input_files"])
    assert path.parent == tmp_path and path.read_text() == "export HF_TOKEN=hf_abc\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and first["encrypt_input_files"] == str(path)
    assert second["transfer_input_files"] == str(path), "which HTCondor may read at any time"
    assert "hf_abc" not in str(schedd.submitted) and "transfer_input_files" not in third
    provider.stop()
    assert os.listdir(tmp_path) == ["htcondor.log"]


def test_a_schedd_that_hangs_is_given_up_in_time_and_asked_again(
    provider: CondorProvider, schedd: Played, short: Any
) -> None:
    [job] = provider.submit(JOB, 1)
    before = processes()
    short()
    for request in ("act", "query"):
        schedd.does(**{request: "hang"})
        with pytest.raises(ProviderError, match=rf"does not answer: .* \(no answer within {FEW_SECONDS} s\)"):
            provider.remove([job]) if request == "act" else provider.find()
        nothing_left(processes, what="whatever hangs is ended")
    provider.find()
    assert len(processes()) == 1 and processes() != before


@pytest.mark.parametrize("how", ["hang", "crash", "done, hang", "done, crash"])
def test_a_submission_that_is_cut_off_is_not_made_twice(
    provider: CondorProvider, schedd: Played, short: Any, how: str
) -> None:
    provider.find()
    short()
    schedd.does(submit=how)
    words = "does not answer" if "hang" in how else "crashed by SIGSEGV; .*pip install --upgrade htcondor"
    with pytest.raises(ProviderError, match=rf"HTCondor did not take 2 workers of tier a10: .*{words}"):
        provider.submit(JOB, 2)
    assert provider.changes() == [], "nobody knows these jobs yet"
    schedd.does(query="hang")
    with pytest.raises(ProviderError, match="does not answer"):
        provider.submit(JOB, 3)
    assert schedd.asked.count("submit") == 1, "not before the queue has told"
    assert len(provider.submit(JOB, 3)) == (2 if "done" in how else 3)
    assert len(schedd.jobs) == (2 if "done" in how else 3)
    assert [change.state for change in provider.changes()] == ["running"] * len(schedd.jobs), "none is lost, or twice"
    provider.submit(JOB, 1)
    assert len(schedd.jobs) == (3 if "done" in how else 4), "once it is settled, each asks anew"


def test_what_was_cut_off_and_will_not_do_any_more_is_removed(
    provider: CondorProvider, schedd: Played, short: Any
) -> None:
    provider.find()
    short()
    schedd.does(submit="done, hang")
    with pytest.raises(ProviderError, match="does not answer"):
        provider.submit(JOB, 2)
    elsewhere = WorkerJob("a10", ["true"], excluded=("h1",))
    assert provider.submit(elsewhere, 2) == ["2.0", "2.1"]
    assert [ad["ClusterId"] for ad in schedd.jobs] == [2, 2]


def test_events_are_told_once_whichever_process_reads_them(provider: CondorProvider, schedd: Played) -> None:
    provider.submit(JOB, 2)
    assert len(provider.changes()) == 2
    for each in processes():
        os.kill(each, signal.SIGKILL)
    with pytest.raises(ProviderError, match=r"HTCondor's job log cannot be read: .*crashed by SIGKILL"):
        provider.changes()
    provider.submit(JOB, 1)
    assert [change.job for change in provider.changes()] == ["2.0"]


def test_nothing_is_left_of_a_driver_that_is_killed(tmp_path: Path, schedd: Played) -> None:
    if (child := os.fork()) == 0:
        try:
            provider = CondorProvider()
            provider.start(str(tmp_path))
            provider.find()
            (tmp_path / "process").write_text(str(processes()[0]))
            time.sleep(FOREVER)
        finally:
            os._exit(1)
    place = tmp_path / "process"
    pid = eventually(lambda: place.exists() and place.read_text())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    gone(int(pid))


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

        monkeypatch.setattr(condor_provider, "_bindings", lambda: SimpleNamespace(ask=ask))
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
    assert condor_provider.jobs_there(["1-a", "2-b"]) == {"1-a": {"7.0": 2, "8.1": 3}, "2-b": {}}
    assert len(heard) == 1
    assert condor_provider.jobs_there([]) == {} and len(heard) == 1


def test_what_is_being_removed_is_left_to_it(asked: Any) -> None:
    heard = asked([])
    condor_provider.end_jobs({"7.0": 2, "8.1": 3})
    condor_provider.end_jobs({"8.1": 3})
    assert [(words[0], words[2]) for words in heard] == [("remove", ["7.0"])]


def test_a_driver_cannot_be_submitted_without_the_bindings(monkeypatch: Any) -> None:
    def missing() -> None:
        raise ProviderError("HTCondor's Python bindings are missing")

    monkeypatch.setattr(condor_provider, "_bindings", missing)
    with pytest.raises(ProviderError, match="bindings"):
        condor_provider.submit_driver(described())


def test_a_driver_of_which_nobody_knows_whether_it_is_queued_can_be_found(monkeypatch: Any) -> None:
    def cut_off(*_: Any) -> None:
        raise NoAnswer("no answer within 30 s")

    monkeypatch.setattr(condor_provider, "_bindings", lambda: SimpleNamespace(ask=cut_off))
    with pytest.raises(ProviderError, match=f"does not answer: .* condor_rm -constraint 'CtxflowDriver == \"{TAG}\"'"):
        condor_provider.submit_driver(described())
