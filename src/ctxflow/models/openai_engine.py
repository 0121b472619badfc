"""What contexts for generation, chat and embeddings build: engines that answer requests of OpenAI's form, many at once.

Whoever writes an item app codes against `OpenAIEngine` and need not know which engine it is: vLLM in the library
process, a server that it started, or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
"""What an engine may be asked at."""

_LONG = 20_000  # Characters and values, which take some hundredths of a second to judge, read and check.
T = TypeVar("T")


@runtime_checkable
class OpenAIEngine(Protocol):
    """An engine that answers requests of OpenAI's form, as many at once as its caller has in flight.

    What it builds and awaits belongs to one event loop: that of the library process in which it was built.
    """

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request. Cancelling the task that awaits it aborts the request in the engine.

        :param endpoint: one of `ENDPOINTS`.
        :param body: the request as OpenAI's API takes it, plain JSON data; without "model" it is for the base model,
            and with one for that adapter. It is never streamed.
        :returns: the response's body as OpenAI's API gives it ("choices", "usage", ...), plain JSON data. "usage" has
            "prompt_tokens_details" with "cached_tokens" where the engine tells them.
        :raises ctxflow.errors.ItemRefused: the request's own fault, in a sentence that says what to change.
        :raises ctxflow.errors.ContextLost: the engine died, or does not answer any more, with its last lines.
        """

    async def aclose(self) -> None:
        """End the engine with all that it started. Requests in flight end with an error; a second call does nothing."""


async def aside(body: Mapping[str, Any], look: Callable[[], T]) -> T:
    """Return what is found in a request's body: in a long one in a thread, since others are answered meanwhile."""
    if _size(body) < _LONG:
        return look()
    import asyncio  # Here, since drivers import this module for its names.

    return await asyncio.to_thread(look)


def _size(value: Any) -> int:
    """Return how many characters and values there are in a value; not many more than `_LONG` are counted."""
    rest, size = [value], 0
    while rest and size < _LONG:
        each = rest.pop()
        inner = each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else ()
        size += len(each) if isinstance(each, str) else len(inner)
        rest += inner if size < _LONG else ()
    return size
