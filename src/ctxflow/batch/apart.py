"""Files that a job reads are not those that it writes, whatever their names: told before anything is opened.

What does not live here: which files a job writes (driver.py), and every other check of a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctxflow.errors import UsageError

Named = tuple[str, Path]
"""What a person calls a file ("the input"), and its path."""


def check_apart(reads: Iterable[Named], writes: Sequence[Named]) -> None:
    """Refuse a job that would write a file that it reads, or one file under two names.

    Files are told apart by what they are, not by their names: hard links, symbolic links, `/proc/self/fd/3`, and names
    that differ in case where the filesystem takes them for one are the same file.

    :raises UsageError: naming both.

    >>> check_apart([("the input", Path("in.jsonl"))], [("the output", Path("out.jsonl"))])
    >>> check_apart([("the input", Path("here/../in.jsonl"))], [("the output", Path("in.jsonl"))])
    Traceback (most recent call last):
    ...
    ctxflow.errors.UsageError: the output in.jsonl is the input here/../in.jsonl: name another output
    """
    known: dict[object, Named] = {}
    for what, path in writes:
        for key in _keys(path):
            other = known.setdefault(key, (what, path))
            if other != (what, path):
                raise UsageError(
                    f"{other[0]} {other[1]} and {what} {path} are one file by two names: "
                    "name another output, or remove one of them"
                )
    for what, path in reads:
        for key in _keys(path):
            if key in known:
                theirs, written = known[key]
                raise UsageError(f"{theirs} {written} is {what} {path}{_how(written, path)}: name another output")


def check_not_among(folder: Path, shards: Iterable[Path], writes: Sequence[Named]) -> None:
    """Refuse an output that the next start would read as one more part of its input's folder.

    :param shards: the files of that folder that are read.
    :raises UsageError: naming it.
    """
    read = {(os.path.realpath(shard.parent), shard.suffix.lower()) for shard in shards}
    for what, path in writes:
        if (os.path.realpath(path.parent), path.suffix.lower()) in read:
            raise UsageError(
                f"{what} {path} would be a part of the input {folder} at the next start: name an output elsewhere"
            )


def _keys(path: Path) -> Iterable[object]:
    """What tells a file apart: itself where it is there, else where it would be made."""
    try:
        found = os.stat(path)
    except OSError:
        yield os.path.realpath(path)
        return
    yield found.st_dev, found.st_ino


def _how(written: Path, read: Path) -> str:
    return "" if os.path.abspath(written) == os.path.abspath(read) else " by another name"
