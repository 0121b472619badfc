"""Make Parquet and CSV of a finished job's lines; columns of the input keep their Arrow types (`restored`)."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ctxflow.batch.engine_answers import later_name
from ctxflow.batch.records import whole_text
from ctxflow.errors import CtxflowError
from ctxflow.files import written_whole
from ctxflow.installing import how_to_install
from ctxflow.ownership import naming

PUBLISHED = ("parquet", "csv")  # The forms that are made at the end, as no lines can be appended to them.
_ROWS = 5000
_MOST_PARTS = 200  # Columns that a column may become: objects with more keys are data of their own.


def publish(
    form: str,
    rows: Path,
    output: Path,
    embeddings: bool = False,
    types: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    nested: Collection[str] = (),
    unpacked: str = "",
) -> None:
    """Make a job's output of its file of JSON lines, at once or not at all; called by the holder of the job's lock.

    :param embeddings: whether the column "embedding" is to be of 32-bit floats, where the form has types.
    :param types: the Arrow types of columns that are the input's own.
    :param columns: of a CSV file's header, where there are no rows.
    :param nested: columns that are text, their values' JSON, whatever they hold.
    :param unpacked: a column whose values become columns by their keys, where they are objects throughout.
    """
    with naming(output):
        if form == "csv":
            publish_csv(rows, output, columns, unpacked)
        else:
            publish_parquet(rows, output, embeddings, types, nested, unpacked)


@dataclasses.dataclass(frozen=True)
class _Lines:
    """The objects of a file of JSON lines, some thousand at a time, as often as one likes.

    :ivar column: one whose values are objects, replaced by their `parts`: key -> column.
    """

    path: Path
    column: str = ""
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        with open(self.path, "rb") as file:
            lines = enumerate(file, 1)
            while records := [_record(line, number, self.path) for number, line in itertools.islice(lines, _ROWS)]:
                yield [self._unpacked(record) for record in records] if self.parts else records

    def _unpacked(self, record: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in record.items():
            if name == self.column:
                made.update((part, (value or {}).get(key)) for key, part in self.parts.items())
            else:
                made[name] = value
        return made


def _unpacking(path: Path, column: str) -> _Lines:
    """Return a file's objects with a column unpacked, if all of its values are objects of a bounded number of keys."""
    if not column:
        return _Lines(path)
    keys: dict[str, None] = {}
    taken: dict[str, None] = {}
    for record in itertools.chain.from_iterable(_Lines(path)):
        taken.update(dict.fromkeys(record))
        value = record.get(column)
        if value is not None and not isinstance(value, dict):
            return _Lines(path)
        keys.update(dict.fromkeys(value or ()))
        if len(keys) > _MOST_PARTS:
            return _Lines(path)
    taken.pop(column, None)
    parts: dict[str, str] = {}
    for key in keys:
        parts[key] = later_name(key or column, taken)
        taken[parts[key]] = None
    return _Lines(path, column, parts)


_NUL_IN_CSV = sys.version_info >= (3, 11)  # Before, the csv module neither writes nor reads that character.


def publish_csv(rows: Path, output: Path, columns: Sequence[str] = (), unpacked: str = "") -> None:
    """Write a file of JSON lines as CSV with a header, tab-separated if its name ends in .tsv.

    Text stands as it is, null as nothing, all else as its JSON, an impossible character as Python escapes it.
    """
    lines = _unpacking(rows, unpacked)
    names = list(dict.fromkeys(name for records in lines for record in records for name in record))
    delimiter = "\t" if output.suffix.lower() == ".tsv" else ","
    with written_whole(output, alone=True) as whole:
        file = io.TextIOWrapper(whole, encoding="utf-8", errors="backslashreplace", newline="")
        plain = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        quoted = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        plain.writerow(names or columns)
        for records in lines:
            for record in records:
                cells = [_cell(record.get(name)) for name in names]
                # The csv module quotes no carriage return on its own, at which readers end a line.
                (quoted if any("\r" in each for each in cells) else plain).writerow(cells)
        file.detach()  # What it held is in the file then, which stays open.


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _NUL_IN_CSV else text.replace("\0", "\\x00")


