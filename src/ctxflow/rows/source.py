"""Rows of an input, as readers give them in chunks, and which of their columns an app gets."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ctxflow.errors import InputError, closest, short

CHUNK_ROWS = 1000
CHUNK_BYTES = 1 << 20
MAX_ROW_BYTES = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14


class RowError(InputError):
    """A row cannot be used; the message says why, without its place."""


@dataclasses.dataclass(slots=True)
class Row:
    """One row.

    :ivar number: its place in the input, from 0: a line's (blank ones count), or a record's.
    :ivar values: column -> value, or the reason why the row cannot be read.
    :ivar size: bytes that it takes in memory, roughly.
    """

    number: int
    values: dict[str, Any] | RowError
    size: int


def left_out(skip: bytes, number: int) -> bool:
    """Return whether a row is one of those to be skipped."""
    return number < len(skip) and skip[number] != 0


class Table(Protocol):
    """Something with rows."""

    name: str

    def columns(self) -> Sequence[str] | None:
        """Return the columns' names, None where each row has its own."""

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield all rows, bad ones among them, some at a time.

        :param skip: a byte for each of the first rows, by their numbers: those that are not 0 are left out, and
            where that can be, not even parsed.
        :param columns: those that are needed, where not all are; others may be left out.
        :raises ValueError: where nothing more can be read, saying why.
        """

    def place(self, number: int) -> str:
        """Return where a row stands, for a person."""


class Source(Table, Protocol):
    """An input that can be read from its beginning as often as one likes."""

    total: int | None  # Rows; None where only reading tells.
    files: Sequence[Path]

    def fraction(self) -> float:
        """Return how much of the input has been read at the end of the last chunk, 0 to 1."""

    def types(self) -> Mapping[str, Any]:
        """Return the Arrow types of its columns, none where the input has no types."""

    def identity(self) -> str:
        """Return a digest that changes with the input: of its size and of samples of it, not of its name or times."""


def opened(path: Path) -> BinaryIO:
    """Open a file to read, as bytes.

    :raises ValueError: if it cannot be read, saying why.
    """
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"the input {path} cannot be read: {error.strerror}") from None


def file_identity(paths: Iterable[Path]) -> str:
    """Return a digest of files' sizes and of samples spread over them: quick for any size, the same for a copy."""
    found = hashlib.blake2b(digest_size=12)
    for path in paths:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "big"))
            for n in range(_SAMPLES):
                file.seek(n * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def suffix_of(path: Path) -> str:
    """Return how a file's name ends, leaving out that it is compressed.

    >>> suffix_of(Path("claims.CSV.gz")), suffix_of(Path("claims"))
    ('.csv', '')
    """
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


class InputFiles:
    """What sources that read files share."""

    def __init__(self, files: Sequence[Path], name: str) -> None:
        self.name = name
        self.files = files
        self.total: int | None = None

    def types(self) -> Mapping[str, Any]:
        """Return none: all is text, or what JSON has."""
        return {}

    def identity(self) -> str:
        """Return a digest of samples."""
        return file_identity(self.files)


class Limited:
    """The first rows of an input; its identity is the input's, so that the same rows are done with a larger limit."""

    def __init__(self, source: Source, limit: int) -> None:
        self.whole = source
        self.name, self.files = source.name, source.files
        self.total = None if source.total is None else min(source.total, limit)
        self.columns, self.types = source.columns, source.types
        self.identity, self.place = source.identity, source.place
        self._limit = limit
        self._read = 0

    def fraction(self) -> float:
        """Return how much of the first rows is read."""
        return max(self.whole.fraction(), min(1.0, self._read / self._limit))

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield those of the input, up to the last."""
        for chunk in self.whole.chunks(skip, columns):
            first = [row for row in chunk if row.number < self._limit]
            if first:
                self._read = first[-1].number + 1
                yield first
            if len(first) < len(chunk) or self._read == self._limit:
                self._read = self._limit
                return


WHOLE = "*"  # Asks for whole rows in place of a column.
_ROWS = "rows"  # A parameter of this name gets whole rows.
_DELIMITER = re.compile(r"[;|,](?=\S)|\t")  # A comma before a space is one of a sentence.


@dataclasses.dataclass(frozen=True)
class Words:
    """What messages advise a person to write, to choose columns or to have an input read otherwise."""

    column: str
    whole: str
    delimiter: str
    encoding: str
    form: str  # Of an unknown format; "" if nothing helps.
    forms: str  # Of several formats.
    split: str  # A file for each split.
    saved: str  # A folder for each split.
    pipe: str


IN_BATCH = Words(
    column="--column NAME",
    whole="--column '*'",
    delimiter="give --delimiter {!r}",
    encoding="give --encoding, such as {}",
    form="name it with --input-format",
    forms="name one with --input-format",
    split="give --split with one of {splits}",
    saved="give --split with one of {splits}",
    pipe="save it as a file, or pipe it to `ctxflow batch -`, which keeps a copy",
)
IN_MAP = Words(
    column='columns=["NAME"]',
    whole='columns="*"',
    delimiter="read it with pandas.read_csv(path, sep={!r}), and map that",
    encoding='save it as UTF-8, or map what pandas.read_csv(path, encoding="{}") gives',
    form="",
    forms="put those of one form into a folder of their own",
    split='it has {splits}: map one of them, as datasets.load_dataset("{folder}", split="{first}") gives it',
    saved="it has {splits}: give the folder of one of them, such as {folder}/{first}",
    pipe="save it as a file",
)


def columns_for(
    app: str,
    parameters: Sequence[str],
    chosen: Sequence[str],
    known: Sequence[str] | None,
    table: str = "the input",
    words: Words = IN_BATCH,
) -> tuple[str, ...]:
    """Return the columns that an app's parameters get, in their order; none if its one parameter gets whole rows.

    Several parameters get the columns of their names. A single one gets the column of its name, or the only column
    that there is; whole rows, as dictionaries, if they were asked for, where rows have no columns in common (as in JSON
    Lines), or if there are several columns and it is called `rows`. How many values the app takes is not looked at.

    :param chosen: the columns that a person named, in the parameters' order; "*" alone asks for whole rows.
    :param known: the columns that are there, None where each row has its own.
    :param table: what messages call the input; `words`: how a person chooses others.
    :raises ValueError: if a column is not there, or none can be told; says which there are, and what to write.

    >>> columns_for("f", ["claim", "evidence"], (), None), columns_for("f", ["rows"], ["claim"], None)
    (('claim', 'evidence'), ('claim',))
    >>> columns_for("f", ["claim"], (), ["id", "claim"]), columns_for("f", ["claims"], (), ["claim"])
    (('claim',), ('claim',))
    >>> columns_for("f", ["rows"], (), ["id", "claim"]), columns_for("f", ["x"], ["*"], ["id", "claim"])
    ((), ())
    >>> columns_for("f", ["texts"], (), ["id", "text"])
    Traceback (most recent call last):
    ...
    ctxflow.errors.InputError: the input has no column 'texts', which f takes: it has 'id', 'text' \
(did you mean 'text'?); give --column NAME to take another, or --column '*' for whole rows
    """
    if tuple(chosen) == (WHOLE,):
        return ()
    if chosen:
        which, otherwise = "", ""
    elif len(parameters) == 1:
        if known is None or (parameters[0] not in known and parameters[0] == _ROWS and len(known) > 1):
            return ()
        if parameters[0] not in known and len(known) == 1 and other_delimiter(known) is None:
            return (known[0],)
        which = f", which {app} takes"
        otherwise = f"; give {words.column} to take another, or {words.whole} for whole rows"
    else:
        which = f", which {app} takes"
        otherwise = f"; give {words.column} for each parameter ({', '.join(parameters)}) to take others"
    wanted = tuple(chosen or parameters)
    if known is not None and (missing := [name for name in wanted if name not in known]):
        there = _available(missing[0], known, words)
        there += "" if other_delimiter(known) else otherwise  # They are to be read in another way first.
        raise InputError(f"{table} has no column {short(missing[0])}{which}: {there}")
    return wanted


def _available(name: str, known: Sequence[str], words: Words = IN_BATCH) -> str:
    """Return which columns there are, and what a person may have meant by one that is not.

    >>> _available("Claim ", ["id", "claim"]), _available("a", ["a;b"])
    ("it has 'id', 'claim' (did you mean 'claim'?)", "it has 'a;b', which ';' seems to separate: give --delimiter ';'")
    """
    if (delimiter := other_delimiter(known)) is not None:
        return f"it has {listed(known)}, which {delimiter!r} seems to separate: {words.delimiter.format(delimiter)}"
    close = closest(name, known)
    return f"it has {listed(known)}" + (f" (did you mean {short(close)}?)" if close else "")


def other_delimiter(columns: Sequence[str]) -> str | None:
    """Return what seems to separate columns that were read as one.

    >>> other_delimiter(["id;claim"]), other_delimiter(["claim"]), other_delimiter(["a;b", "c"])
    (';', None, None)
    """
    if len(columns) != 1:
        return None
    found = _DELIMITER.search(str(columns[0]).strip())
    return found[0] if found else None


def item_maker(columns: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return what makes an item of a row's values: those of some columns, or the whole row.

    >>> item_maker(["b", "a"])({"a": 1, "b": 2, "c": 3}), item_maker([])({"a": 1})
    ((2, 1), ({'a': 1},))
    """
    if not columns:
        return lambda values: (dict(values),)
    return lambda values: tuple([cell(values, column) for column in columns])


def cell(values: Mapping[str, Any], column: str) -> Any:
    """Return a row's value in a column.

    :raises RowError: if it has none.
    """
    if column not in values:
        raise RowError(f"the row has no {short(column)}: it has {listed(values)}")
    return values[column]


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return columns' names for a person, not too many.

    >>> listed(["a", "b"]), listed([])
    ("'a', 'b'", 'nothing')
    """
    names = list(names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(short, names[:10])) + more or "nothing"


def check_names(names: Sequence[Any], called: str) -> None:
    """Refuse a table with two columns of one name.

    :param called: what names them, for messages.
    :raises ValueError: if so.
    """
    if len(set(names)) < len(names):
        raise InputError(f"{called} has two columns {short(first_repeated(names))}: rename one")


def first_repeated(names: Iterable[Any]) -> Any:
    """Return the first of some names that was there before; None without one.

    >>> first_repeated(["a", "b", "a"])
    'a'
    """
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def other_columns(first: object, columns: Sequence[str], other: object, found: Sequence[str]) -> str:
    """Return the message that files of one table have different columns."""
    return (
        f"{first} has the columns {listed(columns)}, but {other} has {listed(found)}: put files of other columns into "
        "a folder of their own"
    )


@dataclasses.dataclass(frozen=True)
class Head:
    """What the beginning of an input tells of all of it.

    :ivar columns: those that it has, None where each row has its own.
    :ivar rows: its first rows, without those that cannot be read.
    """

    name: str
    columns: tuple[str, ...] | None
    rows: Sequence[Mapping[str, Any]]

    @functools.cached_property
    def known(self) -> tuple[str, ...] | None:
        """Return the columns, or what any of the first rows has; None if nothing tells."""
        if self.columns is not None:
            return self.columns
        return tuple(dict.fromkeys(name for row in self.rows for name in row)) if self.rows else None

    def lacks(self, column: str, reads: str) -> str | None:
        """Return what is to be said if there is no such column.

        :param reads: who reads it.

        >>> Head("a.csv", ("id", "claim"), ()).lacks("clam", "--keep names")
        "a.csv has no column 'clam', which --keep names: it has 'id', 'claim' (did you mean 'claim'?)"
        """
        known = self.known
        if known is None or column in known:
            return None
        which = f"{short(column)}, which {reads}: {_available(column, known)}"
        if self.columns is not None:
            return f"{self.name} has no column {which}"
        if len(self.rows) == 1:
            return f"the first row of {self.name} has no {which}"
        which = which.replace(": it has", ": they have", 1)
        return f"none of the first {len(self.rows):,} rows of {self.name} has {which}"


def head_of(table: Table) -> Head:
    """Read the beginning of an input.

    :raises ValueError: if it cannot be read at all.
    """
    columns = table.columns()
    chunk = next(iter(table.chunks()), [])
    rows = [row.values for row in chunk if not isinstance(row.values, RowError)]
    return Head(table.name, None if columns is None else tuple(columns), rows)
