"""What a library process may take of time and memory, and what is said of one that takes more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from ctxflow.host.library_process import LibraryProcess, now
from ctxflow.host.wire import Trouble

_MEMORY_CHECK_SECONDS = 0.5
_STOOD_STILL = 1.0  # A host that is so late, in seconds, did not run: nor did its library processes.
_RESUME_PAUSE = 60.0  # Between two such times: a host that is always late must end what hangs all the same.


Fails: TypeAlias = Callable[[LibraryProcess, Trouble, Sequence[int]], None]
"""Ends a library process, and reports its load or its calls as failed; of several calls some are to blame."""


class LibraryLimits:
    """Those of one host's library processes.

    :param fail: called with each that takes too much.
    :param ask: asks one whether its event loop turns (`AskLoop`).
    """

    def __init__(self, fail: Fails, ask: Callable[[LibraryProcess], None]) -> None:
        self._fail, self._ask = fail, ask
        self._next_memory_check = float("inf")
        self._resumed = float("-inf")

    def due(self, libraries: Collection[LibraryProcess]) -> float:
        """When to call `check`."""
        return min([self._next_memory_check, *(library.deadline for library in libraries)])

    def limit_memory(self, library: LibraryProcess, limit: int) -> None:
        """Give a library process so many bytes."""
        library.memory_limit = limit
        self._next_memory_check = min(self._next_memory_check, now() + _MEMORY_CHECK_SECONDS)

    def check(self, libraries: Collection[LibraryProcess], time: float) -> None:
        """End what has taken too long or too much memory; after a suspension, give processes some time first."""
        if time - self.due(libraries) > _STOOD_STILL and time - self._resumed > _RESUME_PAUSE:
            self._resumed = time
            for library in libraries:
                library.resume(time)
        for library in libraries:
            if library.deadline <= time:
                self._end_overdue(library, time)
        if self._next_memory_check <= time:
            self._check_memory(libraries, time)

    def _end_overdue(self, library: LibraryProcess, time: float) -> None:
        library.remind(time)
        if library.standstill_at <= time:
            if trouble := library.at_standstill(time):
                library.show_where()
                self._fail(library, trouble, ())
                return
            if library.may_be_asked and not library.asked:
                self._ask(library)
        if ignoring := library.ignores_interrupt(time):
            library.show_where()
            long = library.patience.interrupt
            message = f"nobody waited for the call any more, and it went on for {long:g} s after it was interrupted"
            self._fail(library, Trouble("cancelled", "CallInterrupted", message), ignoring)
        elif library.load_deadline <= time and library.moving:
            library.show_where()
            long = library.patience.move
            message = f"to {library.moving} it took longer than {long:g} s: see in the last lines where it hangs"
            self._fail(library, Trouble("timeout", "Timeout", message), ())
        elif library.load_deadline <= time:
            library.show_where()
            message = f"building it took longer than its load_timeout of {library.timeout:g} s: raise that"
            message += ", or see in the last lines where it hangs"
            self._fail(library, Trouble("timeout", "Timeout", message), ())
        elif library.look_at <= time:
            self.end_if_overdue(library, time)
        elif library.deadline <= time:
            # Those that do not overlap take turns: it is the first that runs.
            late = [call for call, due in library.calls.items() if due <= time]
            self.end_call(library, library.timeout or 0.0, late[:1])

    def end_if_overdue(self, library: LibraryProcess, time: float, call: int = 0) -> None:
        """End a process whose calls of items go on long after their timeouts."""
        if found := library.overdue_items(time, call):
            message, blamed = found
            library.show_where()
            self._fail(library, Trouble("timeout", "Timeout", message), blamed)

    def end_call(self, library: LibraryProcess, timeout: float, blamed: Sequence[int]) -> None:
        """End a process whose call has timed out."""
        library.show_where()
        message = (
            f"the call took longer than its timeout of {timeout:g} s: raise that, make batches smaller, or see in the "
            "last lines where it hangs"
        )
        self._fail(library, Trouble("timeout", "Timeout", message), blamed)

    def _check_memory(self, libraries: Collection[LibraryProcess], time: float) -> None:
        limited = [library for library in libraries if library.memory_limit is not None]
        self._next_memory_check = time + _MEMORY_CHECK_SECONDS if limited else float("inf")
        for library in limited:
            self.end_if_too_big(library)

    def end_if_too_big(self, library: LibraryProcess) -> bool:
        """End a process that uses more memory than it may; whether it did."""
        limit = library.memory_limit if not library.parked else None
        used = library.bytes_used(limit) if limit is not None else 0
        if limit is None or used <= limit:
            return False
        message = (
            f"it used {used / 1e9:.2f} GB of memory, more than the {limit / 1e9:.2f} GB that its context "
            "asks for: raise its memory=, or make batches smaller"
        )
        self._fail(library, Trouble("crash", "MemoryExceeded", message), ())
        return True
