"""The library process: builds one context, keeps it, and runs calls against it.

It is spawned (never forked from a process that touched CUDA), and speaks to its host over the socket whose descriptor
it is given. Where the driver is on the same machine, calls and results go over a line of their own to the driver, past
the host, which still gets everything else. The user's code runs here and nowhere else.

Calls run one after the other, or overlap on an event loop (library_loop.py) from the first call of an item on, or
where the context is built by an async function.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ctxflow.host.call_surroundings import leave_notice_to_host
from ctxflow.host.library_calls import LibraryCalls
from ctxflow.host.linux import die_with_parent, restore_python_path
from ctxflow.host.running_calls import Interrupts
from ctxflow.host.wire import BlockingChannel


def main(argv: Sequence[str]) -> None:
    """Serve until the other end closes the connection.

    :param argv: the connection's descriptor; the directory that calls run below; the host's process; an eventfd that
        the host makes readable when the worker has notice of its eviction; and the two of `Interrupts`.
    """
    scratch = argv[1]
    descriptor, parent, notice, asked, running = map(int, (argv[0], *argv[2:]))
    # A process group of its own, in the worker's session: what its calls start is ended with it.
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_notice_to_host()
    for own in (descriptor, notice, asked, running):
        os.set_inheritable(own, False)
    restore_python_path()
    # A crash, and the host before it ends a call that takes too long, have Python print where it is.
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)  # Which would be all that the host keeps of what was printed.
    else:
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    host = BlockingChannel(socket.socket(fileno=descriptor))
    library = LibraryCalls(host, scratch, notice, Interrupts(asked, running))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            message = library.receive()
            if library.overlaps(message):
                from ctxflow.host.library_loop import LibraryLoop  # asyncio takes as long as all else to import.

                LibraryLoop(library, asked, running).serve(message)
            library.handle(message)
    # If it was the line to the driver that ended: the host ends this process, with all that calls started.
    with contextlib.suppress(EOFError, OSError):
        library.host.receive()
    # What the user's code left running (threads, exit handlers) must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    # The module must be importable under its own name, not run twice: pickles may refer to it.
    from ctxflow.host import library  # noqa: PLW0406 - see above

    library.main(sys.argv[1:])