def publish_parquet(
    rows: Path,
    output: Path,
    embeddings: bool = False,
    types: Mapping[str, Any] | None = None,
    nested: Collection[str] = (),
    unpacked: str = "",
) -> None:
    """Write a file of JSON lines as Parquet, holding some thousand rows at a time.

    A column whose values have no common type becomes text, as those in `nested`: the values' JSON. A given type counts
    if all values fit.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise CtxflowError(f"Parquet needs pyarrow ({error}): {how_to_install('pyarrow', extra='batch')}") from None
    lines = _unpacking(rows, unpacked)
    found, known = _types(lines, types or {})
    found.update({name: _MIXED for name in nested if name in found})
    if embeddings and "embedding" in found:
        found["embedding"] = pyarrow.list_(pyarrow.float32())
    with written_whole(output, alone=True) as file:
        while (unfit := _write(lines, file, found, known)) is not None:
            found[unfit] = _MIXED


def _types(lines: _Lines, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the type of each column by all of its values, and those given types that fit them."""
    found: dict[str, Any] = {}
    known = dict(given)
    for records in lines:
        for name in dict.fromkeys(itertools.chain.from_iterable(records)):
            values = [record.get(name) for record in records]
            found[name] = _common(found.get(name), values)
            if name in known and not _fits(values, known[name]):
                del known[name]
    return found, {name: kind for name, kind in known.items() if name in found}


