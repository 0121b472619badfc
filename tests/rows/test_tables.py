"""Tables that a Python program holds: their rows are items, by the columns' names."""

import collections
import datetime
import pathlib
import subprocess
import sys

import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from ctxflow.rows.readers import open_source, open_table
from ctxflow.rows.source import CHUNK_ROWS, RowError
from ctxflow.rows.tables import values_of

COUNT = 2500
COLUMNS = {"n": list(range(COUNT)), "text": [f"text {n}" for n in range(COUNT)]}


class Streamed:
    """What a dataset of Hugging Face's is to those who do not know its class."""

    features = None

    def __init__(self, columns, names=True):
        self._columns = columns
        self.column_names = list(columns) if names else None

    def __iter__(self):
        return (dict(zip(self._columns, row, strict=True)) for row in zip(*self._columns.values(), strict=True))


class Batched(Streamed):
    """One that gives batches, and can leave columns out."""

    def iter(self, batch_size):
        for first in range(0, COUNT, batch_size):
            yield {name: values[first : first + batch_size] for name, values in self._columns.items()}

    def select_columns(self, names):
        return Batched({name: self._columns[name] for name in names})


class Exporting:
    """What a frame of Polars, or a relation of DuckDB, is to those who do not know its class."""

    columns = tuple(COLUMNS)

    def __len__(self):
        return COUNT

    def __iter__(self):
        raise AssertionError("its columns are no rows")

    def __arrow_c_stream__(self, requested_schema=None):
        return table().__arrow_c_stream__(requested_schema)


def table():
    return pyarrow.table(COLUMNS)


def twice():
    return pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])


def parquet_twice(folder):
    pyarrow.parquet.write_table(twice(), folder / "twice.parquet")
    return folder / "twice.parquet"


def parquet(folder):
    pyarrow.parquet.write_table(table(), folder / "in.parquet")
    return folder / "in.parquet"


def saved(folder):
    name = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(name, "wb") as sink, pyarrow.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=700)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return folder


def csv(folder):
    table().to_pandas().to_csv(folder / "in.csv", index=False)
    return folder / "in.csv"


FORMS = {
    "parquet": parquet,
    "parquet, its name": lambda folder: str(parquet(folder)),
    "saved dataset": saved,
    "saved dataset, its name": lambda folder: str(saved(folder)),
    "csv": csv,
    "table": lambda folder: table(),
    "record batch": lambda folder: table().to_batches()[0],
    "reader": lambda folder: table().to_reader(max_chunksize=300),
    "dataset": lambda folder: pyarrow.dataset.dataset(parquet(folder)),
    "dataset in memory": lambda folder: pyarrow.dataset.dataset(table()),
    "frame": lambda folder: pandas.DataFrame(COLUMNS, index=range(7, 7 + COUNT)),
    "exporting": lambda folder: Exporting(),
    "streamed": lambda folder: Streamed(COLUMNS),
    "batched": lambda folder: Batched(COLUMNS),
}


def rows_of(table, **options):
    return [row for chunk in table.chunks(**options) for row in chunk]


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_with_their_columns_as_plain_values(tmp_path, form):
    found = open_table(FORMS[form](tmp_path))
    assert tuple(found.columns()) == ("n", "text")
    rows = rows_of(found)
    assert [row.number for row in rows] == list(range(COUNT))
    kind = str if form == "csv" else int
    assert [row.values for row in rows] == [{"n": kind(n), "text": f"text {n}"} for n in range(COUNT)]
    assert all(type(row.values["n"]) is kind for row in rows)
    assert "row 18" in found.place(17 if form == "csv" else 18)


@pytest.mark.parametrize("form", FORMS)
def test_only_the_columns_that_are_needed(tmp_path, form):
    found = open_table(FORMS[form](tmp_path))
    chunks = list(found.chunks(columns=["text"]))
    assert all(len(chunk) <= CHUNK_ROWS for chunk in chunks)
    assert [row.values["text"] for chunk in chunks for row in chunk] == COLUMNS["text"]
    if form != "csv" and form != "streamed":
        assert "n" not in chunks[0][0].values


