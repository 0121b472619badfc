"""What a call, and an item of a stream, cost the driver of a local run: calls of functions, not time."""

import pytest
from executor_helpers import started

from counted_calls import counted_calls
from ctxflow import batch_app, context

# Only a commit that says in its message why a call or an item has to cost more may raise these.
CALL = 507
ITEM = 15
LOGGED = 100  # Calls after which the log of events writes the lines of theirs.


@context
def offset(value):
    return value


@batch_app(offset(100))
def add(base, numbers):
    return [base + n for n in numbers]


@pytest.fixture
def calls(tmp_path):
    """Counted in a running executor of one worker."""
    with counted_calls() as calls, started(tmp_path, workers=1):
        assert add(1).result() == 101
        yield calls


def test_a_call_costs_no_more_than_its_budget(calls):
    def one_by_one():
        for number in range(LOGGED):
            assert add(number).result() == number + 100

    assert calls.least(12, LOGGED, one_by_one) <= CALL


def test_an_item_of_a_stream_costs_no_more_than_its_budget(calls):
    assert calls.least(3, 10_000, lambda: list(add.map(range(10_000)))) <= ITEM
