"""Generate text with a causal language model of the transformers library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import transformers

from ctxflow.models.reading import (
    Message,
    Read,
    Reader,
    Tokens,
    answered,
    context_length,
)
from ctxflow.models.results import Generation, Sampling, uniforms
from ctxflow.models.transformers import (
    CPU_WRITING_TOKENS,
    InternalBatches,
    LoadedModel,
    left_padded,
    load_language_model,
)

LARGEST_BELOW_ONE = 1 - 2**-22


class TextGenerator:
    """A causal language model that continues prompts and answers conversations, many at a time.

    What a row gets depends neither on the rows beside it nor on their order: rows are padded on the left, masked, and
    each draws its own random numbers. (Rounding differs a little with the size of an internal batch.)

    :param model: a folder, `package:NAME`, a hub id (see `ctxflow.models.model_folder`), or a model already loaded.
    :param max_batch_tokens: tokens of an internal batch, prompts, new tokens and padding together; by default
        what fits in free memory. Halved when the GPU's memory did not suffice after all.
    :param max_batch_size: rows of an internal batch at most.
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
        self._workload = InternalBatches(
            self.loaded, max_batch_tokens, max_batch_size, keeps_cache=True, cpu_tokens=CPU_WRITING_TOKENS
        )

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
        """
        read = self._reader.prompts(prompts, parameters)
        return list(self._answers(*read, on_error, "prompts", self._workload.run))

    def generate_each(
        self, prompts: Iterable[str], *, on_error: str = "raise", **parameters: Any
    ) -> Iterator[Generation]:
        """As `generate`, but yields each answer as soon as it and all before it are there, from full internal batches.

        In a batch app, what was yielded is kept if the worker is taken away.
        """
        read = self._reader.prompts(prompts, parameters)
        yield from self._answers(*read, on_error, "prompts", self._workload.run_each)

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
        return list(self._answers(*read, on_error, "conversations", self._workload.run))

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
        yield from self._answers(*read, on_error, "conversations", self._workload.run_each)

    def close(self) -> None:
        """Free the model's memory now; the generator cannot be used afterwards."""
        self.loaded.close()

    def _answers(
        self, read: list[Read], sampling: list[Sampling], on_error: str, what: str, run: Callable[..., Any]
    ) -> Iterator[Generation]:
        def written(numbers: list[int]) -> Iterable[Generation]:
            prompts = [tokens for number in numbers if isinstance(tokens := read[number], Tokens)]
            chosen = [sampling[number] for number in numbers]
            lengths = [len(tokens.ids) + row.max_new_tokens for tokens, row in zip(prompts, chosen, strict=True)]

            def generate(rows: list[int]) -> list[Generation]:
                return self._generate([prompts[row] for row in rows], [chosen[row] for row in rows])

            return cast(Iterable[Generation], run(lengths, generate))

        return cast(Iterator[Generation], answered(read, written, on_error, what))  # Errors if they were asked for.

    def _generate(self, prompts: list[Tokens], sampling: list[Sampling]) -> list[Generation]:
        loaded = self.loaded
        ids, mask = left_padded([tokens.ids for tokens in prompts], loaded.pad_id, loaded.device)
        width = ids.shape[1]
        ends = _end_tokens(loaded)
        finish = _Finish(loaded.tokenizer, sampling, width, loaded.device)
        greedy = all(row.greedy for row in sampling)
        samplers = [] if greedy else [_Sampler(sampling, prompts, width, loaded.device)]
        written = loaded.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(row.max_new_tokens for row in sampling),
            do_sample=False,  # sampling happens in _Sampler, whose draws do not depend on the other rows
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=loaded.pad_id,
            logits_processor=transformers.LogitsProcessorList(samplers),
            stopping_criteria=transformers.StoppingCriteriaList([finish] if finish.needed else []),
        )
        rows = written[:, width:].tolist()
        return [
            self._answer(row, tokens, chosen, ends, finish.stopped_at[number])
            for number, (row, tokens, chosen) in enumerate(zip(rows, prompts, sampling, strict=True))
        ]

    def _answer(
        self, written: list[int], prompt: Tokens, sampling: Sampling, ends: list[int], stopped_at: int | None
    ) -> Generation:
        ids = written[: min(sampling.max_new_tokens, stopped_at or len(written))]
        end = next((place for place, token in enumerate(ids) if token in ends), None)
        if end is not None:
            ids = ids[: end + 1]
        text = self.loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        cut = min((text.find(stop) for stop in sampling.stop if stop in text), default=None)
        return Generation(
            text=text if cut is None else text[:cut],
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(ids),
            finish_reason="length" if end is None and cut is None and stopped_at is None else "stop",
            truncated=prompt.truncated,
            original_prompt_tokens=prompt.original,
        )


