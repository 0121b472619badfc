"""An engine whose inputs may be cut, in front of one that reads only what fits: prompts, and conversations by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.errors import ItemRefused
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, OpenAIEngine
from ctxflow.models.reading import Reader, messages_of, render_chat, tokenize
from ctxflow.models.results import InputTooLong


class ShorteningEngine:
    """An `OpenAIEngine` that cuts inputs that are too long, as `ctxflow.models.reading.Reader` does, and says so.

    A response to an input that was cut has "truncated" and "original_prompt_tokens". Prompts of tokens, and
    conversations with anything but text in them, are left to the engine.

    :param engine: what answers.
    :param tokenizer: the model's.
    :param length: tokens that the model reads and writes together, None if there is no limit.
    :param max_input_tokens, too_long: as of `Reader`.
    """

    def __init__(
        self, engine: OpenAIEngine, tokenizer: Any, length: int | None, max_input_tokens: int | None, too_long: str
    ) -> None:
        self._engine = engine
        self._reader = Reader(tokenizer, length, max_input_tokens, too_long)

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request, as `OpenAIEngine.answer`.

        :raises InputTooLong: an `ItemRefused`, for an input that is too long, and is not to be cut, or cannot be.
        """
        cut = self._cut(endpoint, body)
        if cut is None:
            return await self._engine.answer(endpoint, body)
        found = await self._engine.answer(endpoint, {**body, **cut[0]})
        return {**found, "truncated": True, "original_prompt_tokens": cut[1]}

    async def aclose(self) -> None:
        """End the engine."""
        await self._engine.aclose()

    def _cut(self, endpoint: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return what takes the place of an input, and its tokens before; None if it fits, or is left as it is."""
        most = self._reader.reserved(body.get("max_completion_tokens") or body.get("max_tokens"))
        room = self._reader.room(most, "max_new_tokens")
        tokenizer = self._reader.tokenizer
        if endpoint == COMPLETIONS and isinstance(body["prompt"], str):
            [ids] = tokenize(tokenizer, [body["prompt"]])
            [read] = self._reader.texts([ids], [room])
            if isinstance(read, InputTooLong):
                raise read
            return ({"prompt": read.ids}, len(ids)) if read.truncated else None
        if endpoint != CHAT:
            return None
        try:
            messages = messages_of(body["messages"])
        except TypeError:  # There is more than text.
            return None
        variables = {**(body.get("chat_template_kwargs") or {})}
        if body.get("tools"):
            variables["tools"] = body["tools"]
        special = not getattr(tokenizer, "chat_template", None)

        def encode(those: Sequence[Any]) -> list[int]:
            try:
                texts = render_chat(tokenizer, [those], variables)
            except ValueError as error:
                raise ItemRefused(str(error)) from None
            return tokenize(tokenizer, texts, add_special_tokens=special)[0]

        ids = encode(messages)
        if room.tokens is None or len(ids) <= room.tokens:
            return None
        fitted = self._reader.shortened(messages, room, encode)
        if fitted is None:
            raise InputTooLong("the conversation", len(ids), room.tokens, room.why)
        return {"messages": fitted[0]}, len(ids)
