"""The loop of a job: rows not yet settled in, answers out, in bounded memory, until all are done or too many failed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ctxflow.batch.job_option import error_limit
from ctxflow.batch.ledger import Keys, Ledger, Pair, SeenKeys, as_keys, contained, id_key, row_digest
from ctxflow.batch.records import Held, Record, dead_letter, error_line
from ctxflow.batch.row_items import Make, Prepared, known_as
from ctxflow.errors import ContextError, CtxflowError, RunEnded, counted, one_line, short
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.pending import Failed, Stream
from ctxflow.models.results import InputTooLong
from ctxflow.observe.history import Causes
from ctxflow.ownership import uninterrupted
from ctxflow.rows.source import Row, RowError, Source

_ITEM_OVERHEAD = 500  # Bytes that an item in flight takes beside its values.
_FIRST_ANSWER = 10_000  # Bytes that an answer is thought to take before there is one.
_SMALL_ROW = 256  # Bytes of a row that is not looked through, but counted as
_MOST_TIMES = 28  # times as much, which is what values take of the shortest text.


def memory_of(*values: Any, shared: Collection[int] = ()) -> int:
    """Return how many bytes plain data takes in memory: short values are many times as large as their text.

    :param shared: ids of values that take none, since they are there once for all.

    >>> memory_of({}) * 1000 < memory_of([{}] * 1000) < memory_of([{}] * 1100)
    True
    """
    rest, size, own = list(values), 0, sys.getsizeof
    while rest:
        value = rest.pop()
        if shared and id(value) in shared:
            continue
        size += own(value, 0)
        kind = type(value)
        if kind is dict:
            rest += value
            rest += value.values()
        elif kind is list or kind is tuple:
            rest += value
    return size


class Intake:
    """The rows of an input that are not settled.

    :param id_column: the column of the ids; None knows rows by their numbers.
    :param ledger: what is settled; without one nothing is.
    :param shared: values that items of all rows hold.
    :ivar read: how many rows the input has up to where it is read.
    """

    def __init__(
        self,
        source: Source,
        make: Make,
        id_column: str | None,
        keep: tuple[str, ...],
        ledger: Ledger | None = None,
        shared: Sequence[object] = (),
    ) -> None:
        self.read = 0
        self._source = source
        self._make = make
        self._id_column = id_column
        self._keep = keep
        self._shared = frozenset(id(value) for value in shared if value is not None)
        self._settled = as_keys(()) if ledger is None else ledger.settled
        self._skip = b"" if ledger is None else ledger.skip
        self._seen = SeenKeys()
        if id_column is not None and ledger is not None:
            self._seen.take(ledger.skipped)

    def chunks(self) -> Iterator[list[Prepared]]:
        """Yield chunks of rows, which may be empty: all of a chunk may be settled."""
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
        """Return the rows' keys; fill in their ids, and what is wrong with them."""
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
            except Exception as error:  # A number of more digits than Python writes, for example.
                errors[n] = RowError(f"the {self._id_column} cannot be used: {error or type(error).__name__}")
                given.append(row.number)
        keys = as_keys(given)
        for n in np.flatnonzero(self._seen.add(keys)).tolist():
            errors[n] = RowError(f"the {self._id_column} {short(ids[n])} is that of an earlier row: each needs its own")
            keys[n] = numbers[n]
        return keys

    def _prepared(self, row: Row, key: int, identifier: Any, error: RowError | None) -> Prepared:
        values, refused = row.values, False
        if isinstance(values, RowError):
            error = values
        elif error is None:
            try:
                kept = {name: _kept(values, name) for name in self._keep} if self._keep else _NOTHING
                item = self._make(values)
                size = row.size * _MOST_TIMES if row.size < _SMALL_ROW else memory_of(item, kept, shared=self._shared)
                return Prepared(row.number, key, identifier, item, kept, size + _ITEM_OVERHEAD)
            except RowError as reason:
                error, refused = reason, True
        return Prepared(row.number, key, identifier, (), _NOTHING, _ITEM_OVERHEAD, error, refused=refused)


_NOTHING: Mapping[str, Any] = {}


def _kept(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise RowError(f"the row has no {short(name)}, which is to be kept")
    return values[name]


def _id(row: Row, column: str) -> str | int:
    if isinstance(row.values, RowError):
        raise row.values
    identifier = row.values.get(column)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)) or identifier == "":
        shown = "missing" if identifier is None else short(identifier)
        raise RowError(f"the {column} is {shown}: each row needs one, a string or a whole number")
    return identifier


FIRST = 100  # Rows before which neither a failing job nor a share of failures is judged.


class TooManyErrors(CtxflowError):
    """So many rows failed that the rest of the job is not run."""


