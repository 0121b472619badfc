from __future__ import annotations

import numpy as np
import pytest

from ctxflow.models.results import Sampling, per_row, uniforms


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
    row = Sampling(seed=3, max_new_tokens=50)
    assert (uniforms(row, [1, 2]) == uniforms(row, [1, 2])).all()
    for other in (
        uniforms(Sampling(seed=4, max_new_tokens=50), [1, 2]),
        uniforms(row, [12]),
        uniforms(row, [2, 1]),
    ):
        assert (uniforms(row, [1, 2]) != other).any()
    assert (uniforms(Sampling(max_new_tokens=50), [1]) != uniforms(Sampling(max_new_tokens=50), [1])).any()
    draws = uniforms(row, [1, 2])
    assert draws.shape == (50,)
    assert ((draws >= 0) & (draws < 1)).all()
    # A longer row begins with the same draws, so that a limit changes nothing before it.
    assert (uniforms(Sampling(seed=3, max_new_tokens=80), [1, 2])[:50] == draws).all()