def test_a_stream_is_read_as_it_is_asked_for():
    taken = collections.Counter()

    def batches():
        for batch in table().to_batches(max_chunksize=100):
            taken["batches"] += 1
            yield batch

    reader = pyarrow.RecordBatchReader.from_batches(table().schema, batches())
    chunks = open_table(reader).chunks()
    for number in range(1, 5):
        assert len(next(chunks)) == 100
        assert taken["batches"] == number


def test_columns_of_pyarrow_are_plain_values():
    column = pyarrow.chunked_array([[1, 2], [3, None]])
    assert list(values_of(column)) == list(values_of(column.combine_chunks())) == [1, 2, 3, None]
    assert type(next(iter(values_of(column)))) is int
    series = pandas.Series([1, 2])
    assert values_of(series) is series


@pytest.mark.parametrize("given", [b"bytes.parquet", [1], {"a": 1}, range(3), pandas.Series([1]), None])
def test_what_is_no_table_is_none(given):
    assert open_table(given) is None


def test_a_text_that_names_a_folder_is_a_path(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert len(rows_of(open_table(tmp_path.name))) == COUNT


class Several(dict):
    """A DatasetDict."""

    @property
    def column_names(self):
        return {name: dataset.column_names for name, dataset in self.items()}


def test_what_cannot_be_read_is_told_in_a_sentence(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "text.dat").write_text("hello")
    for given, sentence in [
        (tmp_path / "missing.parquet", "there is no file or folder '.*missing"),
        ("missing.csv", "there is no file or folder '.*missing"),
        (tmp_path / "bad.parquet", "is not a Parquet file that can be read"),
        (tmp_path / "text.dat", "format of the input .* cannot be told"),
        (tmp_path / "none", "is no dataset"),
        (pathlib.Path("/dev/null"), "a pipe or a device"),
        (Several(train=Streamed(COLUMNS), test=Streamed(COLUMNS)), r"several datasets: give one of them \(train, test"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "has two columns 'a': rename one"),
        (twice(), "the Table has two columns 'a': rename one"),
        (twice().to_reader(), "the RecordBatchReader has two columns 'a': rename one"),
        (parquet_twice(tmp_path), r"twice\.parquet has two columns 'a': rename one"),
    ]:
        with pytest.raises(ValueError, match=sentence) as caught:
            open_table(given)
        assert "\n" not in str(caught.value)


def test_the_real_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    real = datasets.Dataset.from_dict(COLUMNS)
    real.save_to_disk(str(tmp_path))
    for given in (real, real.to_iterable_dataset(), tmp_path):
        found = open_table(given)
        assert tuple(found.columns()) == ("n", "text")
        assert [row.values["text"] for row in rows_of(found, columns=["text"])] == COLUMNS["text"]
    assert open_table(real["text"]) is None and list(values_of(real["text"])) == COLUMNS["text"]
    with pytest.raises(ValueError, match="give one of them"):
        open_table(datasets.DatasetDict(train=real, test=real))


def test_the_real_polars():
    polars = pytest.importorskip("polars", reason="Polars is not installed")
    found = open_table(polars.DataFrame(COLUMNS))
    assert [row.values["text"] for row in rows_of(found, columns=["text"])] == COLUMNS["text"]
    assert open_table(polars.Series([1, 2])) is None


def test_what_is_missing_in_a_frame_is_none():
    frame = pandas.DataFrame({
        "text": ["a", None, float("nan")],
        "number": [1.5, float("nan"), 2.0],
        "whole": pandas.array([1, None, 3], "Int64"),
        "flag": pandas.array([True, None, False], "boolean"),
        "at": pandas.to_datetime(["2026-01-02", None, "2026-01-03"]),
        "kind": pandas.Categorical(["x", None, "y"]),
        7: ["a", "b", None],
    })  # fmt: skip
    first, second, third = [row.values for row in rows_of(open_table(frame))]
    assert first["text"] == "a" and first["whole"] == 1 and first["at"] == pandas.Timestamp("2026-01-02")
    assert {name: value for name, value in second.items() if value is not None}.keys() == {"number", 7}
    assert second["number"] != second["number"], "NaN is a number's own value"
    assert third["text"] is None and third[7] is None


def test_times_that_python_lacks_are_exact_text():
    far = pyarrow.table({"at": pyarrow.array([3_723_000_000_004, 5_000, None], pyarrow.time64("ns"))})
    found = [row.values["at"] for row in rows_of(open_table(far))]
    assert found == ["01:02:03.000000004", datetime.time(0, 0, 0, 5), None]
    time = pyarrow.time64("ns")
    within = {
        "map": pyarrow.array([[("noon", 43_200_000_000_001), ("none", None)]], pyarrow.map_(pyarrow.string(), time)),
        "list": pyarrow.array([[{"at": 1}]], pyarrow.large_list(pyarrow.struct([("at", time)]))),
        "one of few": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), pyarrow.array([1], time)),
    }
    (row,) = rows_of(open_table(pyarrow.table(within)))
    assert row.values == {
        "map": [("noon", "12:00:00.000000001"), ("none", None)],
        "list": [{"at": "00:00:00.000000001"}],
        "one of few": "00:00:00.000000001",
    }
    until = pyarrow.array([253_402_300_800_000, 0, -62_167_219_200_001], pyarrow.timestamp("ms"))
    found = [row.values["until"] for row in rows_of(open_table(pyarrow.table({"until": until})))]
    assert found == ["10000-01-01T00:00:00.000", datetime.datetime(1970, 1, 1), "-001-12-31T23:59:59.999"]


