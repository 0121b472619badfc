import json

import pyarrow
import pyarrow.parquet
import pytest

from ctxflow.batch import publish
from ctxflow.batch.publish import publish_parquet


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
