"""A folder of documents: a row a file, and nothing of a folder left out in silence."""

import gzip
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.rows import documents
from ctxflow.rows.documents import text_of_html
from ctxflow.rows.formats import Reading
from ctxflow.rows.readers import open_source, open_table
from ctxflow.rows.source import RowError


def write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def opened(folder, **reading):
    """The form, the texts or errors by their files, and what was told."""
    told = []
    form, source = open_source(folder, Reading(told=told.append, **reading))
    rows = [row for chunk in source.chunks() for row in chunk]
    assert [row.number for row in rows] == list(range(source.total)) and source.fraction() == 1
    found = {}
    for row in rows:
        error = isinstance(row.values, RowError)
        name = os.path.relpath(source.place(row.number), folder) if error else row.values["file"]
        found[name] = str(row.values) if error else row.values["text"]
    return form, found, told


def test_each_document_is_a_row_in_the_order_of_paths(tmp_path):
    write(
        tmp_path, {"b.txt": "B\n\nand more\n", "a.md": "# A", "sub/deep/c.HTML": "<p>C &amp; c</p>", "sub/d.rst": "D"}
    )
    write(tmp_path, {".git/f.txt": "no", "sub/.hidden.md": "no", "_index.md": "\ufeffindex\r\nof\rit", "e.txt": ""})
    assert opened(tmp_path) == (
        "documents",
        {"_index.md": "index\nof\nit", "a.md": "# A", "b.txt": "B\n\nand more\n", "e.txt": "", "sub/d.rst": "D",
         "sub/deep/c.HTML": "C & c"},
        [],
    )  # fmt: skip
    table = open_table(str(tmp_path))
    assert list(table.columns()) == ["file", "text"], "a map reads them, too"


@pytest.mark.parametrize("table", ["authors.csv", "rows.jsonl", "p.parquet", "data/more.tsv"])
def test_a_folder_of_several_kinds_is_refused_with_the_choice(tmp_path, table):
    write(tmp_path, {"report.txt": "one"})
    (tmp_path / table).parent.mkdir(exist_ok=True)
    (tmp_path / table).write_text("text\nx\n")
    form = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}[(tmp_path / table).suffix]
    with pytest.raises(ValueError, match=rf"of several forms \({', '.join(sorted([form, 'documents']))}\): name one"):
        open_source(tmp_path)
    found = opened(tmp_path, form="documents")
    assert found == ("documents", {"report.txt": "one"}, [f"1 file in {tmp_path} is not read: {table}"])
    if form == "csv":
        told = []
        open_source(tmp_path, Reading("csv", told=told.append))
        assert told == [f"1 file in {tmp_path} is not read: report.txt"]


def test_a_folder_of_tables_is_not_searched_below(tmp_path):
    """Below may be what takes long to look through, or what nobody but root may, such as lost+found."""
    write(tmp_path, {"a.csv": "text\nx\n", "b.pdf": b"%PDF", "sub/c.txt": "C", "data/d.png": b""})
    os.symlink(tmp_path / "gone", tmp_path / "sub" / "deep.csv")
    told = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "walk", None)
        form, source = open_source(tmp_path, Reading(told=told.append))
        assert (form, list(source.columns())) == ("csv", ["text"])
    assert told == [f"3 files and folders in {tmp_path} are not read: b.pdf, data/d.png, sub/"]
    (tmp_path / "a.csv").unlink()
    (tmp_path / "r.jsonl").write_text('{"custom_id": "a", "body": {"input": "x"}}')
    (tmp_path / "report.md").write_text("text")
    with pytest.raises(ValueError, match=r"of several forms \(documents, openai\): name one"):
        open_source(tmp_path)


def test_a_folder_that_is_linked_keeps_its_name(tmp_path):
    write(tmp_path, {"b/real/x.txt": "X", "outside/y.txt": "Y"})
    folder = tmp_path / "b"
    for name in ("a", "z", "real/again"):
        os.symlink(tmp_path / "outside", folder / name)
    os.symlink(folder / "real", folder / "early")
    assert opened(folder)[1] == {"a/y.txt": "Y", "real/x.txt": "X"}


def test_texts_that_may_be_lines_are_told(tmp_path):
    write(tmp_path, {"a.txt": "A", "sub/b.txt": "B"})
    said = f"each text file in {tmp_path} is a row; if each of its lines is: name it with --input-format text"
    assert opened(tmp_path)[2] == [said]
    assert opened(tmp_path, form="documents")[2] == []
    (tmp_path / "c.md").write_text("C")
    assert opened(tmp_path)[2] == []


def test_what_says_what_a_table_is_stands_beside_it(tmp_path):
    write(tmp_path, {"README.md": "about", "LICENSE.txt": "MIT", "train.csv": "text\nx\n", "Citation.md": "cite"})
    told = []
    form, source = open_source(tmp_path, Reading(told=told.append))
    assert (form, list(source.columns()), told) == ("csv", ["text"], [])
    (tmp_path / "train.csv").unlink()
    assert opened(tmp_path)[1] == {"Citation.md": "cite", "LICENSE.txt": "MIT", "README.md": "about"}


def test_files_that_are_not_read_are_told(tmp_path):
    write(tmp_path, {"a.txt": "A", "b.pdf": b"%PDF", "sub/c.docx": b"PK", "sub/d.csv": "x\n1\n", "sub/e.png": b""})
    assert opened(tmp_path)[2] == [f"4 files in {tmp_path} are not read: b.pdf, sub/c.docx, sub/d.csv, ..."]