def _write(lines: _Lines, file: BinaryIO, found: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Write the rows, over what is there; return a column whose values are not of its type after all, if any."""
    import pyarrow
    import pyarrow.parquet

    mixed = {name for name, kind in found.items() if kind is _MIXED and name not in known}
    schema = pyarrow.schema(
        [(name, known.get(name, pyarrow.string() if name in mixed else kind)) for name, kind in found.items()]
    )
    file.seek(0)
    file.truncate()
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for records in lines:
            columns = []
            name: str
            for name, kind in zip(schema.names, schema.types, strict=True):
                values = [record.get(name) for record in records]
                if name in known:
                    columns.append(restored(values, kind))
                    continue
                if name in mixed:
                    values = _each(values, json.dumps)
                try:
                    columns.append(_array(values, kind))
                except (pyarrow.ArrowException, OverflowError):
                    return name
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    return None


def _array(values: list[Any], kind: Any = None) -> Any:
    """Return an Arrow array of values; half of a surrogate pair, which is no text there, becomes U+FFFD."""
    import pyarrow

    try:
        return pyarrow.array(values, kind)
    except UnicodeEncodeError:
        return pyarrow.array(_whole(values), kind)


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {_whole(key): _whole(each) for key, each in value.items()} if isinstance(value, dict) else value


_MIXED = object()


def _fits(values: list[Any], kind: Any) -> bool:
    """Return whether values are of a type that they had before they were JSON."""
    import pyarrow

    try:
        restored(values, kind)
    except (pyarrow.ArrowException, ValueError, TypeError, AttributeError, LookupError, OverflowError):
        return False
    return True


def _common(known: Any, values: list[Any]) -> Any:
    """Return the type of a column, given that of earlier rows: `_MIXED` where there is none."""
    import pyarrow

    if known is _MIXED:
        return known
    try:
        found = _array(values).type
        if known is not None:
            fields = [pyarrow.schema([("", kind)]) for kind in (known, found)]
            found = pyarrow.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pyarrow.ArrowException, OverflowError):
        return _MIXED
    return found if _storable(found) else _MIXED


def _storable(kind: Any) -> bool:
    """Return whether Parquet can hold a type: it has no objects without fields."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return kind.num_fields > 0 and all(_storable(kind.field(n).type) for n in range(kind.num_fields))
    return not pyarrow.types.is_list(kind) or _storable(kind.value_type)


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise CtxflowError(
            f"{path}, line {number}, is no result, so that no output can be made: put the file back as it was, or "
            "start again with --fresh"
        )
    return record


_DURATION = re.compile(r"(?:(-?\d+) days?,? \+?)?(\d+):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_COUNT = re.compile(r"(-?\d+) (s|ms|us|ns)")  # Of a time span that Python has not.
_FAR = re.compile(r"-|\d{5,}-|0000-")  # Dates before the year 1, or beyond 9999.
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def restored(values: Sequence[Any], kind: Any) -> Any:
    """Return an Arrow array of a type, given what its values became in JSON.

    :raises ValueError, TypeError, AttributeError, LookupError, OverflowError, pyarrow.ArrowException: if they are no
        values of that type.

    >>> import pyarrow
    >>> restored(["1.50", None], pyarrow.decimal128(10, 2)).to_pylist()
    [Decimal('1.50'), None]
    >>> restored([{"day": "2026-01-02"}], pyarrow.struct([("day", pyarrow.date32())])).to_pylist()
    [{'day': datetime.date(2026, 1, 2)}]
    """
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return restored(values, kind.value_type).cast(kind)
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        parts = [restored(_each(values, operator.itemgetter(field.name)), field.type) for field in fields]
        return pyarrow.StructArray.from_arrays(parts, fields=fields, mask=_missing(values))
    if types.is_map(kind):
        pairs = _flat(values)
        keys = restored([key for key, _ in pairs], kind.key_type)
        items = restored([item for _, item in pairs], kind.item_type)
        return pyarrow.MapArray.from_arrays(_offsets(values), keys, items)
    if types.is_fixed_size_list(kind):
        flat = restored(_flat([None] * kind.list_size if each is None else each for each in values), kind.value_type)
        return pyarrow.FixedSizeListArray.from_arrays(flat, type=kind, mask=_missing(values))
    if types.is_list(kind) or types.is_large_list(kind):
        array = pyarrow.LargeListArray if types.is_large_list(kind) else pyarrow.ListArray
        return array.from_arrays(_offsets(values), restored(_flat(values), kind.value_type), type=kind)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(kind, restored(values, kind.storage_type))
    return _plain(values, kind)


def _plain(values: Sequence[Any], kind: Any) -> Any:
    import pyarrow

    types = pyarrow.types
    if (types.is_timestamp(kind) or types.is_date(kind)) and any(
        each is not None and _FAR.match(each) for each in values
    ):
        return _with_far_dates(values, kind)
    if types.is_timestamp(kind) and kind.unit != "ns":  # Python writes microseconds, whatever the unit.
        return pyarrow.array(values, pyarrow.string()).cast(pyarrow.timestamp("us", kind.tz)).cast(kind)
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_decimal(kind):
        return pyarrow.array(values, pyarrow.string()).cast(kind)
    if types.is_time(kind) or types.is_duration(kind):
        return pyarrow.array(_each(values, lambda each: _duration(each, kind.unit)), kind)
    binary = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    if any(is_binary(kind) for is_binary in binary):
        return pyarrow.array(_each(values, lambda each: each.encode("latin-1")), kind)
    return pyarrow.array(values, kind)


def _with_far_dates(values: Sequence[str | None], kind: Any) -> Any:
    """Return dates or times beyond Python's range."""
    import numpy as np
    import pyarrow

    far = [each is not None and _FAR.match(each) is not None for each in values]
    near = _plain([None if is_far else each for each, is_far in zip(values, far, strict=True)], kind)
    days = pyarrow.types.is_date32(kind)
    unit: Any = "D" if days else getattr(kind, "unit", "ms")
    counts = near.cast(pyarrow.int32() if days else pyarrow.int64()).to_pylist()
    for n in itertools.compress(range(len(counts)), far):
        counts[n] = int(np.datetime64(str(values[n]).removesuffix("Z"), unit).astype(np.int64))
    return pyarrow.array(counts, kind)


def _each(values: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return values changed, None as it is."""
    return [None if each is None else change(each) for each in values]


def _missing(values: Iterable[Any]) -> Any:
    import pyarrow

    return pyarrow.array([each is None for each in values], pyarrow.bool_())


def _flat(values: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(each for each in values if each is not None))


def _offsets(values: Sequence[Any]) -> list[int | None]:
    """Return where each list begins among the flat values, None where there is none; and the end."""
    ends = list(itertools.accumulate((len(each or ()) for each in values), initial=0))
    return [*(None if each is None else begin for each, begin in zip(values, ends, strict=False)), ends[-1]]


def _duration(text: str, unit: str) -> int:
    """Return a time span or a time of day, as Python, pandas and the reader of rows write it, in units.

    >>> _duration("-1 day, 0:00:05.5", "ms"), _duration("2 days 00:00:00.000000001", "ns"), _duration("-7 s", "s")
    (-86394500, 172800000000001, -7)
    >>> _duration("-1 days +00:00:05", "s"), _duration("01:02:03.000000004", "ns")
    (-86395, 3723000000004)
    """
    if (count := _COUNT.fullmatch(text)) is not None:
        return int(count[1]) * _NANOSECONDS[count[2]] // _NANOSECONDS[unit]
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time span")
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()[:4])
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return (whole * 10**9 + int((found[5] or "").ljust(9, "0"))) // _NANOSECONDS[unit]
