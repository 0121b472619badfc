"""Library processes that were asked to close what they have built, while their host goes on with others."""

from __future__ import annotations

import select
import selectors
from collections.abc import Callable, Collection

from ctxflow.host.library_messages import CloseContext
from ctxflow.host.library_process import LibraryProcess, now
from ctxflow.host.wire import pack


class ClosingLibraries:
    """Those of one host, which has its selector watch them no more.

    :param end: ends one for good, and what it has started.
    """

    def __init__(self, selector: selectors.BaseSelector, end: Callable[[LibraryProcess], None]) -> None:
        self._selector = selector
        self._end = end
        self._due: dict[LibraryProcess, tuple[float, Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    @property
    def look_at(self) -> float:
        """When to call `check`."""
        return min((due for due, _ in self._due.values()), default=float("inf"))

    def pids(self) -> list[int]:
        """Return their numbers."""
        return [library.process.pid for library in self._due]

    def add(self, library: LibraryProcess, then: Callable[[], None]) -> None:
        """Have one close; do what comes then once it is gone."""
        self._due[library] = now() + library.patience.close, then
        library.channel.send_frame(pack(CloseContext()))
        register = self._selector.register
        register(library.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, lambda: self._heard(library))
        register(library.output, selectors.EVENT_READ, library.read_output)
        register(library.death, selectors.EVENT_READ, lambda: self._ended(library))
        self._heard(library)

    def _heard(self, library: LibraryProcess) -> None:
        """Read what nobody waits for: else it might not end for sending that."""
        library.channel.flush()
        library.channel.receive()
        if library.channel.closed:
            self._ended(library)
        elif not library.channel.pending:
            key = self._selector.get_key(library.channel)
            self._selector.modify(library.channel, selectors.EVENT_READ, key.data)

    def _ended(self, library: LibraryProcess) -> None:
        _, then = self._due.pop(library)
        for registered in (library.channel, library.output, library.death):
            self._selector.unregister(registered)
        self._end(library)
        then()

    def check(self, time: float) -> None:
        """End those that have taken too long."""
        for library in [library for library, (due, _) in self._due.items() if due <= time]:
            self._ended(library)

    def finish(self) -> None:
        """Wait for all of them, while nothing else goes on."""
        while self._due:
            _wait(self._due, self.look_at)
            for library in list(self._due):
                self._heard(library)
            self.check(now())


def _wait(libraries: Collection[LibraryProcess], until: float) -> None:
    """Wait until one has said something, or ended."""
    poll = select.poll()
    for library in libraries:
        for descriptor in (library.channel, library.output, library.death):
            poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, until - now()) * 1000)
    for library in libraries:
        library.read_output()
