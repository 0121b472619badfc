"""Keep what a job has done, on disk: its results, its dead letters, and the journal that says how much of both counts.

A commit appends lines to the results and the errors, then a frame to the journal (OUTPUT.progress): both files' sizes,
the rows' keys and numbers, and a digest of each that is done. Where the three do not agree when a job is opened, the
results stand: rows whose lines they lack run again, and lines that the journal does not know count by what they say.
Dead letters that are gone have their rows tried again. The journal's lock keeps others out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxflow.errors import counted
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


class SeenKeys:
    """The keys seen so far, as a few sorted runs of falling sizes."""

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
EARLIER = b'{"ctxflow": "batch journal", "version": 1}\n'  # Of journals without rows' digests.

# Kind, rows done, rows dead, bytes after the head, size of the results, size of the errors; then the checksum.
_HEAD = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<I")
ROWS, RETRY, FINISHED, FACTS, DIGESTED, LEARNT = range(1, 7)
_KIND = re.compile(rb"(?=[\x01-\x06]\0\0\0)")
_LARGEST = 1 << 30
_ANY_SIZE = 1 << 64
CUT = ".cut"
DIGEST_BYTES = 8

Pair = tuple[int, int]  # A row's key and its number.
UNKNOWN = (1 << 64) - 1  # Where a line does not tell its row's number.
_CHUNK = 100_000  # Rows of a frame, where there is a choice.
_ONE_COMMIT = 10_000  # Rows that a kill can have left without a frame, at most.


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
    def learnt(self) -> Keys:
        """Return the keys and digests of rows that a frame of `LEARNT` has."""
        return np.frombuffer(self.body, dtype="<u8").reshape(-1, 2)

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


def check_tail(journal: AppendFile, end: int, known: bool) -> None:
    """Check that no whole frame stands behind what does not count: then that is what a kill or a full disk left.

    :param known: whether what counts says whose job it is, so that the job can go on with it alone.
    :raises ValueError: if there is one, so that there is damage before the journal's end.
    """
    with journal.reader() as file:
        file.seek(end)
        damaged = _has_frame(file.read())
    if damaged:
        path = shlex.quote(str(journal.path))
        instead = "name another output, or begin anew with --fresh"
        if known:
            instead = f"or call cp {path} {path}.damaged && truncate -s {end} {path}, and results stay, but rows that "
            instead += "failed after it run again"
        text = f"{journal.path} is damaged at byte {end:,}, so that the job cannot go on: put a copy of it back"
        raise ValueError(f"{text}; {instead}")


def _has_frame(tail: bytes) -> bool:
    for place in _KIND.finditer(tail):
        start = place.start()
        if len(tail) - start < _HEAD.size + _SUM.size:
            return False
        kind, done, dead, length, *_ = _HEAD.unpack_from(tail, start)
        lengths = {
            ROWS: 16 * (done + dead), DIGESTED: (16 + DIGEST_BYTES) * done + 16 * dead, RETRY: 0, FINISHED: 0,
            FACTS: length, LEARNT: length,
        }  # fmt: skip
        end = start + _HEAD.size + length
        whole = length == lengths[kind] and end + _SUM.size <= len(tail)
        if whole and _SUM.unpack_from(tail, end)[0] == zlib.crc32(memoryview(tail)[start:end]):
            return True
    return False


class ValidPrefix(NamedTuple):
    """The part of a journal that counts: up to the last frame whose results are there."""

    end: int
    rows: int  # In it, at most.
    published: int  # The size of the results when the job came to its end the last time; 0 if it never did.
    behind_retry: bool  # Whether dead letters were forgotten behind it.
    forgotten: int  # Rows whose results are not there.


def valid_prefix(journal: AppendFile, actual: int) -> ValidPrefix:
    """Return which frames count.

    :param actual: the size of the results.
    :raises ValueError: if the journal is damaged before its end.
    """
    end = whole = len(MAGIC)
    rows = forgotten = published = 0
    behind_retry = known = False
    for frame in frames(journal):
        whole = frame.end
        known |= frame.kind == FACTS and "settings" in json.loads(frame.body)
        published = frame.sizes[0] if frame.kind == FINISHED else published
        if frame.sizes[0] <= actual:
            end, rows = frame.end, rows + frame.done + frame.dead
        else:
            forgotten += frame.done
            behind_retry |= frame.kind == RETRY
    check_tail(journal, whole, known)
    return ValidPrefix(end, rows, published, behind_retry, forgotten)


class _Told:
    """What frames of a journal tell, one after the other.

    :param rows: how many rows they have at most.
    :ivar keys: those of rows that are done, the first `count`; `last`, the last of these rows.
    :ivar dead: rows that are dead, each time with the size of the errors that holds their letters.
    :ivar facts: what was noted of the job; `finished`, whether it had come to its end; `end`, the size of the results.
    :ivar undigested: keys of rows that are done of which no digest was kept, less those `learnt`.
    """

    def __init__(self, rows: int) -> None:
        self.keys: Keys = np.empty(rows, dtype=np.uint64)  # All at once, so that none is held twice.
        self.count = self.end = 0
        self.dead: list[tuple[int, Keys]] = []
        self.last: Pair = (0, 0)
        self.facts: dict[str, Any] = {}
        self.undigested: list[Keys] = []
        self.learnt: list[Keys] = []
        self.finished = False
        self._since = self._dead_since = 0  # Those from there on are of the input as it is now.
        self._marks = bytearray()

    def add(self, frame: Frame) -> None:
        """Take in the next."""
        self.end = frame.sizes[0]
        self.finished = frame.kind == FINISHED
        if frame.kind in (ROWS, DIGESTED):
            pairs = frame.pairs
            done = pairs[: frame.done]
            self.keys[self.count : self.count + frame.done] = done[:, 0]
            self.count += frame.done
            self.last = tuple(done[-1].tolist()) if frame.done else self.last
            self.dead += [(frame.sizes[1], pairs[frame.done :].copy())] * bool(frame.dead)
            if not frame.digests.all():
                self.undigested.append(done[frame.digests == 0, 0])
            if (done[:, 1] == UNKNOWN).any():
                self._know_by_keys()
            else:
                _mark(self._marks, done[:, 1])
        elif frame.kind == LEARNT:
            self.learnt.append(frame.learnt[:, 0])
        elif frame.kind == RETRY:
            self.forget_dead(frame.sizes[1])
        elif frame.kind == FACTS:
            facts = json.loads(frame.body)
            self.facts.update(facts)
            if "input" in facts:
                self._know_by_keys()

    def _know_by_keys(self) -> None:
        """Know the rows so far by their keys: where they stand in the input is not known of all."""
        self._since, self._dead_since, self._marks = self.count, len(self.dead), bytearray()

    def forget_dead(self, size: int) -> int:
        """Forget dead rows whose letters are not among the first bytes of the errors; return how many these are."""
        kept = [each for each in self.dead if each[0] <= size]
        lost = sum(len(pairs) for _, pairs in self.dead[len(kept) :])
        self.dead, self._dead_since = kept, min(self._dead_since, len(kept))
        return lost

    def settle(self) -> tuple[bytes, Keys, Keys]:
        """Return what `Ledger` calls `skip`, `skipped` and `settled`; nothing else can be asked any more."""
        dead_now = [pairs for _, pairs in self.dead[self._dead_since :]]
        for pairs in dead_now:
            _mark(self._marks, pairs[:, 1])
        all_now = not self._since and not self._dead_since
        now = [self.keys[self._since : self.count], *(pairs[:, 0] for pairs in dead_now)]
        skipped = as_keys(()) if all_now else np.sort(np.concatenate(now))
        count = self.count
        for _, pairs in self.dead:
            self.keys[count : count + len(pairs)] = pairs[:, 0]
            count += len(pairs)
        settled = self.keys[:count]
        settled.sort()
        return bytes(self._marks), settled if all_now else skipped, settled


class Ledger:
    """A job's files, opened for this driver alone.

    :param fresh: whether to forget an earlier job that wrote there.
    :param made: the output that is made of the results, where they are not it.
    :param given: what is to be noted of the input as it is now.
    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar settled: their keys when the job was opened, sorted.
    :ivar skip: a byte for each of the first rows by their numbers, 1 for those that were settled since the input is
        what it is now; `skipped`, their keys.
    :ivar facts: what was noted of the job; `finished`, whether it had come to its end.
    :ivar undigested: keys of rows that are done of which no digest was kept, sorted.
    :ivar lacking: whether results that `made` was made from are missing: then nothing is changed, or can be added.
    :ivar forgotten: rows that are run again since a file was shorter than it should be; `notes`, sentences on what else
        was not as the journal says.
    :raises ValueError: if another driver writes there, or the files are not those of a job, or are damaged.
    """

    def __init__(
        self,
        results: Path,
        errors: Path,
        journal: Path,
        fresh: bool = False,
        made: Path | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.done = self.dead = self.forgotten = 0
        self.finished = self.lacking = self._usable = False
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.settled: Keys = as_keys(())
        self.skip = b""
        self.skipped: Keys = as_keys(())
        self.undigested: Keys = as_keys(())
        self._made, self._given = made, given
        there = any(path.exists() and path.stat().st_size for path in (results, errors))
        taken = ValueError(
            f"{results} is there already, without the journal {journal.name} of a job that could go on: "
            "put that back, name another output, or start again with --fresh"
        )
        if there and not fresh and not journal.exists():
            raise taken
        with contextlib.ExitStack() as stack:
            self._journal = stack.enter_context(contextlib.closing(AppendFile(journal)))
            self._journal.lock(results)
            self._begin(there)
            # A journal that tells of nothing may be what is left of a job that was refused here.
            if there and not fresh and all(frame.kind == RETRY for frame in frames(self._journal)):
                valid_prefix(self._journal, 0)  # Which says so if it is damaged.
                raise taken
            new = not results.exists()
            self._files = tuple(self._opened(path, new or path == errors, stack) for path in (results, errors))
            self._files[0].lock(results)  # Where the journal is gone, and another has a new one.
            if fresh:
                for file, size in ((self._journal, len(MAGIC)), *((file, 0) for file in self._files)):
                    file.cut(size)
            self._load()
            self._usable = not self.lacking
            self._stack = stack.pop_all()

    def _opened(self, path: Path, brief: bool, stack: contextlib.ExitStack) -> AppendFile:
        """Open a file; one that is to be brief is not left empty: results only where the job can go on."""
        file = stack.enter_context(contextlib.closing(AppendFile(path)))

        def left() -> None:
            if brief and not (self._usable and file is self._files[0]):
                file.remove_empty()

        stack.callback(left)
        return file

    def _begin(self, there: bool) -> None:
        """See that it is a journal, which an empty or torn one becomes."""
        with self._journal.reader() as file:
            begin = file.read(len(MAGIC))
        if begin == EARLIER:  # An earlier ctxflow must not take it up from now on.
            self._journal.change(0, MAGIC)
        if begin in (MAGIC, EARLIER):
            return
        if not MAGIC.startswith(begin):
            raise ValueError(
                f"{self._journal.path} is not the journal of a job: put that back, name another output, or "
                + ("begin anew with --fresh" if there else "remove it")
            )
        self._journal.cut(0)
        self._journal.append(MAGIC)

    # --- opening

    def _load(self) -> None:
        """Take over the frames whose results are there, and have the files hold no more than what counts."""
        results, errors = self._files
        found = valid_prefix(self._journal, results.actual_size())
        short = found.forgotten and results.actual_size() < found.published
        self.lacking = bool(short and self._made is not None and self._made.exists())
        if self.lacking:
            found = valid_prefix(self._journal, _ANY_SIZE)
        told = _Told(found.rows)
        for frame in frames(self._journal, found.end):
            told.add(frame)
        self.facts.update(told.facts)
        self.finished = told.finished
        if not self.lacking:
            # Behind a retry that is forgotten the errors are those of a later time: what they held then is gone.
            lost = told.forget_dead(0 if found.behind_retry else errors.actual_size())
            sizes = told.end, max((size for size, _ in told.dead), default=0)
            self._check(sizes, told.last)
            self._journal.cut(found.end)
            errors.cut(sizes[1])
            results.size = told.end
            if lost:
                self._add(RETRY)
                self._journal.sync()  # As in `retry`.
                self.notes.append(f"{errors.path} lacks dead letters: {counted(lost, 'row')} will be tried again")
            taken = self._take_over(told)
            self.forgotten = self.forgotten or max(0, found.forgotten - taken)
            if taken:
                self._load()
                return
        if told.undigested:
            self.undigested = np.setdiff1d(np.concatenate(told.undigested), np.concatenate([as_keys(()), *told.learnt]))
        self.done, self.dead = told.count, sum(len(pairs) for _, pairs in told.dead)
        self.skip, self.skipped, self.settled = told.settle()

    def _take_over(self, told: _Told) -> int:
        """Have whole lines of the results count that the journal does not know; return how many do.

        From the first line on that is of no row, or of one that has its line, they are kept beside and cut off; so are
        the few that a kill leaves, where the input has changed since, and nobody can tell whether they are of its rows.

        :param told: what the journal knows.
        """
        results, errors = self._files
        begin, actual = told.end, results.actual_size()
        if actual == begin:
            return 0
        settings = self.facts.get("settings")
        lines = _told_by(results.lines(begin), settings.get("id_column") if isinstance(settings, dict) else None)
        taken, end = _taken(lines, told.keys[: told.count], begin)
        count = sum(map(len, taken))
        what = "lines that are no results of rows to do"
        changed = self._given is not None and self.facts.get("input") not in (self._given, self._given.get("digest"))
        if changed and 0 < count <= _ONE_COMMIT and any((pairs[:, 0] < _IDS).any() for pairs in taken):
            what = f"{counted(count, 'row')} that its journal does not know, and the input has changed since"
            taken, end, count = [], begin, 0
        torn = results.last_line(actual)
        if end < actual - (len(torn) if _may_be_torn(torn) else 0):
            self._keep_beside(end, what)
        results.cut(end)
        if not count:
            return 0
        keys = np.sort(np.concatenate(taken)[:, 0])
        if any(contained(pairs[:, 0], keys).any() for _, pairs in told.dead):  # Their letters are of before.
            errors.cut(0)
            self._add(RETRY)
        for pairs in taken:
            self._add(DIGESTED, pairs.tobytes() + bytes(DIGEST_BYTES * len(pairs)), len(pairs))
        self._journal.sync()
        self.notes.append(f"{results.path} holds {counted(count, 'row')} that its journal does not know: they are done")
        return count

    def _keep_beside(self, begin: int, what: str) -> None:
        """Add what the results hold from a place on to a file beside them."""
        path = self._files[0].path
        with contextlib.closing(AppendFile(path.with_name(path.name + CUT))) as beside:
            beside.size = beside.actual_size()
            with self._files[0].reader() as source:
                source.seek(begin)
                while block := source.read(1 << 20):
                    beside.append(block)
            beside.sync()
            self.notes.append(f"{path} holds {what}: they are in {beside.path} now")

    def _check(self, sizes: tuple[int, int], last: Pair) -> None:
        """Check that what counts ends where the journal says, with the last row's line, before anything is cut off."""
        what_to_do = (
            "put it back, name another output, or start again with --fresh",
            "put it back, or move it away to have its rows tried again",
        )
        for n, (file, size) in enumerate(zip(self._files, sizes, strict=True)):
            end = file.last_line(size) if size else b"\n"
            if not end.endswith(b"\n") or (n == 0 and size and not _may_be_of(end, last)):
                raise ValueError(
                    f"{file.path} was changed by another program, so that the job cannot go on: {what_to_do[n]}"
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
        for frame in frames(self._journal, self._journal.size):
            if frame.kind == LEARNT:
                learnt = frame.learnt[contained(frame.learnt[:, 0], keys)]
                digests[np.searchsorted(keys, learnt[:, 0])] = learnt[:, 1]
        return keys, digests

    def learn(self, digests: Mapping[int, int]) -> None:
        """Keep digests of rows that are done, of which none was kept, by their keys."""
        pairs = np.array(list(digests.items()), dtype="<u8").reshape(-1, 2)
        for begin in range(0, len(pairs), _CHUNK):
            self._add(LEARNT, pairs[begin : begin + _CHUNK].tobytes())

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
                file.roll_back(size)
            raise

    def _add(self, kind: int, body: bytes = b"", done: int = 0, dead: int = 0) -> None:
        self._journal.append(packed(kind, body, done, dead, [file.size for file in self._files]))
        self.finished = kind == FINISHED

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files, which lets another driver write; no empty file of errors is left."""
        self._stack.close()


def _mark(data: bytearray, numbers: Keys) -> None:
    """Set a byte to 1 for each of some numbers."""
    if numbers.size:
        data.extend(bytes(max(0, int(numbers.max()) + 1 - len(data))))
        np.frombuffer(data, dtype=np.uint8)[numbers] = 1


def _told_by(lines: Iterable[tuple[int, bytes]], id_column: str | None) -> Iterator[tuple[int, Pair]]:
    """Yield the row of each line of results, with where the line ends, up to the first that names none."""
    for offset, line in lines:
        if (pair := _row_of(line, id_column)) is None:
            return
        yield offset + len(line), pair


def _taken(lines: Iterable[tuple[int, Pair]], known: Keys, begin: int) -> tuple[list[Keys], int]:
    """Return the rows of lines as arrays of keys and numbers, up to the first that is known, and where its line begins.

    :param begin: where the first line does.
    """
    taken: list[Keys] = []
    seen = SeenKeys()
    seen.take(np.sort(known))
    lines = iter(lines)
    while found := list(itertools.islice(lines, _CHUNK)):
        pairs = np.array([pair for _, pair in found], dtype=np.uint64)
        repeated = seen.add(pairs[:, 0])
        count = int(repeated.argmax()) if repeated.any() else len(found)
        if count:
            taken.append(pairs[:count])
            begin = found[count - 1][0]
        if count < len(found):
            break
    return taken, begin


def _may_be_torn(line: bytes) -> bool:
    """Return whether the last line of results may be the begin of one, as a kill or a full disk leaves it."""
    if line.endswith(b"\n") or not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


_REQUEST = re.compile("batch_req_([0-9a-f]{16})")


def _row_of(line: bytes, id_column: str | None) -> Pair | None:
    """Return the row that a line of the results names, None if none; its number only where that is its key.

    (Rows with ids may have stood elsewhere in the input when the line was written.)

    >>> _row_of(b'{"row": 6, "result": "yes"}', None), _row_of(b'{"row": 6, "result": "yes"}', "id")
    ((6, 6), None)
    """
    try:
        record = json.loads(line)
        if "row" not in record:
            request = _REQUEST.fullmatch(record["id"])
            return (int(request[1], 16), UNKNOWN) if request else None
        number, name = record["row"], None if id_column is None else str(record[id_column])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if type(number) is not int or not 0 <= number < _IDS or (name is not None and "\ufffd" in name):
        return None  # U+FFFD may stand for what no output can hold.
    return (number, number) if name is None else (id_key(name), UNKNOWN)


def _may_be_of(line: bytes, row: Pair) -> bool:
    """Return whether a line of the results can be that of a row, as far as it names one.

    >>> _may_be_of(b'{"row": 6, "result": "yes"}', (17, 6)), _may_be_of(b'{"row": 6, "result": "yes"}', (17, 5))
    (True, False)
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return True
    if "row" in record:
        return row[1] in (record["row"], UNKNOWN)
    name = str(record.get("id"))
    return not name.startswith("batch_req_") or name == f"batch_req_{row[0]:016x}"
