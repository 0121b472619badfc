"""The file that keeps a map's results, so that a later run goes on where an earlier one was stopped.

One JSON object a line: a header that says which app wrote it, then results with the index and a fingerprint of
their inputs. Whole lines only are added; a torn last line is mended. One writer at a time. What does not live
here: the order of work (mapping.py).
"""

from __future__ import annotations

import array
import base64
import contextlib
import fcntl
import hashlib
import json
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from ctxflow.context import dumps
from ctxflow.digest import digest
from ctxflow.executors.futures import Failed

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp

_NOTHING = (1 << 64) - 1


def fingerprint(item: Any) -> str:
    """A short digest of an item's inputs, a tuple: exact in types, as 1, 1.0 and True are not the same.

    >>> fingerprint(("a", 1)) == fingerprint(("a", 1)), fingerprint(("a", 1)) == fingerprint(("a", 2))
    (True, False)
    """
    try:
        exact = type(item) is tuple and all(map(_is_json, item))
        text = json.dumps(item, sort_keys=True) if exact else digest(item)
    except RecursionError:  # It contains itself.
        text = digest(item)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode(result: Any) -> dict[str, Any]:
    """A result as JSON where that gives back the very same, types and all; else pickled.

    :raises TypeError: if it can be neither, naming the part that is to blame.

    >>> encode([1, "a"]), sorted(encode((1, 2)))
    ({'result': [1, 'a']}, ['pickle'])
    """
    if _is_json(result):
        return {"result": result}
    return {"pickle": base64.b64encode(dumps(result, "a result that resume= keeps", "return plain data")).decode()}


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the very same: exact types only, since an Enum or numpy.float64 would lose its own."""
    kind = type(value)
    if kind is list:
        return all(map(_is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    return kind in (str, int, bool, type(None)) or (kind is float and math.isfinite(value))


def decode(record: Mapping[str, Any]) -> Any:
    """The result that `encode` wrote."""
    return pickle.loads(base64.b64decode(record["pickle"])) if "pickle" in record else record["result"]


class ResultsFile:
    """Results on disk, found by index. In memory it keeps 8 bytes a result, and what is on its way.

    :raises ValueError: if the file is another app's or another user's, is no results file, or is being written
        by another map.
    """

    def __init__(self, path: str, app: BatchApp, constants: Mapping[str, Any]) -> None:
        self.path = path
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        identity = digest((app, dict(constants)))
        # A user's own results, pickled by this program: opened for this user only.
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115 - closed in `close`
        self._reader: BinaryIO | None = None
        self._offsets = array.array("Q")
        self._keys: dict[int, str] = {}  # Fingerprints of items that are on their way.
        self._skipped: set[int] = set()
        try:
            self._own()
            # The file that was looked at, whatever has the path now.
            self._reader = open(f"/proc/self/fd/{self._file.fileno()}", "rb")  # noqa: SIM115 - closed in `close`
            self._scan(identity, app.__name__)
        except BaseException:
            self.close()
            raise

    def _own(self) -> None:
        """See that the file is this user's, and this map's alone."""
        if os.fstat(self._file.fileno()).st_uid != os.geteuid():
            raise ValueError(
                f"{self.path} belongs to another user, and reading its results could run that user's code: "
                "name another file, or copy it if you trust it"
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{self.path} is being written by another map: wait for it, or name another file"
            ) from None

    def _scan(self, identity: str, name: str) -> None:
        header = {"ctxflow": "map", "app": name, "identity": identity}
        first = self._file.readline()
        if not first.endswith(b"\n") and json.dumps(header).encode().startswith(first):  # Empty, or torn.
            self._file.truncate(0)
            self._file.seek(0)
            self._write([header])
            return
        try:
            found = json.loads(first)
            known = found.get("ctxflow") == "map"
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise ValueError(f"{self.path} is not a results file of a map: name another file")
        if found.get("identity") != identity:
            raise ValueError(
                f"{self.path} holds results of another app, or of {name} with other code, context or constants: "
                "name another file, or delete it to begin anew"
            )
        offset = end = self._file.tell()
        for line in self._file:
            offset, end = end, end + len(line)
            if not line.endswith(b"\n"):
                end = offset
                break
            # A line that a full disk tore is as good as none: its item is computed again.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._note(json.loads(line)["index"], offset)
        self._file.truncate(end)
        self._file.seek(end)

    def _note(self, index: int, offset: int) -> None:
        if index >= len(self._offsets):
            self._offsets.extend([_NOTHING] * (index + 1 - len(self._offsets)))
        self._offsets[index] = offset

    def holds(self, index: int, item: Any) -> bool:
        """Whether the file has the result of this item at this index; else its fingerprint is remembered."""
        key = fingerprint(item)
        known = index < len(self._offsets) and self._offsets[index] != _NOTHING
        if known and self._record(index)["key"] == key:
            self._skipped.add(index)
            return True
        self._keys[index] = key
        return False

    def skips(self, index: int) -> bool:
        """Whether that result is to be read from the file."""
        return index in self._skipped

    def read(self, index: int) -> Any:
        """A result that the file holds; it is then forgotten here."""
        self._skipped.discard(index)
        return decode(self._record(index))

    def _record(self, index: int) -> Any:
        assert self._reader is not None
        self._reader.seek(self._offsets[index])
        return json.loads(self._reader.readline())

    def add(self, indices: Sequence[int], results: Sequence[Any]) -> None:
        """Append results; failures are not kept, so that they are tried again."""
        self._write(
            {"index": index, "key": key, **encode(result)}
            for index, key, result in zip(indices, map(self._keys.pop, indices), results, strict=True)
            if type(result) is not Failed
        )

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(record) + "\n" for record in records).encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file, which lets others write it."""
        try:
            self._file.close()
        finally:
            if self._reader is not None:
                self._reader.close()
