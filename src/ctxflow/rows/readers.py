"""Inputs of lines: JSON Lines and CSV; and which reader an input file needs.

A row that cannot be read is an error of its own; reading goes on behind it, and no line, however long, is held
whole beyond a limit. What does not live here: Arrow's formats (arrow_readers.py), what is no file (tables.py), and
what a row means (batch/requests.py).
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ctxflow.rows.source import CHUNK_BYTES, CHUNK_ROWS, MAX_ROW_BYTES, Row, RowError, Source, left_out

FORMATS = ("openai", "jsonl", "csv", "text", "parquet", "dataset")
_SNIFFED_LINES = 100
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14
BOM = b"\xef\xbb\xbf"


def open_source(path: str | Path, form: str | None = None, split: str | None = None) -> tuple[str, Source]:
    """The format of an input and its reader.

    :param form: one of `FORMATS`; by default as its name and its beginning tell.
    :param split: which part of a dataset folder.
    :raises ValueError: for an input that cannot be read, or not again after a restart, saying what to do.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"the input {path} cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode) and form in (None, "dataset"):
        from ctxflow.rows.arrow_readers import open_dataset

        return "dataset", open_dataset(path, split)
    if stat.S_ISDIR(mode):
        raise ValueError(f"the input {path} is a folder, not a file: name a file, or a dataset's folder")
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"the input {path} is a pipe or a device, which cannot be read again after a restart: save it as a file"
        )
    if split is not None:
        raise ValueError(f"the input {path} is a file, which has no splits: leave --split out")
    form = form or detect(path)
    if form == "parquet":
        from ctxflow.rows.arrow_readers import ParquetSource

        return form, ParquetSource([path], str(path))
    if form == "csv":
        return form, CsvSource(path)
    if form == "text":
        from ctxflow.rows.text_lines import TextSource

        return form, TextSource(path)
    if form == "dataset":
        raise ValueError(f"the input {path} is a file, not a dataset's folder")
    return form, JsonLinesSource(path)


def detect(path: Path) -> str:
    """The format of a file.

    :raises ValueError: if it cannot be told, or is known but not read here.
    """
    with opened(path) as file:
        head = file.read(1 << 16)
    suffix = path.suffix.lower()
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")):
        raise ValueError(f"the input {path} is compressed: decompress it first, as with gunzip or unzip")
    if suffix in (".csv", ".tsv"):
        return "csv"
    if suffix in (".txt", ".text"):
        return "text"
    begin = head.removeprefix(BOM).lstrip()
    if begin.startswith(b"[") and suffix == ".json":
        raise ValueError(f"the input {path} is a JSON array, not an object a line: jq -c '.[]' {path} makes one")
    if suffix in (".jsonl", ".ndjson", ".json") or begin.startswith(b"{"):
        return "openai" if _is_openai(path) else "jsonl"
    raise ValueError(
        f"the format of the input {path} cannot be told: have its name end in .jsonl, .csv, .tsv, .parquet or .txt (a "
        "line is a row), or name it with --input-format"
    )


def _is_openai(path: Path) -> bool:
    """Whether the first line that is an object is a request of OpenAI's batch format."""
    for chunk in JsonLinesSource(path).chunks():
        for row in chunk:
            if isinstance(row.values, dict):
                return "custom_id" in row.values and isinstance(row.values.get("body"), dict)
            if row.number > _SNIFFED_LINES:
                return False
    return False


def opened(path: Path) -> BinaryIO:
    """A file to read, as bytes.

    :raises ValueError: if it cannot be read, saying why.
    """
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"the input {path} cannot be read: {error.strerror}") from None


