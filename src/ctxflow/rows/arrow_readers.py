"""Inputs of Arrow's formats: Parquet files, the folders of Hugging Face's datasets, tables in memory. Needs pyarrow.

What does not live here: files of lines, and which reader an input needs (readers.py, tables.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install
from ctxflow.rows.columns import other_columns
from ctxflow.rows.files import file_identity
from ctxflow.rows.source import CHUNK_BYTES, CHUNK_ROWS, Row, RowError, left_out

try:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError as missing:
    raise CtxflowError(
        f"this input or output needs pyarrow ({missing}): {how_to_install('pyarrow', extra='batch')}"
    ) from None


class _ArrowSource:
    """Files of record batches, one after the other."""

    def __init__(self, files: Sequence[Path], name: str) -> None:
        self.name = name
        self.files = files
        self._done = 0
        self._ended = False
        self.total: int | None = self._count()

    def _count(self) -> int | None:
        return None

    def _schema(self, file: Path) -> Any:
        raise NotImplementedError

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        raise NotImplementedError

    def columns(self) -> Sequence[str] | None:
        """Those of the first file."""
        return tuple(self._schema(self.files[0]).names) if self.files else None

    def types(self) -> Mapping[str, Any]:
        """Those of the first file's columns."""
        schema = self._schema(self.files[0]) if self.files else ()
        return {field.name: field.type for field in schema}

    def fraction(self) -> float:
        """How many of the rows are read; where their number is unknown, 0 before the end."""
        return self._done / self.total if self.total else float(self._ended)

    def place(self, number: int) -> str:
        """The row."""
        return f"{self.name}, row {number} (from 0)"

    def identity(self) -> str:
        """A digest of samples."""
        return file_identity(self.files)

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The rows of each record batch."""
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
            except (OSError, pyarrow.ArrowException) as error:
                raise ValueError(
                    f"{file} cannot be read on from row {self._done}: {str(error).splitlines()[0]}"
                ) from None
        self._ended = True


def _parts(batch: Any) -> Iterator[Any]:
    """A record batch in pieces that are chunks of rows."""
    for start in range(0, batch.num_rows, CHUNK_ROWS):
        yield batch.slice(start, CHUNK_ROWS)


def _rows(batch: Any, first: int) -> list[Row]:
    size = batch.nbytes // max(1, batch.num_rows)
    try:
        return [Row(first + n, values, size) for n, values in enumerate(batch.to_pylist())]
    except (ValueError, OverflowError, pyarrow.ArrowException):  # Not UTF-8, or a date beyond Python's.
        return [_row(batch.slice(n, 1), first + n, size) for n in range(batch.num_rows)]


def _row(batch: Any, number: int, size: int) -> Row:
    try:
        return Row(number, batch.to_pylist()[0], size)
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        return Row(number, RowError(f"the row cannot be read: {error}"), size)


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
            if set(found) != set(columns):
                raise ValueError(other_columns(self.files[0], columns, path, found))
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


def _parquet(path: Path) -> Any:
    try:
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a Parquet file that can be read: {str(error).splitlines()[0]}") from None


class ArrowSource(_ArrowSource):
    """Arrow streams, as datasets are saved."""

    def _schema(self, file: Path) -> Any:
        try:
            with pyarrow.memory_map(str(file)) as memory, pyarrow.ipc.open_stream(memory) as stream:
                return stream.schema
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{file} is not an Arrow file that can be read: {str(error).splitlines()[0]}") from None

    def _batches(self, file: Path, columns: Sequence[str]) -> Iterator[Any]:
        with pyarrow.memory_map(str(file)) as memory, pyarrow.ipc.open_stream(memory) as stream:
            for batch in stream:
                yield batch.select([name for name in columns if name in batch.schema.names]) if columns else batch


class ArrowTable:
    """A table in memory, or what gives record batches: a RecordBatchReader, or a Dataset of pyarrow's.

    :param given: a pyarrow Table, RecordBatch, RecordBatchReader or Dataset.
    """

    def __init__(self, given: Any) -> None:
        self.name = f"the {type(given).__name__}"
        self._given = given

    def columns(self) -> Sequence[str] | None:
        """Those of its schema."""
        return tuple(self._given.schema.names)

    def place(self, number: int) -> str:
        """The row."""
        return f"{self.name}, row {number} (from 0)"

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The rows of each record batch."""
        first = 0
        try:
            for batch in self._batches(columns):
                for part in _parts(batch):
                    yield [row for row in _rows(part, first) if not left_out(skip, row.number)]
                    first += part.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.name} cannot be read on from row {first}: {str(error).splitlines()[0]}") from None

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
        if isinstance(given, pyarrow.RecordBatchReader):
            return (batch.select(list(columns)) if columns else batch for batch in given)
        chosen = given.select(list(columns)) if columns else given
        return [chosen] if isinstance(chosen, pyarrow.RecordBatch) else chosen.to_batches()
