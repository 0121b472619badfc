"""What a job has done, on disk: its results, its dead letters, and the journal that says how much of both counts.

A commit appends lines to the results and the errors, then a frame to the journal: both files' sizes, and the keys and
numbers of the rows. Only what a whole frame vouches for counts; when a job is opened, what lies beyond is cut off, so
that no line is torn and no row is there twice, wherever its driver was killed. Where a file is shorter than its last
frames say (the machine lost power, or somebody cut it), those frames go too, and their rows run again.

The journal is OUTPUT.progress: a first line that says what it is, then frames. Its lock keeps a second driver out.
What does not live here: how files are added to (append_file.py), and what is in the lines (records.py).
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.append_file import AppendFile
from ctxflow.batch.keys import Keys, as_keys
from ctxflow.executors.interrupts import uninterrupted

_MAGIC = b'{"ctxflow": "batch journal", "version": 1}\n'
# Kind, rows done, rows dead, bytes after the head, size of the results, size of the errors; then the checksum.
_HEAD = struct.Struct("<IIIIQQ")
_SUM = struct.Struct("<I")
_ROWS, _RETRY, _FINISHED, _FACTS = range(1, 5)
_LARGEST = 1 << 30


Pair = tuple[int, int]
"""A row's key and its number."""

_NO_PAIRS = np.zeros((0, 2), dtype=np.uint64)