def file_identity(paths: Iterable[Path]) -> str:
    """A digest of files' sizes and of samples spread over them: quick for any size, the same for a copy."""
    found = hashlib.blake2b(digest_size=12)
    for path in paths:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "big"))
            for n in range(_SAMPLES):
                file.seek(n * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


class Lines:
    """The lines of a file, as an iterator that goes on after it has raised `RowError` for too long a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (part := self._file.readline(1 << 20)) and not part.endswith(b"\n"):
                pass
            raise RowError(f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
        return line


class FileSource:
    """What both kinds of files of lines share."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.total: int | None = None
        self.files: Sequence[Path] = [path]
        self._path = path
        self._size = max(1, path.stat().st_size)
        self._read = 0

    def fraction(self) -> float:
        """How much of the file is read."""
        return min(1.0, self._read / self._size)

    def identity(self) -> str:
        """A digest of samples."""
        return file_identity([self._path])

    def types(self) -> Mapping[str, Any]:
        """None: all is text, or what JSON has."""
        return {}

    def _chunked(self, rows: Iterable[Row], file: BinaryIO) -> Iterator[list[Row]]:
        chunk: list[Row] = []
        size = 0
        for row in rows:
            chunk.append(row)
            size += row.size
            if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
                self._read = file.tell()
                yield chunk
                chunk, size = [], 0
        self._read = self._size
        if chunk:
            yield chunk


class JsonLinesSource(FileSource):
    """A file with a JSON object a line, in UTF-8. Blank lines are no rows, but count as lines."""

    def place(self, number: int) -> str:
        """The line."""
        return f"{self.name}, line {number + 1}"

    def columns(self) -> None:
        """Each line has its own."""

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The lines' objects, whole."""
        with opened(self._path) as file:
            yield from self._chunked(self._rows(Lines(file), skip), file)

    @staticmethod
    def _rows(lines: Lines, skip: bytes) -> Iterator[Row]:
        number, skipped = -1, len(skip)
        while True:
            number += 1
            try:
                line = next(lines)
            except StopIteration:
                return
            except RowError as error:
                if not left_out(skip, number):
                    yield Row(number, error, 0)
                continue
            if number < skipped and skip[number]:
                continue
            if number == 0:
                line = line.removeprefix(BOM)
            try:
                values = json.loads(line.rstrip().decode())
            except (ValueError, RecursionError) as error:
                if line.strip():
                    yield Row(number, RowError(_json_reason(error)), len(line))
                continue
            if type(values) is not dict:
                kind = _JSON_KINDS.get(type(values), "a number")
                yield Row(number, RowError(f"the line is {kind}, not a JSON object"), len(line))
                continue
            yield Row(number, values, len(line))


_JSON_KINDS: dict[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _json_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the line is not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}"
    if isinstance(error, json.JSONDecodeError):
        return f"the line is not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "the line's JSON is nested too deeply"
    return f"the line is not JSON that can be read: {str(error).split(';')[0]}"


class _Text:
    """Lines as text for the csv module; what is not UTF-8 becomes surrogates, by which `CsvSource._row` knows it."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines).decode("utf-8", "surrogateescape")


class CsvSource(FileSource):
    """A file of comma-separated values (tab-separated for .tsv), in UTF-8, with the columns' names on top."""

    def place(self, number: int) -> str:
        """The record."""
        return f"{self.name}, row {number + 1} below the header"

    def columns(self) -> Sequence[str] | None:
        """Those that the header names; None if there is none."""
        with opened(self._path) as file:
            return self._columns(self._reader(file)) or None

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The records, whole; all values are strings."""
        with opened(self._path) as file:
            rows = (row for row in self._rows(file) if not left_out(skip, row.number))
            yield from self._chunked(rows, file)

    def _reader(self, file: BinaryIO) -> Iterator[list[str]]:
        if file.read(3) != BOM:
            file.seek(0)
        csv.field_size_limit(MAX_ROW_BYTES)
        delimiter = "\t" if self._path.suffix.lower() == ".tsv" else ","
        return csv.reader(_Text(Lines(file)), delimiter=delimiter, strict=True)

    def _rows(self, file: BinaryIO) -> Iterator[Row]:
        reader = self._reader(file)
        columns = self._columns(reader)
        number = 0
        while columns:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except (csv.Error, RowError) as error:
                yield Row(number, RowError(f"the row cannot be read: {error}"), 0)
                number += 1
                continue
            if fields:
                yield self._row(number, columns, fields)
                number += 1

    def _columns(self, reader: Iterator[list[str]]) -> list[str]:
        try:
            columns = next((fields for fields in reader if fields), [])
        except (csv.Error, RowError) as error:
            raise ValueError(f"the header of {self.name} cannot be read: {error}") from None
        if repeated := {name for name in columns if columns.count(name) > 1}:
            raise ValueError(f"the header of {self.name} names the column {min(repeated)!r} twice")
        return columns

    @staticmethod
    def _row(number: int, columns: list[str], fields: list[str]) -> Row:
        size = sum(map(len, fields))
        if len(fields) != len(columns):
            reason = f"the row has {len(fields)} fields, but the header has {len(columns)}"
            return Row(number, RowError(reason), size)
        values: dict[str, Any] = dict(zip(columns, fields, strict=True))
        if not "".join(fields).isascii():
            for name, value in values.items():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    return Row(number, RowError(f"the column {name!r} is not UTF-8"), size)
        return Row(number, values, size)
