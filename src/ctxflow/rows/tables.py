"""What a Python program holds, as rows: paths, and tables of pyarrow, pandas and Hugging Face's datasets.

None of these libraries is imported here unless its object was given. What does not live here: files (readers.py) and
Arrow's formats (arrow_readers.py).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.rows.columns import IN_MAP
from ctxflow.rows.readers import Reading, open_source
from ctxflow.rows.source import CHUNK_ROWS, Row, Table, left_out
from ctxflow.wording import article, short


def open_table(given: Any) -> Table | None:
    """The rows of a table, None for an iterable of values as any other.

    Text is a path, always: of a file, or of a dataset's folder.

    :raises ValueError: for a file or a table that cannot be read, or is not there, saying why.

    >>> open_table(["a", "b"]) is None
    True
    """
    if isinstance(given, (str, os.PathLike)):
        return _of_path(given)
    if _is(given, "pandas", "DataFrame"):
        return _Frame(given)
    if any(_is(given, "pyarrow", name) for name in ("Table", "RecordBatch", "RecordBatchReader")) or _is(
        given, "pyarrow.dataset", "Dataset"
    ):
        from ctxflow.rows.arrow_readers import ArrowTable

        return ArrowTable(given)
    if hasattr(given, "column_names") and (hasattr(given, "features") or isinstance(given, dict)):
        if isinstance(given, dict):
            splits = ", ".join(map(str, given))
            raise ValueError(f"{article(type(given).__name__)} holds several datasets: give one of them ({splits})")
        return _Dataset(given)
    return None


def values_of(given: Any) -> Iterable[Any]:
    """The values of a column, plain ones where it is pyarrow's; of another iterable, what it gives.

    >>> values_of([1, 2])
    [1, 2]
    """
    if _is(given, "pyarrow", "Array") or _is(given, "pyarrow", "ChunkedArray"):
        return _plain(given)
    return given  # type: ignore[no-any-return]


def _plain(array: Any) -> Iterator[Any]:
    for start in range(0, len(array), CHUNK_ROWS):
        yield from array.slice(start, CHUNK_ROWS).to_pylist()


def _is(given: Any, module: str, name: str) -> bool:
    """Whether it is of a class, whose module has been imported if so."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(given, kind)


def _of_path(given: str | os.PathLike[str]) -> Table:
    path = Path(os.fsdecode(given))
    try:
        there = given != "" and path.exists()
    except PermissionError:  # Of a folder on the way to it.
        there = True
    except (OSError, ValueError):  # Too long for a name, or with a byte that no name has.
        there = False
    if not there:
        raise ValueError(
            f"there is no file or folder {short(os.fsdecode(given))}: give the path of one that is there, or a list of "
            "texts if this is one itself"
        )
    return open_source(path, Reading(words=IN_MAP))[1]


class _Held:
    """What tables in memory share."""

    def __init__(self, given: Any) -> None:
        self.name = f"the {type(given).__name__}"
        self._given = given

    def place(self, number: int) -> str:
        """The row."""
        return f"{self.name}, row {number} (from 0)"


class _Frame(_Held):
    """A DataFrame of pandas; its index is no column.

    :raises ValueError: if two of its columns have one name.
    """

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        if not given.columns.is_unique:
            repeated = given.columns[given.columns.duplicated()][0]
            raise ValueError(f"{self.name} has two columns {repeated!r}: rename one")

    def columns(self) -> Sequence[str] | None:
        """Those of the frame."""
        return tuple(self._given.columns)

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Some rows at a time."""
        frame = self._given[list(columns)] if columns else self._given
        for first in range(0, len(frame), CHUNK_ROWS):
            records = frame.iloc[first : first + CHUNK_ROWS].to_dict("records")
            yield [Row(n, values, 0) for n, values in enumerate(records, first) if not left_out(skip, n)]


class _Dataset(_Held):
    """A dataset of Hugging Face's `datasets`, or one that streams."""

    def columns(self) -> Sequence[str] | None:
        """Those that it names; a dataset that streams may not know them."""
        names = self._given.column_names
        return tuple(names) if names else None

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Some rows at a time."""
        given = self._given
        if columns and hasattr(given, "select_columns") and set(columns) <= set(given.column_names or ()):
            given = given.select_columns(list(columns))
        first = 0
        for records in self._records(given):
            yield [Row(n, dict(values), 0) for n, values in enumerate(records, first) if not left_out(skip, n)]
            first += len(records)

    @staticmethod
    def _records(given: Any) -> Iterator[list[Mapping[str, Any]]]:
        if not hasattr(given, "iter"):
            rows = iter(given)
            while records := list(itertools.islice(rows, CHUNK_ROWS)):
                yield records
            return
        for batch in given.iter(batch_size=CHUNK_ROWS):  # Many times as fast as row by row.
            yield [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
