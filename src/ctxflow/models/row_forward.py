"""Take rows a token further in one pass through a model, where its cache can be held by rows: `RowsForward` finds out.

Sliding windows, recurrent layers, several caches, encoders, attention with sinks or a cap of its own, and positions
that are turned by the longest row are not held so.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ctxflow.models.reading import context_length, rotary_limit
from ctxflow.models.row_cache import RowsCache, Store, TokenStep, Unsupported, attending, make_store
from ctxflow.models.transformers import LoadedModel

OTHER_SETTINGS = (
    "sequence_bias", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "begin_suppress_tokens", "watermarking_config", "guidance_scale",
    "remove_invalid_values", "renormalize_logits", "token_healing", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
)  # fmt: skip
"""What a model's generation settings may ask, that is left to transformers' own loop."""


def other_settings(loaded: LoadedModel) -> list[str]:
    """Return which of `OTHER_SETTINGS` the model asks for."""
    settings = loaded.model.generation_config
    return [name for name in OTHER_SETTINGS if getattr(settings, name, None) not in (None, False, 0, 1)]


class RowsForward:
    """A model's pass over rows in a store.

    :raises Unsupported: for a model that cannot be run so, saying why in a few words.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._device = loaded.device
        config = loaded.model.config
        self._config = config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        if getattr(config, "is_encoder_decoder", False):
            raise Unsupported("it has an encoder")
        if kinds:
            raise Unsupported(f"it has layers of {', '.join(sorted(kinds))}")
        limit, length = rotary_limit(config), context_length(config)
        if limit is not None and (length is None or length > limit):
            raise Unsupported(f"it turns positions otherwise beyond {limit} tokens")
        if asked := other_settings(loaded):
            raise Unsupported(f"its generation settings have {asked[0]}")
        taken = inspect.signature(loaded.model.forward).parameters
        if "position_ids" not in taken:
            raise Unsupported("it takes no positions")
        self._keeps = "logits_to_keep" in taken
        self._layers = int(getattr(text, "num_hidden_layers", 0))
        self._vocabulary = int(getattr(text, "vocab_size", 0) or len(loaded.tokenizer))
        try:
            with torch.inference_mode():
                self._check(make_store(loaded.device, loaded.dtype))
        except (torch.cuda.OutOfMemoryError, Unsupported):
            raise
        except Exception as error:  # A model's code may trip over anything that it is not used to.
            raise Unsupported(f"it fails with {type(error).__name__}: {error}") from error

    def __call__(self, store: Store, going: Sequence[tuple[int, int]], prompts: Sequence[Sequence[int]]) -> Any:
        """Return the scores of each row's next token, of shape (rows, tokens).

        :param going: of each row that is in the store the last token, and how many it has with that.
        :param prompts: the tokens of rows behind them, all of which are new.
        """
        ids = [token for token, _ in going]
        places = [length - 1 for _, length in going]
        last = list(range(len(going)))
        for prompt in prompts:
            ids += prompt
            places += range(len(prompt))
            last.append(len(ids) - 1)
        store.begin(TokenStep([length for _, length in going], [len(prompt) for prompt in prompts]))
        given = torch.tensor([ids, places]).to(self._device)
        options: dict[str, Any] = {}
        wanted = None
        if prompts:  # Otherwise each token's scores are wanted.
            wanted = torch.tensor(last).to(self._device)
            options = {"logits_to_keep": wanted} if self._keeps else {}
        with attending(self._config, store) as layers:
            scores = self._loaded.model(
                input_ids=given[:1], position_ids=given[1:], past_key_values=RowsCache(), use_cache=True, **options
            ).logits[0]
        if len(layers) != self._layers:
            raise Unsupported(f"{len(layers)} of its {self._layers} layers attend")
        return scores if wanted is None or self._keeps else scores[wanted]

    def _check(self, store: Store) -> None:
        """Compare with the model alone: two prompts, then a step of both with a third."""
        rows = [[(7 * row + 3 * place) % self._vocabulary for place in range(3 + 2 * row)] for row in range(3)]
        budget = sum(map(len, rows))
        for row in rows[:2]:
            store.enter(len(row), budget)
        found = list(self(store, [], [row[:-1] for row in rows[:2]]))
        store.enter(len(rows[2]), budget)
        found += self(store, [(row[-1], len(row)) for row in rows[:2]], rows[2:])
        for number in (2, 1, 0):
            store.leave(number)
        parts = [*(row[:-1] for row in rows[:2]), *rows]
        for each, part in zip(found, parts, strict=True):
            plain = self._loaded.model(input_ids=torch.tensor([part]).to(self._device), use_cache=False).logits[0, -1]
            rough = torch.finfo(each.dtype).eps > 1e-4
            # In half types, a mixture's experts may be chosen otherwise where two are nearly as good.
            if not (each - plain).norm() <= (0.3 if rough else 1e-3) * plain.norm():
                raise Unsupported("it gives other scores in such a batch")