def test_a_string_that_is_not_utf8_costs_its_row_alone():
    broken = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    rows = rows_of(open_table(pyarrow.table({"text": broken})))
    assert [row.values for row in (rows[0], rows[2])] == [{"text": "a"}, {"text": "c"}]
    assert isinstance(rows[1].values, RowError)


def test_a_streaming_dataset_may_not_know_its_columns():
    found = open_table(Streamed(COLUMNS, names=False))
    assert found.columns() is None
    assert rows_of(found, columns=["n"])[3].values == {"n": 3, "text": "text 3"}


def test_nothing_is_imported_that_was_not_given():
    program = (
        "import sys, ctxflow.mapping, ctxflow.rows.readers as opening, ctxflow.rows.tables as tables\n"
        "opening.open_table([1]); list(tables.values_of(range(3)))\n"
        "print([name for name in ('pandas', 'pyarrow', 'datasets') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout == "[]\n"


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


ANOTHER = 'save it as UTF-8, or map what pandas.read_csv(path, encoding="cp1252") gives'


@pytest.mark.parametrize(
    ("given", "files", "said"),
    [
        (".", {"train.csv": b"a\n1\n", "test.csv": b"a\n2\n"}, 'as datasets.load_dataset(".", split="test") gives it'),
        (
            ".",
            {"dataset_dict.json": b'{"splits": ["train", "test"]}'},
            "give the folder of one of them, such as ./train",
        ),
        (".", {"a.csv": b"a\n1\n", "b.jsonl": b'{"a": 1}\n'}, "put those of one form into a folder of their own"),
        ("in.dat", {"in.dat": b"hello"}, ".parquet or .txt (a line is a row)"),
        ("in.csv", {"in.csv": "id\né".encode("utf-16-be")}, 'pandas.read_csv(path, encoding="utf-16-be") gives'),
        ("in.csv", {"in.csv": b"k\xf6ln,b\n1,2\n"}, ANOTHER),
        ("in.csv", {"in.csv": b"a\nk\xf6ln\n"}, ANOTHER),
        ("in.jsonl", {"in.jsonl": b'{"a": "k\xf6ln"}\n'}, ANOTHER),
        ("in.txt", {"in.txt": b"k\xf6ln\n"}, ANOTHER),
        ("/dev/null", {}, "which cannot be read again after a restart: save it as a file"),
    ],
)
def test_what_cannot_be_read_names_what_its_reader_can_write(tmp_path, monkeypatch, given, files, said):
    """Who maps it has no flags; who runs `ctxflow batch`, nothing else."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, files)
    told = []
    for source in (lambda: open_table(given), lambda: open_source(given)[1]):
        try:
            found = source()
            found.columns()
            told.append(next(str(row.values) for chunk in found.chunks() for row in chunk))
        except ValueError as error:
            told.append(str(error))
    assert told[0].endswith(said) and "--" not in told[0]
    assert ("--" in told[1] or "`ctxflow batch -`" in told[1]) and not told[1].endswith(said)
