"""A value that the output's form cannot hold costs that value, never the answer."""

import collections
import contextlib
import csv
import dataclasses
import datetime
import decimal
import json
import math
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from batch_helpers import Notes, read_lines, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job, summary
from ctxflow.batch.publish import PUBLISHED, publish
from ctxflow.batch.records import Held

pytestmark = pytest.mark.usefixtures("shared")

FORMS = ("jsonl", "parquet", "csv")
NULL, KEYS, HALVES = "null stands in their place", "their text stands in their place", "U+FFFD stands in its place"

numbers = st.one_of(
    st.floats(), st.integers(), st.integers(-(10**30), 10**30), st.decimals(), st.booleans(), st.none(),
    st.just(5000).map(lambda digits: 10**digits),
    st.sampled_from([np.float32("nan"), np.float64("inf"), np.int64(3), np.float32(0.5)]),
)  # fmt: skip
texts = st.one_of(st.text(), st.sampled_from(["\ud800", "a\udfffb", "\x00", "\r\n", '"', "NaN"]))
plain = st.one_of(
    numbers, texts, st.binary(), st.datetimes(), st.dates(), st.timedeltas(),
    st.sampled_from([uuid.UUID(int=1), Path("a"), {1, "a"}, object(), print, complex(1, 2), np.array([1.0, np.nan])]),
)  # fmt: skip
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)


def published(form, folder, lines):
    """The answers that are in an output, as somebody reads them."""
    rows, output = folder / "rows.jsonl", folder / f"out.{form}"
    rows.write_bytes(b"".join(lines))
    if not lines:
        return []
    if form not in PUBLISHED:
        return [json.loads(line, parse_constant=pytest.fail)["result"] for line in rows.read_bytes().splitlines()]
    publish(form, rows, output)
    if form == "parquet":
        return pyarrow.parquet.read_table(output).column("result").to_pylist()
    with open(output, newline="") as file:
        return [row["result"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.lists(values, min_size=1, max_size=4))
def test_whatever_is_kept_the_answer_stands(tmp_path, form, kept):
    csv.field_size_limit(1 << 30)
    told = []
    held = Held(["kept"], nan=form in PUBLISHED, told=told.append)
    lines = [held.line({"row": n, "kept": value, "result": f"answer {n}"}) for n, value in enumerate(kept)]
    assert published(form, tmp_path, lines) == [f"answer {n}" for n in range(len(kept))]
    assert held.nulled.keys() | held.altered.keys() <= {"kept"} and bool(told) == bool(held.nulled or held.altered)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(values, min_size=1, max_size=4))
def test_an_answer_is_written_or_refused_with_a_reason(tmp_path, form, answers):
    """Never an output that cannot be made when all is paid."""
    held = Held(nan=form in PUBLISHED)
    lines = []
    for n, answer in enumerate(answers):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            lines.append(held.line({"row": n, "result": answer}))
    assert len(published(form, tmp_path, lines)) == len(lines)


JSON_ROWS = [
    '{"text": "a", "price": NaN}',
    '{"text": "b", "price": 1.5}',
    '{"text": "c", "price": -1e400}',
    '{"text": "d", "price": [1, NaN, {"x": Infinity}]}',
]


def job(output, **choices):
    chosen = {"function": "batch_functions:upper", "column": ["text"], "keep": ["price"], **choices}
    return load_job(None, input="in.jsonl", output=output, **chosen)


def test_a_number_that_is_none_costs_itself(folder):
    write_lines(folder / "in.jsonl", JSON_ROWS)
    notes = Notes()
    outcome = run_job(job("out.jsonl", order="input"), display=notes)
    assert (outcome.done, outcome.dead, outcome.exit_status, outcome.nulled) == (4, 0, 0, {"price": 4})
    assert [(each["price"], each["result"]) for each in read_lines(folder / "out.jsonl")] == [
        (None, "A"), (1.5, "B"), (None, "C"), ([1, None, {"x": None}], "D"),
    ]  # fmt: skip
    assert [said for said in notes.said if "JSON" in said] == [
        "ctxflow: the column price has values that JSON cannot hold, such as nan: null stands in their place"
    ]
    assert "4 values of price became null, since the output cannot hold them" in summary(outcome, "out.jsonl")


def test_parquet_and_csv_hold_it(folder):
    write_lines(folder / "in.jsonl", [*JSON_ROWS[:3], '{"text": "d", "price": 2}'])
    for name in ("out.parquet", "out.csv"):
        outcome = run_job(job(name, order="input"))
        assert (outcome.done, outcome.nulled) == (4, {})
    prices = pyarrow.parquet.read_table(folder / "out.parquet").column("price").to_pylist()
    assert math.isnan(prices[0]) and prices[1:] == [1.5, -math.inf, 2.0]
    assert (folder / "out.csv").read_text().splitlines()[1:3] == ["0,NaN,A", "1,1.5,B"]


