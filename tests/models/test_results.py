from __future__ import annotations

import numpy as np
import pytest

from ctxflow.models.results import LARGEST, Sampling, Uniforms, per_row


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range: give 1 or more"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 is a float: give a whole number"),
        ({"max_new_tokens": True}, "is a bool"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"temperature": "hot"}, "temperature='hot' is a str: give a number"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range"),
        ({"top_p": 1.5}, "top_p=1.5 is out of range"),
        ({"top_k": -1}, "top_k=-1 is out of range"),
        ({"seed": "one"}, "seed='one' is a str: give a whole number or None"),
        ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648 is out of range"),
        ({"temperature": 10**400}, "temperature=1000.* is out of range"),
        ({"top_k": 2**63}, "top_k=9223372036854775808 is out of range"),
        ({"seed": 2**63}, "seed=9223372036854775808 is out of range: give a whole number of 64 bits, or None"),
        ({"stop": ("",)}, "empty one: give strings"),
    ],
)
def test_a_parameter_out_of_range_is_named(parameters, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sampling(**parameters)


def test_parameters_are_for_all_rows_or_one_for_each():
    rows = per_row(2, max_new_tokens=[3, 4], temperature=0.5, seed=np.array([7, 8]), stop=[["a"], ["b", "c"]])
    assert rows == [
        Sampling(max_new_tokens=3, temperature=0.5, seed=7, stop=("a",)),
        Sampling(max_new_tokens=4, temperature=0.5, seed=8, stop=("b", "c")),
    ]
    assert [row.stop for row in per_row(3, stop=["a", "b"])] == [("a", "b")] * 3
    assert per_row(0, max_new_tokens=[]) == []


def test_lists_of_another_length_and_unknown_parameters_are_errors():
    with pytest.raises(ValueError, match="temperature has 3 values for 2 prompts: give one for each, or one for all"):
        per_row(2, temperature=[0.1, 0.2, 0.3])
    with pytest.raises(TypeError, match="max_tokens is no generation parameter: there are max_new_tokens, "):
        per_row(0, max_tokens=3)


def test_draws_depend_on_seed_and_prompt_alone():
    def draws(prompt, count=50, **choices):
        found = Uniforms(Sampling(**choices), prompt)
        return [found[number] for number in range(count)]

    once = draws([1, 2], seed=3)
    assert once == draws([1, 2], seed=3)
    for other in (draws([1, 2], seed=4), draws([12], seed=3), draws([2, 1], seed=3)):
        assert once != other
    assert draws([1]) != draws([1])
    assert all(0 <= draw < 1 for draw in once)
    assert draws([1, 2], 1000, seed=3)[:50] == once, "however many are drawn at a time"
    assert Uniforms(Sampling(seed=3), [1, 2])[999] == draws([1, 2], 1000, seed=3)[999]
    assert Uniforms(Sampling(seed=3, max_new_tokens=LARGEST), [1, 2])[0] == once[0], "a limit costs nothing"
