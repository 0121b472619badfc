"""The context host of an embedded worker: speaks to the driver over a socket that it is given."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ctxflow.host.artifacts import user_store
from ctxflow.host.context_host import Host
from ctxflow.host.forking import ForkedProcess, Zygote
from ctxflow.host.library_start import library_variables
from ctxflow.host.linux import adopt_orphans, is_exiting, kill_children, on_signal, readable
from ctxflow.host.local_files import clear
from ctxflow.host.messages import TO_HOST, FromHost, HostStarted, LeaveWorker, NoticeGiven
from ctxflow.host.wire import Channel, pack

CopyZygote: TypeAlias = Callable[[int, Sequence[int]], int]


def main(argv: Sequence[str], copy: CopyZygote | None = None) -> None:
    """Serve until the driver closes the connection or is gone.

    :param argv: the descriptor of the connection; the worker's directory, in one that is the run's; where the output of
        library processes is kept; and the driver's process.
    :param copy: forks a copy of the zygote that this process was forked from, if it was, for library processes, with
        this socket and without these descriptors.
    """
    line, scratch, logs, driver = argv
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(scratch)
    except FileNotFoundError:
        return  # The run has ended, and another host removed its directory: a new one would be left behind.
    descriptor = int(line)
    copied = None if copy is None else _copied(copy, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    selector = selectors.DefaultSelector()
    # A process that the driver forked may hold the connection open for longer than the driver lives; and the
    # kernel's notice of a parent's death is one of its thread's.
    driver_ended = os.pidfd_open(int(driver))
    selector.register(driver_ended, selectors.EVENT_READ, lambda: None)

    def watch_writes() -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
        key = selector.get_key(channel)
        if key.events != wanted:
            selector.modify(channel, wanted, key.data)

    def emit(message: FromHost) -> None:
        channel.send_frame(pack(message))
        if channel.pending:
            watch_writes()

    host = Host(emit, selector, scratch, logs, copied, user_store())

    released = False

    def heard() -> None:
        nonlocal released
        channel.flush()
        for head, body in channel.receive():
            message = TO_HOST.open(head, body)
            if isinstance(message, LeaveWorker):
                released = True
            else:
                host.handle(message)
        watch_writes()

    def noticed() -> None:
        host.give_notice()  # First, so that the driver, which is told next, can rely on it.
        emit(NoticeGiven())

    adopt_orphans()
    on_signal(signal.SIGCHLD, selector, host.bury_orphans)
    on_signal(signal.SIGTERM, selector, noticed)
    selector.register(channel, selectors.EVENT_READ, heard)
    emit(HostStarted(os.getpid(), sys.version.split()[0]))
    _serve(host, selector, alive=lambda: not (released or channel.closed or readable(driver_ended, 0)))
    host.stop()
    kill_children()
    # Where the driver has ended, so has the run; else it has given up this worker alone.
    clear(os.path.dirname(scratch) if readable(driver_ended, 0) or is_exiting(int(driver)) else scratch)


def _serve(host: Host, selector: selectors.BaseSelector, alive: Callable[[], bool]) -> None:
    """Run a host until `alive` says no."""
    while alive():
        for key, _ in selector.select(host.timeout()):
            if key.fd in selector.get_map():  # An earlier one of this round may have removed it.
                data: Any = key.data
                data()
        host.check()


def _copied(copy: CopyZygote, line: int) -> Zygote | None:
    """Take along a copy of the zygote that this process was forked from, without the connection to the driver.

    None if there is no room for it.
    """
    with contextlib.ExitStack() as ours, contextlib.suppress(OSError):
        near, far = socket.socketpair()
        ours.callback(near.close)
        with far:
            process = ForkedProcess(copy(far.fileno(), [line, near.fileno()]))
        ours.pop_all()
        return Zygote(library_variables({}), os.getcwd(), process=(process, near))
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
