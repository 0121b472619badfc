"""Folders as inputs: datasets of Hugging Face's, and tables in several files.

What does not live here: what is in a file (readers.py, arrow_readers.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.rows.columns import other_columns
from ctxflow.rows.files import file_identity, suffix_of
from ctxflow.rows.readers import Reading, open_file
from ctxflow.rows.source import Row, Source

_KINDS = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".txt": "text",
    ".text": "text",
}  # fmt: skip
_OF_FORM = {"dataset": "parquet", "openai": "jsonl"}
_SHARD = re.compile(r"(.+)-\d+-of-\d+")
_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}


def open_folder(folder: Path, reading: Reading) -> tuple[str, Source]:
    """The format of a folder and its reader.

    A dataset that `save_to_disk` made; or files of Parquet, JSON Lines, CSV or text, there or in its folder `data`.
    They are one table, in the order of their names, unless these are those of splits: `test.jsonl`,
    `train-00000-of-00002.parquet`.

    :raises ValueError: if it is none, has several splits and none is named, or its files do not go together.
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
                raise ValueError(f"the input {folder} is of {kind.capitalize()} files: leave {flag} out")
        from ctxflow.rows.arrow_readers import ArrowSource, ParquetSource

        if saved:
            if reading.split is not None:
                raise ValueError(f"the dataset {folder} has no splits: leave --split out")
            listed = _json(folder / "state.json").get("_data_files", [])
            return "dataset", ArrowSource([folder / str(file["filename"]) for file in listed], str(folder))
        return "dataset", ParquetSource(_of_split(folder, files, reading), str(folder))
    form = None if kind == "jsonl" and reading.form is None else reading.form or kind
    parts = [
        open_file(file, dataclasses.replace(reading, form=form, split=None))
        for file in _of_split(folder, files, reading)
    ]
    if len(forms := sorted({form for form, _ in parts})) > 1:
        raise ValueError(f"the files of {folder} are of several forms ({', '.join(forms)}): {reading.words.forms}")
    return forms[0], Shards([source for _, source in parts], str(folder))


def _files_of(folder: Path, reading: Reading) -> tuple[str, list[Path]]:
    """The kind of the files that are the folder's rows, and these files."""
    form = reading.form
    for place in (folder, folder / "data"):
        if not place.is_dir():
            continue
        by_kind: dict[str, list[Path]] = {}
        for file in sorted(place.iterdir()):
            if file.is_file() and not file.name.startswith((".", "_")) and suffix_of(file) in _KINDS:
                by_kind.setdefault(_KINDS[suffix_of(file)], []).append(file)
        if form is not None:
            by_kind = {kind: files for kind, files in by_kind.items() if kind == _OF_FORM.get(form, form)}
        elif len(by_kind) > 1:
            by_kind.pop("text", None)  # Which says what the others are.
        if len(by_kind) > 1:
            raise ValueError(
                f"the folder {place} has files of several forms ({', '.join(sorted(by_kind))}): {reading.words.forms}"
            )
        for kind, files in by_kind.items():
            return kind, [file for file in files if file.stat().st_size] or files
    raise ValueError(
        f"{folder} is no dataset: it has neither state.json (save_to_disk) nor files of "
        + (form if form is not None else "Parquet, JSON Lines, CSV or text")
    )


def _of_split(folder: Path, files: Sequence[Path], reading: Reading) -> list[Path]:
    """The files of the split that is asked for; all of them, if their names are not those of splits."""
    split = reading.split
    names = [_split_of(file) for file in files]
    if not any(names):
        if split is not None:
            raise ValueError(f"the files of {folder} are one table, not splits: leave --split out")
        return list(files)
    named = [name or _stem(file) for name, file in zip(names, files, strict=True)]
    chosen = _chosen(folder, sorted(set(named)), split, reading.words.split)
    return [file for name, file in zip(named, files, strict=True) if name == chosen]


def _stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _split_of(file: Path) -> str | None:
    """The split that a file's name says it is a part of.

    >>> _split_of(Path("train-00000-of-00002.parquet")), _split_of(Path("test.csv.gz")), _split_of(Path("b.parquet"))
    ('train', 'test', None)
    """
    stem = _stem(file)
    shard = _SHARD.fullmatch(stem)
    first = re.split(r"[-_]", stem, maxsplit=1)[0]
    return shard[1] if shard else first if first.lower() in _SPLITS else None


def _chosen(folder: Path, splits: Sequence[str], split: str | None, advice: str) -> str:
    """The split that is asked for, or the only one; `advice` says how to ask for one of them."""
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        what = "has several splits" if split is None else f"has no split {split!r}"
        given = {"splits": ", ".join(splits), "folder": folder, "first": next(iter(splits), "train")}
        raise ValueError(f"the dataset {folder} {what}: {advice.format(**given)}")
    return split


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not the JSON that a dataset has there")
    return found


class Shards:
    """A table in several files of lines, one after the other.

    :raises ValueError: if they do not have the same columns.
    """

    def __init__(self, parts: Sequence[Any], name: str) -> None:
        self.name = name
        self.total: int | None = None
        self.files: Sequence[Path] = [file for part in parts for file in part.files]
        self._parts = parts
        self._sizes = [max(1, file.stat().st_size) for file in self.files]
        self._begins = [0]  # The numbers of the first rows of those that were read, and of the next.
        headers = [part.columns() for part in parts]
        for file, found in zip(self.files, headers, strict=True):
            if found is not None and set(found) != set(headers[0] or ()):
                raise ValueError(other_columns(self.files[0], headers[0] or (), file, found))

    def columns(self) -> Sequence[str] | None:
        """Those of the first."""
        found: Sequence[str] | None = self._parts[0].columns()
        return found

    def types(self) -> Mapping[str, Any]:
        """None: all is text, or what JSON has."""
        return {}

    def fraction(self) -> float:
        """How much of the files is read."""
        read = sum(part.fraction() * size for part, size in zip(self._parts, self._sizes, strict=True))
        return float(min(1.0, read / sum(self._sizes)))

    def identity(self) -> str:
        """A digest of samples."""
        return file_identity(self.files)

    def place(self, number: int) -> str:
        """The file, and the place in it."""
        n = min(bisect.bisect_right(self._begins, number), len(self._parts)) - 1
        place: str = self._parts[n].place(number - self._begins[n])
        return place

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """The rows of one file after the other."""
        begin = 0
        self._begins = [0]
        for part in self._parts:
            for chunk in part.chunks(skip[begin:] if begin < len(skip) else b""):
                for row in chunk:
                    row.number += begin
                yield chunk
            begin += part.count
            self._begins.append(begin)
