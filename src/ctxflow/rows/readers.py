"""Inputs of lines: JSON Lines and CSV; and which reader an input file needs.

A row that cannot be read is an error of its own; reading goes on behind it, and no line, however long, is held
whole beyond a limit. What does not live here: how lines are had of files (files.py), Arrow's formats
(arrow_readers.py), folders (folders.py), what is no file (tables.py), and what a row means (batch/requests.py).
"""

from __future__ import annotations

import csv
import dataclasses
import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.rows.columns import IN_BATCH, Words
from ctxflow.rows.files import (
    FileSource,
    Lines,
    LineSource,
    another_encoding,
    head_of_file,
    open_lines,
    suffix_of,
    undecodable,
)
from ctxflow.rows.source import MAX_ROW_BYTES, Row, RowError, Source, left_out
from ctxflow.wording import counted

FORMATS = ("openai", "jsonl", "csv", "text", "parquet", "dataset")
_SNIFFED_LINES = 100


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an input is to be read, where that is not as it tells itself.

    :ivar form: one of `FORMATS`.
    :ivar split: which part of a dataset's folder.
    :ivar delimiter: what separates the values of CSV.
    :ivar encoding: what text is in.
    :ivar name: what a person calls the input, by default its path; `words`, what to write to have it read otherwise.
    """

    form: str | None = None
    split: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    name: str = ""
    words: Words = IN_BATCH


def open_source(path: str | Path, reading: Reading | None = None) -> tuple[str, Source]:
    """The format of an input and its reader.

    :raises ValueError: for an input that cannot be read, or not again after a restart, saying what to do.
    """
    path, reading = Path(path), reading or Reading()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"the input {path} cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        from ctxflow.rows.folders import open_folder

        return open_folder(path, reading)
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"the input {path} is a pipe or a device, which cannot be read again after a restart: {reading.words.pipe}"
        )
    if reading.split is not None:
        raise ValueError(f"the input {path} is a file, which has no splits: leave --split out")
    if reading.form == "dataset":
        raise ValueError(f"the input {path} is a file, not a dataset's folder")
    return open_file(path, reading)


def open_file(path: Path, reading: Reading) -> tuple[str, Source]:
    """The format of a file and its reader.

    :raises ValueError: for a file that cannot be read so, saying what to do.
    """
    form = reading.form or ("csv" if reading.delimiter is not None else detect(path, reading))
    called = reading.name or f"the input {path}"
    if reading.delimiter is not None and form != "csv":
        raise ValueError(f"{called} is read as {form}, which has no delimiter: leave --delimiter out")
    if form == "parquet":
        if reading.encoding is not None:
            raise ValueError(f"{called} is Parquet, which says its encoding itself: leave --encoding out")
        from ctxflow.rows.arrow_readers import ParquetSource

        return form, ParquetSource([path], reading.name or str(path))
    if form == "csv":
        return form, CsvSource(path, reading.encoding, reading.name, reading.words, reading.delimiter)
    if form == "text":
        from ctxflow.rows.text_lines import TextSource

        return form, TextSource(path, reading.encoding, reading.name, reading.words)
    return form, JsonLinesSource(path, reading.encoding, reading.name, reading.words)


def detect(path: Path, reading: Reading = Reading()) -> str:
    """The format of a file.

    :raises ValueError: if it cannot be told, or is known but not read here.
    """
    called, words = reading.name or f"the input {path}", reading.words
    head = head_of_file(path, 1 << 16)
    suffix = suffix_of(path)
    if head.startswith(b"PAR1") or path.suffix.lower() == ".parquet":
        return "parquet"
    if head.startswith((b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")):
        raise ValueError(f"{called} is compressed, and not by gzip: decompress it first, as with unzip")
    if suffix in (".csv", ".tsv"):
        return "csv"
    if suffix in (".txt", ".text"):
        return "text"
    with open_lines(path, reading.encoding, reading.name, words) as (lines, _):
        try:
            begin = next((line.lstrip() for line in lines if line.strip()), b"")
        except RowError:
            begin = b""
    if begin.startswith(b"[") and (suffix == ".json" or reading.name):
        of = "" if reading.name else f" {path}"
        raise ValueError(f"{called} is a JSON array, not an object a line: jq -c '.[]'{of} makes one")
    if suffix in (".jsonl", ".ndjson", ".json") or begin.startswith(b"{"):
        return "openai" if _is_openai(path, reading) else "jsonl"
    ending = "have its name end in .jsonl, .csv, .tsv, .parquet or .txt (a line is a row)"
    advice = [ending] * (not reading.name) + [words.form] * bool(words.form)
    raise ValueError(f"the format of {called} cannot be told: {', or '.join(advice)}")


def _is_openai(path: Path, reading: Reading) -> bool:
    """Whether the first line that is an object is a request of OpenAI's batch format."""
    for chunk in JsonLinesSource(path, reading.encoding, reading.name, reading.words).chunks():
        for row in chunk:
            if isinstance(row.values, dict):
                return "custom_id" in row.values and isinstance(row.values.get("body"), dict)
            if row.number > _SNIFFED_LINES:
                return False
    return False


