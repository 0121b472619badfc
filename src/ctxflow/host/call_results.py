"""What an app's function gives back, checked and pickled: results of a batch, chunks and states of sessions.

An app that yields its results has them sent along while it goes on, and kept whatever happens to the rest. In a step of
sessions, what goes wrong with one session's state or chunk is reported of that session alone.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ctxflow.errors import BatchContractError, article, counted, name_of
from ctxflow.host.call_surroundings import StateGone, digest_of, read_state, remove_states, state_path, write_state
from ctxflow.on_worker import Turn
from ctxflow.pickling import dumps

_LONGEST = 60  # Characters that are shown of what came in place of results.
_ASK = "return a list with one result for each item"
EVERY_SECONDS = 0.5  # How often results are sent along: so much work may be lost with a process that is killed.
Extent = dict[str, int]
"""Which of a call's items results are for: `count` from the `first` on; empty for all."""


def one_each(results: Any, expected: int, function: Callable[..., Any]) -> list[Any]:
    """Return what an app returned for a batch as a list with one result for each item.

    :raises BatchContractError: if it is not one result for each item. Text, mappings, sets, records and tables are
        never taken for several results, whatever their length: not by chance for a batch of one either.

    >>> one_each(range(2), 2, len)
    [0, 1]
    >>> one_each("x", 1, len)
    Traceback (most recent call last):
    ...
    ctxflow.errors.BatchContractError: len returned a str ('x') for a batch of 1 item: return a list with one result \
for each item, in their order
    """
    if type(results) is list and len(results) == expected:  # As nearly always.
        return results
    if not _is_several(results):
        raise _contract_error(function, f"returned {_shown(results)}", expected, _ASK)
    listed = list(itertools.islice(results, expected + 1))  # Which may have no end.
    if len(listed) != expected:
        count = len(results) if hasattr(results, "__len__") else len(listed)
        more = "or more " if len(listed) > expected and not hasattr(results, "__len__") else ""
        given = f"{count} {more}result{'s' * (count != 1)}"
        raise _contract_error(function, f"returned {given}", expected, _ASK)
    return listed


def _contract_error(function: Callable[..., Any], did: str, items: int, instead: str, more: str = "") -> Exception:
    text = f"{name_of(function)} {did} for a batch of {counted(items, 'item')}: {instead}, in their order{more}"
    return BatchContractError(text)


def _is_several(results: Any) -> bool:
    """Return whether what an app returned may be several results, not one that happens to be iterable."""
    kind = type(results)
    return (
        hasattr(kind, "__iter__")
        and not isinstance(results, (str, bytes, bytearray, memoryview, Mapping, Set))
        and not hasattr(kind, "_fields")  # A named tuple.
        and not hasattr(kind, "model_fields")  # A model of pydantic's, iterated by its fields.
        and not (hasattr(kind, "columns") and hasattr(kind, "shape"))  # A data frame, iterated by its columns.
        and getattr(results, "shape", None) != ()  # An array of no dimension.
    )


def _shown(value: Any) -> str:
    """Return how a message names a value: by its type, and its beginning where that is short."""
    if value is None:
        return "nothing"
    kind = article(type(value).__name__)
    if type(value) not in (str, bytes, int, float):
        return kind
    text = repr(value)
    return f"{kind} ({text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'})"


def dump_results(results: Any) -> bytes:
    """Return an app's results, pickled; raise `TypeError` if they cannot be."""
    return dumps(results, "the result of the app", "return plain data instead")


