"""Find the reader that a file, a folder of files or an object of a Python program needs."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.errors import InputError, article, counted, short
from ctxflow.rows.documents import SUFFIXES, DocumentSource, files_below, is_document
from ctxflow.rows.formats import (
    CsvSource,
    FileSource,
    JsonLinesSource,
    Reading,
    TextSource,
    decompressed,
    head_of,
    open_lines,
)
from ctxflow.rows.source import (
    IN_MAP,
    InputFiles,
    Row,
    RowError,
    Source,
    Table,
    other_columns,
    suffix_of,
)
from ctxflow.rows.tables import ArrowSource, ArrowTable, DatasetTable, FrameTable, ParquetSource, arrow, is_of

logger = logging.getLogger("ctxflow")

_SNIFFED_LINES = 100


def open_source(path: str | Path, reading: Reading | None = None) -> tuple[str, Source]:
    """Return the format of an input and its reader.

    :raises ValueError: for an input that cannot be read, or not again after a restart, saying what to do.
    """
    path, reading = Path(path), reading or Reading()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"the input {path} cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return open_folder(path, reading)
    if not stat.S_ISREG(mode):
        raise InputError(
            f"the input {path} is a pipe or a device, which cannot be read again after a restart: {reading.words.pipe}"
        )
    if reading.split is not None:
        raise InputError(f"the input {path} is a file, which has no splits: leave --split out")
    if reading.form == "dataset":
        raise InputError(f"the input {path} is a file, not a dataset's folder")
    return open_file(path, reading)


def open_file(path: Path, reading: Reading) -> tuple[str, Any]:
    """Return the format of a file and its reader.

    :raises ValueError: for a file that cannot be read so, saying what to do.
    """
    form = reading.form or ("csv" if reading.delimiter is not None else detect(path, reading))
    called = reading.called(path)
    if reading.delimiter is not None and form != "csv":
        raise InputError(f"{called} is read as {form}, which has no delimiter: leave --delimiter out")
    if form == "parquet":
        if reading.encoding is not None:
            raise InputError(f"{called} is Parquet, which says its encoding itself: leave --encoding out")
        return form, ParquetSource([path], reading.name or str(path))
    if form == "csv":
        return form, CsvSource(path, reading)
    if form == "documents":
        return form, DocumentSource([path], path.parent, reading)
    return form, (TextSource if form == "text" else JsonLinesSource)(path, reading)


def detect(path: Path, reading: Reading) -> str:
    """Return the format of a file.

    :raises ValueError: if it cannot be told, or is known but not read here.
    """
    called, words = reading.called(path), reading.words
    with decompressed(path) as (data, _):
        head = head_of(data, 1 << 16, called)
    suffix = suffix_of(path)
    if head.startswith(b"PAR1") or path.suffix.lower() == ".parquet":
        return "parquet"
    if head.startswith((b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")):
        raise InputError(f"{called} is compressed, and not by gzip: decompress it first, as with unzip")
    if suffix in (".csv", ".tsv"):
        return "csv"
    if suffix in (".txt", ".text"):
        return "text"
    if suffix in SUFFIXES:
        return "documents"
    with open_lines(path, reading) as (lines, _):
        try:
            begin = next((line.lstrip() for line in lines if line.strip()), b"")
        except RowError:
            begin = b""
    if begin.startswith(b"[") and (suffix == ".json" or reading.name):
        of = "" if reading.name else f" {path}"
        raise InputError(f"{called} is a JSON array, not an object a line: jq -c '.[]'{of} makes one")
    if suffix in (".jsonl", ".ndjson", ".json") or begin.startswith(b"{"):
        return "openai" if _is_openai(path, reading) else "jsonl"
    ending = "have its name end in .jsonl, .csv, .tsv, .md, .html, .parquet or .txt (a line is a row)"
    advice = [ending] * (not reading.name) + [words.form] * bool(words.form)
    raise InputError(f"the format of {called} cannot be told: {', or '.join(advice)}")


def _is_openai(path: Path, reading: Reading) -> bool:
    """Return whether the first line that is an object is a request of OpenAI's batch format."""
    for row in itertools.chain.from_iterable(JsonLinesSource(path, reading).chunks()):
        if isinstance(row.values, dict):
            return "custom_id" in row.values and isinstance(row.values.get("body"), dict)
        if row.number > _SNIFFED_LINES:
            break
    return False


_OF_ARROW = (
    ("pyarrow", "Table"), ("pyarrow", "RecordBatch"), ("pyarrow", "RecordBatchReader"), ("pyarrow.dataset", "Dataset"),
)  # fmt: skip


def open_table(given: Any) -> Table | None:
    """Return the rows of a table, None for an iterable of values as any other.

    Text is a path, always: of a file, or of a dataset's folder.

    :raises ValueError: for a file or a table that cannot be read, or is not there, saying why.

    >>> open_table(["a", "b"]) is None
    True
    """
    if isinstance(given, (str, os.PathLike)):
        return _of_path(given)
    if is_of(given, "pandas", "DataFrame"):
        return FrameTable(given)
    if any(is_of(given, *each) for each in _OF_ARROW):
        return ArrowTable(given)
    if hasattr(given, "column_names") and (hasattr(given, "features") or isinstance(given, dict)):
        if isinstance(given, dict):
            splits = ", ".join(map(str, given))
            raise InputError(f"{article(type(given).__name__)} holds several datasets: give one of them ({splits})")
        return DatasetTable(given)
    if hasattr(given, "__arrow_c_stream__") and hasattr(given, "columns"):  # Polars, DuckDB and others; no column.
        return ArrowTable(arrow().RecordBatchReader.from_stream(given), given)
    return None


