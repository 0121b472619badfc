"""What a host's reports are as events."""

import pytest

from ctxflow.executors.protocol import events_of
from ctxflow.host.messages import LibraryDied
from ctxflow.host.wire import Trouble
from ctxflow.scheduler import events as ev

TROUBLE = Trouble("timeout", "Timeout", "it went on")


def failed(calls, blamed):
    return events_of(1.0, "w", LibraryDied("c", "k", calls, TROUBLE, blamed))


def test_all_that_a_library_process_was_ended_for_are_blamed_in_the_first_event():
    first, *rest = failed([4, 5, 6, 7], [5, 6])
    assert (first.attempt, list(first.beside), first.failure.kind, first.lost_context) == (5, [6], "timeout", True)
    assert [(event.attempt, event.failure.kind) for event in rest] == [
        (4, "cancelled"), (6, "timeout"), (7, "cancelled")
    ]  # fmt: skip


def test_who_is_to_blame_is_told_also_in_the_answers_of_others():
    first, second = failed([3], [5])
    assert (first.attempt, first.failure.kind) == (5, "timeout")
    assert (second.attempt, second.failure.kind, second.lost_context) == (3, "cancelled", True)


@pytest.mark.parametrize("calls", [[], [3, 4]])
def test_where_nobody_is_to_blame_each_is_told_the_same(calls):
    events = failed(calls, ())
    if not calls:
        assert events == [ev.ContextUnloaded(1.0, "w", "c")]
    assert [event.attempt for event in events if isinstance(event, ev.BatchFailed)] == calls
    assert {event.failure.kind for event in events if isinstance(event, ev.BatchFailed)} <= {"timeout"}
