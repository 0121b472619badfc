"""The loop of a job: how much is in flight, and what an error of one row's own values costs."""

import contextlib
import json
import tracemalloc
import types

import pytest
from batch_helpers import read_lines, write_lines
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.batch import load_job, pump
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.pump import Intake, Pump, Tolerance, memory_of
from ctxflow.batch.row_items import plain_maker
from ctxflow.rows.readers import open_source
from ctxflow.rows.source import Row, RowError

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=40) | st.integers(1000, 10**30),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
)


@given(VALUES)
def test_memory_is_about_what_values_take(value):
    text = json.dumps(value)
    tracemalloc.start()
    try:
        kept = json.loads(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory_of(kept) <= 4 * taken + 500 and taken <= 4 * memory_of(kept) + 5000


@contextlib.contextmanager
def pumped(folder, rows, record=None, tally=None, result=None, in_order=False):
    """A pump over rows, whose items are answered by themselves or `result` when `answer` is called.

    In order, the first is answered when nothing else is left to answer.
    """
    write_lines(folder / "in.jsonl", rows)
    _, source = open_source(folder / "in.jsonl")
    in_flight = []

    def submit(items, stream):
        numbers = list(range(submit.next, submit.next + len(items)))
        submit.next += len(items)
        in_flight.append((numbers, items, stream))
        return numbers

    def answer(count):
        answer.most = max(answer.most, sum(memory_of(items) for _, items, _ in in_flight))
        while in_flight:
            numbers, items, stream = in_flight.pop()
            if in_order and numbers[0] == 0 and len(numbers) > 1:
                in_flight.append((numbers[:1], items[:1], stream))
                numbers, items = numbers[1:], items[1:]
            answer.given += len(numbers)
            answer.first = answer.first or (numbers[0] == 0 and answer.given)
            stream.deliver(numbers, [items[n] if result is None else result for n in range(len(items))])
            if in_order:
                return

    submit.next = answer.most = answer.given = answer.first = 0
    places = (folder / name for name in ("out.jsonl", "errors.jsonl", "progress"))
    with Ledger(*places) as ledger:
        intake = Intake(source, lambda values: (values["text"],), None, (), ledger)
        yield answer, ledger, Pump(
            intake.chunks(), submit, ledger, record or (lambda row, result: {"row": row.number}), str, in_order,
            lambda *said: None, answer, tally or (lambda row, result: None), Tolerance("100%"),
        )  # fmt: skip


def test_what_is_in_flight_is_bounded_by_the_memory_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(pump, "WINDOW_BYTES", 20_000_000)
    rows = [{"text": [{}] * 30_000} for _ in range(40)]  # Each of 90 KB of text, and 2 MB of memory.
    with pumped(tmp_path, rows) as (answer, ledger, running):
        running.run()
        chunk = 12 * memory_of(json.loads(json.dumps(rows[0])))
        assert ledger.done == 40 and 20_000_000 / 2 < answer.most < 20_000_000 + chunk


def test_a_schema_that_all_rows_share_is_counted_for_none(tmp_path):
    properties = {f"property {n}": {"type": "string"} for n in range(2000)}
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{n}" * 1000} for n in range(3)])

    def sizes(**schema):
        asked = load_job(None, input=tmp_path / "in.jsonl", output="out", model="m", task="generate", **schema)
        _, source = open_source(tmp_path / "in.jsonl")
        intake = Intake(source, plain_maker(asked), None, (), None, (asked.schema_of_answers,))
        return [row.size for rows in intake.chunks() for row in rows]

    for bound, free in zip(sizes(answer_schema=json.dumps({"properties": properties})), sizes(), strict=True):
        assert 0 < bound - free < 2000


def test_so_is_what_waits_for_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(pump, "WINDOW_BYTES", 20_000_000)
    rows = [{"text": f"text {n}"} for n in range(4000)]
    vector = [float(n) for n in range(4096)]
    with pumped(tmp_path, rows, result=vector, in_order=True) as (answer, ledger, running):
        running.run()
        assert ledger.done == 4000
        assert answer.first < 2500, "few were asked before it was known how large answers are, and no more then"


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, MemoryError, ValueError])
@pytest.mark.parametrize("name", ["record", "tally"])
def test_an_error_at_a_rows_own_answer_is_that_rows_alone(tmp_path, name, kind):
    def fail(row, result):
        if result == ("bad",):
            raise kind("planted")
        return {"row": row.number}

    rows = [{"text": "bad" if n == 4 else f"text {n}"} for n in range(9)]
    with pumped(tmp_path, rows, **{name: fail}) as (_, ledger, running):
        running.run()
        assert (ledger.done, ledger.dead) == (8, 1)
    assert [each["row"] for each in read_lines(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 5, 6, 7, 8]
    [letter] = read_lines(tmp_path / "errors.jsonl")
    assert letter["row"] == 4 and letter["error"]["message"] == "the result cannot be written: planted"


def test_an_id_of_more_digits_than_python_writes_is_that_rows_error(tmp_path):
    source = types.SimpleNamespace(chunks=lambda skip: iter([[Row(n, {"id": 10 ** (5000 * n)}, 9) for n in range(2)]]))
    [[fine, wrong]] = Intake(source, lambda values: ("a",), "id", ()).chunks()
    assert fine.error is None and isinstance(wrong.error, RowError) and "the id cannot be used" in str(wrong.error)
