import csv
import datetime
import decimal
import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxflow.batch import publish
from ctxflow.batch.publish import publish_csv, publish_parquet, restored
from ctxflow.batch.records import line
from ctxflow.rows.readers import open_source
from ctxflow.rows.tables import ArrowTable


def published(tmp_path, records, **options):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    publish_parquet(rows, output, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "rows.jsonl"]
    return pyarrow.parquet.read_table(output)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(publish, "_ROWS", 2)


def test_types_are_those_of_all_rows(tmp_path):
    records = [{"row": 0, "n": None}, {"row": 1, "n": 1}, {"row": 2, "n": 1.5, "more": {"a": [1]}}]
    table = published(tmp_path, records)
    assert table.to_pylist() == [
        {"row": 0, "n": None, "more": None},
        {"row": 1, "n": 1.0, "more": None},
        {"row": 2, "n": 1.5, "more": {"a": [1]}},
    ]


@pytest.mark.parametrize("values", [[1, "a", None], [[1], "a", {}], [{}, {}, {}], [10**30, 1, 2], ["a", "b", 1]])
def test_values_without_a_common_type_become_text(tmp_path, values):
    table = published(tmp_path, [{"result": value} for value in values])
    found = table.column("result").to_pylist()
    assert [None if text is None else json.loads(text) for text in found] == values


def test_embeddings_are_of_32_bits(tmp_path):
    table = published(tmp_path, [{"embedding": [0.5, 1.0]}] * 3, embeddings=True)
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32())
    assert table.to_pylist() == [{"embedding": [0.5, 1.0]}] * 3


def test_no_rows(tmp_path):
    assert published(tmp_path, []).num_rows == 0


# What a kept column may be, and values of it.
NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 123456)
TYPES = {
    "int8": (pyarrow.int8(), [1, None, -128]),
    "uint64": (pyarrow.uint64(), [2**64 - 1, None, 0]),
    "float32": (pyarrow.float32(), [0.1, None, 1e30]),
    "float16": (pyarrow.float16(), [0.5, None, 1.0]),
    "bool": (pyarrow.bool_(), [True, None, False]),
    "large text": (pyarrow.large_string(), ["a", None, "é"]),
    "bytes": (pyarrow.binary(), [b"\x00\xff", None, b""]),
    "fixed bytes": (pyarrow.binary(2), [b"\x00\xff", None, b"ab"]),
    "date": (pyarrow.date32(), [NOON.date(), None, datetime.date(1, 1, 1)]),
    "time": (pyarrow.time64("us"), [NOON.time(), None, datetime.time()]),
    "timestamp": (pyarrow.timestamp("us"), [NOON, None, datetime.datetime(1969, 1, 1)]),
    "seconds": (pyarrow.timestamp("s"), [NOON.replace(microsecond=0), None, None]),
    "zone": (pyarrow.timestamp("ms", "Europe/Rome"), [1_700_000_000_123, None, 0]),
    "nanoseconds": (pyarrow.timestamp("ns"), [1_700_000_000_123_456_789, None, 0]),
    "duration": (pyarrow.duration("us"), [datetime.timedelta(-1, 5, 3), None, datetime.timedelta(0)]),
    "nano duration": (pyarrow.duration("ns"), [1, None, 86_400_000_000_001]),
    "negative duration": (pyarrow.duration("ns"), [-86_395_000_000_000, None, 5]),
    "far duration": (pyarrow.duration("s"), [2**62, None, -(2**62)]),
    "nanoseconds of a day": (pyarrow.time64("ns"), [3_723_000_000_004, None, 0]),
    "seconds of a day": (pyarrow.time32("s"), [86_399, None, 0]),
    "far": (pyarrow.timestamp("ms"), [0, 253_402_300_800_000 * 30, None, -62_135_596_800_001]),
    "far zone": (pyarrow.timestamp("us", "Europe/Rome"), [0, 253_402_300_800_000_000, None]),
    "far day": (pyarrow.date32(), [2**31 - 1, None, -800_000, 0]),
    "far days in milliseconds": (pyarrow.date64(), [86_400_000 * 10**7, None, 0]),
    "list of far": (pyarrow.list_(pyarrow.timestamp("s")), [[10**13, None, 0], None, []]),
    "struct of far": (
        pyarrow.struct([("until", pyarrow.date32()), ("at", pyarrow.time64("ns"))]),
        [{"until": 10**7, "at": 1}, None],
    ),
    "view of bytes": (pyarrow.binary_view(), [b"\x00\xff", None, b""]),
    "decimal": (pyarrow.decimal128(20, 3), [decimal.Decimal("12345678901234567.125"), None, decimal.Decimal("-0.5")]),
    "decimal256": (pyarrow.decimal256(60, 3), [decimal.Decimal("1" * 50 + ".125"), None, decimal.Decimal(0)]),
    "dictionary": (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), ["a", None, "a"]),
    "list": (pyarrow.list_(pyarrow.date32()), [[NOON.date(), None], None, []]),
    "large list": (pyarrow.large_list(pyarrow.int8()), [[1, None], None, []]),
    # Before 26, pyarrow reads no null of these.
    "fixed list": (pyarrow.list_(pyarrow.float32(), 2), [[0.5, None], [1.0, 2.0]]),
    "struct": (
        pyarrow.struct([("day", pyarrow.date32()), ("price", pyarrow.decimal128(5, 2))]),
        [{"day": NOON.date(), "price": decimal.Decimal("1.50")}, None, {"day": None, "price": None}],
    ),
    "map": (pyarrow.map_(pyarrow.string(), pyarrow.int16()), [[("a", 1), ("b", None)], None, []]),
    "null": (pyarrow.null(), [None, None, None]),
}


