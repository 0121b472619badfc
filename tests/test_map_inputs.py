"""All that somebody may give a map: it goes through items, or says in a sentence why not and what to give."""

import array
import collections
import csv
import gzip
import io
import json
import pathlib
import re
from concurrent.futures import Future

import numpy
import pandas
import parsl
import pyarrow
import pytest

from ctxflow import ContextExecutor, batch_app
from ctxflow.map_inputs import inputs_of


@batch_app
def echo(values):
    return [repr(value) for value in values]


@batch_app
def pair(left, right):
    return list(zip(left, right, strict=True))


@pytest.fixture(scope="module", autouse=True)
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=1, log_events=False)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("claims.txt").write_bytes("\ufeffa b\r\n\n c \nüü".encode())
    pathlib.Path("latin.txt").write_bytes(b"fine\nm\xfcde\nfine too\n")
    pathlib.Path("claims.csv").write_text("values,id\na,1\nb,2\n")
    pathlib.Path("claims.tsv").write_text("values\tid\na\t1\n")
    pathlib.Path("claims.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    pathlib.Path("objects.json").write_text('{"x": 1}\n')
    pathlib.Path("list.json").write_text(json.dumps(["a", "b"]))
    pathlib.Path("claims.csv.gz").write_bytes(gzip.compress(b"values\na\n"))
    pathlib.Path("claims.zip").write_bytes(b"PK\3\4...")
    pathlib.Path("notes").write_text("hello\n")
    pathlib.Path("empty").mkdir()
    pathlib.Path("closed.csv").symlink_to("nowhere.csv")
    return tmp_path


def numbers():
    yield from (1, 2)


class Asynchronous:
    def __aiter__(self):
        return self


class ByIndex:
    """Iterable in the old way."""

    def __getitem__(self, index):
        return [7, 8][index]


GOOD = {
    "list": ([1, "a"], ["1", "'a'"], 2),
    "tuple": ((1, None), ["1", "None"], 2),
    "range": (range(3), ["0", "1", "2"], 3),
    "generator": (numbers(), ["1", "2"], None),
    "iterator": (iter([1]), ["1"], None),
    "set": ({5}, ["5"], 1),
    "frozenset": (frozenset([5]), ["5"], 1),
    "keys": ({"a": 1}.keys(), ["'a'"], 1),
    "pairs": ({"a": 1}.items(), ["('a', 1)"], 1),
    "list of texts": (["claims.txt"], ["'claims.txt'"], 1),
    "list of bytes": ([b"x"], ["b'x'"], 1),
    "deque": (collections.deque([1]), ["1"], 1),
    "array": (array.array("i", [1, 2]), ["1", "2"], 2),
    "numpy": (numpy.array([1.5]), [repr(numpy.float64(1.5))], 1),
    "series": (pandas.Series([1]), ["1"], 1),
    "column": (pyarrow.array([1, None]), ["1", "None"], 2),
    "old": (ByIndex(), ["7", "8"], None),
    "csv reader": (csv.reader(["a,b"]), ["['a', 'b']"], None),
    "frame": (pandas.DataFrame({"values": ["a"]}), ["'a'"], 1),
    "table": (pyarrow.table({"values": ["a"]}), ["'a'"], 1),
    "record batch": (pyarrow.record_batch({"values": ["a"]}), ["'a'"], 1),
    "text file": ("claims.txt", ["'a b'", "' c '", "'üü'"], None),
    "text file's path": (pathlib.Path("claims.txt"), ["'a b'", "' c '", "'üü'"], None),
    "numpy's text": (numpy.str_("claims.txt"), ["'a b'", "' c '", "'üü'"], None),
    "Parsl's file": (parsl.File("claims.txt"), ["'a b'", "' c '", "'üü'"], None),
    "csv": ("claims.csv", ["'a'", "'b'"], None),
    "compressed csv": ("claims.csv.gz", ["'a'"], None),
    "csv from here": ("./claims.csv", ["'a'", "'b'"], None),
    "tsv": ("claims.tsv", ["'a'"], None),
    "jsonl": ("claims.jsonl", ["{'x': 1}", "{'x': 2}"], None),
    "json of objects": ("objects.json", ["{'x': 1}"], None),
    "nothing": ([], [], 0),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_a_map_goes_through(folder, kind):
    given, results, count = GOOD[kind]
    assert inputs_of(echo, [given], ()).count == count
    assert list(echo.map(given)) == results


BAD = {
    "missing text": ("cliams.txt", ValueError, "there is no file or folder 'cliams.txt': give the path of one"),
    "missing table": ("nowhere.csv", ValueError, "there is no file or folder 'nowhere.csv'"),
    "missing path": (pathlib.Path("nowhere.parquet"), ValueError, "there is no file or folder 'nowhere.parquet'"),
    "missing folder": ("nowhere/", ValueError, "there is no file or folder 'nowhere/'"),
    "link to nothing": ("closed.csv", ValueError, "there is no file or folder 'closed.csv'"),
    "letters": ("AB", ValueError, "there is no file or folder 'AB': .*, or a list of texts if this is one itself"),
    "a letter": ("A", ValueError, "there is no file or folder 'A'"),
    "no letter": ("", ValueError, "there is no file or folder ''"),
    "prompt": ("Is Paris in France? " * 1000, ValueError, r"there is no file or folder 'Is Paris.*\.\.\..*': give"),
    "null byte": ("a\0b", ValueError, "there is no file or folder"),
    "lines": ("one\ntwo", ValueError, "there is no file or folder"),
    "compressed": ("claims.zip", ValueError, "claims.zip is compressed, and not by gzip: decompress it first"),
    "json array": ("list.json", ValueError, "list.json is a JSON array, not an object a line: jq -c"),
    "unknown": ("notes", ValueError, "the format of the input notes cannot be told: have its name end in .jsonl,"),
    "empty folder": ("empty", ValueError, "empty is no dataset"),
    "device": ("/dev/null", ValueError, "a pipe or a device"),
    "bytes": (b"claims.txt", TypeError, "bytes are one value, not a sequence of items: give a list of them, or a path"),
    "bytearray": (bytearray(b"ab"), TypeError, "bytes are one value"),
    "memoryview": (memoryview(b"ab"), TypeError, "bytes are one value"),
    "dict": ({"a": [1]}, TypeError, r"a dict would give its keys alone: give list\(d\), d.values\(\) or d.items\(\)"),
    "counter": (collections.Counter("ab"), TypeError, "a Counter would give its keys alone"),
    "text in memory": (io.StringIO("a\nb"), TypeError, r"an open file .* give its path, or \(line.rstrip"),
    "bytes in memory": (io.BytesIO(b"a\nb"), TypeError, "an open file"),
    "none": (None, TypeError, "None is no sequence of items .* give a list, a generator, a table or a path"),
    "int": (3, TypeError, "3 is no sequence of items"),
    "object": (object(), TypeError, "<object .* is no sequence of items"),
    "class": (list, TypeError, "is no sequence of items"),
    "function": (len, TypeError, "is no sequence of items"),
    "generator function": (numbers, TypeError, r"numbers is a function that makes a generator: call it, as in numbers"),
    "future": (Future(), TypeError, r"a future is one value to come, .* give its result\(\)"),
    "asynchronous": (Asynchronous(), TypeError, "an? Asynchronous is read with `async for`"),
    "array of no dimension": (numpy.array(3), TypeError, "is no sequence of items .*0-d array"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_a_map_refuses(folder, kind):
    given, error, sentence = BAD[kind]
    with pytest.raises(error, match=sentence) as caught:
        echo.map(given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 350
    with pytest.raises((TypeError, ValueError)):
        pair.map([1], given)


def test_an_open_file_is_refused_by_the_name_of_what_to_give(folder):
    with open("claims.csv") as text, open("claims.csv", "rb") as binary:
        for file in (text, binary):
            with pytest.raises(TypeError, match="would give its lines, header and line ends among them"):
                echo.map(file)


def test_a_set_has_no_order_that_a_later_run_could_go_by(folder):
    with pytest.raises(TypeError, match=re.escape("give sorted(...)")):
        echo.map({1, 2}, resume="results.jsonl")
    assert list(echo.map(sorted({1, 2}), resume="results.jsonl")) == ["1", "2"]
    assert list(echo.map({"b": 1, "a": 2}.keys(), resume="more.jsonl")) == ["'b'", "'a'"]


def test_a_line_that_is_not_utf8_fails_in_its_place(folder):
    good, bad, more = echo.map("latin.txt", on_error="return")
    assert (good, more) == ("'fine'", "'fine too'")
    assert str(bad) == (
        "latin.txt, line 2: the line is not UTF-8: byte 2 is 0xfc; if all of the input is of another encoding, "
        'save it as UTF-8, or map what pandas.read_csv(path, encoding="cp1252") gives'
    )


def test_the_one_column_of_a_text_file_may_be_named(folder):
    assert next(echo.map("claims.txt", columns=["text"])) == "'a b'"
    with pytest.raises(ValueError, match=r"claims.txt has no column 'left', which pair takes: it has 'text'"):
        pair.map("claims.txt")
    with pytest.raises(TypeError, match="a table's rows are whole items: give it alone"):
        pair.map("claims.txt", [1])


def test_a_map_goes_through_the_results_of_another(folder):
    assert list(echo.map(echo.map([1, 2]))) == ["'1'", "'2'"]
    texts = list(echo.map("claims.txt"))
    assert list(pair.map(echo.map([1, 2]), echo.map("claims.txt"))) == list(pair.map(["1", "2"], texts))
    half = echo.map(range(3))
    next(half)
    assert inputs_of(echo, [half], ()).count is None, "of which one is taken"
    assert list(echo.map(half)) == ["'1'", "'2'"]


def test_how_many_there_are_side_by_side():
    assert inputs_of(pair, [range(5), [1, 2]], ()).count == 2
    assert inputs_of(pair, [range(5), numbers()], ()).count is None
