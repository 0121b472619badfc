"""Waiting for the answers of a run in a coroutine: no thread waits meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

from ctxflow.executors.futures import Stream


async def arrival(stream: Stream) -> None:
    """Wait until an answer has arrived."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(tell)

    if stream.listen(wake):
        await arrived
