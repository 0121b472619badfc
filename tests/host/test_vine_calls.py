"""Which TaskVine call is answered with what, and in which order the driver reads it."""

import pytest

from ctxflow.host.library_messages import CallFinished, RunCall
from ctxflow.host.messages import FROM_WORKER, LibraryDied, Listen
from ctxflow.host.vine_calls import OpenCall, OpenCalls
from ctxflow.host.wire import Trouble, unframe

TROUBLE = Trouble("crash", "LibraryDied", "killed")


class Played:
    """Open calls of a host whose library processes are gone, and the reports in the order in which they left."""

    def __init__(self):
        self.open = OpenCalls(self._carry_out, self._answer)
        self.reports = []

    def begin(self, *instructions):
        self.open.begin(OpenCall(None, list(instructions), b""))

    def _carry_out(self, call, message):
        if isinstance(message, Listen):
            self.open.listen(call)
            return False
        if message.overlaps:  # As the host says for a process that is gone.
            self.open.report(LibraryDied(message.context, None, [message.call], TROUBLE))
            return True
        self.open.wait_for_call(call, message.call, message.context)
        return False

    def _answer(self, call):
        for head, body in unframe(b"".join(call.reports)):
            report = FROM_WORKER.open(head, body)
            self.reports += report.calls if isinstance(report, LibraryDied) else [f"{report.call} answered"]


@pytest.mark.parametrize("listens", [False, True])
def test_an_answer_comes_before_the_death_that_came_after_it(listens):
    played = Played()
    if listens:
        played.begin(Listen())
    played.begin(RunCall(3, "c"))
    played.open.report(CallFinished(7, 0.1))
    played.open.report(LibraryDied("c", "k", [8, 3], TROUBLE))
    played.begin(RunCall(5, "c", style="item"))
    played.begin(Listen())
    assert played.reports.index("7 answered") < min(map(played.reports.index, (3, 5, 8)))
    assert sorted(map(str, played.reports)) == ["3", "5", "7 answered", "8"]


def test_an_item_for_a_process_that_is_gone_waits_behind_answers():
    played = Played()
    played.open.report(CallFinished(7, 0.1))
    played.begin(RunCall(5, "c", style="item"))
    played.begin(Listen())
    assert played.reports == ["7 answered", 5]
