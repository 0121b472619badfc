"""What HTCondor's events mean, and what is said where it is missing. The provider itself: tests/cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ctxflow.factory import CondorProvider, JobChange, ProviderError
from ctxflow.factory.condor import bindings
from ctxflow.factory.condor_events import change_of

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
    assert change_of({"Cluster": 12, "Proc": 3, **event}) == JobChange("12.3", state, reason, host)


@pytest.mark.parametrize("number", [0, 6, 10, 11, 28, 36, 40])
def test_other_events_are_no_changes(number: int) -> None:
    assert change_of({"EventTypeNumber": number, "Cluster": 12, "Proc": 3}) is None


def test_without_the_bindings_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "htcondor2", None)  # So that importing it fails.
    bindings.cache_clear()
    with pytest.raises(ProviderError, match=r"pip install .*\[htcondor\]'?"):
        CondorProvider().start(str(tmp_path))
    CondorProvider().stop()