class JsonLinesSource(LineSource):
    """A file with a JSON object a line."""

    def _values(self, line: bytes, encoding: str) -> dict[str, Any]:
        try:
            values = json.loads(line.rstrip().decode())
        except (ValueError, RecursionError) as error:
            raise RowError(_json_reason(error, encoding, self._words)) from None
        if type(values) is not dict:
            raise RowError(f"the line is {_JSON_KINDS.get(type(values), 'a number')}, not a JSON object")
        return values


_JSON_KINDS: dict[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def _json_reason(error: Exception, encoding: str, words: Words) -> str:
    if isinstance(error, UnicodeDecodeError):
        return undecodable(error, encoding, words)
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
    """A file of comma-separated values (tab-separated for .tsv), with the columns' names on top.

    :param delimiter: what separates values, if it is another character.
    """

    def __init__(
        self,
        path: Path,
        encoding: str | None = None,
        name: str = "",
        words: Words = IN_BATCH,
        delimiter: str | None = None,
    ) -> None:
        super().__init__(path, encoding, name, words)
        self._delimiter = delimiter or ("\t" if suffix_of(path) == ".tsv" else ",")

    def place(self, number: int) -> str:
        """The record."""
        return f"{self.name}, row {number + 1} below the header"

    def columns(self) -> Sequence[str] | None:
        """Those that the header names; None if there is none."""
        with self._open() as (lines, _):
            return self._columns(self._reader(lines), lines.encoding) or None

    def _reader(self, lines: Lines) -> Iterator[list[str]]:
        csv.field_size_limit(MAX_ROW_BYTES)
        return csv.reader(_Text(lines), delimiter=self._delimiter, strict=True)

    def _rows(self, lines: Lines, skip: bytes) -> Iterator[Row]:
        reader = self._reader(lines)
        columns = self._columns(reader, lines.encoding)
        number = 0
        while columns:
            try:
                fields = next(reader)
            except StopIteration:
                break
            except (csv.Error, RowError) as error:
                if not left_out(skip, number):
                    yield Row(number, RowError(f"the row cannot be read: {error}"), 0)
                number += 1
                continue
            if fields:
                if not left_out(skip, number):
                    yield self._row(number, columns, fields, lines.encoding)
                number += 1
        self.count = number

    def _columns(self, reader: Iterator[list[str]], encoding: str) -> list[str]:
        try:
            columns = next((fields for fields in reader if fields), [])
        except (csv.Error, RowError) as error:
            raise ValueError(f"the header of {self.name} cannot be read: {error}") from None
        for name in columns:
            try:
                name.encode()
            except UnicodeEncodeError:
                shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                raise ValueError(
                    f"the header of {self.name} is not {encoding} ({shown}): {self._words.encoding.format('cp1252')}"
                ) from None
        if repeated := {name for name in columns if columns.count(name) > 1}:
            raise ValueError(f"the header of {self.name} names the column {min(repeated)!r} twice")
        return columns

    def _row(self, number: int, columns: list[str], fields: list[str], encoding: str) -> Row:
        size = sum(map(len, fields))
        if len(fields) != len(columns):
            reason = f"the row has {counted(len(fields), 'field')}, but the header has {len(columns)}"
            return Row(number, RowError(reason), size)
        values: dict[str, Any] = dict(zip(columns, fields, strict=True))
        if not "".join(fields).isascii():
            for name, value in values.items():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    reason = f"the column {name!r} is not {encoding}{another_encoding(encoding, self._words)}"
                    return Row(number, RowError(reason), size)
        return Row(number, values, size)
