"""The states of the sessions that a library process carries, and its steps: the chunks of several sessions in one call.

A state is whatever the app's function makes of it; here it is only handed to the function, pickled, written to a file
of the worker's cache, and read from there. What goes wrong with one session's state or chunk is said of that session
alone. What does not live here: which sessions those are, and where they go (scheduler/).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ctxflow.on_worker import Turn
from ctxflow.pickling import dumps


class StepEntry(NamedTuple):
    """What a step does with one session: an `Order` of the scheduler, with what it needs.

    :ivar prompts: pickled one by one, for the chunk that it makes.
    :ivar state: pickled, if it is the one that was kept beside the worker.
    :ivar digest: of the frozen state that it is to go on from.
    """

    session: int
    thaw: str
    made: int
    makes_chunk: bool
    then: str
    prompts: Sequence[bytes] = ()
    state: bytes = b""
    digest: str = ""


class _Failed(Exception):
    """Something is wrong with one session; its cause says what."""


class _Gone(Exception):
    """A frozen state cannot be had."""


class States:
    """The states that a library process has, by the sessions' numbers.

    :param leaving: says whether the worker has notice of its eviction: then the states that a step has changed are
        kept beside the worker, whatever was asked.
    :param own: called after the app's code; ends a process that it forked and that came back here.
    """

    def __init__(self, leaving: Callable[[], bool], own: Callable[[], None]) -> None:
        self._leaving = leaving
        self._own = own
        self._states: dict[int, Any] = {}

    def step(
        self, function: Callable[..., Any], value: Sequence[Any], entries: Sequence[StepEntry], folder: str
    ) -> tuple[list[dict[str, Any]], bytes]:
        """Carry a step out.

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
                _remove(folder, entry.session)
        for position, entry in enumerate(entries):
            if entry.thaw == "frozen" and not entry.makes_chunk:
                results[position] = None, _brought_out(entry, outcomes[position], folder)
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
                _remove(folder, entry.session)
        return outcomes, pickle.dumps(results)

    def _prepare(
        self, entries: Sequence[StepEntry], outcomes: list[dict[str, Any]], folder: str
    ) -> dict[int, list[Any]]:
        """Bring in the states and prompts of those that make a chunk; gives the prompts by position."""
        prompts = {}
        for position, entry in enumerate(entries):
            if not entry.makes_chunk:
                continue
            try:
                self._thaw(entry, folder)
                prompts[position] = [_opened(each, "a prompt") for each in entry.prompts]
            except _Gone as gone:
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
            self._states[entry.session] = _opened(_frozen(entry, folder), "its frozen state")
        elif entry.session not in self._states:
            raise _Gone("the session's state is not in the library process")

    def _make_chunks(
        self,
        function: Callable[..., Any],
        value: Sequence[Any],
        entries: Sequence[StepEntry],
        prompts: dict[int, list[Any]],
    ) -> dict[int, Any]:
        """Call the function once for all, and take its states; gives the chunks by position."""
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
                keep = not _written(state, path)  # Where there is no room here, there may be beside the worker.
            if keep:
                kept, outcome["kept"] = state, len(state)
            else:
                outcome["frozen"] = [digest_of(state), len(state)]
        if entry.then in ("leave", "freeze"):
            del self._states[entry.session]
        return pickled, kept


_ADVICE = "keep what cannot be pickled in the context, and in the state what says which of it is meant"


def state_path(folder: str, session: int, made: int) -> str:
    """Return where the state of a session with so many chunks made is in a worker's cache."""
    return os.path.join(folder, f"{session}-{made}.state")


def digest_of(data: bytes) -> str:
    """Return what a state is told by.

    >>> digest_of(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    import hashlib  # Which takes a twentieth of the time in which a library process starts.

    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _frozen(entry: StepEntry, folder: str) -> bytes:
    """Return a state from the cache, as it was frozen.

    :raises _Gone: if it is not there, or another.
    """
    try:
        with open(state_path(folder, entry.session, entry.made), "rb") as file:
            data = file.read()
    except OSError as error:
        raise _Gone(f"the session's frozen state cannot be read: {error}") from None
    if digest_of(data) != entry.digest:
        raise _Gone("the session's frozen state is not what was frozen: its digest differs")
    return data


def _brought_out(entry: StepEntry, outcome: dict[str, Any], folder: str) -> bytes | None:
    """Return a frozen state that is to be kept beside the worker: as it is, since nobody here needs to open it."""
    try:
        data = _frozen(entry, folder)
    except _Gone as gone:
        outcome["lost"] = str(gone)
        return None
    outcome["kept"] = len(data)
    return data


def _written(state: bytes, path: str) -> bool:
    """Write a state to the cache, complete or not at all; say whether it is there."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "wb") as file:
            file.write(state)
        os.replace(path + ".part", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + ".part")
        return False
    return True


def _remove(folder: str, session: int) -> None:
    """Take a session's states off the cache."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(f"{session}-"):
                os.unlink(os.path.join(folder, name))


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
    """Return what the function gave, as a list.

    :raises TypeError: if it is not one pair of chunk and state for each session.
    """
    name = getattr(function, "__name__", "the app")
    sessions = "1 session" if expected == 1 else f"{expected} sessions"
    wish = "return (or yield) one pair of chunk and state for each, in their order"
    if not hasattr(made, "__iter__"):
        raise TypeError(f"{name} returned {type(made).__name__} for {sessions}: {wish}")
    pairs = list(made)
    if len(pairs) != expected or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"{name} gave {len(pairs)} result{'s' * (len(pairs) != 1)} for {sessions}, or no pairs: {wish}")
    return pairs
