"""Files of lines in any encoding, compressed or not, read as the same rows."""

import codecs
import gzip
import itertools

import pytest

from ctxflow.rows.formats import Reading, TextLines, open_lines
from ctxflow.rows.readers import open_source
from ctxflow.rows.source import RowError

# What is written, and the encoding that is to be given: None where the file tells itself.
ENCODINGS = {
    "utf-8": (lambda text: text.encode(), None),
    "utf-8 with a mark": (lambda text: text.encode("utf-8-sig"), None),
    "utf-16": (lambda text: text.encode("utf-16"), None),
    "utf-16 from the other end": (lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"), None),
    "utf-16 without a mark": (lambda text: text.encode("utf-16-le"), "utf-16-le"),
    "utf-16 named and marked": (lambda text: text.encode("utf-16"), "UTF-16"),
    "utf-16-le named and marked": (lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"), "utf-16-le"),
    "utf-32": (lambda text: text.encode("utf-32"), None),
    "latin-1": (lambda text: text.encode("latin-1"), "latin-1"),
    "cp1252": (lambda text: text.encode("cp1252"), "cp1252"),
    "utf-8 named": (lambda text: text.encode("utf-8-sig"), "utf8"),
}
# Each holds the same two rows.
CONTENTS = {
    "in.csv": ('id,text\n1,Köln\n\n2,"two\nlines é"\n', {}),
    "in.tsv": ('id\ttext\r\n1\tKöln\r\n2\t"two\nlines é"\r\n', {}),
    "semicolons.csv": ('id;text\n1;Köln\n2;"two\nlines é"', {"delimiter": ";"}),
    "in.dat": ('id|text\n1|Köln\n2|"two\nlines é"', {"delimiter": "|"}),
    "mac.csv": ('id,text\r1,Köln\r\r2,"two\rlines é"\r', {}),
    "mac.jsonl": ('{"id": "1", "text": "Köln"}\r\r{"id": "2", "text": "two\\nlines é"}', {}),
    "excel.csv": ('id,text,,\r\n1,Köln,,\r\n2,"two\nlines é"\r\n', {}),
    "mixed.csv": (f'id,text{chr(13) * 70_000}1,Köln\r\n2,"two\nlines é"\n', {}),
    "mixed.jsonl": ('{"id": "1", "text": "Köln"}' + chr(13) * 70_000 + '{"id": "2", "text": "two\\nlines é"}\n\n', {}),
    "longer rows.csv": ('id,text\n1,Köln,\n2,"two\nlines é",,\n', {}),
    "in.jsonl": ('{"id": "1", "text": "Köln"}\n\n{"id": "2", "text": "two\\nlines é"}\n', {}),
}


def rows_of(source):
    return [row for chunk in source.chunks() for row in chunk]


@pytest.mark.parametrize(("name", "encoding", "compressed"), itertools.product(CONTENTS, ENCODINGS, [False, True]))
def test_the_same_rows_whatever_the_file_is_in(tmp_path, name, encoding, compressed):
    text, how = CONTENTS[name]
    encode, named = ENCODINGS[encoding]
    path = tmp_path / (name + ".gz" if compressed else name)
    data = encode(text)
    path.write_bytes(gzip.compress(data) if compressed else data)
    form, source = open_source(path, Reading(encoding=named, **how))
    assert form == ("jsonl" if name.endswith("l") else "csv")
    assert [row.values for row in rows_of(source)] == [
        {"id": "1", "text": "Köln"},
        {"id": "2", "text": "two\nlines é"},
    ]
    assert source.fraction() == 1
    if form == "csv":
        assert list(source.columns()) == ["id", "text"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", ["Köln\r\n\né\n last", "Köln\r\ré\r last"])
def test_lines_of_text(tmp_path, encoding, text):
    encode, named = ENCODINGS[encoding]
    (tmp_path / "in.txt").write_bytes(encode(text))
    form, source = open_source(tmp_path / "in.txt", Reading(encoding=named))
    assert (form, source.columns()) == ("text", ("text",))
    assert [(row.number, row.values["text"]) for row in rows_of(source)] == [(0, "Köln"), (2, "é"), (3, " last")]


@pytest.mark.parametrize(
    ("name", "data", "reading", "sentence"),
    [
        ("in.csv", "id\né".encode("utf-16-le"), {}, "seems to be of UTF-16: give --encoding, such as utf-16-le"),
        ("in.csv", b"\xff\xfei\0d\0", {"encoding": "latin-1"}, "byte order mark of utf-16: leave --encoding out"),
        ("in.csv", b"k\xf6ln,b\n1,2\n", {}, r"not UTF-8 \(k\\xf6ln\): give --encoding, such as cp1252"),
        ("in.csv", b"a\n", {"encoding": "klingon"}, "there is no encoding 'klingon'"),
        ("in.csv", b"a\n", {"encoding": "base64"}, "there is no encoding 'base64'"),
        ("in.jsonl", b'{"a": 1}\n', {"delimiter": ";", "form": "jsonl"}, "read as jsonl, which has no delimiter"),
        ("in.csv.gz", b"\x1f\x8b\x08\x00broken", {}, "its compressed data are broken"),
        ("in.csv.gz", gzip.compress(b"a\n1\n" * 9, mtime=0)[:-12], {}, "its compressed data are broken"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_so_is_told(tmp_path, name, data, reading, sentence):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=sentence):
        source = open_source(tmp_path / name, Reading(**reading))[1]
        source.columns()
        rows_of(source)


def test_bytes_that_are_none_of_the_encoding_cost_their_row_alone(tmp_path):
    broken = "a\n1\n".encode("utf-16") + b"\x00\xd8" + "x\n2\n".encode("utf-16-le")  # Half of a pair.
    (tmp_path / "in.csv").write_bytes(broken)
    first, bad, last = rows_of(open_source(tmp_path / "in.csv")[1])
    assert (first.values, last.values) == ({"a": "1"}, {"a": "2"})
    assert str(bad.values) == "the column 'a' is not UTF-16"
    (tmp_path / "in.jsonl").write_bytes(b'{"a": 1}\n{"a": "\x81"}\n')
    first, bad = rows_of(open_source(tmp_path / "in.jsonl", Reading(encoding="cp1252"))[1])
    assert isinstance(bad.values, RowError) and str(bad.values) == "the line is not CP1252"


def test_what_is_read_before_compressed_data_break_is_given(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % n for n in range(50_000)), 1)
    path.write_bytes(whole[: len(whole) // 2])
    read = []
    with pytest.raises(ValueError, match=r"in\.jsonl\.gz cannot be read on, as its compressed data are broken"):
        for chunk in open_source(path)[1].chunks():
            read += chunk
    assert 1000 < len(read) < 50_000
    assert [row.values["a"] for row in read] == list(range(len(read)))


def test_a_plain_file_is_read_directly(tmp_path):
    """Nothing stands between UTF-8 and its reader: it is what most inputs are."""
    (tmp_path / "in.jsonl").write_bytes(b"a\nb\n")
    with open_lines(tmp_path / "in.jsonl") as (lines, raw):
        assert isinstance(lines, TextLines) and lines._file is raw


def test_one_column_without_a_name_is_one_as_pandas_writes_it(tmp_path):
    (tmp_path / "in.csv").write_text("text,\na,1\nb,\nc\nd,4,,\n,,5\n")
    *good, bad = rows_of(open_source(tmp_path / "in.csv")[1])
    expected = [{"text": "a", "": "1"}, {"text": "b", "": ""}, {"text": "c", "": ""}, {"text": "d", "": "4"}]
    assert [row.values for row in good] == expected
    assert str(bad.values) == "the row has 3 fields, but the header has 2"


def test_a_row_that_a_stray_quote_makes_of_many_is_told(tmp_path):
    eaten = '2,"he is 6 ft tall\n' + "".join(f"{n},row {n}\n" for n in range(3, 41)) + '41,the end"\n42,last\n'
    texts = '2,"so\nit is, he said\n\nand, so, on\nit goes"\n'
    cases = {
        "id,text\n1,fine\n" + eaten: "row 2 below the header, has 40 lines, 3 to 42 of the file, which look like rows",
        "id,text\n1,fine\n" + texts: None,
        "text\n" + texts.replace(",", ""): None,
    }
    for number, (content, sentence) in enumerate(cases.items()):
        (tmp_path / f"{number}.csv").write_text(content)
        told = []
        source = open_source(tmp_path / f"{number}.csv", Reading(told=told.append))[1]
        assert all(isinstance(row.values, dict) for row in [*rows_of(source), *rows_of(source)])
        assert [sentence in each for each in told] == [True] * (sentence is not None), "once, however often it is read"


def test_a_quote_without_an_end_names_the_lines_that_it_takes(tmp_path):
    (tmp_path / "in.csv").write_text('id,text\n1,"fine\n2,b\n3,c\n')
    (row,) = rows_of(open_source(tmp_path / "in.csv")[1])
    assert "unexpected end of data in lines 2 to 4 of the file, which are one row if the quotes" in str(row.values)
    (tmp_path / "in.csv").write_text("id,text\n1,a\rb\n2,c\n")
    bad, good = rows_of(open_source(tmp_path / "in.csv")[1])
    assert str(bad.values) == "the row cannot be read: a carriage return stands in it, outside of quotes"
    assert good.values == {"id": "2", "text": "c"}
