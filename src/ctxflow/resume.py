"""The file that keeps a map's results, so that a later run goes on where an earlier one was stopped.

One JSON object a line: a header that says which app wrote it, then results with the index and a fingerprint of
their inputs. Results are found by the index of their item, or by what the item is, wherever it stands now.
"""

from __future__ import annotations

import array
import base64
import bisect
import hashlib
import json
import logging
import math
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctxflow.app_options import MappedApp
from ctxflow.digest import digest
from ctxflow.errors import InputError
from ctxflow.executors.pending import Failed
from ctxflow.identity import Identity, changes
from ctxflow.ownership import AppendFile, uninterrupted
from ctxflow.pickling import dumps

_LOG = logging.getLogger("ctxflow")
_NOTHING = (1 << 64) - 1
# How a result's line begins, as `ResultsFile.add` writes it: recognised without parsing all of it.
_BEGIN = re.compile(rb'\{"index": ([0-9]{1,18}), "key": "')


def fingerprint(item: Any, size: int = 16) -> str:
    """Return a digest, of so many bytes, of an item's inputs, a tuple: exact in types, as 1, 1.0 and True differ."""
    try:
        exact = type(item) is tuple and all(map(_is_json, item))
        text = json.dumps(item, sort_keys=True) if exact else digest(item)
    except RecursionError:  # It contains itself.
        text = digest(item)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def encode(result: Any) -> dict[str, Any]:
    """Return a result as JSON where that gives back the very same, types and all; else pickled.

    :raises TypeError: if it can be neither, naming the part that is to blame.

    >>> encode([1, "a"]), sorted(encode((1, 2)))
    ({'result': [1, 'a']}, ['pickle'])
    """
    if _is_json(result):
        return {"result": result}
    return {"pickle": base64.b64encode(dumps(result, "a result that resume= keeps", "return plain data")).decode()}


def _is_json(value: Any) -> bool:
    """Return whether JSON gives back the very same: exact types, since an Enum or numpy.float64 would lose its own."""
    kind = type(value)
    if kind is list:
        return all(map(_is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    return kind in (str, int, bool, type(None)) or (kind is float and math.isfinite(value))


def decode(record: Mapping[str, Any]) -> Any:
    """Return the result that `encode` was given."""
    return pickle.loads(base64.b64decode(record["pickle"])) if "pickle" in record else record["result"]


class ResultsFile:
    """Results on disk, found by index. In memory it keeps 8 bytes a result, and what is on its way.

    :raises ValueError: if the file is another app's or another user's, is no resume file, or is being written
        by another driver.
    """

    def __init__(
        self, path: str | os.PathLike[str], app: MappedApp, constants: Mapping[str, Any], identity: Identity
    ) -> None:
        whole = digest((app, dict(constants)))  # All that an earlier ctxflow kept of an app.
        self._path = Path(path)
        self._key_bytes = 16
        self._offsets = array.array("Q")
        self._keys: dict[int, str] = {}  # Fingerprints of items that are on their way.
        self._skipped: set[int] = set()
        self._file = AppendFile(self._path.resolve(), private=True)  # Results are pickles, which run code.
        try:
            self._file.lock(self._path)
            self._reader = self._file.reader()
        except BaseException:
            self._file.close()
            raise
        try:
            self._load(whole, identity, app.__name__)
        except BaseException:
            self.close()
            raise

    def _load(self, whole: str, identity: Identity, name: str) -> None:
        about = {"ctxflow": "map", "app": name, "identity": whole}
        header = json.dumps({**about, "key_bytes": 16, "made_of": identity.as_json()}).encode() + b"\n"
        first = self._reader.readline()
        if not first.endswith(b"\n") and (header.startswith(first) or first.startswith(header[:18])):  # Empty, or torn.
            self._file.cut(0)
            self._file.append(header)
            return
        known = _about(first)
        if known is None:
            raise InputError(f"{self._path} is not a results file of a map: name another file")
        self._key_bytes = 16 if known.get("key_bytes") == 16 else 8  # As an earlier ctxflow had it.
        end, limit = len(first), self._file.actual_size()
        for offset, line in self._file.lines(end):
            end = offset + len(line)
            index = _index(line)
            if 0 <= index < limit:  # There cannot be more results than bytes.
                self._note(index, offset, line)
            elif index < 0:
                known.update(_about(line) or {})
        self._check(known, whole, identity, name)
        self._read_all()
        self._file.cut(end)
        if "made_of" not in known:
            _LOG.warning(
                "%s is of an earlier ctxflow, which did not keep what models were made of: changes are noticed from "
                "now on",
                self._path,
            )
        known_identity = Identity.from_json(known.get("made_of", {}))
        if known_identity != (now := identity.knowing(known_identity)):
            self._file.append(json.dumps({**about, "made_of": now.as_json()}).encode() + b"\n")

    def _check(self, known: Mapping[str, Any], whole: str, identity: Identity, name: str) -> None:
        """Refuse to add to another app's results."""
        if "made_of" in known:
            changed = changes(Identity.from_json(known["made_of"]), identity)
        else:
            changed = [f"{name} has other code, another context or other constants"] * (known["identity"] != whole)
        if changed:
            raise InputError(
                f"{self._path} holds results of another app, or of {name} as it was ({'; '.join(changed)}): "
                "name another file, or delete it to begin anew"
            )

    def _read_all(self) -> None:
        """Finish reading: all results are noted."""

    def _note(self, index: int, offset: int, line: bytes) -> None:
        if index >= len(self._offsets):
            self._offsets.extend([_NOTHING] * (index + 1 - len(self._offsets)))
        self._offsets[index] = offset

    def holds(self, index: int, item: Any) -> bool:
        """Return whether the file has the result of this item at this index; else remember its fingerprint."""
        key = fingerprint(item, self._key_bytes)
        known = index < len(self._offsets) and self._offsets[index] != _NOTHING
        if known and _is_of(self._line(index), index, key):
            self._skipped.add(index)
            return True
        self._keys[index] = key
        return False

    def skips(self, index: int) -> bool:
        """Return whether that result is to be read from the file."""
        return index in self._skipped

    def read(self, index: int) -> Any:
        """Return a result that the file holds, and forget it here.

        :raises ValueError: if its line is damaged.
        """
        self._skipped.discard(index)
        try:
            return decode(json.loads(self._line(index)))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{self._path} was changed by another program: the result of item {index}, at byte "
                f"{self._offset(index)}, cannot be read; remove that line to have it computed again"
            ) from None

    def _line(self, index: int) -> bytes:
        self._reader.seek(self._offset(index))
        return self._reader.readline()

    def _offset(self, index: int) -> int:
        return self._offsets[index]

    @uninterrupted
    def add(self, answers: Iterable[tuple[int, Any]]) -> None:
        """Append results; failures are not kept, so that they are tried again.

        :raises TypeError: for a result that cannot be kept; those before it are.
        """
        lines: list[str] = []
        try:
            for index, result in answers:
                key = self._keys.pop(index)
                if type(result) is not Failed:
                    lines.append(json.dumps({"index": index, "key": key, **encode(result)}) + "\n")
        finally:
            self._file.append("".join(lines).encode())

    def close(self) -> None:
        """Close the file, which lets others write it."""
        try:
            self._file.close()
        finally:
            self._reader.close()


def _about(line: bytes) -> dict[str, Any] | None:
    """Return what a line says of the app, None if it says nothing."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("ctxflow") == "map" and "identity" in found else None


def _index(line: bytes) -> int:
    """Return the index of a result's line, -1 for one that a full disk tore: its item is computed again."""
    if match := _BEGIN.match(line):
        return int(match[1])
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError):
        return -1
    return index if type(index) is int else -1


