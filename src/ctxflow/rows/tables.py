"""Rows of Arrow's formats, and of tables in memory; a library is imported only where its format or object is given."""

from __future__ import annotations

import abc
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError, InputError
from ctxflow.installing import how_to_install
from ctxflow.rows.source import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    InputFiles,
    Row,
    RowError,
    check_names,
    left_out,
    other_columns,
)


def is_of(given: Any, module: str, name: str) -> bool:
    """Return whether it is of a class, without importing the class's module."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(given, kind)


def values_of(given: Any) -> Iterable[Any]:
    """Return the values of a column, plain ones where it is pyarrow's; of another iterable, what it gives.

    >>> values_of([1, 2])
    [1, 2]
    """
    if is_of(given, "pyarrow", "Array") or is_of(given, "pyarrow", "ChunkedArray"):
        return _plain(given)
    return given  # type: ignore[no-any-return]


def _plain(array: Any) -> Iterator[Any]:
    for start in range(0, len(array), CHUNK_ROWS):
        yield from array.slice(start, CHUNK_ROWS).to_pylist()


class _Held:
    """What tables in memory share."""

    def __init__(self, given: Any) -> None:
        self.name = f"the {type(given).__name__}"
        self._given = given

    def place(self, number: int) -> str:
        """Return the row, for a person."""
        return f"{self.name}, row {number} (from 0)"


def _with_nulls(frame: Any) -> Any:
    """Return a DataFrame with None for what is missing, which pandas has several values for; NaN is a float's own."""
    missing = frame.isna()
    made = {}
    for name in frame.columns[missing.any().to_numpy()]:
        dtype = frame[name].dtype
        if not (type(dtype).__module__.startswith("numpy") and dtype.kind in "fc"):
            made[name] = frame[name].astype(object).where(~missing[name], None)
    frame = frame.copy() if made else frame
    for name, column in made.items():
        frame[name] = column
    return frame


class FrameTable(_Held):
    """A DataFrame of pandas; its index is no column. What is missing is None, but in columns of floats.

    :raises ValueError: if two of its columns have one name.
    """

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        check_names(tuple(given.columns), self.name)

    def columns(self) -> Sequence[str] | None:
        """Return the columns of the frame."""
        return tuple(self._given.columns)

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield some rows at a time."""
        frame = self._given[list(columns)] if columns else self._given
        for first in range(0, len(frame), CHUNK_ROWS):
            records = _with_nulls(frame.iloc[first : first + CHUNK_ROWS]).to_dict("records")
            yield [Row(n, values, 0) for n, values in enumerate(records, first) if not left_out(skip, n)]


class DatasetTable(_Held):
    """A dataset of Hugging Face's `datasets`, or one that streams."""

    def columns(self) -> Sequence[str] | None:
        """Return the columns that it names; a dataset that streams may not know them."""
        names = self._given.column_names
        return tuple(names) if names else None

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield some rows at a time."""
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


def arrow() -> Any:
    """Return pyarrow, with its formats.

    :raises CtxflowError: if it is not installed, saying how to install it.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as missing:
        raise CtxflowError(
            f"this input or output needs pyarrow ({missing}): {how_to_install('pyarrow', extra='batch')}"
        ) from None
    return pyarrow


class _ArrowSource(InputFiles, abc.ABC):
    """Files of record batches, one after the other."""

    def __init__(self, files: Sequence[Path], name: str) -> None:
        arrow()  # If it is missing, that is reported first.
        super().__init__(files, name)
        self._done = 0
        self._ended = False
        self.total = self._count()
        check_names(self.columns() or (), name)

    def _count(self) -> int | None:
        return None

    @abc.abstractmethod
    def _schema(self, file: Path) -> Any: ...

    @abc.abstractmethod
    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]: ...

    def columns(self) -> Sequence[str] | None:
        """Return the columns of the first file."""
        return tuple(self._schema(self.files[0]).names) if self.files else None

    def types(self) -> Mapping[str, Any]:
        """Return the types of the first file's columns."""
        schema = self._schema(self.files[0]) if self.files else ()
        return {field.name: field.type for field in schema}

    def fraction(self) -> float:
        """Return how many of the rows are read; where their number is unknown, 0 before the end."""
        return self._done / self.total if self.total else float(self._ended)

    def place(self, number: int) -> str:
        """Return the row, for a person."""
        return f"{self.name}, row {number} (from 0)"

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows of each record batch."""
        self._done = 0
        for file in self.files:
            try:
                for batch in self._batches(file, columns):
                    for part in _parts(batch):
                        first, self._done = self._done, self._done + part.num_rows
                        skipped = skip[first : self._done]
                        if not any(skipped):
                            yield _rows(part, first)
                        elif not all(skipped) or len(skipped) < part.num_rows:
                            yield [row for row in _rows(part, first) if not left_out(skip, row.number)]
            except (OSError, arrow().ArrowException) as error:
                raise InputError(f"{file} cannot be read on from row {self._done}: {_first_line(error)}") from None
        self._ended = True


def _parts(batch: Any) -> Iterator[Any]:
    """Yield a record batch in pieces that are chunks of rows."""
    for start in range(0, batch.num_rows, CHUNK_ROWS):
        yield batch.slice(start, CHUNK_ROWS)


def _rows(batch: Any, first: int) -> list[Row]:
    size = batch.nbytes // max(1, batch.num_rows)
    if not any(map(_has_nanoseconds, batch.schema.types)):
        try:
            return [Row(first + n, values, size) for n, values in enumerate(batch.to_pylist())]
        except (ValueError, OverflowError, arrow().ArrowException):  # Not UTF-8, or a date beyond Python's.
            pass
    return [_row(batch.slice(n, 1), first + n, size) for n in range(batch.num_rows)]


def _has_nanoseconds(kind: Any) -> bool:
    """Return whether values have times of day as exact as Python's are not, which it would cut in silence."""
    if arrow().types.is_dictionary(kind):
        return _has_nanoseconds(kind.value_type)
    if arrow().types.is_nested(kind):
        return any(_has_nanoseconds(kind.field(n).type) for n in range(kind.num_fields))
    return bool(arrow().types.is_time(kind) and kind.unit == "ns")


