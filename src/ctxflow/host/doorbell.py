"""The doorbell: a TaskVine library whose calls end when a byte arrives on a socket.

A manager that sleeps in TaskVine's wait cannot be woken; a worker beside it with this library, and one standing
call, ends the call and so the sleep. That worker runs where the user's program does, so it serves files to nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
from collections.abc import Sequence

from ctxflow.host.processes import end_transfer_server
from ctxflow.host.vine_protocol import LibraryPipes, Request, parse
from ctxflow.host.wire import short_path


def main(argv: Sequence[str]) -> int:
    """Serve until the vine_worker is gone."""
    parser = argparse.ArgumentParser("doorbell", description="A TaskVine library that wakes its manager.")
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to wait for the byte")
    parsed, worker = parse(parser, argv)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parsed.socket)
        with short_path(parsed.socket) as address:
            bell.bind(address)
        bell.setblocking(False)
        end_transfer_server(worker.given.worker)
        worker.announce("doorbell")
        _serve(worker, bell)
    return 0


def _serve(worker: LibraryPipes, bell: socket.socket) -> None:
    waiting: list[Request] = []
    rung = False
    while not worker.closed:
        ready = select.select([worker.fileno(), bell.fileno()], [], [], worker.due())[0]
        if worker.fileno() in ready:
            waiting += worker.requests()
        if bell.fileno() in ready:
            rung = True
            with contextlib.suppress(BlockingIOError):
                while True:
                    bell.recv(64)
        if rung and waiting:
            for request in waiting:
                worker.answer(request, b"")
            waiting, rung = [], False
        worker.nudge()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
