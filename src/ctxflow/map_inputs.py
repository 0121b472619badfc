"""What the inputs of a map are: items, from a table's rows or from iterables side by side.

What does not live here: what is a table (rows/tables.py), and when inputs are pulled (mapping.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow.app_options import Options
from ctxflow.executors.futures import Failed
from ctxflow.option_values import closest, refuse, short
from ctxflow.rows.columns import IN_MAP, columns_for, item_maker
from ctxflow.rows.source import RowError, Table
from ctxflow.rows.tables import open_table, values_of
from ctxflow.wording import article

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp


@dataclasses.dataclass(frozen=True)
class MapInputs:
    """What a map goes through.

    :ivar items: the parameters of each item; a row that cannot be used is a `Failed`.
    :ivar count: how many there are, None where only reading tells.
    :ivar may_wait: whether the next one may be long in coming: of generators and other iterators.
    """

    items: Iterator[Any]
    count: int | None
    may_wait: bool = False


def inputs_of(app: BatchApp, inputs: Sequence[Any], columns: Any, by_index: bool = False) -> MapInputs:
    """The items of one table's rows, or of iterables side by side; see `BatchApp.map`.

    :param by_index: whether an item is known by its place, which has to be the same in another run.
    :raises TypeError: for what is no sequence of items, or if they do not fit the app.
    :raises ValueError: for a table that cannot be read, or lacks a column.
    """
    chosen = _chosen(columns)
    for given in inputs:
        _check(given, by_index)
    tables = [open_table(given) for given in inputs]
    if len(tables) == 1 and tables[0] is not None:
        table = tables[0]
        count = count_of(inputs[0], table)
        items = _table_items(table, _columns_of(app, table, chosen))
        return MapInputs(items, count, count is None and not isinstance(inputs[0], (str, os.PathLike)))
    if any(tables):
        raise TypeError("a table's rows are whole items: give it alone, or give its columns side by side")
    if chosen:
        raise TypeError("columns= names those of a table: leave it out where values are given")
    app.check_width(len(inputs))
    counts = [count for count in map(count_of, inputs) if count is not None]
    known = min(counts) if len(counts) == len(inputs) else None
    return MapInputs(zip(*map(values_of, inputs), strict=False), known, len(counts) < len(inputs))


def count_of(given: Any, table: Table | None = None) -> int | None:
    """How many items there are in something, None where only reading tells."""
    total = getattr(table, "total", None)  # Of a file, where it says so.
    if total is not None or isinstance(given, (str, os.PathLike)):
        return total
    if hasattr(given, "num_rows") and not hasattr(given, "__len__"):  # A record batch of pyarrow's.
        return int(given.num_rows)
    try:
        return len(given)
    except TypeError:  # An iterator, or one that has no length but in name, such as an array of no dimension.
        return None


def _check(given: Any, by_index: bool) -> None:
    """Refuse what is no sequence of items, or surely not the one that was meant.

    :raises TypeError: saying what to give.
    """
    kind = type(given).__name__
    if isinstance(given, (str, os.PathLike)):
        return
    advice = ""
    if isinstance(given, (bytes, bytearray, memoryview)):
        advice = "bytes are one value, not a sequence of items: give a list of them, or a path as text"
    elif isinstance(given, io.IOBase) or (hasattr(given, "readline") and hasattr(given, "read")):
        advice = (
            f"an open file ({article(kind)}) would give its lines, header and line ends among them: give its path, or "
            '(line.rstrip("\\n") for line in file)'
        )
    elif isinstance(given, Mapping) and not hasattr(given, "column_names"):
        advice = (
            f"{article(kind)} would give its keys alone: give list(d), d.values() or d.items(); a dict of columns as "
            "pandas.DataFrame(d)"
        )
    elif isinstance(given, Future):
        advice = "a future is one value to come, not a sequence of items: give its result()"
    elif hasattr(given, "__aiter__"):
        advice = f"{article(kind)} is read with `async for`, which a map cannot do: collect its items in a list first"
    elif by_index and isinstance(given, (set, frozenset)):
        advice = (
            f"{article(kind)} has another order in each run, and resume= knows items by their places: give "
            'sorted(...), or write resume_by="content"'
        )
    elif inspect.isgeneratorfunction(given):
        advice = f"{given.__name__} is a function that makes a generator: call it, as in {given.__name__}(...)"
    else:
        try:
            if not hasattr(type(given), "__next__"):  # An iterator is left alone.
                iter(given)
        except TypeError as error:
            advice = f"{short(given)} is no sequence of items ({error}): give a list, a generator, a table or a path"
    if advice:
        raise TypeError(f"map cannot go through this: {advice}")


def _chosen(columns: Any) -> list[str]:
    chosen = [columns] if isinstance(columns, str) else columns
    if not isinstance(chosen, (list, tuple)) or not all(isinstance(each, str) for each in chosen):
        raise refuse("columns", columns, 'a list of names of columns, such as ["claim"]', TypeError)
    return list(chosen)


def _columns_of(app: BatchApp, table: Table, chosen: Sequence[str]) -> tuple[str, ...]:
    columns = columns_for(app.__name__, app.parameters, chosen, table.columns(), table.name, IN_MAP)
    app.check_width(len(columns) or len(app.parameters[:1]))
    return columns


def _table_items(table: Table, columns: Sequence[str]) -> Iterator[Any]:
    make = item_maker(columns)
    for rows in table.chunks(columns=tuple(dict.fromkeys(columns))):
        for row in rows:
            try:
                if isinstance(row.values, RowError):
                    raise row.values
                yield make(row.values)
            except RowError as error:
                yield Failed(RowError(f"{table.place(row.number)}: {error}"))


def unknown_option(app: BatchApp, name: str) -> TypeError:
    """The error for what is neither an option of a map nor a constant of the app: it says where to write it."""
    called = app.__name__
    if name in app.parameters:
        return TypeError(
            f"{name} is a parameter of which each item of {called} has a value of its own: give an iterable for it, or "
            f"make it a constant: def {called}(..., *, {name}=...)"
        )
    if name in _OF_APPS:
        return TypeError(f"{name} is an option of the app, not of map: write {called}.using({name}=...).map(...)")
    if name in ("chunksize", "chunk_size"):
        return TypeError(
            f"map has no {name}, for batches are formed as workers come free: leave it out, or fix their size with "
            f"{called}.using(batch_size=...).map(...)"
        )
    meant = closest(name, [*_OF_MAPS, *app.constants, *_OF_APPS])
    hint = f"; did you mean {meant!r}?" if meant else ""
    return TypeError(f"{called}.map has no option {name!r}{app.constants_hint()}{hint}")


_OF_MAPS = ("columns", "resume", "resume_by", "on_error", "order", "window", "progress")
_OF_APPS = tuple(field.name for field in dataclasses.fields(Options))