@pytest.mark.parametrize("form", FORMS)
def test_half_a_character_is_told_and_counted(folder, form):
    write_lines(folder / "in.jsonl", [{"text": "a", "price": "x\ud800"}, {"text": "b\udfff", "price": "y"}])
    notes = Notes()
    outcome = run_job(job(f"out.{form}", order="input"), display=notes)
    assert (outcome.done, outcome.nulled, outcome.altered) == (2, {}, {"price": 1, "result": 1})
    read = {
        "jsonl": read_lines, "parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
        "csv": lambda path: list(csv.DictReader(path.read_text().splitlines())),
    }[form](folder / f"out.{form}")  # fmt: skip
    assert [(each["price"], each["result"]) for each in read] == [("x�", "A"), ("y", "B�")]
    assert len([said for said in notes.said if said.endswith(HALVES)]) == 2
    assert (
        "1 text or key of price was written otherwise, since the output cannot hold it as it is\n"
        "1 text or key of result was written otherwise"
    ) in summary(outcome, "out")


def test_numbers_without_a_common_type_become_text(tmp_path):
    """Too large for a float of 64 bits that other rows need."""
    lines = [Held().line({"row": n, "result": value}) for n, value in enumerate([0.5, 2**63 - 1, 2**62])]
    assert published("parquet", tmp_path, lines) == ["0.5", str(2**63 - 1), str(2**62)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (float("nan"), "the result is nan, which JSON cannot hold"),
        (np.float32("inf"), "the result is inf, which JSON cannot hold"),
        (object(), "an object, which JSON cannot"),
        (ValueError("no"), "a ValueError, which JSON cannot"),
    ],
)
def test_an_answer_that_cannot_be_held_is_refused_with_its_reason(answer, said):
    held = Held()
    with pytest.raises((ValueError, TypeError), match=said):
        held.line({"row": 0, "result": answer})
    assert not held.nulled


def test_a_part_of_an_answer_costs_itself():
    told = []
    held = Held(told=told.append)
    answer = {"label": "x", "scores": {"x": float("nan"), "y": np.float32("nan")}, "vector": np.array([1.0, np.inf])}
    assert json.loads(held.line({"row": 0, "result": answer}))["result"] == {
        "label": "x", "scores": {"x": None, "y": None}, "vector": [1.0, None],
    }  # fmt: skip
    assert held.nulled == {"result": 3} and len(told) == 1


@dataclasses.dataclass
class Verdict:
    label: str
    why: object


@pytest.mark.parametrize(
    ("answer", "written", "counts", "said"),
    [
        ({"label": "x", "error": ValueError("no")}, {"label": "x", "error": None}, (1, 0), f"ValueError('no'): {NULL}"),
        (["x", object], ["x", None], (1, 0), f"such as <class 'object'>: {NULL}"),
        ([{"a": [10**5000]}], [{"a": [None]}], (1, 0), f"such as an int: {NULL}"),
        (Verdict("x", threading.Lock()), {"label": "x", "why": None}, (1, 0), NULL),
        (collections.OrderedDict(a=object(), b=1), {"a": None, "b": 1}, (1, 0), NULL),
        ({(1, 2): 3}, {"(1, 2)": 3}, (0, 1), f"result has keys that JSON cannot hold, such as (1, 2): {KEYS}"),
        ({(1, 2): 3, "(1, 2)": 4}, {"(1, 2)": 4, "(1, 2)'": 3}, (0, 1), KEYS),
        ({"pairs": [{("a", "b"): math.nan}]}, {"pairs": [{"('a', 'b')": None}]}, (1, 1), KEYS),
        ("x\ud800", "x\ufffd", (0, 1), f"such as 'x\\ud800': {HALVES}"),
        ({"\ud800": ["\udfff"]}, {"\ufffd": ["\ufffd"]}, (0, 2), HALVES),
    ],
)
def test_what_an_answer_cannot_hold_costs_that_alone(answer, written, counts, said):
    told = []
    held = Held(told=told.append)
    assert json.loads(held.line({"row": 0, "result": answer})) == {"row": 0, "result": written}
    assert (held.nulled.get("result", 0), held.altered.get("result", 0)) == counts
    assert any(said in sentence for sentence in told)


def test_keys_are_text_as_values_of_their_type_are():
    answer = {np.int64(3): 1, datetime.date(2026, 1, 2): [1], 4: 2, None: 3, "\ud83d\ude00": 5}
    held = Held(told=pytest.fail)
    assert json.loads(held.line({"result": answer}))["result"] == {
        "3": 1, "2026-01-02": [1], "4": 2, "null": 3, "\U0001f600": 5,
    }  # fmt: skip


def test_dates_and_decimals_stand_as_text():
    kept = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50")}
    assert json.loads(Held(["kept"]).line({"kept": kept}))["kept"] == {"day": "2026-01-02", "price": "1.50"}
