"""Taking connections from a listening socket: where no descriptor is left for one, it is left waiting for a moment.

It would make the socket readable for ever, and who serves it spin.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from ctxflow.host.descriptors import advice, none_left

PAUSE_SECONDS = 0.5


class Acceptor:
    """Serves a listening socket by a selector; its owner asks `resume` in each round how long that may last.

    :param accepted: called with each connection, and where it comes from.
    :param tell: called once with what is wrong where connections have to wait.
    :ivar paused: whether they do.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        accepted: Callable[[socket.socket, Any], None],
        tell: Callable[[str], None],
    ) -> None:
        self._selector, self._listener = selector, listener
        self._accepted, self._tell = accepted, tell
        self._told = False
        self.paused = False
        self._resume_at = 0.0
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if none_left(error):
                self._pause(error)
            return
        with contextlib.suppress(OSError):  # It may have left again.
            self._accepted(connection, address)

    def _pause(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self.paused, self._resume_at = True, time.monotonic() + PAUSE_SECONDS
        self.complain(error)

    def complain(self, error: OSError) -> None:
        """Tell that there is no descriptor, once."""
        if not self._told:
            self._told = True
            self._tell(f"connections of workers have to wait ({error}){advice(error)}")

    def resume(self) -> float:
        """Serve the socket again, if it is time; gives how many seconds there are until then."""
        if not self.paused:
            return math.inf
        left = self._resume_at - time.monotonic()
        if left > 0:
            return left
        self.paused = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return math.inf

    def close(self) -> None:
        """Let nobody connect any more."""
        self._listener.close()
