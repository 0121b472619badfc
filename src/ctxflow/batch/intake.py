"""From an input's rows to what is still to be done: ids, keys, repeated ids, rows that are settled, items.

What does not live here: reading (readers.py), and what is asked of a model (requests.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ctxflow.batch.keys import Keys, SeenKeys, as_keys, contained, id_key
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.requests import Item, Make
from ctxflow.rows.source import Row, RowError, Source

_ITEM_OVERHEAD = 500  # Bytes that an item on its way takes beside its values.


@dataclasses.dataclass(slots=True)
class Prepared:
    """A row on its way.

    :ivar key: what the ledger knows it by.
    :ivar id: its id, None where rows are known by their numbers.
    :ivar item: what the app gets, () for a row that failed before.
    :ivar kept: columns that go to the output.
    :ivar error: why it failed, None if it did not.
    :ivar context: the name of the context that answered it, where the app has alternatives.
    """

    number: int
    key: int
    id: str | int | None
    item: Item
    kept: Mapping[str, Any]
    size: int
    error: BaseException | None = None
    context: str | None = None


class Intake:
    """The rows of an input that are not settled.

    :param make: makes items of rows.
    :param id_column: the column of the ids; None knows rows by their numbers.
    :param keep: columns to be kept.
    :param ledger: what is settled; without one nothing is.
    :ivar read: how many rows the input has up to where it is read.
    """

    def __init__(
        self, source: Source, make: Make, id_column: str | None, keep: tuple[str, ...], ledger: Ledger | None = None
    ) -> None:
        self.read = 0
        self._source = source
        self._make = make
        self._id_column = id_column
        self._keep = keep
        self._settled = as_keys(()) if ledger is None else ledger.settled
        self._skip = b"" if ledger is None else ledger.skip
        self._seen = SeenKeys()
        if id_column is not None and ledger is not None:
            self._seen.take(ledger.skipped)

    def chunks(self) -> Iterator[list[Prepared]]:
        """Chunks of rows, which may be empty: all of a chunk may be settled."""
        for rows in self._source.chunks(self._skip):
            ids: list[Any] = [None] * len(rows)
            errors: list[RowError | None] = [None] * len(rows)
            keys = self._keys(rows, ids, errors)
            settled = contained(keys, self._settled).tolist()
            self.read = rows[-1].number + 1
            yield [
                self._prepared(row, key, identifier, error)
                for row, key, identifier, error, known in zip(rows, keys.tolist(), ids, errors, settled, strict=True)
                if not known
            ]

    def _keys(self, rows: list[Row], ids: list[Any], errors: list[RowError | None]) -> Keys:
        """The rows' keys; fills in their ids, and what is wrong with them."""
        numbers = [row.number for row in rows]
        if self._id_column is None:
            return as_keys(numbers)
        given = []
        for n, row in enumerate(rows):
            try:
                ids[n] = identifier = _id(row, self._id_column)
                given.append(id_key(str(identifier)))
            except RowError as error:
                errors[n] = error
                given.append(row.number)
        keys = as_keys(given)
        for n in np.flatnonzero(self._seen.add(keys)).tolist():
            errors[n] = RowError(f"the {self._id_column} {ids[n]!r} is that of an earlier row: each needs its own")
            keys[n] = numbers[n]
        return keys

    def _prepared(self, row: Row, key: int, identifier: Any, error: RowError | None) -> Prepared:
        values = row.values
        if isinstance(values, RowError):
            error = values
        if error is None:
            assert isinstance(values, dict)
            try:
                kept = {name: _kept(values, name) for name in self._keep} if self._keep else _NOTHING
                return Prepared(row.number, key, identifier, self._make(values), kept, row.size + _ITEM_OVERHEAD)
            except RowError as reason:
                error = reason
        return Prepared(row.number, key, identifier, (), _NOTHING, _ITEM_OVERHEAD, error)


_NOTHING: Mapping[str, Any] = {}


def _id(row: Row, column: str) -> str | int:
    if isinstance(row.values, RowError):
        raise row.values
    identifier = row.values.get(column)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)) or identifier == "":
        shown = "missing" if identifier is None else repr(identifier)[:60]
        raise RowError(f"the {column} is {shown}: each row needs one, a string or a whole number")
    return identifier


def _kept(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise RowError(f"the row has no {name!r}, which is to be kept")
    return values[name]