class Tolerance:
    """Count the failures of this run of a job, and say when they are too many.

    By default that is when each of the first `FIRST` rows failed, and no other row succeeded so far.

    :param most: as a person writes it, None for the default.

    >>> tolerance = Tolerance("1")
    >>> tolerance.read([0, 1, 2]); tolerance.dead(0, "ValueError", "no"); tolerance.exceeded() is None
    True
    >>> tolerance.dead(1, "ValueError", "no"); tolerance.exceeded()
    '2 rows failed, and --max-errors allows 1: ValueError: no'
    """

    def __init__(self, most: str | None = None) -> None:
        self._most, self._share = error_limit(most) if most is not None else (None, None)
        self._read = self._dead = self._first_dead = 0
        self._last_of_first = -1  # The number of the last of the first rows.
        self._went_well = False
        self._causes = Causes()

    def read(self, numbers: Sequence[int]) -> None:
        """Count rows that were read, whose numbers ascend."""
        if numbers and self._read < FIRST:
            self._last_of_first = numbers[: FIRST - self._read][-1]
        self._read += len(numbers)

    def done(self, amount: int) -> None:
        """Count rows that have a result."""
        self._went_well |= amount > 0

    def dead(self, number: int, error: str, message: str) -> None:
        """Count a row that failed."""
        self._dead += 1
        self._first_dead += number <= self._last_of_first
        self._causes.bury({"kind": "exception", "error": error, "message": message}, 1)

    def exceeded(self) -> str | None:
        """Return why the job is to be ended, None if it is not."""
        if self._most is not None:
            too_many = self._dead > self._most
            said = f"{counted(self._dead, 'row')} failed, and --max-errors allows {self._most:,}"
        elif self._share is not None:
            too_many = self._read >= FIRST and self._dead > self._read * self._share / 100
            said = f"{counted(self._dead, 'row')} of {self._read:,} failed, and --max-errors allows {self._share:g} %"
        else:
            too_many = not self._went_well and self._first_dead >= FIRST
            said = f"each of the first {self._first_dead:,} rows failed"
        return f"{said}: {self._commonest()}" if too_many else None

    def _commonest(self) -> str:
        cause = self._causes.ordered()[0]
        share = "" if cause.items == self._dead else f"most often ({cause.items:,}) for "
        return f"{share}{cause.error}: {one_line(cause.message, 300)}"


Submit = Callable[
    [Sequence[Any], Stream], Sequence[int]
]  # Submits items, answered to the stream; returns their numbers.

WINDOW_ROWS = 20_000
WINDOW_BYTES = 64 << 20
_PATIENCE = 0.5
_FATAL = (ContextError, RunEnded, EngineFailed)  # What is no row's fault.


class ResultError(CtxflowError, ValueError):
    """A result cannot be written, or is not what was asked for; the message says what is wrong with it."""