@pytest.mark.parametrize("name", TYPES)
def test_columns_that_are_the_inputs_keep_their_types(tmp_path, name):
    kind, values = TYPES[name]
    given = pyarrow.table({"kept": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(given, tmp_path / "in.parquet")
    source = open_source(tmp_path / "in.parquet")[1]
    kept = [row.values["kept"] for chunk in source.chunks() for row in chunk]
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    rows.write_bytes(b"".join(line({"row": n, "kept": value}) for n, value in enumerate(kept)))
    publish_parquet(rows, output, types=source.types())
    found = pyarrow.parquet.read_table(output)
    assert found.schema.field("kept").type == source.types()["kept"] == pyarrow.parquet.read_schema(output).types[1]
    assert found.column("kept").equals(pyarrow.parquet.read_table(tmp_path / "in.parquet").column("kept"))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_objects_become_columns_by_their_keys(tmp_path, form):
    def written(*results):
        rows, output = tmp_path / "rows.jsonl", tmp_path / f"out.{form}"
        rows.write_bytes(b"".join(line({"row": n, "result": each}) for n, each in enumerate(results)))
        publish.publish(form, rows, output, unpacked="result")
        if form == "parquet":
            return pyarrow.parquet.read_table(output).to_pylist()
        csv.field_size_limit(1 << 20)
        with open(output, newline="") as file:
            return [{key: json.loads(each or "null") for key, each in row.items()} for row in csv.DictReader(file)]

    assert written({"n": 1, "parts": [1, 2]}, None, {"n": 3, "row": 4, "": 5}) == [
        {"row": 0, "n": 1, "parts": [1, 2], "answer_row": None, "result": None},
        {"row": 1, "n": None, "parts": None, "answer_row": None, "result": None},
        {"row": 2, "n": 3, "parts": None, "answer_row": 4, "result": 5},
    ]
    assert [list(row) for row in written({"n": 1}, 2)] == [["row", "result"]] * 2, "not where some are no objects"
    assert [list(row) for row in written({}, {})] == [["row", "result"]] * 2
    many = {f"k{n}": n for n in range(300)}
    assert [list(row) for row in written(many)] == [["row", "result"]]


def test_a_type_that_its_values_are_not_of_is_left(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"kept": 1}\n{"kept": 2}\n{"kept": "many"}\n{"other": 1}\n')
    publish_parquet(rows, tmp_path / "out.parquet", types={"kept": pyarrow.int8(), "absent": pyarrow.int8()})
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").column("kept").to_pylist() == ["1", "2", '"many"', None]


TIMES = {
    **{pyarrow.timestamp(unit, zone): 63 for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")},
    **{pyarrow.duration(unit): 63 for unit in ("s", "ms", "us", "ns")},
    pyarrow.date32(): 31,
}


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(list(TIMES)))
def test_any_time_is_kept_as_it_is(data, kind):
    most = 2 ** TIMES[kind] - 1
    counts = data.draw(st.lists(st.none() | st.integers(-most, most) | st.integers(-(10**10), 10**10), min_size=1))
    given = pyarrow.array([None if each is None else max(-most, min(most, each)) for each in counts], kind)
    rows = [row for chunk in ArrowTable(pyarrow.table({"kept": given})).chunks() for row in chunk]
    values = [json.loads(line(row.values))["kept"] for row in rows]
    assert restored(values, kind).equals(given)


CELLS = st.one_of(
    st.none(),
    st.text() | st.just("\0"),
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.text()),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", 'odd,"\r\n name']), CELLS), max_size=8), st.booleans())
@example([{"a": "one\rtwo", "b": "three"}], False)
def test_csv_is_read_back_as_it_was(tmp_path_factory, records, tabs):
    folder = tmp_path_factory.mktemp("csv")
    rows, output = folder / "rows.jsonl", folder / ("out.tsv" if tabs else "out.csv")
    rows.write_bytes(b"".join(line({"row": n, **record}) for n, record in enumerate(records)))
    publish_csv(rows, output)
    with open(output, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t" if tabs else ","))
    assert len(found) == len(records)
    for n, (record, cells) in enumerate(zip(records, found, strict=True)):
        assert cells.pop("row") == str(n)
        for name, cell in cells.items():
            value = record.get(name)
            if isinstance(value, str):
                text = value.encode("utf-8", "backslashreplace").decode()
                assert cell == (text if sys.version_info >= (3, 11) else text.replace("\0", r"\x00"))
            else:
                assert (json.loads(cell) if cell else None) == value
    assert sorted(path.name for path in folder.iterdir()) == [output.name, "rows.jsonl"]


@pytest.mark.parametrize(("form", "name"), [("parquet", "out.parquet"), ("csv", "out.csv")])
def test_what_is_published_is_on_the_disk_before_it_has_its_name_and_no_link_is_followed(
    tmp_path, monkeypatch, form, name
):
    """The journal says next that the job is finished: a power cut must not leave an empty file behind that."""
    rows, output, precious = tmp_path / "rows.jsonl", tmp_path / name, tmp_path / "precious"
    rows.write_text('{"row": 0, "n": 1}\n')
    precious.write_text("mine")
    (tmp_path / f"{name}.part").symlink_to(precious)
    done, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append((os.path.basename(path), os.path.isdir(path) or os.path.getsize(path) > 0))
        sync(descriptor)

    def renamed(source, target):
        done.append(("named", True))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    publish.publish(form, rows, output)
    assert done == [(f"{name}.part", True), ("named", True), (tmp_path.name, True)]
    assert precious.read_text() == "mine" and not output.is_symlink() and output.stat().st_size > 0
