"""Maps over tables: rows become an app's parameters, lazily, and a bad one fails in its place."""

import json

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from ctxflow import ContextExecutor, batch_app, context


@context
def offset(value):
    return value


@batch_app(offset(100))
def add(base, n, other, *, times=1):
    return [times * (base + a + b) for a, b in zip(n, other, strict=True)]


@batch_app
def upper(text):
    return [each.upper() for each in text]


@batch_app
def widths(rows):
    return [sorted(row) for row in rows]


@batch_app
def anything(*lists):
    return list(zip(*lists, strict=True))


@pytest.fixture(scope="module", autouse=True)
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=1, log_events=False)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


TABLE = pyarrow.table({"text": ["a", "b"], "other": [10, 20], "n": [1, 2]})


@pytest.mark.parametrize("given", [TABLE, TABLE.to_pandas()], ids=["pyarrow", "pandas"])
def test_columns_go_to_the_parameters_of_their_names(given):
    assert list(add.map(given)) == [111, 122]
    assert list(add.map(given, times=2)) == [222, 244]
    assert list(add.map(given, columns=["n", "n"])) == [102, 104]
    assert list(upper.map(given)) == ["A", "B"], "a single one gets the column of its name"
    assert list(widths.map(given)) == [["n", "other", "text"]] * 2, "or the whole row, where there is none"
    assert list(widths.map(given, columns="text")) == [["a"], ["b"]]
    assert list(anything.map(given, columns=["n", "text", "other"])) == [(1, "a", 10), (2, "b", 20)]


def test_columns_side_by_side():
    assert list(add.map(TABLE["n"], pandas.Series([5, 6]))) == [106, 108]
    assert list(add.map(TABLE["n"], [5, 6])) == [106, 108]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_bad_row_fails_in_its_place_and_the_others_run(tmp_path, order, resume):
    lines = [json.dumps({"text": f"t{n}"}) for n in range(9)]
    lines[2], lines[5], lines[8] = "broken", "{}", "[1]"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    more = {"resume": tmp_path / "out.jsonl"} if resume else {}
    for _ in range(2):
        found = upper.map(tmp_path / "in.jsonl", columns=["text"], on_error="return", order=order, **more)
        results = dict(enumerate(found) if order == "input" else found)
        assert sorted(results) == list(range(9))
        errors = {n: str(result) for n, result in results.items() if isinstance(result, ValueError)}
        assert {n: results[n] for n in set(results) - set(errors)} == {n: f"T{n}" for n in range(9) if n % 3 != 2}
        assert errors == {
            2: f"{tmp_path}/in.jsonl, line 3: the line is not JSON: Expecting value at column 1",
            5: f"{tmp_path}/in.jsonl, line 6: the row has no 'text': it has nothing",
            8: f"{tmp_path}/in.jsonl, line 9: the line is a list, not a JSON object",
        }
    results = upper.map(tmp_path / "in.jsonl", columns="text")
    assert [next(results), next(results)] == ["T0", "T1"]
    with pytest.raises(ValueError, match="line 3"):
        next(results)


def test_a_table_that_was_begun_goes_on(tmp_path):
    pyarrow.parquet.write_table(TABLE, tmp_path / "in.parquet")
    more = {"resume": tmp_path / "out.jsonl"}
    assert list(add.map(tmp_path / "in.parquet", **more)) == [111, 122]
    before = (tmp_path / "out.jsonl").read_bytes()
    for given in (tmp_path / "in.parquet", TABLE, TABLE.to_pandas(), TABLE.to_reader()):
        assert list(add.map(given, **more)) == [111, 122]
    assert (tmp_path / "out.jsonl").read_bytes() == before, "the same items, whatever they are read from"


def test_a_stream_is_read_no_further_than_the_window_and_a_batch():
    taken = []

    def batches():
        for first in range(0, 100_000, 50):
            taken.append(first)
            yield pyarrow.record_batch({"text": [f"t{n}" for n in range(first, first + 50)]})

    reader = pyarrow.RecordBatchReader.from_batches(pyarrow.schema([("text", pyarrow.string())]), batches())
    results = upper.map(reader, window=100)
    for n in range(500):
        assert next(results) == f"T{n}"
        assert 50 * len(taken) <= n + 1 + 100 + 50
    results.close()


@batch_app
def whole(rows):
    return [repr(row) for row in rows]


def tables_of(folder, columns):
    """The same columns as each kind of table that a map reads, but JSON Lines, whose rows have their own."""
    table = pyarrow.table(columns)
    table.to_pandas().to_csv(folder / "in.csv", index=False)
    pyarrow.parquet.write_table(table, folder / "in.parquet")
    (folder / "shards").mkdir(exist_ok=True)
    table.to_pandas().to_csv(folder / "shards" / "a.csv", index=False)
    return [folder / "in.csv", folder / "in.parquet", folder / "shards", table, table.to_pandas()]


def test_what_an_app_of_one_parameter_gets_of_each_kind_of_table(tmp_path):
    for given in tables_of(tmp_path, {"claim": ["a", "b"]}):
        assert list(upper.map(given)) == ["A", "B"], "the values of the only column"
        assert list(whole.map(given)) == ["'a'", "'b'"]
        assert list(whole.map(given, columns="*")) == ["{'claim': 'a'}", "{'claim': 'b'}"]
    for given in tables_of(tmp_path, {"claim": ["a"], "text": ["b"]}):
        assert list(upper.map(given, columns=["text"])) == ["B"]
        assert list(whole.map(given)) == ["{'claim': 'a', 'text': 'b'}"]
        with pytest.raises(
            ValueError, match=r"no column 'texts', .*it has 'claim', 'text' \(did you mean 'text'\?\)"
        ) as told:
            unnamed.map(given)
        assert 'give columns=["NAME"] to take another, or columns="*" for whole rows' in str(told.value)


def test_a_header_of_another_delimiter_is_told(tmp_path):
    (tmp_path / "in.csv").write_text("id;text\n1;a\n")
    with pytest.raises(
        ValueError, match=r"which ';' seems to separate: read it with pandas\.read_csv\(path, sep=';'\)"
    ):
        unnamed.map(tmp_path / "in.csv")


@batch_app
def unnamed(texts):
    return texts


def test_wrong_use_says_what_to_write(tmp_path):
    pyarrow.parquet.write_table(TABLE, tmp_path / "in.parquet")
    frame = TABLE.to_pandas()
    for error, sentence, inputs, options in [
        (ValueError, "has no column 'other', which add takes: it has 'n'; give columns=", [frame[["n"]]], {}),
        (ValueError, "in.parquet has no column 'm': it has", [tmp_path / "in.parquet"], {"columns": ["m"]}),
        (TypeError, r"add takes 2 values an item \(n, other\), but got 1", [frame], {"columns": ["n"]}),
        (TypeError, "a table's rows are whole items: give it alone", [frame, [1]], {}),
        (TypeError, "columns= names those of a table: leave it out", [[1], [2]], {"columns": ["n"]}),
        (TypeError, r"anything takes any number of values an item \(\*lists\), but got none: give", [frame], {}),
    ]:
        app = upper if "upper" in sentence else anything if "anything" in sentence else add
        with pytest.raises(error, match=sentence) as caught:
            app.map(*inputs, **options)
        assert "\n" not in str(caught.value)
