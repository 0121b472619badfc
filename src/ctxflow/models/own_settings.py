"""What a model's generation settings do to the scores of rows in a running batch, as transformers' own loop does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import transformers

from ctxflow.models.transformers import LoadedModel

TURNED_OFF: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.0},
    "min_tokens": {"min_new_tokens": None, "min_length": 0},
    "bad_words": {"bad_words_ids": None},
    "logit_bias": {"sequence_bias": None},
}
"""Fields of a request whose neutral value turns off a setting of the model: what `generate` is told then."""


class GrowingText(Protocol):
    """A row of a running batch: its prompt, what was written so far, and which of the settings do not hold for it."""

    prompt: list[int]
    written: list[int]
    off: frozenset[str]


class OwnSettings:
    """The settings that a running batch follows; mostly there are none, and it is false.

    It is told of rows that enter and leave, so that their tokens are kept on the device: what a penalty costs at each
    step does not grow with the time it takes to put whole texts there.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        settings = loaded.model.generation_config
        self._penalty: Any = None
        self._no_repeats: Any = None
        self._suppressed: Any = None
        if (penalty := getattr(settings, "repetition_penalty", None)) not in (None, 1.0):
            self._penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        if size := getattr(settings, "no_repeat_ngram_size", None):
            self._no_repeats = transformers.NoRepeatNGramLogitsProcessor(size)
        if suppressed := getattr(settings, "suppress_tokens", None):
            self._suppressed = transformers.SuppressTokensLogitsProcessor(suppressed, device=loaded.device)
        self._texts = _Texts(loaded.device)

    def __bool__(self) -> bool:
        return any(each is not None for each in (self._penalty, self._no_repeats, self._suppressed))

    def enter(self, row: GrowingText) -> None:
        """Keep the tokens of a row, which has the next number."""
        if self._penalty is not None:
            self._texts.enter([*row.prompt, *row.written])

    def leave(self, number: int) -> None:
        """Forget a row's tokens; the last row takes its number."""
        if self._penalty is not None:
            self._texts.leave(number)

    def __call__(self, scores: torch.Tensor, rows: Sequence[GrowingText]) -> torch.Tensor:
        """Return the scores of all rows as the settings change them; shape (rows, tokens)."""
        if self._penalty is not None:
            ids = self._texts.grown(rows)
            where = [number for number, row in enumerate(rows) if "repetition_penalty" not in row.off]
            if len(where) == len(rows):
                scores = self._penalty(ids, scores)
            elif where:
                those = torch.tensor(where, device=scores.device)
                scores[those] = self._penalty(ids[those], scores[those])
        if self._no_repeats is not None:
            texts = [torch.tensor([[*row.prompt, *row.written]], device=scores.device) for row in rows]
            each = zip(texts, scores.split(1), strict=True)
            scores = torch.cat([self._no_repeats(text, own) for text, own in each])
        if self._suppressed is not None:
            scores = self._suppressed(None, scores)
        return scores


class _Texts:
    """The tokens of rows, on the device; each is filled up with its first token, which is penalised anyhow."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._lengths: list[int] = []

    def enter(self, text: Sequence[int]) -> None:
        number, length = len(self._lengths), len(text)
        ids = torch.tensor(text).to(self._ids.device)
        self._make_room(number + 1, length)
        self._lengths.append(length)
        self._ids[number] = text[0]
        self._ids[number, :length] = ids

    def leave(self, number: int) -> None:
        last = len(self._lengths) - 1
        self._ids[number] = self._ids[last]
        self._lengths[number] = self._lengths[last]
        del self._lengths[last]

    def grown(self, rows: Sequence[GrowingText]) -> torch.Tensor:
        """Return the tokens of all rows, with the one that each has written since, if it has."""
        lengths = [len(row.prompt) + len(row.written) for row in rows]
        later = [number for number, length in enumerate(lengths) if length > self._lengths[number]]
        self._make_room(len(rows), max(lengths))
        if later:
            places = [lengths[number] - 1 for number in later]
            given = torch.tensor([later, places, [rows[number].written[-1] for number in later]])
            where, place, token = given.to(self._ids.device)
            self._ids[where, place] = token
        self._lengths = lengths
        return self._ids[: len(rows), : max(lengths)]

    def _make_room(self, rows: int, length: int) -> None:
        had, width = self._ids.shape
        if rows <= had and length <= width:
            return
        more = max(rows, 2 * had) if rows > had else had, max(length, 2 * width) if length > width else width
        ids = self._ids.new_zeros(more)
        if had and width:
            ids[:had] = self._ids[:, :1]
            ids[:had, :width] = self._ids
        self._ids = ids