class Ledger:
    """A job's files, opened for this driver alone.

    :param results: where results go; `errors` likewise.
    :param journal: the journal's path.
    :param fresh: whether to forget an earlier job that wrote there.
    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar settled: their keys when the job was opened, sorted.
    :ivar skip: a byte for each of the first rows by their numbers, 1 for those that were settled since the input is
        what it is now; `skipped`, their keys.
    :ivar facts: what was noted of the job with `note`.
    :ivar finished: whether the job had come to its end.
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
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._journal = stack.enter_context(contextlib.closing(AppendFile(journal)))
            self._journal.lock(results)
            known = self._begin()
            if fresh:
                self._journal.cut(len(_MAGIC))
            if not known and not fresh and any(_size(path) for path in (results, errors)):
                raise ValueError(
                    f"{results} is there already, without the journal {journal.name} of a job that could go on: "
                    "name another output, or begin anew with --fresh"
                )
            self._files = tuple(stack.enter_context(contextlib.closing(AppendFile(path))) for path in (results, errors))
            self._load()
            self._stack = stack.pop_all()

    def _begin(self) -> bool:
        """See that it is a journal, which an empty or torn one becomes; whether it was one."""
        with self._journal.reader() as file:
            begin = file.read(len(_MAGIC))
        if begin == _MAGIC:
            return True
        if not _MAGIC.startswith(begin):
            raise ValueError(f"{self._journal.path} is not the journal of a job: name another output, or remove it")
        self._journal.cut(0)
        self._journal.append(_MAGIC)
        return False

    # --- opening

    def _load(self) -> None:
        """Take over what frames say that the files bear out, and cut the rest off."""
        actual = [file.actual_size() for file in self._files]
        frames = list(_frames(self._journal))
        good, behind_retry = len(frames), False
        while good:
            last = frames[good - 1]
            if last.sizes[0] <= actual[0] and (behind_retry or last.sizes[1] <= actual[1]):
                break
            behind_retry |= last.kind == _RETRY
            good -= 1
        self.forgotten = sum(frame.done for frame in frames[good:])
        end, sizes = len(_MAGIC), (0, 0)
        done, dead = [_NO_PAIRS], [_NO_PAIRS]
        since = (1, 1)  # Where those begin whose numbers are of the input as it is now.
        for frame in frames[:good]:
            end, sizes = frame.end, frame.sizes
            self.finished = frame.kind == _FINISHED
            if frame.kind == _ROWS:
                pairs = np.frombuffer(frame.body, dtype="<u8").reshape(-1, 2)
                done.append(pairs[: frame.done])
                dead.append(pairs[frame.done :])
            elif frame.kind == _RETRY:
                del dead[1:]
                since = (since[0], 1)
            elif frame.kind == _FACTS:
                facts = json.loads(frame.body)
                self.facts.update(facts)
                if "input" in facts:
                    since = (len(done), len(dead))
        if behind_retry:  # The errors are those of a later time: what they held at that one is gone.
            del dead[1:]
            since, sizes = (since[0], 1), (sizes[0], 0)
        self.done, self.dead = sum(map(len, done)), sum(map(len, dead))
        self.settled = np.concatenate([pairs[:, 0] for pairs in done + dead])
        self.settled.sort()
        now = [_NO_PAIRS, *done[since[0] :], *dead[since[1] :]]
        self.skipped = np.concatenate([pairs[:, 0] for pairs in now])
        self.skip = _marked(np.concatenate([pairs[:, 1] for pairs in now]))
        self._journal.cut(end)
        for file, size in zip(self._files, sizes, strict=True):
            if not file.cut(size):
                raise ValueError(
                    f"{file.path} was changed by another program, so that the job cannot go on: "
                    "name another output, or begin anew with --fresh"
                )
        if behind_retry:
            self._add(_RETRY)

    # --- writing

    @uninterrupted
    def commit(self, results: bytes, errors: bytes, done: Sequence[Pair], dead: Sequence[Pair]) -> None:
        """Keep whole lines, and that their rows are done or dead.

        :param done: a key and a number for each line of the results; `dead` likewise of the errors.

        :raises OSError: if there is no room; then nothing of it counts.
        """
        with self._all_or_nothing():
            for file, data in zip(self._files, (results, errors), strict=True):
                file.append(data)
            self._add(_ROWS, np.array([*done, *dead], dtype="<u8").tobytes(), len(done), len(dead))
        self.done += len(done)
        self.dead += len(dead)

    @uninterrupted
    def retry(self) -> None:
        """Forget the dead letters, so that their rows are missing again."""
        with self._all_or_nothing():
            self._files[1].size = 0
            self._add(_RETRY)
        # Without this frame, what will be in the errors from now on would be taken for what was there before.
        self._journal.sync()
        self._load()

    def note(self, facts: Mapping[str, Any]) -> None:
        """Keep what is to be known of the job when it is opened again, if it is not known yet."""
        new = {name: value for name, value in facts.items() if self.facts.get(name) != value or name not in self.facts}
        if new:
            self._add(_FACTS, json.dumps(new).encode())
            self.facts.update(new)
            if "input" in new:
                self.skip, self.skipped = b"", as_keys(())

    def finish(self) -> None:
        """Note that nothing is missing."""
        if not self.finished:
            for file in self._files:
                file.sync()
            self._add(_FINISHED)

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
        frame = _HEAD.pack(kind, done, dead, len(body), *(file.size for file in self._files)) + body
        self._journal.append(frame + _SUM.pack(zlib.crc32(frame)))
        self.finished = kind == _FINISHED

    def __enter__(self) -> Ledger:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, which lets another driver write; no empty file of errors is left."""
        if not self._files[1].size:
            self._files[1].path.unlink(missing_ok=True)
        self._stack.close()


class _Frame:
    """A frame of the journal; `end` is where the next begins."""

    __slots__ = ("body", "dead", "done", "end", "kind", "sizes")

    def __init__(self, head: tuple[int, ...], body: bytes, end: int) -> None:
        self.kind, self.done, self.dead = head[:3]
        self.sizes = (head[4], head[5])
        self.body = body
        self.end = end


def _frames(journal: AppendFile) -> Iterator[_Frame]:
    """The whole frames of a journal, up to the first that is torn."""
    with journal.reader() as file:
        file.seek(len(_MAGIC))
        while len(packed := file.read(_HEAD.size)) == _HEAD.size:
            head = _HEAD.unpack(packed)
            if head[3] > _LARGEST:
                return
            rest = file.read(head[3] + _SUM.size)
            body = rest[: head[3]]
            if len(rest) < head[3] + _SUM.size or _SUM.unpack(rest[head[3] :])[0] != zlib.crc32(
                body, zlib.crc32(packed)
            ):
                return
            yield _Frame(head, body, file.tell())


def _marked(numbers: Keys) -> bytes:
    """A byte for each number up to the highest, 1 for those that are there."""
    marks = np.zeros(int(numbers.max()) + 1 if numbers.size else 0, dtype=np.uint8)
    marks[numbers] = 1
    return marks.tobytes()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
