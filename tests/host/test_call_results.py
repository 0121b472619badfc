"""Calls that yield their results one by one, and steps of sessions: what is kept where something goes wrong."""

import os
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import BatchContractError
from ctxflow.host.call_results import States, StepEntry, Yielding
from ctxflow.host.call_surroundings import digest_of, state_path
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


def count(states, prompts):
    return [((state or 0) + 1, (state or 0) + 1) for state in states]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "sessions")


def states(leaving=False):
    return States(lambda: leaving, lambda: None)


def step(here, folder, *entries, function=count):
    outcomes, results = here.step(function, [], entries, folder)
    return outcomes, [
        tuple(None if each is None else pickle.loads(each) for each in pair) for pair in pickle.loads(results)
    ]


def test_a_state_for_which_there_is_no_room_is_kept_beside_the_worker(tmp_path):
    (tmp_path / "file").write_text("no folder")
    here = states()
    outcomes, results = step(here, str(tmp_path / "file" / "sessions"), StepEntry(1, "anew", 0, True, "freeze"))
    assert sorted(outcomes[0]) == ["kept", "made"] and results == [(1, 1)]


def test_where_the_worker_has_notice_what_a_step_changed_is_kept(folder):
    outcomes, results = step(states(leaving=True), folder, StepEntry(1, "anew", 0, True, ""))
    assert sorted(outcomes[0]) == ["kept", "made"] and results == [(1, 1)]


def test_a_frozen_state_stays_in_the_cache_until_the_step_it_was_thawed_for_has_ended(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"))
    with open(state_path(folder, 1, 1), "rb") as file:
        digest = digest_of(file.read())
    thawed = StepEntry(1, "frozen", 1, True, "", (), b"", digest)

    def bad(states, prompts):
        raise ValueError

    with pytest.raises(ValueError):
        here.step(bad, [], [thawed], folder)
    assert step(here, folder, thawed)[1] == [(2, None)]
    assert os.listdir(folder) == []


def test_a_frozen_state_is_brought_out_unopened(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"))
    with open(state_path(folder, 1, 1), "wb") as file:
        file.write(b"no pickle")
    outcomes, results = here.step(
        count, [], [StepEntry(1, "frozen", 1, False, "leave", (), b"", digest_of(b""))], folder
    )
    assert list(outcomes[0]) == ["lost"], "it is not what was frozen"
    with open(state_path(folder, 1, 1), "wb") as file:
        file.write(b"no pickle")
    out = StepEntry(1, "frozen", 1, False, "leave", (), b"", digest_of(b"no pickle"))
    outcomes, results = here.step(count, [], [out], folder)
    assert outcomes == [{"kept": 9}] and pickle.loads(results) == [(None, b"no pickle")]
    assert os.listdir(folder) == []


def test_dropping_takes_a_session_off_the_cache_and_no_other(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"), StepEntry(11, "anew", 0, True, "freeze"))
    step(here, folder, StepEntry(1, "", 0, False, "drop"))
    assert os.listdir(folder) == ["11-1.state"]


def test_a_prompt_that_cannot_be_opened_harms_its_session_alone(folder):
    outcomes, results = step(
        states(), folder, StepEntry(1, "anew", 0, True, "", (b"no pickle",)), StepEntry(2, "anew", 0, True, "")
    )
    assert "a prompt cannot be opened" in outcomes[0]["failure"]["message"] and results[1] == (1, None)


@pytest.mark.parametrize("made", [None, [1], [(1, 2), (1, 2)], "ab"])
def test_what_are_no_pairs_is_told(folder, made):
    with pytest.raises(TypeError, match="one pair of chunk and state for each"):
        states().step(lambda states, prompts: made, [], [StepEntry(1, "anew", 0, True, "")], folder)
