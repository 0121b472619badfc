"""The journal of a job: frames, each with a checksum, behind a first line that says what it is.

What does not live here: what is written when, and what of it counts (ledger.py).
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from ctxflow.append_file import AppendFile
from ctxflow.batch.keys import Keys

MAGIC = b'{"ctxflow": "batch journal", "version": 2}\n'
EARLIER = b'{"ctxflow": "batch journal", "version": 1}\n'
"""Of journals without rows' digests."""

# Kind, rows done, rows dead, bytes after the head, size of the results, size of the errors; then the checksum.
_HEAD = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<I")
ROWS, RETRY, FINISHED, FACTS, DIGESTED = range(1, 6)
_LARGEST = 1 << 30
DIGEST_BYTES = 8


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
        """Keys and numbers of its rows, those that are done first."""
        return np.frombuffer(self.body, dtype="<u8", count=2 * (self.done + self.dead)).reshape(-1, 2)

    @property
    def digests(self) -> Keys:
        """Digests of its rows that are done; zeros where there are none, as an earlier ctxflow kept none."""
        if self.kind != DIGESTED:
            return np.zeros(self.done, dtype=np.uint64)
        return np.frombuffer(self.body, dtype="<u8", offset=16 * (self.done + self.dead))


def packed(kind: int, body: bytes, done: int, dead: int, sizes: Sequence[int]) -> bytes:
    """A frame as bytes."""
    frame = _HEAD.pack(kind, done, dead, len(body), *sizes) + body
    return frame + _SUM.pack(zlib.crc32(frame))


def frames(journal: AppendFile, limit: int | None = None) -> Iterator[Frame]:
    """The whole frames of a journal, up to the first that is torn; one at a time is held.

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
class Survey:
    """How much of a journal its files bear out.

    :ivar end: where the frames end that count; `rows`, how many rows are in them at most.
    :ivar behind_retry: whether dead letters were forgotten behind that.
    :ivar forgotten: rows with results that do not count.
    """

    end: int
    rows: int
    behind_retry: bool
    forgotten: int


def survey(journal: AppendFile, actual: Sequence[int]) -> Survey:
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
    return Survey(good[1], good[2], retried > good[0], done - good[3])