def _row(batch: Any, number: int, size: int) -> Row:
    try:
        values = {name: _value(column[0]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        return Row(number, values, size)
    except (ValueError, OverflowError, arrow().ArrowException) as error:
        return Row(number, RowError(f"the row cannot be read: {error}"), size)


def _value(scalar: Any) -> Any:
    """Return a value of Arrow's as Python has it; a time, date or time span that Python has not, as exact text.

    :raises ValueError, OverflowError, pyarrow.ArrowException: if it has no other.
    """
    types, kind = arrow().types, scalar.type
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        return {kind.field(n).name: _value(scalar[n]) for n in range(kind.num_fields)}
    if types.is_dictionary(kind):
        return _value(scalar.value)
    if types.is_map(kind):
        return [tuple(_value(pair).values()) for pair in scalar.values]
    if isinstance(scalar, arrow().ListScalar):
        return [_value(each) for each in scalar.values]
    if types.is_time(kind) and kind.unit == "ns" and scalar.value % 1000:
        seconds, rest = divmod(scalar.value, 10**9)
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest:09}"
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        if types.is_duration(kind):
            return f"{scalar.value} {kind.unit}"
        if not types.is_timestamp(kind) and not types.is_date(kind):
            raise
        import numpy as np

        unit: Any = kind.unit if types.is_timestamp(kind) else "D" if types.is_date32(kind) else "ms"
        return str(np.datetime64(scalar.value, unit)) + ("Z" if getattr(kind, "tz", None) else "")


class ParquetSource(_ArrowSource):
    """Parquet files.

    :raises ValueError: for a file that is not Parquet, or has other columns than the first.
    """

    def _count(self) -> int:
        total, columns = 0, None
        for path in self.files:
            with _parquet(path) as file:
                total += file.metadata.num_rows
                found = file.schema_arrow.names
            columns = found if columns is None else columns
            if sorted(found) != sorted(columns):
                raise InputError(other_columns(self.files[0], columns, path, found))
        return total

    def _schema(self, file: Path) -> Any:
        with _parquet(file) as parquet:
            return parquet.schema_arrow

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        with _parquet(file) as parquet:
            about = parquet.metadata
            size = sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
            rows = max(1, min(CHUNK_ROWS, 8 * CHUNK_BYTES * about.num_rows // max(1, size)))
            yield from parquet.iter_batches(batch_size=rows, use_threads=False, columns=list(columns) or None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]  # Where an error of Arrow's goes on, it is with places in its source.


def _parquet(path: Path) -> Any:
    try:
        return arrow().parquet.ParquetFile(path, pre_buffer=False)
    except (OSError, arrow().ArrowException) as error:
        raise InputError(f"{path} is not a Parquet file that can be read: {_first_line(error)}") from None


class ArrowSource(_ArrowSource):
    """Arrow streams, as datasets are saved."""

    def _schema(self, file: Path) -> Any:
        try:
            with arrow().memory_map(str(file)) as memory, arrow().ipc.open_stream(memory) as stream:
                return stream.schema
        except (OSError, arrow().ArrowException) as error:
            raise InputError(f"{file} is not an Arrow file that can be read: {_first_line(error)}") from None

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        with arrow().memory_map(str(file)) as memory, arrow().ipc.open_stream(memory) as stream:
            for batch in stream:
                yield batch.select([name for name in columns if name in batch.schema.names]) if columns else batch


class ArrowTable(_Held):
    """A table in memory, or what gives record batches: a RecordBatchReader, or a Dataset of pyarrow's.

    :param given: a pyarrow Table, RecordBatch, RecordBatchReader or Dataset.
    :param of: what it was made of, for messages.
    :raises ValueError: if two of its columns have one name.
    """

    def __init__(self, given: Any, of: Any = None) -> None:
        super().__init__(given)
        if of is not None:
            self.name = f"the {type(of).__name__}"
        check_names(given.schema.names, self.name)

    def columns(self) -> Sequence[str] | None:
        """Return the columns of its schema."""
        return tuple(self._given.schema.names)

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows of each record batch."""
        first = 0
        try:
            for batch in self._batches(columns):
                for part in _parts(batch):
                    yield [row for row in _rows(part, first) if not left_out(skip, row.number)]
                    first += part.num_rows
        except (OSError, arrow().ArrowException) as error:
            raise InputError(f"{self.name} cannot be read on from row {first}: {_first_line(error)}") from None

    def _batches(self, columns: Sequence[str]) -> Iterable[Any]:
        given = self._given
        if hasattr(given, "scanner"):  # A Dataset: read as it is asked for, not many batches ahead.
            return given.to_batches(  # type: ignore[no-any-return]
                columns=list(columns) or None,
                batch_size=CHUNK_ROWS,
                batch_readahead=1,
                fragment_readahead=1,
                use_threads=False,
            )
        if isinstance(given, arrow().RecordBatchReader):
            return (batch.select(list(columns)) if columns else batch for batch in given)
        chosen = given.select(list(columns)) if columns else given
        return [chosen] if isinstance(chosen, arrow().RecordBatch) else chosen.to_batches()