def _of_path(given: str | os.PathLike[str]) -> Table:
    path = Path(os.fsdecode(given))
    try:
        there = given != "" and path.exists()
    except PermissionError:  # Of a folder on the way to it.
        there = True
    except (OSError, ValueError):  # Too long for a name, or with a byte that no name has.
        there = False
    if not there:
        raise InputError(
            f"there is no file or folder {short(os.fsdecode(given))}: give the path of one that is there, or a list of "
            "texts if this is one itself"
        )
    return open_source(path, Reading(words=IN_MAP, told=logger.warning))[1]


_KINDS = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".txt": "text",
    ".text": "text",
}  # fmt: skip
_OF_FORM = {"dataset": "parquet", "openai": "jsonl"}
_SHARD = re.compile(r"(.+)-\d+-of-\d+")
_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|dataset_infos)\b", re.IGNORECASE
)


def open_folder(folder: Path, reading: Reading) -> tuple[str, Source]:
    """Return the format of a folder and its reader.

    A dataset that `save_to_disk` made; or files of Parquet, JSON Lines or CSV, there or in its folder `data`; or
    documents, there and in all folders below, a row each. Tables are one table, in the order of their names, unless
    these are those of splits: `test.jsonl`, `train-00000-of-00002.parquet`. So are lines of text, where their format is
    named or their names are of splits. Files that are not read are reported, except those that describe the others.

    :raises ValueError: if it is none, its files are of several kinds, it has several splits and none is named, or its
        files do not go together.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = [str(each) for each in _json(folder / "dataset_dict.json").get("splits", [])]
        split = _chosen(folder, splits, reading.split, reading.words.saved)
        return open_folder(folder / split, dataclasses.replace(reading, split=None))
    saved = (folder / "state.json").is_file()
    kind, files = ("arrow", []) if saved else _files_of(folder, reading)
    if kind in ("arrow", "parquet"):
        for flag, given in (("--delimiter", reading.delimiter), ("--encoding", reading.encoding)):
            if given is not None:
                raise InputError(f"the input {folder} is of {kind.capitalize()} files: leave {flag} out")
        if saved:
            if reading.split is not None:
                raise InputError(f"the dataset {folder} has no splits: leave --split out")
            listed = _json(folder / "state.json").get("_data_files", [])
            return "dataset", ArrowSource([folder / str(file["filename"]) for file in listed], str(folder))
        return "dataset", ParquetSource(_of_split(folder, files, reading), str(folder))
    if kind == "documents":
        for flag, given in (("--delimiter", reading.delimiter), ("--split", reading.split)):
            if given is not None:
                raise InputError(f"the input {folder} is of documents, a row each: leave {flag} out")
        return kind, DocumentSource(files, folder, reading)
    form = None if kind == "jsonl" and reading.form is None else reading.form or kind
    of_file = dataclasses.replace(reading, form=form, split=None)
    parts = [open_file(file, of_file) for file in _of_split(folder, files, reading)]
    if len(forms := sorted({form for form, _ in parts})) > 1:
        raise InputError(f"the files of {folder} are of several forms ({', '.join(forms)}): {reading.words.forms}")
    return forms[0], Shards([source for _, source in parts], str(folder))


def _files_of(folder: Path, reading: Reading) -> tuple[str, list[Path]]:
    """Return the kind of the files that are the folder's rows, and these files."""
    form = reading.form
    places = [_entries(place) for place in (folder, folder / "data") if place.is_dir()]
    by_kind = next(filter(None, (_tables_in(entries, form) for entries in places)), {})
    every = [each for entries in places for each in entries if each != folder / "data"]
    if form in (None, "documents"):
        if by_kind:
            tables = set(by_kind.get("text", ()))
            documents = [each for each in every if is_document(each) and not _ABOUT.match(each.name)]
            documents = [each for each in documents if each not in tables and each.is_file()]
        else:  # Documents are in the folders below, too.
            every = files_below(folder)
            documents = [file for file in every if is_document(file)]
        by_kind.update({"documents": documents} if documents else {})
    if len(by_kind) > 1:
        found = [detect(files[0], reading) if kind == "jsonl" else kind for kind, files in by_kind.items()]
        forms = ", ".join(sorted(found))
        raise InputError(f"the folder {folder} has files of several forms ({forms}): {reading.words.forms}")
    for kind, files in by_kind.items():
        others = {each for each in every if not each.name.startswith("_") or is_document(each)}
        _tell_of_others(folder, sorted(others.difference(files)), reading)
        texts = kind == "documents" and all(_KINDS.get(suffix_of(each)) == "text" for each in every)
        if texts and form is None and reading.words.form:
            reading.told(f"each text file in {folder} is a row; if each of its lines is: {reading.words.form} text")
        return kind, files if kind == "documents" else [file for file in files if file.stat().st_size] or files
    raise InputError(
        f"{folder} is no dataset: it has neither state.json (save_to_disk) nor files of "
        + (form if form is not None else "Parquet, JSON Lines, CSV or text")
    )