@dataclasses.dataclass(eq=False)
class Pump:
    """Submit the rows of some chunks, and commit their results.

    At most `WINDOW_ROWS` rows or `WINDOW_BYTES` are in flight, or wait for their turn.

    :ivar submit: called for the first time when there is a row to run.
    :ivar place: where a row stands, for a person.
    :ivar in_order: whether results are kept in the order of the rows, instead of as they come.
    :ivar told: called with the place and the message of each dead letter.
    :ivar show: called now and then with the number of rows in flight.
    :ivar tally: counts what there is to be counted of rows and their answers.
    :ivar passed_on: gets lines of results, too, once they are kept.
    :ivar rows: how many are in flight.
    """

    chunks: Iterator[list[Prepared]]
    submit: Submit
    ledger: Ledger
    record: Record
    place: Callable[[int], str]
    in_order: bool
    told: Callable[[str, str], None]
    show: Callable[[int], None]
    tally: Callable[[Prepared, Any], None] = lambda row, answer: None
    tolerance: Tolerance = dataclasses.field(default_factory=Tolerance)
    held: Held = dataclasses.field(default_factory=Held)
    passed_on: Callable[[bytes], None] | None = None

    def __post_init__(self) -> None:
        self.rows = 0
        self._passing: list[bytes] = []
        self._stream = Stream()
        self._turns = _Turns() if self.in_order else None
        self._waiting: dict[int, Prepared] = {}
        self._bytes = 0
        self._exhausted = False
        self._broken: ValueError | None = None
        self._fatal: BaseException | None = None

    def run(self) -> None:
        """Run all of them.

        :raises ContextError, RunEnded, EngineFailed: if nothing more can be run; what was done is kept.
        :raises TooManyErrors: if so many rows failed that the rest is not to be run.
        :raises ValueError: if the input cannot be read to its end; what was read is run before.
        :raises OSError: if results cannot be written.
        """
        try:
            while self._feed() or self._waiting:
                if (reason := self.tolerance.exceeded()) is not None:
                    raise TooManyErrors(
                        f"{reason}; the rest is not run, what is done is kept: mend it and give --retry-errors, or "
                        "go on in any case with --max-errors 100%"
                    )
                self.show(self.rows)
                self._settle(self._answers(_PATIENCE))
                if self._fatal is not None:
                    raise self._fatal
        except BaseException:
            with contextlib.suppress(OSError):  # The disk may be full, which is reported already.
                self._settle(self._answers(0))
            raise
        if self._broken is not None:
            raise self._broken

    def _feed(self) -> bool:
        """Take in rows until the window is full; whether there may be more, although none is on its way."""
        until = time.monotonic() + _PATIENCE
        while not self._exhausted and self.rows < WINDOW_ROWS and self._held < WINDOW_BYTES:
            try:
                chunk = next(self.chunks, None)
            except ValueError as error:
                chunk, self._broken = None, error
            if chunk is None:
                self._exhausted = True
                return False
            self._take_in(chunk)
            if time.monotonic() > until:
                break
        return not self._exhausted

    @property
    def _held(self) -> int:
        return self._bytes + (self._turns.expected() if self._turns is not None else 0)

    def _take_in(self, chunk: list[Prepared]) -> None:
        self.tolerance.read([row.number for row in chunk])
        self.rows += len(chunk)
        self._bytes += sum(row.size for row in chunk)
        if self._turns is not None:
            self._turns.expect(chunk)
        good = [row for row in chunk if row.error is None]
        if good:
            items = self.submit([row.item for row in good], self._stream)
            self._waiting.update(zip(items, good, strict=True))
        if len(good) < len(chunk):
            self._settle((row, Failed(row.error)) for row in chunk if row.error is not None)

    def _answers(self, timeout: float) -> Iterable[tuple[Prepared, Any]]:
        if not self._waiting:
            return
        pop = self._waiting.pop
        for items, results in self._stream.take(timeout):
            for item, result in zip(items, results, strict=True):
                if (row := pop(item, None)) is None:  # Of a chunk of which the run's end let in a part only.
                    continue
                if self._stream.contexts:
                    row.context = self._stream.contexts.pop(item, None)
                yield row, result

    def _settle(self, answers: Iterable[tuple[Prepared, Any]]) -> None:
        """Keep answers, or have them wait for their turn."""
        self._keep(list(answers))
        while self._passing and self.passed_on is not None:  # Where it may be interrupted: a reader may be slow.
            self.passed_on(self._passing.pop(0))

    @uninterrupted
    def _keep(self, answers: list[tuple[Prepared, Any]]) -> None:
        if self._fatal is not None and self._turns is not None:
            return  # Nothing may go before rows that were not run.
        results: list[bytes] = []
        errors: list[bytes] = []
        done: list[Pair] = []
        dead: list[Pair] = []
        digests: list[bytes] = []
        for row, result in self._turns.next(answers) if self._turns is not None else answers:
            self.rows -= 1
            self._bytes -= row.size
            error = result.error if type(result) is Failed else result if type(result) is InputTooLong else None
            if isinstance(error, _FATAL):
                self._fatal = error
                if self._turns is not None:
                    break
                continue
            if error is None:
                try:
                    made = self.held.line(self.record(row, result)), row_digest(known_as(row.item), row.kept)
                    self.tally(row, result)
                except ResultError as reason:
                    error = reason
                except Exception as reason:  # Whatever a row's own values lead to, it is that row's.
                    error = ResultError(f"the result cannot be written: {reason or type(reason).__name__}")
                else:
                    results.append(made[0])
                    digests.append(made[1])
                    done.append((row.key, row.number))
            if error is not None:
                place = self.place(row.number)
                errors.append(error_line(dead_letter(row.number, row.key, row.id, place, error)))
                dead.append((row.key, row.number))
                self.told(place, _in_words(error))
                self.tolerance.dead(row.number, type(error).__name__, str(error))
        self.tolerance.done(len(done))
        if done or dead:
            lines = b"".join(results)
            self.ledger.commit(lines, b"".join(errors), done, dead, b"".join(digests))
            if self.passed_on is not None:
                self._passing.append(lines)


def _in_words(error: BaseException) -> str:
    """Return an error's message, behind its name unless it is one of ctxflow's own sentences.

    >>> _in_words(KeyError("author")), _in_words(AssertionError()), _in_words(RowError("it is empty"))
    ("KeyError: 'author'", 'AssertionError', 'it is empty')
    """
    if type(error).__module__.partition(".")[0] == "ctxflow":
        return str(error)
    return ": ".join(filter(None, [type(error).__name__, str(error)]))


class _Turns:
    """Answers that wait until all rows before theirs are answered."""

    def __init__(self) -> None:
        self._bytes = 0  # Of answers that wait,
        self._seen, self._seen_bytes = 1, _FIRST_ANSWER  # and of all that came.
        self._order: collections.deque[Prepared] = collections.deque()
        self._ready: dict[int, tuple[Any, int]] = {}

    def expect(self, rows: Iterable[Prepared]) -> None:
        self._order += rows

    def next(self, answers: Iterable[tuple[Prepared, Any]]) -> Iterator[tuple[Prepared, Any]]:
        """Yield those whose turn has come."""
        for row, answer in answers:
            size = memory_of(answer)
            self._ready[row.number] = answer, size
            self._bytes += size
            self._seen, self._seen_bytes = self._seen + 1, self._seen_bytes + size
        while self._order and self._order[0].number in self._ready:
            row = self._order.popleft()
            answer, size = self._ready.pop(row.number)
            self._bytes -= size
            yield row, answer

    def expected(self) -> int:
        """Return what the answers take that wait, and those that may have to, by what answers took so far."""
        return self._bytes + (len(self._order) - len(self._ready)) * self._seen_bytes // self._seen
