"""A folder of files is one table, unless their names are those of splits."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ctxflow.rows.formats import Reading
from ctxflow.rows.readers import open_source


def texts(source):
    return [row.values["text"] for chunk in source.chunks() for row in chunk]


def write(path, *values):
    """A file of a column "text", as its name says."""
    path.parent.mkdir(exist_ok=True)
    suffix = path.suffixes[0]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, pyarrow.string())}), path)
        return
    lines = {
        ".jsonl": [json.dumps({"text": each}) for each in values],
        ".csv": ["text", *values],
        ".txt": list(values),
    }[suffix]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".txt", ".jsonl.gz", ".csv.gz"])
@pytest.mark.parametrize("names", [("a", "b"), ("2026-01", "2026-02"), ("part-0", "part-1"), ("train-1", "train-2")])
def test_shards_are_one_table_in_the_order_of_their_names(tmp_path, suffix, names):
    write(tmp_path / f"{names[1]}{suffix}", "three", "four")
    write(tmp_path / f"{names[0]}{suffix}", "one", "two")
    (tmp_path / "README.md").write_text("about it")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / f"_about{suffix}").write_text("broken")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    form, source = open_source(tmp_path, Reading("text" if suffix == ".txt" else None))
    assert form == {".parquet": "dataset", ".txt": "text"}.get(suffix, suffix.split(".")[1])
    assert texts(source) == ["one", "two", "three", "four"]
    assert source.fraction() == 1
    assert [path.name for path in source.files] == [f"{name}{suffix}" for name in names]


def test_rows_of_shards_have_numbers_and_places_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a0"}\n\nbroken\n{"text": "a3"}\n\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b0"}\n')
    (tmp_path / "c.jsonl").write_text('\n{"text": "c1"}')
    source = open_source(tmp_path)[1]
    rows = [row for chunk in source.chunks() for row in chunk]
    assert [row.number for row in rows] == [0, 2, 3, 5, 7]
    assert [source.place(row.number) for row in rows] == [
        f"{tmp_path}/a.jsonl, line 1",
        f"{tmp_path}/a.jsonl, line 3",
        f"{tmp_path}/a.jsonl, line 4",
        f"{tmp_path}/b.jsonl, line 1",
        f"{tmp_path}/c.jsonl, line 2",
    ]
    for skip in (b"\1", b"\1\0\1\1\0\1", b"\0\0\0\1\0\0\0\1", b"\1" * 20):
        found = [row.number for chunk in source.chunks(skip) for row in chunk]
        assert found == [row.number for row in rows if row.number >= len(skip) or not skip[row.number]]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".txt"])
def test_files_named_as_splits_are_splits(tmp_path, suffix):
    write(tmp_path / "data" / f"train-00000-of-00002{suffix}", "one")
    write(tmp_path / "data" / f"train-00001-of-00002{suffix}", "two")
    write(tmp_path / "data" / f"test{suffix}", "three")
    assert texts(open_source(tmp_path, Reading(split="train"))[1]) == ["one", "two"]
    assert texts(open_source(tmp_path, Reading(split="test"))[1]) == ["three"]
    for split in (None, "dev"):
        with pytest.raises(ValueError, match="give --split with one of test, train"):
            open_source(tmp_path, Reading(split=split))


def test_what_does_not_go_together_is_told(tmp_path):
    write(tmp_path / "a.csv", "one")
    (tmp_path / "b.csv").write_text("claim,id\n")
    with pytest.raises(ValueError, match=r"a\.csv has the columns 'text', but .*b\.csv has 'claim', 'id'"):
        open_source(tmp_path)
    (tmp_path / "b.csv").unlink()
    with pytest.raises(ValueError, match="are one table, not splits: leave --split out"):
        open_source(tmp_path, Reading(split="a"))
    write(tmp_path / "c.jsonl", "two")
    with pytest.raises(ValueError, match=r"several forms \(csv, jsonl\): name one with --input-format"):
        open_source(tmp_path)
    assert texts(open_source(tmp_path, Reading("jsonl"))[1]) == ["two"]
    write(tmp_path / "p.parquet", "three")
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet has the columns 'text', but .*q\.parquet has 'other'"):
        open_source(tmp_path, Reading("parquet"))
    with pytest.raises(ValueError, match="is of Parquet files: leave --encoding out"):
        open_source(tmp_path, Reading("parquet", encoding="latin-1"))