def _entries(place: Path) -> list[Path]:
    try:
        return sorted(each for each in place.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise InputError(f"the folder {place} cannot be read: {error.strerror}") from None


def _tables_in(entries: Sequence[Path], form: str | None) -> dict[str, list[Path]]:
    """Return by kind those of a folder's entries that are tables, of that form if one is named.

    Texts are tables of lines only where that is said, or all of them are called as splits are.
    """
    by_kind: dict[str, list[Path]] = {}
    for each in entries:
        if suffix_of(each) in _KINDS and not each.name.startswith("_") and each.is_file():
            by_kind.setdefault(_KINDS[suffix_of(each)], []).append(each)
    if form is not None:
        return {kind: files for kind, files in by_kind.items() if kind == _OF_FORM.get(form, form)}
    texts = [file for file in by_kind.pop("text", ()) if not _ABOUT.match(file.name)]
    if texts and all(map(_split_of, texts)):
        by_kind["text"] = texts
    return by_kind


def _tell_of_others(folder: Path, others: Sequence[Path], reading: Reading) -> None:
    others = [each for each in others if not _ABOUT.match(each.name)]
    if not others:
        return
    shown = [f"{each.relative_to(folder)}{'/' * each.is_dir()}" for each in others]
    names = ", ".join(shown[:3]) + ", ..." * (len(shown) > 3)
    folders = sum(name.endswith("/") for name in shown)
    what = "file" if not folders else "folder" if folders == len(shown) else "files and folder"
    reading.told(f"{counted(len(others), what)} in {folder} {'is' if len(others) == 1 else 'are'} not read: {names}")


def _of_split(folder: Path, files: Sequence[Path], reading: Reading) -> list[Path]:
    """Return the files of the split that is asked for; all of them, if their names are not those of splits."""
    split = reading.split
    names = [_split_of(file) for file in files]
    if not any(names):
        if split is not None:
            raise InputError(f"the files of {folder} are one table, not splits: leave --split out")
        return list(files)
    named = [name or file.name.partition(".")[0] for name, file in zip(names, files, strict=True)]
    chosen = _chosen(folder, sorted(set(named)), split, reading.words.split)
    return [file for name, file in zip(named, files, strict=True) if name == chosen]


def _split_of(file: Path) -> str | None:
    """Return the split that a file is a part of by its name.

    >>> _split_of(Path("train-00000-of-00002.parquet")), _split_of(Path("test.csv.gz")), _split_of(Path("b.parquet"))
    ('train', 'test', None)
    """
    stem = file.name.partition(".")[0]
    shard = _SHARD.fullmatch(stem)
    first = re.split(r"[-_]", stem, maxsplit=1)[0]
    return shard[1] if shard else first if first.lower() in _SPLITS else None


def _chosen(folder: Path, splits: Sequence[str], split: str | None, advice: str) -> str:
    """Return the split that is asked for, or the only one; `advice` says how to ask for one of them."""
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        what = "has several splits" if split is None else f"has no split {short(split)}"
        given = {"splits": ", ".join(splits), "folder": folder, "first": next(iter(splits), "train")}
        raise InputError(f"the dataset {folder} {what}: {advice.format(**given)}")
    return split


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not the JSON that a dataset has there")
    return found


class Shards(InputFiles):
    """A table in several files of lines, one after the other.

    :raises ValueError: if they do not have the same columns.
    """

    def __init__(self, parts: Sequence[FileSource], name: str) -> None:
        super().__init__([file for part in parts for file in part.files], name)
        self._parts = parts
        self._sizes = [max(1, file.stat().st_size) for file in self.files]
        self._begins = [0]  # The numbers of the first rows of those that were read, and of the next.
        headers = [part.columns() for part in parts]
        for file, found in zip(self.files, headers, strict=True):
            if found is not None and set(found) != set(headers[0] or ()):
                raise InputError(other_columns(self.files[0], headers[0] or (), file, found))

    def columns(self) -> Sequence[str] | None:
        """Return the columns of the first."""
        return self._parts[0].columns()

    def fraction(self) -> float:
        """Return how much of the files is read."""
        read = sum(part.fraction() * size for part, size in zip(self._parts, self._sizes, strict=True))
        return min(1.0, read / sum(self._sizes))

    def place(self, number: int) -> str:
        """Return the file, and the place in it."""
        n = min(bisect.bisect_right(self._begins, number), len(self._parts)) - 1
        return self._parts[n].place(number - self._begins[n])

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the rows of one file after the other."""
        begin = 0
        self._begins = [0]
        for part in self._parts:
            for chunk in part.chunks(skip[begin:] if begin < len(skip) else b""):
                for row in chunk:
                    row.number += begin
                yield chunk
            begin += part.count
            self._begins.append(begin)
