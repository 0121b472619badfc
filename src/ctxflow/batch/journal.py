"""The journal's format (OUTPUT.progress): frames with a checksum each, behind a line that names the version.

All that is on disk of it is decided here: how rows are known (`id_key`, `row_digest`), what a frame holds, and how much
of a journal counts when it is opened again (`valid_prefix`). What is committed when is the ledger's part (ledger.py).

A row's key is its number, or the hash of its id. Among 10 million ids two share a hash with a probability of
3 in a million; the second would be taken for a repetition of the first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ctxflow.ownership import AppendFile

Keys = NDArray[np.uint64]
_IDS = 1 << 63


def id_key(identifier: str) -> int:
    """Return the key of a row with an id: its highest bit is set, which tells it from a row's number.

    >>> id_key("request-1") >> 63
    1
    """
    hashed = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") | _IDS


def row_digest(item: tuple[Any, ...], kept: Mapping[str, Any]) -> bytes:
    """Return 8 bytes by which to tell whether a row is as it was: of its item, and of the columns kept.

    >>> row_digest(("a",), {}) == row_digest(("a",), {}), row_digest(("a",), {}) == row_digest(("a",), {"id": 1})
    (True, False)
    """
    if len(item) == 1 and type(item[0]) is str and not kept:  # By far the most frequent, and twice as fast.
        text = item[0].encode("utf-8", "surrogatepass")
    else:
        text = repr((item, kept) if kept else item).encode()
    return hashlib.blake2b(text, digest_size=8).digest()


def as_keys(numbers: Iterable[int]) -> Keys:
    """Return numbers as an array of keys."""
    return np.array(list(numbers), dtype=np.uint64)


def contained(keys: Keys, among: Keys) -> NDArray[np.bool_]:
    """Return for each key whether it is in a sorted array.

    >>> contained(as_keys([1, 2, 3]), as_keys([2, 9])).tolist()
    [False, True, False]
    """
    if not among.size:
        return np.zeros(keys.size, dtype=bool)
    places = np.minimum(np.searchsorted(among, keys), among.size - 1)
    found: NDArray[np.bool_] = among[places] == keys
    return found


class SeenKeys:
    """The keys seen so far, as a few sorted runs of falling sizes.

    >>> seen = SeenKeys()
    >>> seen.add(as_keys([5, 7, 5])).tolist(), seen.add(as_keys([7, 8])).tolist()
    ([False, False, True], [True, False])
    """

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def take(self, keys: Keys) -> None:
        """Take over keys that are sorted, without a copy of them."""
        if keys.size:
            self._runs.insert(0, keys)

    def add(self, keys: Keys) -> NDArray[np.bool_]:
        """Add keys; tells for each whether it was seen before, in an earlier chunk or earlier in this one."""
        unique, firsts = np.unique(keys, return_index=True)
        repeated = np.ones(keys.size, dtype=bool)
        repeated[firsts] = False
        for run in self._runs:
            repeated |= contained(keys, run)
        self._runs.append(unique)
        while len(self._runs) > 1 and 2 * self._runs[-1].size >= self._runs[-2].size:
            last = self._runs.pop()
            merged = np.concatenate([self._runs.pop(), last])
            merged.sort(kind="stable")
            self._runs.append(merged)
        return repeated


MAGIC = b'{"ctxflow": "batch journal", "version": 2}\n'
EARLIER = b'{"ctxflow": "batch journal", "version": 1}\n'
"""Of journals without rows' digests."""

# Kind, rows done, rows dead, bytes after the head, size of the results, size of the errors; then the checksum.
_HEAD = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<I")
ROWS, RETRY, FINISHED, FACTS, DIGESTED = range(1, 6)
_LARGEST = 1 << 30
DIGEST_BYTES = 8


Pair = tuple[int, int]
"""A row's key and its number."""


@dataclasses.dataclass(slots=True)
class Frame:
    """A frame of the journal.

    :ivar sizes: of the results and of the errors, once it was written.
    :ivar end: where the next begins.
    """

    kind: int
    done: int
    dead: int
    sizes: tuple[int, int]
    body: bytes
    end: int

    @property
    def pairs(self) -> Keys:
        """Return keys and numbers of its rows, those that are done first."""
        return np.frombuffer(self.body, dtype="<u8", count=2 * (self.done + self.dead)).reshape(-1, 2)

    @property
    def digests(self) -> Keys:
        """Return digests of its rows that are done; zeros where there are none, as an earlier ctxflow kept none."""
        if self.kind != DIGESTED:
            return np.zeros(self.done, dtype=np.uint64)
        return np.frombuffer(self.body, dtype="<u8", offset=16 * (self.done + self.dead))


def packed(kind: int, body: bytes, done: int, dead: int, sizes: Sequence[int]) -> bytes:
    """Return a frame as bytes."""
    frame = _HEAD.pack(kind, done, dead, len(body), *sizes) + body
    return frame + _SUM.pack(zlib.crc32(frame))


def rows_body(done: Sequence[Pair], dead: Sequence[Pair], digests: bytes = b"") -> bytes:
    """Return the body of a frame of rows (`DIGESTED`), which `Frame.pairs` and `Frame.digests` read.

    :param digests: `DIGEST_BYTES` for each row that is done; by default nothing is known of them.
    """
    return np.array([*done, *dead], dtype="<u8").tobytes() + (digests or bytes(DIGEST_BYTES * len(done)))


def frames(journal: AppendFile, limit: int | None = None) -> Iterator[Frame]:
    """Yield the whole frames of a journal, up to the first that is torn; one at a time is held.

    :param limit: where to end.
    """
    with journal.reader() as file:
        file.seek(len(MAGIC))
        while (limit is None or file.tell() < limit) and (frame := _next(file)) is not None:
            yield frame


def _next(file: BinaryIO) -> Frame | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, done, dead, length, *sizes = _HEAD.unpack(head)
    if length > _LARGEST:
        return None
    rest = file.read(length + _SUM.size)
    body = rest[:length]
    if len(rest) < length + _SUM.size or _SUM.unpack(rest[length:])[0] != zlib.crc32(body, zlib.crc32(head)):
        return None
    return Frame(kind, done, dead, (sizes[0], sizes[1]), body, file.tell())


@dataclasses.dataclass(frozen=True, slots=True)
class ValidPrefix:
    """The part of a journal that counts: up to the last frame whose files are as long as it says.

    :ivar end: where the frames end that count; `rows`, how many rows are in them at most.
    :ivar behind_retry: whether dead letters were forgotten behind that.
    :ivar forgotten: rows with results that do not count.
    """

    end: int
    rows: int
    behind_retry: bool
    forgotten: int


def valid_prefix(journal: AppendFile, actual: Sequence[int]) -> ValidPrefix:
    """See which frames count: up to the last whose files are as long as it says.

    The errors of frames before a retry are not asked for: it emptied them.

    :param actual: the sizes of the results and of the errors.
    """
    # Of the last frame that is borne out, by both files and by the results: its number, where it ends, rows and done.
    nothing = (-1, len(MAGIC), 0, 0)
    both = results = before_retry = nothing
    retried, rows, done = -1, 0, 0
    for number, frame in enumerate(frames(journal)):
        rows, done = rows + frame.done + frame.dead, done + frame.done
        if frame.kind == RETRY:
            before_retry, retried = results, number
        if frame.sizes[0] <= actual[0]:
            results = (number, frame.end, rows, done)
            both = results if frame.sizes[1] <= actual[1] else both
    good = max(both, before_retry)
    return ValidPrefix(good[1], good[2], retried > good[0], done - good[3])
