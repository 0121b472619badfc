"""Readers: every line is a row, good or bad, with its number; none ends the reading."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.rows import formats
from ctxflow.rows.formats import CsvSource, JsonLinesSource, Reading
from ctxflow.rows.readers import detect, open_source
from ctxflow.rows.source import RowError, file_identity

GOOD = '{"a": 1}'


def rows_of(source):
    return [row for chunk in source.chunks() for row in chunk]


def outcomes(rows):
    return {row.number: str(row.values) if isinstance(row.values, RowError) else row.values for row in rows}


BAD_LINES = {
    b"\xff\xfe": "not UTF-8: byte 1 is 0xff",
    b'{"a": "\xe9"}': "not UTF-8: byte 8 is 0xe9",
    b'{"a": 1': "not JSON: Expecting ',' delimiter at column 8",
    b"[1, 2]": "a list, not a JSON object",
    b'"text"': "a string, not a JSON object",
    b"17": "a number, not a JSON object",
    b"null": "null, not a JSON object",
    b"true": "true or false, not a JSON object",
    b'{"a": ' + b"9" * 5000 + b"}": "not JSON that can be read",
    b"[" * 100_000: "nested too deeply",
    b"\x00": "not JSON",
    b'{"a": 1}{"a": 2}': "not JSON: Extra data",
    b'{"a": 1, "b": 2, "a": 1}': "the line names 'a' twice",
    b'{"a": {"b": 1, "b": 2}}': "the line names 'b' twice",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_costs_itself_alone(tmp_path, bad):
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + bad + b"\n\n" + GOOD.encode())
    source = JsonLinesSource(path)
    found = outcomes(rows_of(source))
    assert found.keys() == {0, 1, 3}
    assert found[0] == found[3] == {"a": 1}
    assert BAD_LINES[bad] in found[1]
    assert source.place(3) == f"{path}, line 4"
    assert source.fraction() == 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.one_of(st.just(GOOD.encode()), st.binary(max_size=30).map(lambda b: b.replace(b"\n", b""))), max_size=30
    )
)
def test_any_bytes_are_rows_or_errors_and_good_lines_are_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("fuzz") / "in.jsonl"
    lines.insert(0, GOOD.encode())  # The beginning of a file may say that it is of another encoding, or compressed.
    path.write_bytes(b"\n".join(lines))
    found = outcomes(rows_of(JsonLinesSource(path)))
    assert all(found[number] == {"a": 1} for number, line in enumerate(lines) if line == GOOD.encode())
    blank = {number for number, line in enumerate(lines) if not line.removeprefix(b"\xef\xbb\xbf").strip()}
    assert set(range(len(lines))) - blank <= found.keys() <= set(range(len(lines)))


def test_a_giant_line_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 1000)
    path = tmp_path / "in.jsonl"
    longest = json.dumps({"a": "x" * 990})
    path.write_text("\n".join([GOOD, json.dumps({"a": "x" * 5000}), longest, GOOD, "y" * 3000]))
    found = outcomes(rows_of(JsonLinesSource(path)))
    assert found[0] == found[3] == {"a": 1}
    assert "longer than" in found[1] and "longer than" in found[4]
    assert found[2] == {"a": "x" * 990}


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert outcomes(rows_of(JsonLinesSource(path))) == {0: {"a": 1}}
    path = tmp_path / "in.csv"
    path.write_bytes(b"\xef\xbb\xbfa\n1\n")
    assert outcomes(rows_of(CsvSource(path))) == {0: {"a": "1"}}


def test_csv(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b'a,b\n1,"two\nlines"\n3\n4,\xff\n\n5,6,7\n"8"x,9\n10,11\n')
    source = CsvSource(path)
    found = outcomes(rows_of(source))
    assert found == {
        0: {"a": "1", "b": "two\nlines"},
        1: "the row has 1 field, but the header has 2",
        2: "the column 'b' is not UTF-8; if all of the input is of another encoding, give --encoding, such as cp1252",
        3: "the row has 3 fields, but the header has 2",
        4: "the row cannot be read: ',' expected after '\"'",
        5: {"a": "10", "b": "11"},
    }
    assert source.place(5) == f"{path}, row 6 below the header"


def test_csv_goes_on_behind_a_giant_field(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 1000)
    path = tmp_path / "in.csv"
    path.write_text("a\n" + "x" * 5000 + "\n1\n")
    found = outcomes(rows_of(CsvSource(path)))
    assert "longer than" in found[0] and found[1] == {"a": "1"}


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_below_a_header_are_rows_or_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "in.csv"
    path.write_bytes(b"a,b\n" + data)
    rows = rows_of(CsvSource(path))
    assert [row.number for row in rows] == list(range(len(rows)))
    assert all(isinstance(row.values, RowError) or set(row.values) == {"a", "b"} for row in rows)


def test_csv_headers(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("a,a\n1,2\n")
    with pytest.raises(ValueError, match="has two columns 'a': rename one"):
        rows_of(CsvSource(path))
    path.write_text("")
    assert rows_of(CsvSource(path)) == [] and CsvSource(path).columns() is None
    path.write_text("\n\na,b\n\n1,2\n")
    assert outcomes(rows_of(CsvSource(path))) == {0: {"a": "1", "b": "2"}}
    assert list(CsvSource(path).columns()) == ["a", "b"]
    path = tmp_path / "in.tsv"
    path.write_text("a\tb\n1\t2,3\n")
    assert outcomes(rows_of(CsvSource(path))) == {0: {"a": "1", "b": "2,3"}}


def test_chunks_are_bounded_in_rows_and_bytes(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text((GOOD + "\n") * 2500)
    assert [len(chunk) for chunk in JsonLinesSource(path).chunks()] == [1000, 1000, 500]
    path.write_text((json.dumps({"a": "x" * 600_000}) + "\n") * 5)
    assert [len(chunk) for chunk in JsonLinesSource(path).chunks()] == [2, 2, 1]


REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}'


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("in.jsonl", GOOD, "jsonl"),
        ("in.jsonl", REQUEST, "openai"),
        ("in.jsonl", "broken\n\n" + REQUEST, "openai"),
        ("in.jsonl", "", "jsonl"),
        ("in.csv", "a,b", "csv"),
        ("prompts", GOOD, "jsonl"),
        ("prompts", "PAR1", "parquet"),
    ],
)
def test_forms_are_told_by_name_and_beginning(tmp_path, name, content, form):
    path = tmp_path / name
    path.write_text(content)
    assert detect(path, Reading()) == form


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("in.dat", b"hello", "cannot be told: have its name end in .* or name it with --input-format"),
        ("in.jsonl.gz", b"\x1f\x8b\x08", "its compressed data are broken"),
        ("in.jsonl.zip", b"PK\x03\x04", "is compressed, and not by gzip"),
        ("in.json", b" [\n{}]", "is a JSON array"),
    ],
)
def test_what_is_not_read_is_told(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        open_source(path)


def test_what_is_no_file_is_told(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        open_source(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"no dataset: it has neither .* nor files of jsonl"):
        open_source(tmp_path, Reading(form="jsonl"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a pipe or a device"):
        open_source(tmp_path / "pipe")
    (tmp_path / "in.jsonl").write_text(GOOD)
    with pytest.raises(ValueError, match="has no splits"):
        open_source(tmp_path / "in.jsonl", Reading(split="train"))
    with pytest.raises(ValueError, match="not a dataset's folder"):
        open_source(tmp_path / "in.jsonl", Reading("dataset"))


def test_an_identity_is_that_of_the_content(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 3_000_000)
    second.write_bytes(b"x" * 3_000_000)
    assert file_identity([first]) == file_identity([second])
    second.write_bytes(b"x" * 3_000_000 + b"\n")
    assert file_identity([first]) != file_identity([second])
    second.write_bytes(b"x" * 2_999_999 + b"y")
    assert file_identity([first]) != file_identity([second])


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_rows_that_are_skipped_are_left_out_good_or_bad(tmp_path, name):
    lines = [GOOD, "broken", GOOD, "[]", GOOD] if name == "in.jsonl" else ["a", "1", "2,3", "4", "5,6", "7"]
    (tmp_path / name).write_text("\n".join(lines))
    source = open_source(tmp_path / name)[1]
    every = [row.number for row in rows_of(source)]
    assert every == [0, 1, 2, 3, 4]
    for skip in (b"", b"\0\1\1", b"\1\0\0\1\1", b"\1" * 9):
        found = [row.number for chunk in source.chunks(skip) for row in chunk]
        assert found == [number for number in every if number >= len(skip) or not skip[number]]