@pytest.mark.parametrize(
    ("name", "data", "reading", "text"),
    [
        ("a.txt", "Köln".encode("utf-8-sig"), {}, "Köln"),
        ("a.md", "Köln".encode("utf-16"), {}, "Köln"),
        ("a.txt", "Köln".encode("cp1252"), {"encoding": "cp1252"}, "Köln"),
        ("a.txt.gz", gzip.compress("Köln\r\n".encode()), {}, "Köln\n"),
        ("a.html", '<meta charset="ISO-8859-1">\u201cKöln\u201d'.encode("cp1252"), {}, "\u201cKöln\u201d"),
        ("a.htm", '<META http-equiv=x content="text/html; charset=koi8-r">Да'.encode("koi8-r"), {}, "Да"),
        ("a.html", '<meta charset="klingon">Köln'.encode(), {}, "Köln"),
        ("a.html", '<meta charset="utf-16">Köln'.encode(), {}, "Köln"),
        ("a.html", '<meta charset="latin-1">Köln'.encode("utf-8-sig"), {}, "Köln"),
    ],
)
def test_marks_encodings_and_ends_of_lines_are_those_of_other_inputs(tmp_path, name, data, reading, text):
    (tmp_path / name).write_bytes(data)
    assert opened(tmp_path, **reading)[1] == {name: text}
    if not name.startswith("a.txt"):
        assert opened(tmp_path / name, **reading)[:2] == ("documents", {name: text}), "also as a file"


def test_a_document_that_cannot_be_read_costs_its_row_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_ROW_BYTES", 100)
    write(tmp_path, {"a.txt": b"\xff\xfe\xfd", "b.txt": b"fine \xe9", "c.txt": "x" * 101, "e.txt": "E"})
    write(tmp_path, {"d.txt.gz": b"\x1f\x8b\x08broken", "f.txt": "f".encode("utf-16-le") * 3})
    found = opened(tmp_path)[1]
    assert found.pop("e.txt") == "E"
    expected = {
        "a.txt": "the file is not UTF-16",
        "b.txt": "the file is not UTF-8: byte 6 is 0xe9; if all of the input is of another encoding, give --encoding",
        "c.txt": "the file is longer than",
        "d.txt.gz": "the file cannot be read",
        "f.txt": "the file seems to be of UTF-16: give --encoding, such as utf-16-le",
    }
    assert found.keys() == expected.keys()
    for name, beginning in expected.items():
        assert found[name].startswith(beginning)


def test_a_link_to_a_folder_above_ends(tmp_path):
    write(tmp_path, {"docs/a.txt": "A", "docs/sub/b.txt": "B"})
    os.symlink(tmp_path / "docs", tmp_path / "docs" / "sub" / "again")
    assert opened(tmp_path / "docs")[1] == {"a.txt": "A", "sub/b.txt": "B"}


def test_flags_of_tables_are_refused(tmp_path):
    write(tmp_path, {"a.txt": "A"})
    for reading, flag in (({"delimiter": ";"}, "--delimiter"), ({"split": "train"}, "--split")):
        with pytest.raises(ValueError, match=f"is of documents, a row each: leave {flag} out"):
            open_source(tmp_path, Reading(**reading))


def test_an_identity_changes_with_names_and_contents(tmp_path):
    write(tmp_path, {"a.txt": "A", "b.txt": "B"})
    known = {open_source(tmp_path)[1].identity()}
    for name, content in (("a.txt", "C"), ("c.txt", "A"), ("a.txt", "AB")):
        (tmp_path / name).write_text(content)
        identity = open_source(tmp_path)[1].identity()
        assert identity not in known
        known.add(identity)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<ul><li>one<li>two</ul>after", "one\ntwo\n\nafter"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><td>c<td>d</table>", "a\tb\nc\td"),
        ("<pre>  x = 1\n    y</pre>", "  x = 1\n    y"),
        ("a<style>p {}</style><script>if (1 < 2) '</p>'</script> b<!-- c --> d", "a b d"),
        ("one\n\n  two <b> three</b>&nbsp;&lt;four&gt;", "one two three <four>"),
        ("<div><div>deep</div></div><p></p><p>next</p>", "deep\n\nnext"),
        ("<svg><text>no</text></svg><p>yes", "yes"),
        ("<svg class='a'/><p>yes<math /> and<svg><svg/>no<svg></svg>no</svg> more", "yes and more"),
        ("<p>a<template/>no</template> b", "a b"),
        ("no tags at all < 3", "no tags at all < 3"),
        ("", ""),
    ],
)
def test_html_is_the_text_that_is_shown(page, text):
    assert text_of_html(page) == text


@pytest.mark.parametrize(
    "unit", ["<a ", "<!--", "<a b='", '<a b="><', "<script>", "</", "&", "<svg></math>", "<![CDATA["]
)
def test_a_broken_page_costs_no_more_than_a_whole_one(unit):
    """In the square of its size, which the limit of a test ends, it would take hours."""
    text_of_html(unit * (200_000 // len(unit)))


@given(st.text(alphabet="<>/!-&;ab p\n\"'=?[]", max_size=60))
def test_any_page_has_a_text(page):
    text_of_html(page)
