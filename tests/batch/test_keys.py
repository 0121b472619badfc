import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.batch.ledger import as_keys, contained, id_key
from ctxflow.batch.pump import SeenKeys

numbers = st.integers(0, 30)


@given(st.lists(st.lists(numbers, max_size=12), max_size=12))
def test_seen_keys_tell_what_a_set_would(chunks):
    seen, plain = SeenKeys(), set()
    for chunk in chunks:
        expected = []
        for number in chunk:
            expected.append(number in plain)
            plain.add(number)
        assert seen.add(as_keys(chunk)).tolist() == expected


@given(st.lists(numbers), st.lists(numbers))
def test_contained_tells_what_in_would(keys, among):
    assert contained(as_keys(keys), np.sort(as_keys(among))).tolist() == [key in among for key in keys]


def test_many_keys_take_a_handful_of_runs():
    seen = SeenKeys()
    for start in range(0, 100_000, 1000):
        assert not seen.add(as_keys(range(start, start + 1000))).any()
    assert len(seen._runs) < 10
    assert seen.add(as_keys(range(0, 100_000, 7))).all()


@given(st.text())
def test_an_id_is_no_number(text):
    assert id_key(text) >= 1 << 63


def test_an_id_that_is_no_valid_unicode_has_a_key_too():
    assert id_key("\ud800") != id_key("\ud801")
