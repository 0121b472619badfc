import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest

from ctxflow.rows.formats import Reading
from ctxflow.rows.readers import open_source
from ctxflow.rows.source import RowError


def rows_of(source):
    return [row for chunk in source.chunks() for row in chunk]


def saved_dataset(folder, tables):
    """What `save_to_disk` of Hugging Face's datasets writes."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(tables):05}.arrow" for n in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def table(first, count):
    return pyarrow.table({"text": [f"text {n}" for n in range(first, first + count)]})


def test_parquet(tmp_path):
    path = tmp_path / "in.parquet"
    day = datetime.date(2026, 1, 2)
    pyarrow.parquet.write_table(pyarrow.table({"n": range(2500), "day": [day] * 2500}), path, row_group_size=700)
    form, source = open_source(path)
    rows = rows_of(source)
    assert (form, source.total, source.fraction()) == ("parquet", 2500, 1)
    assert [row.number for row in rows] == list(range(2500))
    assert rows[2400].values == {"n": 2400, "day": day}
    assert source.identity() == open_source(path)[1].identity()
    assert source.place(7) == f"{path}, row 7 (from 0)"


def test_a_string_that_is_not_utf8_costs_its_row_alone(tmp_path):
    path = tmp_path / "in.parquet"
    broken = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), path)
    rows = rows_of(open_source(path)[1])
    assert [row.values for row in (rows[0], rows[2])] == [{"text": "a"}, {"text": "c"}]
    assert isinstance(rows[1].values, RowError)


def test_what_is_no_parquet_is_told(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match="not a Parquet file that can be read"):
        open_source(path)


def test_parquet_that_is_broken_in_the_middle_gives_what_is_before(tmp_path):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(table(0, 2000), path, row_group_size=1000, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    second = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[second : second + 40] = b"\xff" * 40
    path.write_bytes(data)
    read = []
    with pytest.raises(ValueError, match="cannot be read on from row 1000"):
        for chunk in open_source(path)[1].chunks():
            read += chunk
    assert [row.values["text"] for row in read] == [f"text {n}" for n in range(1000)]


def test_a_saved_dataset(tmp_path):
    folder = saved_dataset(tmp_path / "set", [table(0, 5), table(5, 4)])
    form, source = open_source(folder)
    assert form == "dataset"
    assert [(row.number, row.values["text"]) for row in rows_of(source)] == [(n, f"text {n}") for n in range(9)]


def test_splits_of_a_saved_dataset(tmp_path):
    saved_dataset(tmp_path / "train", [table(0, 2)])
    saved_dataset(tmp_path / "test", [table(7, 1)])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="several splits: give --split with one of train, test"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="no split 'dev'"):
        open_source(tmp_path, Reading(split="dev"))
    assert [row.values["text"] for row in rows_of(open_source(tmp_path, Reading(split="test"))[1])] == ["text 7"]


def test_a_dataset_as_on_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    for n in range(2):
        pyarrow.parquet.write_table(table(3 * n, 3), tmp_path / "data" / f"train-{n:05}-of-00002.parquet")
    pyarrow.parquet.write_table(table(9, 1), tmp_path / "data" / "test-00000-of-00001.parquet")
    source = open_source(tmp_path, Reading(split="train"))[1]
    assert source.total == 6
    assert [row.values["text"] for row in rows_of(source)] == [f"text {n}" for n in range(6)]
    with pytest.raises(ValueError, match="several splits"):
        open_source(tmp_path)


def test_a_folder_that_is_no_dataset_is_told(tmp_path):
    with pytest.raises(ValueError, match="is no dataset"):
        open_source(tmp_path)
    (tmp_path / "state.json").write_text("[")
    with pytest.raises(ValueError, match="not the JSON that a dataset has there"):
        open_source(tmp_path)


def test_rows_that_are_skipped_are_left_out(tmp_path):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(table(0, 3000), path)
    source = open_source(path)[1]
    skip = b"\1" * 1000 + b"\0\1" * 300
    chunks = list(source.chunks(skip))
    found = [row.number for chunk in chunks for row in chunk]
    assert all(chunks) and found == [n for n in range(3000) if n >= len(skip) or not skip[n]]
    assert [row.values["text"] for chunk in chunks for row in chunk][:2] == ["text 1000", "text 1002"]
