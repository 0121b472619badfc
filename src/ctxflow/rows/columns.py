"""Which columns of a row an app's parameters get: the same for a batch job's function and for a map. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.rows.source import RowError


def columns_for(parameters: Sequence[str], chosen: Sequence[str], known: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of an app's parameters, in their order; none if its one parameter gets whole rows.

    :param parameters: the names of the app's parameters.
    :param chosen: the columns that a person named, in the parameters' order.
    :param known: the columns that are there, None where each row has its own.

    >>> columns_for(["claim", "evidence"], (), None), columns_for(["rows"], ["claim"], None)
    (('claim', 'evidence'), ('claim',))
    >>> columns_for(["claim"], (), ["id", "claim"]), columns_for(["rows"], (), ["id", "claim"])
    (('claim',), ())
    """
    if not chosen and len(parameters) == 1 and parameters[0] not in (known or ()):
        return ()
    return tuple(chosen or parameters)


def item_maker(columns: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Makes an item of a row's values: those of some columns, or the whole row.

    >>> item_maker(["b", "a"])({"a": 1, "b": 2, "c": 3}), item_maker([])({"a": 1})
    ((2, 1), ({'a': 1},))
    """
    if not columns:
        return lambda values: (dict(values),)
    return lambda values: tuple([cell(values, column) for column in columns])


def cell(values: Mapping[str, Any], column: str) -> Any:
    """A row's value in a column.

    :raises RowError: if it has none.
    """
    if column not in values:
        raise RowError(f"the row has no {column!r}: it has {listed(values)}")
    return values[column]


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Columns' names for a person, not too many.

    >>> listed(["a", "b"]), listed([])
    ("'a', 'b'", 'nothing')
    """
    return ", ".join(map(repr, list(names)[:10])) or "nothing"
