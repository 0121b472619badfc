"""Generate text with a causal language model of the transformers library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from ctxflow.models.padded_batches import PaddedBatches
from ctxflow.models.reading import (
    Message,
    Read,
    Reader,
    Tokens,
    answered,
    context_length,
)
from ctxflow.models.results import Generation, Sampling
from ctxflow.models.row_cache import Unsupported
from ctxflow.models.running_batch import RunningBatch, RunningRow, decoded
from ctxflow.models.transformers import (
    CPU_RUNNING_TOKENS,
    CPU_WRITING_TOKENS,
    InternalBatches,
    LoadedModel,
    load_language_model,
)


class TextGenerator:
    """A causal language model that continues prompts and answers conversations, many at a time.

    What a row gets depends neither on the rows beside it nor on their order: each attends to its own tokens alone, and
    draws its own random numbers. (Rounding differs a little with what goes through the model beside it.) Rows that have
    ended leave the running batch, and waiting ones enter it (`ctxflow.models.running_batch`). Models whose cache cannot
    be held by rows, as of sliding windows or recurrent layers, answer one internal batch of padded rows after another.

    :param model: a folder, `package:NAME`, a hub id (see `ctxflow.models.model_folder`), or a model already loaded.
    :param max_batch_tokens: tokens of the rows that run together, prompts, new tokens and padding; by default
        what fits in free memory. Halved when the GPU's memory did not suffice after all.
    :param max_batch_size: rows that run together at most.
    :param max_input_tokens: prompts with more tokens are too long; by default those with more than the model reads.
    :param too_long: what becomes of those: "error" (an `InputTooLong` with both numbers), "cut-start" or "cut-end".
        A prompt must leave room for its `max_new_tokens`. Conversations lose whole turns, but for
        system messages and the last turn, whose longest message is cut if it has to be.
    :param loading: parameters of `ctxflow.models.transformers.load_language_model`.

    >>> import tempfile
    >>> from ctxflow.testing.small_models import make_causal_lm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     generator = TextGenerator(make_causal_lm(folder), device="cpu")
    >>> answers = generator.generate(["The capital of France is", "Twice two is"], max_new_tokens=5)
    >>> [answer.completion_tokens for answer in answers]
    [5, 5]
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        max_batch_tokens: int | None = None,
        max_batch_size: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        **loading: Any,
    ) -> None:
        self.loaded = model if isinstance(model, LoadedModel) else load_language_model(model, **loading)
        length = context_length(self.loaded.model.config)
        self._reader = Reader(self.loaded.tokenizer, length, max_input_tokens, too_long)
        self._batch = batch_of(self.loaded, max_batch_tokens, max_batch_size)

    def generate(self, prompts: Iterable[str], *, on_error: str = "raise", **parameters: Any) -> list[Generation]:
        """Continue each prompt.

        :param prompts: texts, taken as they are; an empty one is begun with the start token.
        :param on_error: "return" puts the errors of prompts that are too long in the places of their answers.
        :param parameters: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop` of
            `ctxflow.models.results.Sampling`: each a value for all prompts, or a list with a value for each.
        :returns: one answer for each prompt, in their order; none for none.
        :raises InputTooLong: for a prompt that is too long, before anything is written.
        :raises TypeError, ValueError: for prompts or parameters that make no sense, saying which.
        :raises OutOfMemoryError: if one prompt alone does not fit in the device's memory.
        :raises ItemRefused: for a prompt with tokens that the model does not know, though its tokenizer does.
        """
        read = self._reader.prompts(prompts, parameters)
        return list(self._answers(*read, on_error, "prompts", at_once=True))

    def generate_each(
        self, prompts: Iterable[str], *, on_error: str = "raise", **parameters: Any
    ) -> Iterator[Generation]:
        """As `generate`, but yields each answer as soon as it and all before it are there, from a full running batch.

        In a batch app, what was yielded is kept if the worker is taken away.
        """
        read = self._reader.prompts(prompts, parameters)
        yield from self._answers(*read, on_error, "prompts", at_once=False)

    def chat(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        template_options: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **parameters: Any,
    ) -> list[Generation]:
        """Answer each conversation, written out by the model's chat template.

        :param conversations: lists of messages like {"role": "user", "content": "..."}. Without a template, turns are
            written out as "User: ..." and the answer ends where the next would begin.
        :param template_options: further variables for the template, such as `tools`.
        :param on_error, parameters: as `generate`.
        """
        read = self._reader.chats(conversations, template_options, parameters)
        return list(self._answers(*read, on_error, "conversations", at_once=True))

    def chat_each(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        template_options: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **parameters: Any,
    ) -> Iterator[Generation]:
        """As `chat`, but yields each answer as `generate_each` does."""
        read = self._reader.chats(conversations, template_options, parameters)
        yield from self._answers(*read, on_error, "conversations", at_once=False)

    def close(self) -> None:
        """Free the model's memory now; the generator cannot be used afterwards."""
        self.loaded.close()

    def _answers(
        self, read: list[Read], sampling: list[Sampling], on_error: str, what: str, *, at_once: bool
    ) -> Iterator[Generation]:
        self.loaded.check_read(read, what)

        def written(numbers: list[int]) -> Iterator[Generation]:
            prompts = [tokens for number in numbers if isinstance(tokens := read[number], Tokens)]
            chosen = [sampling[number] for number in numbers]
            rows = [RunningRow(tokens.ids, row) for tokens, row in zip(prompts, chosen, strict=True)]
            for row, tokens in zip(self._batch.run(rows, at_once=at_once), prompts, strict=True):
                yield generation(self.loaded.tokenizer, row, tokens)

        return cast(Iterator[Generation], answered(read, written, on_error, what))  # Errors if they were asked for.


def batch_of(
    loaded: LoadedModel, max_batch_tokens: int | None = None, max_batch_size: int | None = None
) -> RunningBatch | PaddedBatches:
    """Return what writes rows with a model: a running batch, or padded ones where its cache cannot be held by rows.

    :raises ValueError: for a limit below 1.
    """
    limits = max_batch_tokens, max_batch_size
    padded = InternalBatches(loaded, *limits, keeps_cache=True, cpu_tokens=CPU_WRITING_TOKENS)
    running = InternalBatches(loaded, *limits, keeps_cache=True, cpu_tokens=CPU_RUNNING_TOKENS)
    try:
        return RunningBatch(loaded, running.most_tokens, max_batch_size)
    except Unsupported:
        return PaddedBatches(loaded, padded)


def generation(tokenizer: Any, row: RunningRow, prompt: Tokens) -> Generation:
    """Return the answer of a row that has ended."""
    text = decoded(tokenizer, row.written)
    cut = min((text.find(stop) for stop in row.sampling.stop if stop in text), default=None)
    return Generation(
        text=text if cut is None else text[:cut],
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(row.written),
        finish_reason="stop" if row.finish_reason == "stop" or cut is not None else "length",
        truncated=prompt.truncated,
        original_prompt_tokens=prompt.original,
    )