def _end_tokens(loaded: LoadedModel) -> list[int]:
    """Return the tokens that end a text: as the model's generation settings say, else its tokenizer."""
    ends = loaded.model.generation_config.eos_token_id
    ends = loaded.tokenizer.eos_token_id if ends is None else ends
    return [int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends]) if end is not None]


class _Finish(transformers.StoppingCriteria):  # type: ignore[misc]
    """End a row at its own number of new tokens or at one of its stop strings."""

    def __init__(self, tokenizer: Any, sampling: Sequence[Sampling], width: int, device: torch.device) -> None:
        limits = [row.max_new_tokens for row in sampling]
        self._tokenizer = tokenizer
        self._width = width
        self._limits = torch.tensor(limits, device=device)
        self._stops = [row.stop for row in sampling]
        # A token is at least a byte of text, so that many tokens hold the whole stop string; four more keep a
        # tokenizer that drops leading spaces from dropping the stop string's.
        self._tails = [4 + max((len(stop.encode()) for stop in stops), default=0) for stops in self._stops]
        # For each row the number of new tokens at which a stop string was complete.
        self.stopped_at: list[int | None] = [None] * len(sampling)
        self.needed = any(self._stops) or min(limits) < max(limits)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._width
        done = self._limits <= new
        if not any(self._stops):
            return done
        longest = max(self._tails)
        for row, tail in enumerate(input_ids[:, self._width :][:, -longest:].tolist()):
            if self._stops[row] and self.stopped_at[row] is None and new <= self._limits[row]:
                text = self._tokenizer.decode(
                    tail[-self._tails[row] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                if any(stop in text for stop in self._stops[row]):
                    self.stopped_at[row] = new
        return done | torch.tensor([place is not None for place in self.stopped_at], device=input_ids.device)


class _Sampler(transformers.LogitsProcessor):  # type: ignore[misc]
    """Draw each row's next token and leave it as the only one possible; greedy rows keep their logits.

    Inverse-transform sampling over the tokens in the vocabulary's order: a row's number u picks the token at
    which the running sum of probabilities passes u. It needs one number per row and step, known before the first.
    """

    def __init__(
        self, sampling: Sequence[Sampling], prompts: Sequence[Tokens], width: int, device: torch.device
    ) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        self._width = width
        self._greedy = column([row.greedy for row in sampling])
        self._temperature = column([1.0 if row.greedy else row.temperature for row in sampling])
        self._top_p = column([row.top_p for row in sampling]) if any(r.top_p < 1 for r in sampling) else None
        self._top_k = column([row.top_k for row in sampling]) if any(r.top_k for r in sampling) else None
        draws = torch.zeros(len(sampling), max(row.max_new_tokens for row in sampling))
        for number, (row, tokens) in enumerate(zip(sampling, prompts, strict=True)):
            if not row.greedy:
                draws[number, : row.max_new_tokens] = torch.from_numpy(uniforms(row, tokens.ids))
        self._draws = draws.clamp_(max=LARGEST_BELOW_ONE).to(device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self._width
        probabilities = torch.softmax(scores.float() / self._temperature, dim=-1)
        if self._top_k is not None or self._top_p is not None:
            probabilities = probabilities * self._kept(probabilities)
        sums = probabilities.cumsum(dim=-1)
        drawn = torch.searchsorted(sums, self._draws[:, step : step + 1] * sums[:, -1:], right=True)
        chosen = torch.full_like(scores, float("-inf")).scatter_(1, drawn.clamp_(max=scores.shape[1] - 1), 0.0)
        return torch.where(self._greedy, scores, chosen)

    def _kept(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return which tokens top_k and top_p leave, in the vocabulary's order; shape as `probabilities`."""
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if self._top_k is not None:
            rank = torch.arange(ranked.shape[1], device=ranked.device)[None]
            keep &= (rank < self._top_k) | (self._top_k == 0)
            ranked = ranked * keep
            ranked = ranked / ranked.sum(dim=-1, keepdim=True)
        if self._top_p is not None:
            before = ranked.cumsum(dim=-1) - ranked
            keep &= (before < self._top_p) | (self._top_p >= 1)
        return torch.zeros_like(keep).scatter_(1, order, keep)