class Yielding:
    """A call whose function yields its results one by one.

    :param send: sends a message with results that were not sent yet.
    :param leaving: says whether the worker has notice: then the call ends with what is done.
    :param own: called in between; ends a process that the function forked and that returned here.
    :param every: seconds from one message to the next.
    :ivar at: the item that the function is about, counted from 0; once something was raised, the one to blame.

    >>> def squares(numbers):
    ...     for number in numbers:
    ...         yield number * number
    >>> call = Yielding(lambda head, body: None, lambda: False, lambda: None)
    >>> call.run(squares([1, 2, 3]), 3, squares) == ({}, dump_results([1, 4, 9]))
    True
    """

    def __init__(
        self,
        send: Callable[[Extent, bytes], None],
        leaving: Callable[[], bool],
        own: Callable[[], None],
        every: float = EVERY_SECONDS,
    ) -> None:
        self.at = 0
        self._send = send
        self._leaving = leaving
        self._own = own
        self._every = every
        self._sent = 0
        self._unsent: list[Any] = []

    def run(
        self, results: Generator[Any, Any, Any], expected: int, function: Callable[..., Any]
    ) -> tuple[Extent, bytes]:
        """Take one result for each of so many items; return which results were not sent yet, and those, pickled.

        :raises BaseException: what the function raises; TypeError for a result that cannot be pickled. What came
            before it has been sent then.
        :raises BatchContractError: if it yields too few or too many results. What was not sent yet is dropped: it may
            be that of other items.
        """
        try:
            whole = self._take(results, expected, function)
            if not whole:
                self._flush()
                _close(results)
            body = self._dumped()
        except BaseException as error:
            self._own()
            _close(results)
            if not isinstance(error, BatchContractError):
                self._flush()
            raise
        if whole and not self._sent:
            return {}, body
        return {"first": self._sent, "count": len(self._unsent)}, body

    def _take(self, results: Generator[Any, Any, Any], expected: int, function: Callable[..., Any]) -> bool:
        """Return whether all results have come: else the worker is about to leave."""
        due = time.monotonic() + self._every
        for self.at in range(expected):
            if self._leaving():
                return False
            if self._unsent and time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + self._every
            try:
                result = next(results)
            except StopIteration:
                raise self._wrong(function, counted(self.at, "result"), expected) from None
            self._own()
            self._unsent.append(result)
        # What the function does after the last result, such as to yield another, goes to the last item's account.
        last = self._unsent.pop()
        for _ in results:
            raise self._wrong(function, "too many results", expected)
        self._unsent.append(last)
        return True

    def _wrong(self, function: Callable[..., Any], given: str, expected: int) -> Exception:
        more = f"; the {self._sent} that were sent along before may be those of other items" if self._sent else ""
        return _contract_error(function, f"yielded {given}", expected, "yield one for each item", more)

    def _flush(self) -> None:
        if not self._unsent:
            return
        body = self._dumped()
        self._send({"first": self._sent, "count": len(self._unsent)}, body)
        self._sent += len(self._unsent)
        self._unsent = []

    def _dumped(self) -> bytes:
        """Return what was not sent yet, pickled.

        :raises TypeError: if one cannot be; those before it have been sent then, and those after it are dropped.
        """
        try:
            return dump_results(self._unsent)
        except Exception:
            for number, result in enumerate(self._unsent):
                try:
                    dump_results([result])
                except Exception:
                    self.at = self._sent + number
                    del self._unsent[number:]
                    self._flush()
                    raise
            raise


def _close(results: Generator[Any, Any, Any]) -> None:
    """Let the function clean up, and ignore what it raises then."""
    with contextlib.suppress(BaseException):
        results.close()


class StepEntry(NamedTuple):
    """What a step does with one session: an `Order` of the scheduler, with what it needs."""

    session: int
    thaw: str
    made: int
    makes_chunk: bool
    then: str
    prompts: Sequence[bytes] = ()  # Pickled one by one, for the chunk that it makes.
    state: bytes = b""  # Pickled, if it is the one that was kept beside the worker.
    digest: str = ""  # Of the frozen state that it is to continue from.


class _Failed(Exception):
    """Something is wrong with one session; its cause says what."""


