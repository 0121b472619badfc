"""What contexts for generation, chat and embeddings build: engines that answer requests of OpenAI's form, many at once.

Whoever writes an item app codes against `OpenAIEngine` and need not know which engine it is: vLLM in the library
process, a server that it started, or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
"""What an engine may be asked at."""


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
