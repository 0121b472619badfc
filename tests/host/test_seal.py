"""Seals: what was altered, belongs to another call or worker, or has another key is not opened."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.host.vine_protocol import SEAL_BYTES, Once, key_of, open_answer, open_call, seal_answer, seal_call

KEY = key_of(b"password")


@given(st.text(max_size=20), st.integers(0, 2**64 - 1), st.binary(max_size=100))
def test_what_is_sealed_opens(worker, number, data):
    call = seal_call(KEY, worker, number, data)
    assert open_call(KEY, worker, call) == (number, data)
    assert open_answer(KEY, call, seal_answer(KEY, call, data)) == data


@given(st.binary(max_size=60), st.data())
def test_one_bit_is_noticed(data, draw):
    call = seal_call(KEY, "w", 1, data)
    answer = seal_answer(KEY, call, data)
    for sealed, opened in ((call, lambda c: open_call(KEY, "w", c)), (answer, lambda a: open_answer(KEY, call, a))):
        bit = draw.draw(st.integers(0, 8 * len(sealed) - 1))
        bent = bytearray(sealed)
        bent[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):
            assert opened(bytes(bent)) is None


@given(st.lists(st.integers(1, 40), max_size=60))
def test_each_number_counts_once_in_any_order(numbers):
    once = Once()
    assert [once.take(number) for number in numbers] == [
        number not in numbers[:place] for place, number in enumerate(numbers)
    ]


def test_an_answer_is_no_call():
    """Even where what they are about is the same: the tag names the direction."""
    about = b"w" * SEAL_BYTES
    answer = seal_answer(KEY, about, (1).to_bytes(8, "big") + b"x")
    with pytest.raises(ValueError, match="seal"):
        open_call(KEY, about.decode(), answer)


def test_of_another_worker_call_or_key():
    call, other = seal_call(KEY, "w", 1, b"x"), seal_call(KEY, "w", 2, b"x")
    with pytest.raises(ValueError, match="seal"):
        open_call(KEY, "v", call)
    with pytest.raises(ValueError, match="seal"):
        open_call(key_of(b""), "w", call)
    assert open_answer(KEY, other, seal_answer(KEY, call, b"y")) is None
    assert open_answer(KEY, call, call) is None, "a call is no answer"
    for short in (b"", b"x" * 15):
        assert open_answer(KEY, call, short) is None
        with pytest.raises(ValueError, match="seal"):
            open_call(KEY, "w", short)
