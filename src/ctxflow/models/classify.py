"""Classify by likelihood: which label a causal language model finds likeliest after a prompt."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ctxflow.models.reading import (
    Message,
    Read,
    Reader,
    TokenRoom,
    Tokens,
    answered,
    check_conversations,
    check_texts,
    context_length,
    tokenize,
)
from ctxflow.models.results import Classification
from ctxflow.models.transformers import (
    CPU_READING_TOKENS,
    InternalBatches,
    LoadedModel,
    left_padded,
    load_language_model,
    right_padded,
)


class LabelClassifier:
    """A causal language model that chooses among labels by how likely it is to write each after the prompt.

    A label's log-probability is that of exactly its tokens after the prompt's, in natural logs. Between
    prompt and label stands one space, unless the prompt ends in a line break or with the generation prompt of
    a chat template; spaces at the prompt's end are dropped. The prompt goes through the model once for all labels.

    :param model: a folder, `package:NAME`, a hub id (see `ctxflow.models.model_folder`), or a model already loaded.
    :param labels: the labels to choose among, unless `classify` is given others.
    :param length_normalised: choose by the log-probability per token, so that a long label is at no disadvantage.
    :param max_batch_tokens: tokens of an internal batch, padding included; by default what fits in free memory.
    :param max_batch_size: rows of an internal batch at most.
    :param max_input_tokens: prompts with more tokens are too long; by default those with more than the model reads
        beside the longest label.
    :param too_long: what becomes of those, as of `TextGenerator`.
    :param loading: `dtype`, `device`, `revision`, `options` of `ctxflow.models.transformers.load_language_model`.
    :raises ValueError: for labels that are empty or not distinct.

    >>> import tempfile
    >>> from ctxflow.testing.small_models import make_causal_lm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     classifier = LabelClassifier(make_causal_lm(folder), labels=["true", "false"], device="cpu")
    >>> answer = classifier.classify(["Paris is in France. This is"])[0]
    >>> answer.label in ("true", "false"), round(sum(answer.probabilities.values()), 6)
    (True, 1.0)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        labels: Iterable[str] | None = None,
        length_normalised: bool = False,
        max_batch_tokens: int | None = None,
        max_batch_size: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        **loading: Any,
    ) -> None:
        self.labels = None if labels is None else _check_labels(labels)
        self.loaded = model if isinstance(model, LoadedModel) else load_language_model(model, **loading)
        self.length_normalised = length_normalised
        length = context_length(self.loaded.model.config)
        self._reader = Reader(self.loaded.tokenizer, length, max_input_tokens, too_long)
        self._workload = InternalBatches(
            self.loaded, max_batch_tokens, max_batch_size, keeps_cache=True, cpu_tokens=CPU_READING_TOKENS
        )
        self._accepted = set(inspect.signature(self.loaded.model.forward).parameters)
        self._shares_cache = _shares_cache(self.loaded.model, self._accepted)

    def classify(
        self, prompts: Iterable[str], labels: Iterable[str] | None = None, *, on_error: str = "raise"
    ) -> list[Classification]:
        """Choose a label for each prompt.

        :param prompts: texts, taken as they are but for spaces at their ends.
        :param labels: the labels to choose among, in place of the classifier's own.
        :param on_error: "return" puts the errors of prompts that are too long in the places of their answers.
        :returns: one answer for each prompt, in their order; none for none.
        :raises InputTooLong: for a prompt that is too long, before anything is looked at.
        :raises TypeError, ValueError: for prompts or labels that make no sense, saying which.
        :raises OutOfMemoryError: if one prompt alone does not fit in the device's memory.
        """
        texts = [text.rstrip(" ") for text in check_texts(prompts)]
        chosen = self._chosen(labels)
        read = self._reader.texts(tokenize(self.loaded.tokenizer, texts), [chosen.room] * len(texts))
        return self._run(read, chosen, on_error, "prompts", texts)

    def classify_chat(
        self,
        conversations: Iterable[Sequence[Message]],
        labels: Iterable[str] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        on_error: str = "raise",
    ) -> list[Classification]:
        """Choose a label as the answer to each conversation; parameters as of `classify` and `TextGenerator.chat`."""
        those, chosen = check_conversations(conversations), self._chosen(labels)
        read = self._reader.conversations(
            those, [chosen.room] * len(those), template_options, lambda text: text.rstrip(" ")
        )
        return self._run(read, chosen, on_error, "conversations")

    def close(self) -> None:
        """Free the model's memory now; the classifier cannot be used afterwards."""
        self.loaded.close()

    def _chosen(self, labels: Iterable[str] | None) -> _Choice:
        chosen = self.labels if labels is None else _check_labels(labels)
        if chosen is None:
            raise ValueError("there are no labels to choose among: give labels=[...] here or to the classifier")
        after_text, alone = self._label_ids(chosen, " "), self._label_ids(chosen, "")
        longest = max(len(ids) for ids in after_text + alone)
        return _Choice(chosen, after_text, alone, longest, self._reader.room(longest, "the longest label"))

    def _run(
        self, read: list[Read], choice: _Choice, on_error: str, what: str, texts: Sequence[str] | None = None
    ) -> list[Classification]:
        self.loaded.check_read(read, what)

        def classified(numbers: list[int]) -> list[Classification]:
            rows = []
            for number in numbers:
                tokens = read[number]
                assert isinstance(tokens, Tokens)
                if texts is None or tokens.truncated:
                    apart = not self.loaded.tokenizer.decode(tokens.ids[-1:]).endswith("\n")
                else:
                    apart = bool(texts[number]) and not texts[number].endswith("\n")
                rows.append(_Row(tokens, choice.after_text if apart else choice.alone))
            return self._classified(rows, choice)

        return cast(list[Classification], list(answered(read, classified, on_error, what)))  # And errors, if asked for.

    def _classified(self, rows: list[_Row], choice: _Choice) -> list[Classification]:
        def score(numbers: list[int]) -> list[Classification]:
            batch = [rows[number] for number in numbers]
            scores = self._score_shared(batch) if self._shares_cache else self._score_whole(batch)
            return [self._answer(row, choice.labels, logs) for row, logs in zip(batch, scores.tolist(), strict=True)]

        return self._workload.run([len(row.prompt.ids) + choice.longest for row in rows], score)

    def _label_ids(self, labels: Sequence[str], joint: str) -> list[list[int]]:
        """Return each label's tokens as they follow other text: those of "text + label" beyond those of "text"."""
        before = "Answer:" if joint else "Answer:\n"
        texts = [before, *(before + joint + label for label in labels), *(joint + label for label in labels)]
        stem, *encoded = tokenize(self.loaded.tokenizer, texts, add_special_tokens=False)
        after, alone = encoded[: len(labels)], encoded[len(labels) :]
        # If the tokenizer merges the text's end into the label, nothing can be cut off: then the label alone.
        return [
            ids[len(stem) :] if ids[: len(stem)] == stem and len(ids) > len(stem) else other
            for ids, other in zip(after, alone, strict=True)
        ]

    def _forward(self, keep: int, **inputs: Any) -> Any:
        """Log-probabilities of the next token at the last `keep` places, shape (rows, keep, vocabulary)."""
        known = {name: value for name, value in inputs.items() if name in self._accepted}
        if "logits_to_keep" in self._accepted:
            known["logits_to_keep"] = keep
        logits = self.loaded.model(**known, return_dict=True).logits[:, -keep:]
        return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)

    def _score_shared(self, rows: Sequence[_Row]) -> Any:
        """Return the labels' log-probabilities, shape (rows, labels): the prompts once, then each label after."""
        loaded = self.loaded
        ids, mask = left_padded([row.prompt.ids for row in rows], loaded.pad_id, loaded.device)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        cache = DynamicCache(config=loaded.model.config)
        inputs = {"past_key_values": cache, "use_cache": True}
        first = self._forward(1, input_ids=ids, attention_mask=mask, position_ids=positions, **inputs)[:, 0]
        columns = []
        for label in zip(*(row.label_ids for row in rows), strict=True):
            label_ids, label_mask = right_padded(label, loaded.pad_id, loaded.device)
            column = first.gather(1, label_ids[:, :1])[:, 0]
            more = label_ids.shape[1] - 1
            if more:
                logs = self._forward(
                    more,
                    input_ids=label_ids[:, :-1],
                    attention_mask=torch.cat([mask, label_mask[:, :-1]], dim=1),
                    position_ids=positions[:, -1:] + 1 + torch.arange(more, device=loaded.device),
                    **inputs,
                )
                cache.crop(-more)
                column = column + (logs.gather(2, label_ids[:, 1:, None])[:, :, 0] * label_mask[:, 1:]).sum(dim=1)
            columns.append(column)
        return torch.stack(columns, dim=1)

    def _score_whole(self, rows: Sequence[_Row]) -> Any:
        """Return the same for a model whose state cannot be wound back: prompt and label together for each label."""
        loaded = self.loaded
        columns = []
        for label in zip(*(row.label_ids for row in rows), strict=True):
            together = [row.prompt.ids + label_ids for row, label_ids in zip(rows, label, strict=True)]
            ids, mask = left_padded(together, loaded.pad_id, loaded.device)
            positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
            most = max(len(label_ids) for label_ids in label)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
            logs = self._forward(most + 1, **inputs)[:, :-1]
            _, counted = left_padded(label, 0, loaded.device)
            columns.append((logs.gather(2, ids[:, -most:, None])[:, :, 0] * counted).sum(dim=1))
        return torch.stack(columns, dim=1)

    def _answer(self, row: _Row, labels: Sequence[str], logs: Sequence[float]) -> Classification:
        sizes = [len(ids) if self.length_normalised else 1 for ids in row.label_ids]
        scores = {label: log / size for label, log, size in zip(labels, logs, sizes, strict=True)}
        return Classification(
            label=max(scores, key=lambda label: scores[label]),
            scores=scores,
            log_probabilities=dict(zip(labels, logs, strict=True)),
            prompt_tokens=len(row.prompt.ids),
            truncated=row.prompt.truncated,
            original_prompt_tokens=row.prompt.original,
        )


class _Choice(NamedTuple):
    """The labels, the tokens of each as they follow a text and a line's end, and the room that they leave."""

    labels: list[str]
    after_text: list[list[int]]
    alone: list[list[int]]
    longest: int
    room: TokenRoom


class _Row(NamedTuple):
    """A prompt, and the tokens of each label as they follow it."""

    prompt: Tokens
    label_ids: list[list[int]]


def _check_labels(labels: Iterable[str]) -> list[str]:
    checked = check_texts(labels, "labels")
    if not checked or any(not label.strip() for label in checked) or len(set(checked)) < len(checked):
        raise ValueError(f"labels={checked!r} leave no choice: give texts that are distinct and not empty")
    return checked


def _shares_cache(model: Any, accepted: set[str]) -> bool:
    """Return whether the keys and values of a prompt can be used again after each label, by cutting the label's off.

    Not so for recurrent states, nor for sliding windows, which have forgotten what a label pushed out.
    """
    if "past_key_values" not in accepted or getattr(model, "_is_stateful", False):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