def _is_of(line: bytes, index: int, key: str) -> bool:
    """Return whether a line is the result of that item, without parsing all of it."""
    if _BEGIN.match(line):
        return line.startswith(f'{{"index": {index}, "key": "{key}", '.encode()) and line.endswith(b"}\n")
    record = json.loads(line)
    return isinstance(record, dict) and record.get("key") == key


_USED = _NOTHING
_KEY = re.compile(rb'\{"index": [0-9]{1,18}, "key": "((?:[0-9a-f]{16}){1,2})", ')


class ResultsByContent(ResultsFile):
    """A resume file that knows items by their fingerprints alone. In memory it keeps 16 bytes a result.

    Equal items have a result each: so many of them are answered as the file has results, in the order in which these
    were written; the others are computed.
    """

    def __init__(self, *what: Any) -> None:
        self._by_key = array.array("Q")  # How fingerprints begin, in rising order once all are read.
        self._found: dict[int, int] = {}  # Index -> the offset of the result of an item that is on its way.
        super().__init__(*what)

    def _note(self, index: int, offset: int, line: bytes) -> None:
        key = _key(line)
        if key is not None:
            self._by_key.append(_beginning(key))
            self._offsets.append(offset)

    def _read_all(self) -> None:
        import numpy  # Results that are found by their index need none.

        keys, offsets = (numpy.frombuffer(each, dtype=numpy.uint64) for each in (self._by_key, self._offsets))
        order = numpy.argsort(keys, kind="stable")
        self._by_key, self._offsets = (array.array("Q", each[order].tobytes()) for each in (keys, offsets))

    def holds(self, index: int, item: Any) -> bool:
        """Return whether the file has a result of such an item that no other has got; else remember its fingerprint."""
        key = fingerprint(item, self._key_bytes)
        number = _beginning(key)
        first = bisect.bisect_left(self._by_key, number)
        last = bisect.bisect_right(self._by_key, number, lo=first)
        # Of the results of equal items those that were used come first.
        place = bisect.bisect_left(self._offsets, True, lo=first, hi=last, key=lambda offset: offset != _USED)
        if place < last:
            self._found[index] = self._offsets[place]
        if place == last or _key(self._line(index)) != key:  # Its beginning alone may be another's.
            self._keys[index] = key
            self._found.pop(index, None)
            return False
        self._offsets[place] = _USED
        self._skipped.add(index)
        return True

    def read(self, index: int) -> Any:
        """Return a result that the file holds, and forget it here; as `ResultsFile.read` does."""
        try:
            return super().read(index)
        finally:
            del self._found[index]

    def _offset(self, index: int) -> int:
        return self._found[index]


def _key(line: bytes) -> str | None:
    """Return the fingerprint in a result's line, None for one that a full disk tore: its item is computed again."""
    if not line.endswith(b"}\n"):
        return None
    if match := _KEY.match(line):
        return match[1].decode()
    try:
        key = json.loads(line)["key"]
    except (ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) and _HEXADECIMAL.fullmatch(key) else None


_HEXADECIMAL = re.compile("(?:[0-9a-f]{16}){1,2}")


def _beginning(key: str) -> int:
    """Return the first 64 bits of a fingerprint."""
    return int(key[:16], 16)
