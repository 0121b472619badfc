from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.models.batch_limits import BatchLimits, Ceiling
from ctxflow.models.results import OutOfMemoryError

lengths_strategy = st.lists(st.integers(0, 50), max_size=40)


@given(lengths=lengths_strategy, max_tokens=st.integers(1, 200), max_rows=st.none() | st.integers(1, 10))
def test_every_row_goes_once_within_the_limits_and_comes_back_in_order(lengths, max_tokens, max_rows):
    seen: list[list[int]] = []

    def run(rows: list[int]) -> list[int]:
        seen.append(rows)
        return [row * 2 for row in rows]

    assert BatchLimits(max_tokens, max_rows).run_batches(lengths, run) == [row * 2 for row in range(len(lengths))]
    assert sorted(row for rows in seen for row in rows) == list(range(len(lengths)))
    for rows in seen:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= max_tokens
        assert max_rows is None or len(rows) <= max_rows
    flat = [lengths[row] for rows in seen for row in rows]
    assert flat == sorted(flat, reverse=True)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), fits=st.integers(50, 300))
def test_what_does_not_fit_is_halved_until_it_does(lengths, fits):
    tried: list[int] = []
    limits: list[int] = []

    def run(rows: list[int]) -> list[int]:
        tokens = len(rows) * max(lengths[row] for row in rows)
        if tokens > fits:
            tried.append(tokens)
            raise MemoryError("too much")
        return rows

    assert BatchLimits(10_000, recover=limits.append).run_batches(lengths, run) == list(range(len(lengths)))
    assert limits == [tokens // 2 for tokens in tried]
    assert limits == sorted(limits, reverse=True)


def test_a_row_that_does_not_fit_alone_says_what_to_do():
    def run(rows: list[int]) -> list[int]:
        raise MemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    with pytest.raises(OutOfMemoryError, match=r"one prompt alone does not fit .* larger GPU \(CUDA out.*GiB\.\)"):
        BatchLimits(100).run_batches([3, 4], run)


def test_another_exception_is_not_retried():
    calls = []

    def run(rows: list[int]) -> list[int]:
        calls.append(rows)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        BatchLimits(100).run_batches([1, 1], run)
    assert len(calls) == 1


def test_a_wrong_number_of_results_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        BatchLimits(100).run_batches([1, 1], lambda rows: [0])


@given(lengths=lengths_strategy, max_tokens=st.integers(1, 200), max_rows=st.none() | st.integers(1, 10))
def test_each_row_comes_in_order_from_batches_that_are_as_full_as_may_be(lengths, max_tokens, max_rows):
    seen: list[list[int]] = []

    def run(rows: list[int]) -> list[int]:
        seen.append(rows)
        return [row * 2 for row in rows]

    found = list(BatchLimits(max_tokens, max_rows).run_each(lengths, run))
    assert found == [row * 2 for row in range(len(lengths))]
    assert sorted(row for rows in seen for row in rows) == list(range(len(lengths)))
    for rows in seen:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= max_tokens
        assert max_rows is None or len(rows) <= max_rows


def test_the_first_rows_come_before_the_last_have_run():
    ran: list[int] = []
    results = BatchLimits(200).run_each([10, 30, 20, 40] * 100, lambda rows: ran.extend(rows) or rows)
    assert next(results) == 0
    assert len(ran) <= 20
    batches: list[int] = []
    random = [((n * 7919) % 97) + 3 for n in range(1000)]
    assert list(BatchLimits(2000).run_each(random, lambda rows: batches.append(len(rows)) or rows)) == [*range(1000)]
    whole: list[int] = []
    BatchLimits(2000).run_batches(random, lambda rows: whole.append(len(rows)) or rows)
    assert len(batches) <= 1.2 * len(whole), "hardly more batches than if all were sorted"


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), fits=st.integers(50, 300))
def test_what_does_not_fit_is_halved_there_too(lengths, fits):
    limits: list[int] = []

    def run(rows: list[int]) -> list[int]:
        if len(rows) * max(lengths[row] for row in rows) > fits:
            raise MemoryError("too much")
        return rows

    found = list(BatchLimits(10_000, recover=limits.append).run_each(lengths, run))
    assert found == list(range(len(lengths)))
    assert limits == sorted(limits, reverse=True)


def run_full(ceiling, most, memory, times):
    """Run batches as large as they may be, on a device with memory for so many tokens; return what was tried."""
    tried = []
    for _ in range(times):
        tokens = ceiling.limit(most)
        tried.append(tokens)
        if tokens > memory:
            ceiling.lower(tokens, tokens // 2)
        else:
            ceiling.fitted(most)
    return tried


@given(most=st.integers(1, 200_000), memories=st.lists(st.integers(1, 200_000), max_size=4))
def test_a_ceiling_rises_to_the_most_again_whatever_was_before(most, memories):
    ceiling = Ceiling()
    for memory in memories:
        tried = run_full(ceiling, most, memory, 300)
        assert all(1 <= tokens <= most for tokens in tried)
    run_full(ceiling, most, most, 12_000)
    assert ceiling.limit(most) == most


@given(most=st.integers(2, 200_000), share=st.floats(0.001, 0.999))
def test_a_ceiling_that_stays_costs_few_batches_in_vain_and_little_memory(most, share):
    memory = max(1, int(share * most))
    tried = run_full(ceiling := Ceiling(), most, memory, 20_000)
    in_vain = [tokens for tokens in tried if tokens > memory]
    assert len(in_vain) <= most.bit_length() + 24, "each try in vain doubles the wait for the next"
    assert len([tokens for tokens in tried if 2 * tokens < memory]) < 1000
    assert ceiling.limit(most) <= most


@given(tokens=st.integers(1, 1000), most=st.integers(1, 1000))
def test_a_batch_that_fits_says_nothing_where_there_is_no_ceiling(tokens, most):
    ceiling = Ceiling()
    for _ in range(100):
        ceiling.fitted(most)
    assert ceiling.limit(most) == most
    ceiling.lower(2 * tokens, tokens)
    assert ceiling.limit(most) == min(most, tokens)
