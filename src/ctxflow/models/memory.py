"""How much goes through a model at once: estimated from free memory, corrected by what did not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ctxflow.models.batches import run_batches, run_each
from ctxflow.models.transformers import LoadedModel

Result = TypeVar("Result")

CPU_READING_TOKENS = 1024
"""Tokens of an internal batch on a CPU where a model only reads: its caches hold no more (measured)."""
CPU_WRITING_TOKENS = 4096
"""The same where it writes, since each step's pass over the weights serves all rows."""
GPU_BATCH_TOKENS = 131_072
"""The most on a GPU by default: more rows gain nothing, but wait for the slowest among them."""


class Workload:
    """How large one model's internal batches may be, and running them.

    :param max_batch_tokens: tokens of an internal batch, padding included; None takes what fits in free
        memory.
    :param max_batch_size: rows of an internal batch; None for any number.
    :param keeps_cache: whether keys and values of all layers stay for every token.
    :param cpu_tokens: tokens of an internal batch on a CPU, where free memory says little about what is quick.
    :raises ValueError: for a number below 1.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        max_batch_tokens: int | None,
        max_batch_size: int | None,
        *,
        keeps_cache: bool,
        cpu_tokens: int,
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_batch_size", max_batch_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} is out of range: give a whole number of 1 or more, or None")
        self._loaded = loaded
        self._chosen = max_batch_tokens
        self._max_rows = max_batch_size
        self._keeps_cache = keeps_cache
        self._cpu_tokens = cpu_tokens
        self._ceiling: int | None = None  # set when an internal batch did not fit, kept for the model's life

    def run(self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]]) -> list[Result]:
        """Run rows of these lengths (tokens, those to be written too) in internal batches, without gradients.

        :param run: takes rows' numbers, gives a result for each.
        :returns: the results in the order of the rows.
        :raises OutOfMemoryError: if one row alone does not fit.
        """
        return run_batches(lengths, _inferring(run), **self._limits())

    def run_each(self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]]) -> Iterator[Result]:
        """As `run`, but yields each row's result as soon as it and all before it are there."""
        return run_each(lengths, _inferring(run), **self._limits())

    def _limits(self) -> dict[str, Any]:
        most = self._chosen or self._fitting()
        return {
            "max_tokens": min(most, self._ceiling or most),
            "max_rows": self._max_rows,
            "out_of_memory": torch.cuda.OutOfMemoryError,
            "recover": self._shrink,
        }

    def _fitting(self) -> int:
        """How many tokens of an internal batch should fit in the memory that is free on the device now."""
        device = self._loaded.device
        if device.type != "cuda":
            return self._cpu_tokens
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        per_token = _bytes_per_token(self._loaded.model.config, self._loaded.dtype.itemsize, self._keeps_cache)
        return max(1, min(int(0.7 * (free + unused) / per_token), GPU_BATCH_TOKENS))

    def _shrink(self, tokens: int) -> None:
        self._ceiling = tokens
        release(self._loaded.device)


def _inferring(run: Callable[[list[int]], Sequence[Result]]) -> Callable[[list[int]], Sequence[Result]]:
    """Without gradients while it runs, and only then."""

    def inferring(rows: list[int]) -> Sequence[Result]:
        with torch.inference_mode():
            return run(rows)

    return inferring


def release(device: torch.device) -> None:
    """Give memory that nothing refers to any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes_per_token(config: Any, itemsize: int, keeps_cache: bool) -> int:
    """An estimate of the memory that one token of a batch takes while it goes through a model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(config, "hidden_size", 4096)
    passing = 8 * hidden + 3 * (getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or hidden // heads
    kept_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = getattr(config, "num_hidden_layers", 32) + 1  # one more: a layer's cache is copied when it grows
    kept = 2 * layers * kept_heads * head_size if keeps_cache else 0
    return itemsize * (passing + kept)
