"""A batch app gives one result for each item: what else it may return is told at once, and never passes by chance."""

import array
import itertools
from typing import NamedTuple

import pytest
from executor_helpers import started

from ctxflow import batch_app
from ctxflow.errors import BatchContractError
from waiting import finished

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One worker, that all items of a short queue go to together."""
    with started(tmp_path_factory.mktemp("alone"), workers=1) as executor:
        yield executor


class Pair(NamedTuple):
    left: int
    right: int


class Frame:
    """Iterates over its columns, as a data frame does."""

    columns = shape = None

    def __init__(self, numbers):
        self.names = [str(n) for n in numbers]

    def __iter__(self):
        return iter(self.names)


class Scalar:
    """An array of no dimension has an __iter__, which raises."""

    shape = ()

    def __iter__(self):
        raise TypeError("iteration over a 0-d array")


# What an app returns for a batch of 2 items, each of them of length 2 where it has one, and how the message calls it.
WRONG = {
    "a string": (lambda numbers: "xy", "returned a str ('xy')"),
    "bytes": (lambda numbers: b"xy", "returned a bytes (b'xy')"),
    "a bytearray": (lambda numbers: bytearray(2), "returned a bytearray"),
    "a dict": (dict.fromkeys, "returned a dict"),
    "a set": (set, "returned a set"),
    "a dict's keys": (lambda numbers: dict.fromkeys(numbers).keys(), "returned a dict_keys"),
    "a named tuple": (lambda numbers: Pair(*numbers), "returned a Pair"),
    "a data frame": (Frame, "returned a Frame"),
    "an array of no dimension": (lambda numbers: Scalar(), "returned a Scalar"),
    "nothing": (lambda numbers: None, "returned nothing"),
    "a number": (sum, "returned an int (3)"),
    "one result for all": (lambda numbers: [sum(numbers)], "returned 1 result"),
    "too many": (lambda numbers: [*numbers, 1, 2], "returned 4 results"),
    "none": (lambda numbers: [], "returned 0 results"),
    "without an end": (lambda numbers: itertools.repeat(1), "returned 3 or more results"),
    "too few, yielded": (lambda numbers: (n for n in numbers[:1]), "yielded 1 result"),
    "too many, yielded": (lambda numbers: (n for n in [*numbers, 3]), "yielded too many results"),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_a_batch_without_one_result_for_each_item_is_told_at_once(alone, wrong, said):
    @batch_app(batch_size=2, retries=3)
    def app(numbers):
        return wrong(numbers)

    before = alone.status()
    answers = list(app.map([1, 2], on_error="return"))
    assert {type(answer) for answer in answers} == {BatchContractError}
    for answer in answers:
        assert str(answer).startswith(f"app {said} for a batch of 2 items: ")
        assert "one result for each item, in their order" in str(answer).replace("yield one", "one result")
    after = alone.status()
    assert after.batches - before.batches == 1, "it is not halved, where it would pass, nor tried again"
    assert after.items_dead - before.items_dead == 2


@pytest.mark.parametrize("wrong", ["x", b"x", {"x": 1}, {1}, bytearray(1)], ids=repr)
def test_what_has_one_element_by_chance_is_not_the_result_of_one_item(wrong):
    @batch_app
    def app(numbers):
        return wrong

    with pytest.raises(BatchContractError, match=f"app returned a {type(wrong).__name__}.* for a batch of 1 item:"):
        finished(app(1)).result()


class Several:
    """Not a list, but several results all the same."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return (n + 1 for n in self.numbers)


@pytest.mark.parametrize(
    "several",
    [
        lambda numbers: (n + 1 for n in numbers),
        lambda numbers: map((1).__add__, numbers),
        lambda numbers: tuple(n + 1 for n in numbers),
        lambda numbers: {n: n + 1 for n in numbers}.values(),
        lambda numbers: array.array("l", [n + 1 for n in numbers]),
        Several,
    ],
    ids=["generator", "map", "tuple", "a dict's values", "array", "iterable"],
)
def test_whatever_else_gives_one_result_for_each_item_is_fine(several):
    @batch_app
    def app(numbers):
        return several(numbers)

    assert list(app.map(range(10))) == list(range(1, 11))


def test_an_app_that_forgets_one_item_in_a_hundred_fails_that_batch():
    @batch_app(batch_size=50)
    def app(numbers):
        return [n for n in numbers if n != 66]

    answers = list(app.map(range(100), on_error="return"))
    bad = [n for n, answer in enumerate(answers) if answer != n]
    assert 66 in bad and bad == list(range(bad[0], bad[-1] + 1)), "whose results they are, nobody can tell"
    assert "results for a batch of" in str(answers[66])
