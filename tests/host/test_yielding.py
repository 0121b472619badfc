"""Calls whose function yields its results one by one: what is sent along, what is kept, who is to blame."""

import os
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import BatchContractError
from ctxflow.host.call_results import Yielding
from ctxflow.testing.worker_calls import slower_items


class Sent:
    """A call, what it sent along, and when the worker gets its notice."""

    def __init__(self, every=0.0, notice_at=None):
        self.parts = []
        self.closed = False
        self._asked = 0
        self._notice_at = notice_at
        self.call = Yielding(self._send, self._leaving, lambda: None, every)

    def _send(self, head, body):
        self.parts.append((head["first"], pickle.loads(body)))

    def _leaving(self):
        """It is asked once before each item."""
        self._asked += 1
        return self._notice_at is not None and self._asked > self._notice_at

    def run(self, results, expected):
        head, body = self.call.run(results, expected, iter_of)
        if "first" not in head:
            assert not self.parts
            head = {"first": 0, "count": expected}
        rest = pickle.loads(body)
        assert len(rest) == head["count"]
        self.parts.append((head["first"], rest))
        return self.answers()

    def answers(self):
        """All results in their order; each was sent once."""
        found = []
        for first, results in self.parts:
            assert first == len(found)
            found += results
        return found

    def watched(self, items):
        try:
            yield from items
        finally:
            self.closed = True


def test_a_short_call_is_answered_like_any_other():
    sent = Sent(every=60.0)
    head, body = sent.call.run(iter_of([1, 2]), 2, iter_of)
    assert (head, pickle.loads(body), sent.parts) == ({}, [1, 2], [])


def iter_of(items):
    yield from items


def test_each_result_is_sent_before_the_next_item_begins():
    sent, before = Sent(), []

    def app():
        for n in range(4):
            before.append(sent.answers())
            yield n

    assert sent.run(app(), 4) == [0, 1, 2, 3]
    assert before == [[], [0], [0, 1], [0, 1, 2]]


@given(count=st.integers(1, 12), at=st.integers(0, 12), every=st.sampled_from([0.0, 60.0]))
def test_a_notice_ends_it_after_the_item_in_flight(count, at, every):
    sent = Sent(every, notice_at=at)
    assert sent.run(sent.watched(range(count)), count) == list(range(min(at, count)))
    assert sent.closed or not at, "the function cleans up, if it had begun"


def test_what_the_function_does_when_it_is_ended_is_of_no_account():
    def app():
        try:
            yield 1
            yield 2
        finally:
            raise SystemExit

    assert Sent(notice_at=1).run(app(), 2) == [1]


@pytest.mark.parametrize("every", [0.0, 60.0])
def test_what_came_before_an_error_is_kept_and_the_item_is_named(every):
    sent = Sent(every)
    with pytest.raises(TypeError, match="the result of the app"):
        sent.run(iter_of([1, threading.Lock(), 3]), 3)
    assert (sent.answers(), sent.call.at) == ([1], 1)


@pytest.mark.parametrize("every", [0.0, 60.0])
@pytest.mark.parametrize("yielded", [[1, 2], [], [1, 2, 3, 4]], ids=str)
def test_results_whose_items_are_unknown_are_not_sent(yielded, every):
    sent = Sent(every)
    words = "too many results" if len(yielded) == 4 else f"{len(yielded)} results"
    with pytest.raises(BatchContractError, match=f"yielded {words} for a batch of 3 items: yield one") as caught:
        sent.run(iter_of(yielded), 3)
    already = sent.answers()
    assert already == ([] if every else yielded[: min(len(yielded), 2)])
    assert ("may be those of other items" in str(caught.value)) == bool(already)


@given(count=st.integers(1, 9), data=st.data(), every=st.sampled_from([0.0, 60.0]))
def test_whatever_item_raises_or_cannot_be_pickled(count, data, every):
    bad = data.draw(st.integers(0, count))
    odd = data.draw(st.integers(0, count - 1))
    sent = Sent(every)

    def app():
        for n in range(count):
            if n == bad:
                raise KeyError(n)
            yield threading.Lock() if n == odd else n
        if bad == count:
            raise KeyError(bad)

    with pytest.raises((KeyError, TypeError)):
        sent.run(app(), count)
    assert sent.call.at == min(bad, odd, count - 1)
    assert sent.answers() == list(range(sent.call.at))


def test_a_process_that_the_function_forks_ends_where_it_comes_back():
    seen = []
    call = Yielding(lambda head, body: None, lambda: False, lambda: seen.append(os.getpid()), 60.0)
    call.run(iter_of([1, 2]), 2, iter_of)
    assert seen == [os.getpid()] * 2


def test_items_are_slowed_one_by_one():
    import time

    def app():
        for _ in range(2):
            time.sleep(0.02)
            yield time.monotonic()

    first, second = Sent().run(slower_items(app(), 3.0), 2)
    assert second - first >= 0.06
