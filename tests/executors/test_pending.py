"""How an item begins: it is read off its texts, and what has none, or no end, costs nothing."""

import pytest

from ctxflow.executors.pending import beginning

LONG = "x" * 300


class Tokens(list):
    """Counts how many of its elements are looked at."""

    looked_at = 0

    def __iter__(self):
        for each in super().__iter__():
            self.looked_at += 1
            yield each


@pytest.mark.parametrize("within", [lambda tokens: tokens, lambda tokens: {"prompt": tokens}, lambda tokens: [tokens]])
def test_a_prompt_of_numbers_is_not_walked_through(within):
    tokens = Tokens(range(8000))
    assert beginning(("/v1/completions", within(tokens))) == ()
    assert not tokens.looked_at


def test_texts_beside_numbers_and_within_each_other_are_found():
    (number,) = beginning((LONG,))
    for values in [(7, LONG), ({"messages": [{"role": 1, "content": [{"text": LONG}]}]},), ([[LONG]],), (3, [4], LONG)]:
        assert beginning(values) == (number,)


def test_an_item_with_very_many_parts_is_looked_at_in_part():
    parts = Tokens([""] * 100_000)
    assert beginning((parts,)) == ()
    assert 0 < parts.looked_at <= 1000


def test_an_item_within_itself_has_an_end():
    endless: list = ["x"]
    endless.append(endless)
    assert beginning((endless,)) == ()
    mapping: dict = {}
    mapping["content"] = [mapping, mapping]
    assert beginning((mapping,)) == ()
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert beginning((deep, LONG)) == beginning((LONG,))
