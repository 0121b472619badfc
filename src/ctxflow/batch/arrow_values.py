"""Values that went through JSON, as values of the Arrow types that they had. Needs pyarrow.

What does not live here: how they became JSON (records.py), and the file that is made of them (publish.py).
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow

_DURATION = re.compile(r"(?:(-?\d+) days?,? )?(\d+):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def restored(values: Sequence[Any], kind: Any) -> Any:
    """Return an Arrow array of a type, given what its values became in JSON.

    :raises ValueError, TypeError, AttributeError, LookupError, OverflowError, pyarrow.ArrowException: if they are no
        values of that type.

    >>> restored(["1.50", None], pyarrow.decimal128(10, 2)).to_pylist()
    [Decimal('1.50'), None]
    >>> restored([{"day": "2026-01-02"}], pyarrow.struct([("day", pyarrow.date32())])).to_pylist()
    [{'day': datetime.date(2026, 1, 2)}]
    """
    types = pyarrow.types
    if types.is_dictionary(kind):
        return restored(values, kind.value_type).cast(kind)
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        parts = [
            restored([None if each is None else each[field.name] for each in values], field.type) for field in fields
        ]
        return pyarrow.StructArray.from_arrays(parts, fields=fields, mask=_missing(values))
    if types.is_map(kind):
        pairs = _flat(values)
        keys = restored([key for key, _ in pairs], kind.key_type)
        return pyarrow.MapArray.from_arrays(
            _offsets(values), keys, restored([item for _, item in pairs], kind.item_type)
        )
    if types.is_fixed_size_list(kind):
        filled = [[None] * kind.list_size if each is None else each for each in values]
        return pyarrow.FixedSizeListArray.from_arrays(
            restored(_flat(filled), kind.value_type), type=kind, mask=_missing(values)
        )
    if types.is_list(kind) or types.is_large_list(kind):
        array = pyarrow.LargeListArray if types.is_large_list(kind) else pyarrow.ListArray
        return array.from_arrays(_offsets(values), restored(_flat(values), kind.value_type), type=kind)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(kind, restored(values, kind.storage_type))
    return _plain(values, kind)


def _plain(values: Sequence[Any], kind: Any) -> Any:
    types = pyarrow.types
    if types.is_timestamp(kind) and kind.unit != "ns":  # Python writes microseconds, whatever the unit.
        return pyarrow.array(values, pyarrow.string()).cast(pyarrow.timestamp("us", kind.tz)).cast(kind)
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_decimal(kind):
        return pyarrow.array(values, pyarrow.string()).cast(kind)
    if types.is_time(kind):
        return pyarrow.array([None if each is None else datetime.time.fromisoformat(each) for each in values], kind)
    if types.is_duration(kind):
        return pyarrow.array([None if each is None else _duration(each, kind.unit) for each in values], kind)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pyarrow.array([None if each is None else each.encode("latin-1") for each in values], kind)
    return pyarrow.array(values, kind)


def _missing(values: Iterable[Any]) -> Any:
    return pyarrow.array([each is None for each in values], pyarrow.bool_())


def _flat(values: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(each for each in values if each is not None))


def _offsets(values: Sequence[Any]) -> list[int | None]:
    """Where each list begins among the flat values, None where there is none; and the end."""
    ends = list(itertools.accumulate((len(each or ()) for each in values), initial=0))
    return [*(None if each is None else begin for each, begin in zip(values, ends, strict=False)), ends[-1]]


def _duration(text: str, unit: str) -> int:
    """A time span as Python and pandas write it, in units.

    >>> _duration("-1 day, 0:00:05.5", "ms"), _duration("2 days 00:00:00.000000001", "ns")
    (-86394500, 172800000000001)
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time span")
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()[:4])
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return (whole * 10**9 + int((found[5] or "").ljust(9, "0"))) // _NANOSECONDS[unit]
