"""Choose which columns of a row an app's parameters get: the same for a batch job's function and for a map. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.rows.source import RowError, Table

WHOLE = "*"
"""Asks for whole rows in place of a column."""
_ROWS = "rows"  # A parameter of this name gets whole rows.
_DELIMITER = re.compile(r"[;|,](?=\S)|\t")  # A comma before a space is one of a sentence.


@dataclasses.dataclass(frozen=True)
class Words:
    """What a person writes to choose columns, or to have an input read otherwise than it tells itself.

    :ivar column: to choose one; `whole`: to get whole rows; `delimiter`: to read a file of another delimiter.
    :ivar encoding: to read one in another encoding; `form`: one whose format cannot be told, "" if nothing does.
    :ivar forms: to choose among files of several formats; `split`: among the splits that files are; `saved`: among
        those that are folders; `pipe`: to read what can be read once.
    """

    column: str
    whole: str
    delimiter: str
    encoding: str
    form: str
    forms: str
    split: str
    saved: str
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

    :param app: the app's name; `parameters`: the names of its parameters.
    :param chosen: the columns that a person named, in the parameters' order; "*" alone asks for whole rows.
    :param known: the columns that are there, None where each row has its own.
    :param table: what they are the columns of, for messages; `words`: how a person chooses others.
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
    ValueError: the input has no column 'texts', which f takes: it has 'id', 'text' (did you mean 'text'?); \
give --column NAME to take another, or --column '*' for whole rows
    """
    if tuple(chosen) == (WHOLE,):
        return ()
    if chosen:
        if missing := _missing(chosen, known):
            raise ValueError(f"{table} has no column {missing[0]!r}: {told(missing[0], known or (), words)}")
        return tuple(chosen)
    if len(parameters) != 1:
        if missing := _missing(parameters, known):
            raise ValueError(
                f"{table} has no column {missing[0]!r}, which {app} takes: {told(missing[0], known or (), words)}"
                + _or(known, f"give {words.column} for each parameter ({', '.join(parameters)}) to take others")
            )
        return tuple(parameters)
    name = parameters[0]
    if known is None:
        return ()
    if name in known:
        return (name,)
    if len(known) == 1 and other_delimiter(known) is None:
        return (known[0],)
    if name == _ROWS and len(known) > 1:
        return ()
    raise ValueError(
        f"{table} has no column {name!r}, which {app} takes: {told(name, known, words)}"
        + _or(known, f"give {words.column} to take another, or {words.whole} for whole rows")
    )


def _or(known: Sequence[str] | None, what: str) -> str:
    """Return what else can be done, unless the columns are to be read in another way first."""
    return "" if other_delimiter(known or ()) else f"; {what}"


def _missing(names: Sequence[str], known: Sequence[str] | None) -> list[str]:
    return [] if known is None else [name for name in names if name not in known]


def told(name: str, known: Sequence[str], words: Words = IN_BATCH) -> str:
    """Return which columns there are, and what a person may have meant by one that is not.

    >>> told("Claim ", ["id", "claim"]), told("a", ["a;b"])
    ("it has 'id', 'claim' (did you mean 'claim'?)", "it has 'a;b', which ';' seems to separate: give --delimiter ';'")
    """
    if (delimiter := other_delimiter(known)) is not None:
        return f"it has {listed(known)}, which {delimiter!r} seems to separate: {words.delimiter.format(delimiter)}"
    close = closest(name, known)
    return f"it has {listed(known)}" + (f" (did you mean {close!r}?)" if close else "")


def closest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that is most like another, if one is; neither case nor spaces matter.

    >>> closest("Txt", ["id", "text"]), closest("claim", ["x"])
    ('text', None)
    """
    plain = {str(each).strip().lower(): each for each in reversed(names)}
    found = difflib.get_close_matches(name.strip().lower(), list(plain), n=1)
    return plain[found[0]] if found else None


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
        raise RowError(f"the row has no {column!r}: it has {listed(values)}")
    return values[column]


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return columns' names for a person, not too many.

    >>> listed(["a", "b"]), listed([])
    ("'a', 'b'", 'nothing')
    """
    names = list(names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more or "nothing"


def other_columns(first: object, columns: Sequence[str], other: object, found: Sequence[str]) -> str:
    """Return what is to be said of files that are to be one table, but have not the same columns."""
    return (
        f"{first} has the columns {listed(columns)}, but {other} has {listed(found)}: put files of other columns into "
        "a folder of their own"
    )


@dataclasses.dataclass(frozen=True)
class Head:
    """What the beginning of an input tells of all of it.

    :ivar name: the input's.
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
        if self.columns is not None:
            return f"{self.name} has no column {column!r}, which {reads}: {told(column, known)}"
        if len(self.rows) == 1:
            return f"the first row of {self.name} has no {column!r}, which {reads}: {told(column, known)}"
        count = f"none of the first {len(self.rows):,} rows of {self.name}"
        return f"{count} has {column!r}, which {reads}: {told(column, known).replace('it has', 'they have', 1)}"


def head_of(table: Table) -> Head:
    """Read the beginning of an input.

    :raises ValueError: if it cannot be read at all.
    """
    columns = table.columns()
    chunk = next(iter(table.chunks()), [])
    rows = [row.values for row in chunk if not isinstance(row.values, RowError)]
    return Head(table.name, None if columns is None else tuple(columns), rows)
