"""What the inputs of a map are: items, from a table's rows or from iterables side by side.

What does not live here: what is a table (rows/tables.py), and when inputs are pulled (mapping.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.executors.futures import Failed
from ctxflow.option_values import refuse
from ctxflow.rows.columns import columns_for, item_maker, listed
from ctxflow.rows.source import RowError, Table
from ctxflow.rows.tables import open_table, values_of

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp


def items_of(app: BatchApp, inputs: Sequence[Any], columns: Sequence[str]) -> Iterator[Any]:
    """The parameters of items: of one table's rows, or of iterables side by side; see `BatchApp.map`.

    A row that cannot be used is a `Failed`.

    :raises TypeError: if they do not fit the app.
    :raises ValueError: for a table that cannot be read, or lacks a column.
    """
    chosen = _chosen(columns)
    tables = [open_table(given) for given in inputs]
    if len(tables) == 1 and tables[0] is not None:
        return _table_items(tables[0], _columns_of(app, tables[0], chosen))
    if any(tables):
        raise TypeError("a table's rows are whole items: give it alone, or give its columns side by side")
    if chosen:
        raise TypeError("columns= names those of a table: leave it out where values are given")
    app.check_width(len(inputs))
    return zip(*map(values_of, inputs), strict=False)


def _chosen(columns: Any) -> list[str]:
    chosen = [columns] if isinstance(columns, str) else columns
    if not isinstance(chosen, (list, tuple)) or not all(isinstance(each, str) for each in chosen):
        raise refuse("columns", columns, 'a list of names of columns, such as ["claim"]', TypeError)
    return list(chosen)


def _columns_of(app: BatchApp, table: Table, chosen: Sequence[str]) -> tuple[str, ...]:
    known = table.columns()
    columns = columns_for(app.parameters, chosen, known)
    app.check_width(len(columns) or len(app.parameters[:1]))
    if missing := [name for name in columns if known is not None and name not in known]:
        raise ValueError(
            f"{table.name} has no column {missing[0]!r}, which {app.__name__} takes: it has {listed(known or ())}; "
            "name others with columns=[...]"
        )
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
