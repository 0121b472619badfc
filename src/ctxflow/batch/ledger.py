"""Keep what a job has done, on disk: its results, its dead letters, and the journal that says how much of both counts.

A commit appends lines to the results and the errors, then a frame to the journal (OUTPUT.progress): both files' sizes,
the rows' keys and numbers, and a digest of each that is done. What no whole frame covers is cut off when a job is
opened; frames that say more than a file holds go too, and their rows run again. The journal's lock keeps others out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxflow.ownership import AppendFile, uninterrupted

Keys = NDArray[np.uint64]
_IDS = 1 << 63


def id_key(identifier: str) -> int:
    """Return the key of a row with an id: its highest bit is set, which tells it from a row's number.

    Among 10 million ids two share a hash with a probability of 3 in a million; the second is taken for a repetition.
    """
    hashed = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") | _IDS


def row_digest(item: tuple[Any, ...], kept: Mapping[str, Any]) -> bytes:
    """Return 8 bytes by which to tell whether a row is as it was: of its item, and of the columns kept."""
    if len(item) == 1 and type(item[0]) is str and not kept:  # By far the most frequent, and twice as fast.
        text = item[0].encode("utf-8", "surrogatepass")
    else:
        text = repr((item, kept) if kept else item).encode()
    return hashlib.blake2b(text, digest_size=8).digest()


def as_keys(numbers: Iterable[int]) -> Keys:
    """Return numbers as an array of keys."""
    return np.array(list(numbers), dtype=np.uint64)


def contained(keys: Keys, among: Keys) -> NDArray[np.bool_]:
    """Return for each key whether it is in a sorted array."""
    if not among.size:
        return np.zeros(keys.size, dtype=bool)
    places = np.minimum(np.searchsorted(among, keys), among.size - 1)
    found: NDArray[np.bool_] = among[places] == keys
    return found


MAGIC = b'{"ctxflow": "batch journal", "version": 2}\n'
EARLIER = b'{"ctxflow": "batch journal", "version": 1}\n'  # Of journals without rows' digests.

# Kind, rows done, rows dead, bytes after the head, size of the results, size of the errors; then the checksum.
_HEAD = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<I")
ROWS, RETRY, FINISHED, FACTS, DIGESTED = range(1, 6)
_LARGEST = 1 << 30
DIGEST_BYTES = 8

Pair = tuple[int, int]  # A row's key and its number.


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
        """Return digests of its rows that are done; zeros where an earlier ctxflow kept none."""
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
    """Yield the whole frames of a journal, up to a limit or the first that is torn; one at a time is held."""
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


class ValidPrefix(NamedTuple):
    """The part of a journal that counts: up to the last frame whose files are as long as it says."""

    end: int
    rows: int  # In it, at most.
    behind_retry: bool  # Whether dead letters were forgotten behind it.
    forgotten: int  # Rows with results that do not count.


def valid_prefix(journal: AppendFile, actual: Sequence[int]) -> ValidPrefix:
    """Return which frames count; the errors of frames before a retry do not matter, since it emptied them.

    :param actual: the sizes of the results and of the errors.
    """
    # Of the last frame that both files, or the results, are long enough for: its number, end, rows and rows done.
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


class Ledger:
    """A job's files, opened for this driver alone.

    :param fresh: whether to forget an earlier job that wrote there.
    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar settled: their keys when the job was opened, sorted.
    :ivar skip: a byte for each of the first rows by their numbers, 1 for those that were settled since the input is
        what it is now; `skipped`, their keys.
    :ivar facts: what was noted of the job; `finished`, whether it had come to its end.
    :ivar forgotten: rows that are run again since a file was shorter than it should be.
    :raises ValueError: if another driver writes there, or the files are not those of a job.
    """

    def __init__(self, results: Path, errors: Path, journal: Path, fresh: bool = False) -> None:
        self.done = self.dead = self.forgotten = 0
        self.finished = False
        self.facts: dict[str, Any] = {}
        self.settled: Keys = as_keys(())
        self.skip = b""
        self.skipped: Keys = as_keys(())
        there = any(path.exists() and path.stat().st_size for path in (results, errors))
        taken = ValueError(
            f"{results} is there already, without the journal {journal.name} of a job that could go on: "
            "name another output, or begin anew with --fresh"
        )
        if there and not fresh and not journal.exists():
            raise taken
        with contextlib.ExitStack() as stack:
            self._journal = stack.enter_context(contextlib.closing(AppendFile(journal)))
            self._journal.lock(results)
            self._begin()
            if fresh:
                self._journal.cut(len(MAGIC))
            # A journal without a frame may be what is left of a job that was refused here.
            elif there and next(frames(self._journal), None) is None:
                raise taken
            self._files = tuple(stack.enter_context(contextlib.closing(AppendFile(path))) for path in (results, errors))
            self._load()
            self._stack = stack.pop_all()

    def _begin(self) -> None:
        """See that it is a journal, which an empty or torn one becomes."""
        with self._journal.reader() as file:
            begin = file.read(len(MAGIC))
        if begin == EARLIER:  # An earlier ctxflow must not take it up from now on.
            self._journal.change(0, MAGIC)
        if begin in (MAGIC, EARLIER):
            return
        if not MAGIC.startswith(begin):
            raise ValueError(f"{self._journal.path} is not the journal of a job: name another output, or remove it")
        self._journal.cut(0)
        self._journal.append(MAGIC)

    # --- opening

    def _load(self) -> None:
        """Take over the frames that the files are long enough for, and cut the rest off."""
        found = valid_prefix(self._journal, [file.actual_size() for file in self._files])
        self.forgotten, sizes = found.forgotten, (0, 0)
        keys: Keys = np.empty(found.rows, dtype=np.uint64)  # All at once, so that none is held twice.
        count = since = 0  # Keys that are there; those from `since` on are of the input as it is now.
        dead: list[Keys] = []
        dead_since = 0
        marks = bytearray()
        last: Pair = (0, 0)
        for frame in frames(self._journal, found.end):
            sizes = frame.sizes
            self.finished = frame.kind == FINISHED
            if frame.kind in (ROWS, DIGESTED):
                pairs = frame.pairs
                keys[count : count + frame.done] = pairs[: frame.done, 0]
                _mark(marks, pairs[: frame.done, 1])
                count += frame.done
                last = tuple(pairs[frame.done - 1].tolist()) if frame.done else last
                dead += [pairs[frame.done :].copy()] * bool(frame.dead)
            elif frame.kind == RETRY:
                dead, dead_since = [], 0
            elif frame.kind == FACTS:
                facts = json.loads(frame.body)
                self.facts.update(facts)
                if "input" in facts:
                    since, dead_since, marks = count, len(dead), bytearray()
        if found.behind_retry:  # The errors are those of a later time: what they held at that one is gone.
            dead, dead_since, sizes = [], 0, (sizes[0], 0)
        self.done, self.dead = count, sum(map(len, dead))
        for pairs in dead[dead_since:]:
            _mark(marks, pairs[:, 1])
        now = [keys[since:count], *(pairs[:, 0] for pairs in dead[dead_since:])]
        all_now = not since and not dead_since
        self.skipped = as_keys(()) if all_now else np.sort(np.concatenate(now))
        for pairs in dead:
            keys[count : count + len(pairs)] = pairs[:, 0]
            count += len(pairs)
        self.settled = keys[:count]
        self.settled.sort()
        if all_now:
            self.skipped = self.settled
        self.skip = bytes(marks)
        self._check(sizes, last)
        self._journal.cut(found.end)
        for file, size in zip(self._files, sizes, strict=True):
            file.cut(size)
        if found.behind_retry:
            self._add(RETRY)

    def _check(self, sizes: tuple[int, int], last: Pair) -> None:
        """Check that what counts ends where the journal says, with the last row's line, before anything is cut off."""
        for n, (file, size) in enumerate(zip(self._files, sizes, strict=True)):
            end = file.last_line(size) if size else b"\n"
            if not end.endswith(b"\n") or (n == 0 and size and not _may_be_of(end, last)):
                raise ValueError(
                    f"{file.path} was changed by another program, so that the job cannot go on: "
                    "put it back, name another output, or begin anew with --fresh"
                )

    def digests(self) -> tuple[Keys, Keys]:
        """Return the keys of the rows that are done, sorted, and the digest of each, 0 where none was kept."""
        keys: Keys = np.empty(self.done, dtype=np.uint64)
        digests: Keys = np.empty(self.done, dtype=np.uint64)
        count = 0
        for frame in frames(self._journal, self._journal.size):
            if frame.kind in (ROWS, DIGESTED):
                keys[count : count + frame.done] = frame.pairs[: frame.done, 0]
                digests[count : count + frame.done] = frame.digests
                count += frame.done
        digests = digests[np.argsort(keys)]
        keys.sort()
        return keys, digests

    # --- writing

    @uninterrupted
    def commit(
        self, results: bytes, errors: bytes, done: Sequence[Pair], dead: Sequence[Pair], digests: bytes = b""
    ) -> None:
        """Keep whole lines, and that their rows are done or dead.

        :param digests: 8 bytes for each row that is done, one after the other; by default nothing is known of them.
        :raises OSError: if there is no room; then nothing of it counts.
        """
        with self._all_or_nothing():
            for file, data in zip(self._files, (results, errors), strict=True):
                file.append(data)
            self._add(DIGESTED, rows_body(done, dead, digests), len(done), len(dead))
        self.done += len(done)
        self.dead += len(dead)

    @uninterrupted
    def retry(self) -> None:
        """Forget the dead letters, so that their rows are missing again."""
        with self._all_or_nothing():
            self._files[1].size = 0
            self._add(RETRY)
        # Without this frame, what will be in the errors from now on would be taken for what was there before.
        self._journal.sync()
        self._load()

    def note(self, facts: Mapping[str, Any]) -> None:
        """Keep what is to be known of the job when it is opened again, if it is not known yet."""
        new = {name: value for name, value in facts.items() if self.facts.get(name) != value or name not in self.facts}
        if new:
            self._add(FACTS, json.dumps(new).encode())
            self._journal.sync()  # Whatever the machine loses, the results are known to be this job's.
            self.facts.update(new)
            if "input" in new:
                self.skip, self.skipped = b"", as_keys(())

    def finish(self) -> None:
        """Note that nothing is missing."""
        if not self.finished:
            for file in self._files:
                file.sync()
            self._add(FINISHED)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Let as much of the files count as before, if there is no room for the frame that says otherwise."""
        before = [file.size for file in self._files]
        try:
            yield
        except BaseException:
            for file, size in zip(self._files, before, strict=True):
                file.size = size
            raise

    def _add(self, kind: int, body: bytes = b"", done: int = 0, dead: int = 0) -> None:
        self._journal.append(packed(kind, body, done, dead, [file.size for file in self._files]))
        self.finished = kind == FINISHED

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files, which lets another driver write; no empty file of errors is left."""
        if not self._files[1].size:
            self._files[1].path.unlink(missing_ok=True)
        self._stack.close()


def _mark(data: bytearray, numbers: Keys) -> None:
    """Set a byte to 1 for each of some numbers."""
    if numbers.size:
        data.extend(bytes(max(0, int(numbers.max()) + 1 - len(data))))
        np.frombuffer(data, dtype=np.uint8)[numbers] = 1


def _may_be_of(line: bytes, row: Pair) -> bool:
    """Return whether a line of the results can be that of a row, as far as it names one.

    >>> _may_be_of(b'{"row": 6, "result": "yes"}', (17, 6)), _may_be_of(b'{"row": 6, "result": "yes"}', (17, 5))
    (True, False)
    """
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return True
    if "row" in record:
        return bool(record["row"] == row[1])
    name = str(record.get("id"))
    return not name.startswith("batch_req_") or name == f"batch_req_{row[0]:016x}"
