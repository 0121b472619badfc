"""Parquet from a finished job's lines: it has no form in which rows could be appended, so it is made at the end.

Needs pyarrow. What does not live here: the lines (records.py).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install

_ROWS = 5000


def publish_parquet(rows: Path, output: Path, embeddings: bool = False) -> None:
    """Write a file of JSON lines as Parquet, at once or not at all, holding some thousand rows at a time.

    A column whose values have no common type becomes text: the values' JSON.

    :param embeddings: whether the column "embedding" is to be of 32-bit floats.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CtxflowError(f"Parquet needs pyarrow ({error}): {how_to_install('pyarrow', extra='batch')}") from None
    types: dict[str, Any] = {}
    for records in _records(rows):
        for name in dict.fromkeys(itertools.chain.from_iterable(records)):
            types[name] = _common(types.get(name), [record.get(name) for record in records])
    if embeddings and "embedding" in types:
        types["embedding"] = pyarrow.list_(pyarrow.float32())
    schema = pyarrow.schema([(name, pyarrow.string() if kind is _MIXED else kind) for name, kind in types.items()])
    mixed = [name for name, kind in types.items() if kind is _MIXED]
    part = output.with_name(output.name + ".part")
    with pyarrow.parquet.ParquetWriter(part, schema) as writer:
        for records in _records(rows):
            for record in records:
                for name in mixed:
                    if record.get(name) is not None:
                        record[name] = json.dumps(record[name])
            writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))
    os.replace(part, output)


_MIXED = object()


def _common(known: Any, values: list[Any]) -> Any:
    """The type of a column, given that of earlier rows: `_MIXED` where there is none."""
    import pyarrow

    if known is _MIXED:
        return known
    try:
        found = pyarrow.array(values).type
        if pyarrow.types.is_struct(found) and not found.num_fields:
            return _MIXED  # Parquet has no empty objects.
        if known is None:
            return found
        fields = [pyarrow.schema([("", kind)]) for kind in (known, found)]
        return pyarrow.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pyarrow.ArrowException, OverflowError):
        return _MIXED


def _records(path: Path) -> Iterator[list[dict[str, Any]]]:
    with open(path, "rb") as file:
        while records := [json.loads(line) for line in itertools.islice(file, _ROWS)]:
            yield records