class States:
    """The states that a library process has, by the sessions' numbers: whatever the app's function makes of them.

    :param leaving: says whether the worker has notice of its eviction: then the states that a step has changed are
        kept beside the worker, whatever was asked.
    :param own: as of `Yielding`.
    """

    def __init__(self, leaving: Callable[[], bool], own: Callable[[], None]) -> None:
        self._leaving = leaving
        self._own = own
        self._states: dict[int, Any] = {}

    def step(
        self, function: Callable[..., Any], value: Sequence[Any], entries: Sequence[StepEntry], folder: str
    ) -> tuple[list[dict[str, Any]], bytes]:
        """Make the chunks of several sessions in one call of the function, and move their states as asked.

        :param value: the built context, if there is one.
        :param folder: of the worker's cache, where frozen states are.
        :returns: the outcomes that `StepFinished` describes, and the pickled list of each entry's chunk and kept state,
            pickled themselves.
        :raises BaseException: what the function raises: then the states of all whose chunks it was to make are gone.
        """
        outcomes: list[dict[str, Any]] = [{} for _ in entries]
        results: list[tuple[bytes | None, bytes | None]] = [(None, None)] * len(entries)
        for entry in entries:
            if entry.then == "drop":
                self._states.pop(entry.session, None)
                remove_states(folder, entry.session)
        for position, entry in enumerate(entries):
            if entry.thaw == "frozen" and not entry.makes_chunk:
                results[position] = None, self._brought_out(entry, outcomes[position], folder)
        prompts = self._prepare(entries, outcomes, folder)
        chunks = self._make_chunks(function, value, entries, prompts)
        for position, entry in enumerate(entries):
            outcome = outcomes[position]
            if outcome or entry.then == "drop":
                continue
            if not entry.makes_chunk and entry.session not in self._states:
                outcome["lost"] = "the session's state is not in the library process"
                continue
            try:
                results[position] = self._settle(entry, chunks.get(position), outcome, folder)
            except _Failed as failed:
                outcomes[position] = {"failure": _failure(failed)}
                self._states.pop(entry.session, None)
        for entry in entries:
            if entry.thaw == "frozen" and entry.then != "freeze":
                remove_states(folder, entry.session)
        return outcomes, pickle.dumps(results)

    @staticmethod
    def _brought_out(entry: StepEntry, outcome: dict[str, Any], folder: str) -> bytes | None:
        """Return a frozen state that is to be kept beside the worker: as it is, since nobody here needs to open it."""
        try:
            data = read_state(folder, entry.session, entry.made, entry.digest)
        except StateGone as gone:
            outcome["lost"] = str(gone)
            return None
        outcome["kept"] = len(data)
        return data

    def _prepare(
        self, entries: Sequence[StepEntry], outcomes: list[dict[str, Any]], folder: str
    ) -> dict[int, list[Any]]:
        """Bring in the states of those that make a chunk; return their prompts by position."""
        prompts = {}
        for position, entry in enumerate(entries):
            if not entry.makes_chunk:
                continue
            try:
                self._thaw(entry, folder)
                prompts[position] = [_opened(each, "a prompt") for each in entry.prompts]
            except StateGone as gone:
                outcomes[position]["lost"] = str(gone)
            except _Failed as failed:
                outcomes[position]["failure"] = _failure(failed)
                self._states.pop(entry.session, None)
        return prompts

    def _thaw(self, entry: StepEntry, folder: str) -> None:
        if entry.thaw == "anew":
            self._states[entry.session] = None
        elif entry.thaw == "kept":
            self._states[entry.session] = _opened(entry.state, "its kept state")
        elif entry.thaw == "frozen":
            self._states[entry.session] = _opened(
                read_state(folder, entry.session, entry.made, entry.digest), "its frozen state"
            )
        elif entry.session not in self._states:
            raise StateGone("the session's state is not in the library process")

    def _make_chunks(
        self,
        function: Callable[..., Any],
        value: Sequence[Any],
        entries: Sequence[StepEntry],
        prompts: dict[int, list[Any]],
    ) -> dict[int, Any]:
        """Call the function once for all, and take its states; return the chunks by position."""
        if not prompts:
            return {}
        sessions = [entries[position].session for position in prompts]
        try:
            made = function(*value, [self._states[session] for session in sessions], list(prompts.values()))
            pairs = _pairs(made, len(sessions), function)
        except BaseException:
            self._own()
            for session in sessions:
                del self._states[session]
            raise
        self._own()
        for session, (_, state) in zip(sessions, pairs, strict=True):
            self._states[session] = state
        return {position: chunk for position, (chunk, _) in zip(prompts, pairs, strict=True)}

    def _settle(
        self, entry: StepEntry, chunk: Any, outcome: dict[str, Any], folder: str
    ) -> tuple[bytes | None, bytes | None]:
        """Pickle what leaves the process: the chunk, and the state if it is kept or frozen."""
        pickled = kept = None
        if entry.makes_chunk:
            if type(chunk) is Turn:
                outcome["last" if chunk.over else "idle"] = 1
                chunk = chunk.chunk
            pickled = _dumped(chunk, "a chunk of the session", "return plain data instead")
            outcome["made"] = 1
        keep = entry.then in ("keep", "leave") or (entry.makes_chunk and entry.then == "" and self._leaving())
        if keep or entry.then == "freeze":
            state = _dumped(self._states[entry.session], "the state of the session", _ADVICE)
            if not keep:
                path = state_path(folder, entry.session, entry.made + entry.makes_chunk)
                keep = not write_state(state, path)  # Where there is no room here, there may be beside the worker.
            if keep:
                kept, outcome["kept"] = state, len(state)
            else:
                outcome["frozen"] = [digest_of(state), len(state)]
        if entry.then in ("leave", "freeze"):
            del self._states[entry.session]
        return pickled, kept


_ADVICE = "keep what cannot be pickled in the context, and in the state what says which of it is meant"


def _dumped(value: Any, what: str, advice: str) -> bytes:
    try:
        return dumps(value, what, advice)
    except BaseException as error:
        raise _Failed from error


def _opened(data: bytes, what: str) -> Any:
    try:
        return pickle.loads(data)
    except BaseException as error:
        raise _Failed from TypeError(f"{what} cannot be opened on the worker: {type(error).__name__}: {error}")


def _failure(failed: _Failed) -> dict[str, Any]:
    error = failed.__cause__ or failed
    text = "".join(traceback.format_exception_only(type(error), error))
    return {"kind": "exception", "error": type(error).__name__, "message": str(error), "traceback": text}


def _pairs(made: Any, expected: int, function: Callable[..., Any]) -> list[tuple[Any, Any]]:
    """Return what the function gave as a list; raise `TypeError` if it is not one pair for each session."""
    name, sessions = getattr(function, "__name__", "the app"), counted(expected, "session")
    wish = "return (or yield) one pair of chunk and state for each, in their order"
    if not hasattr(made, "__iter__"):
        raise TypeError(f"{name} returned {type(made).__name__} for {sessions}: {wish}")
    pairs = list(made)
    if len(pairs) != expected or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"{name} gave {counted(len(pairs), 'result')} for {sessions}, or no pairs: {wish}")
    return pairs
