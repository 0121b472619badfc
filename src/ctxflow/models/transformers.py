"""Load a model with the transformers library, and run its work in internal batches that fit in memory, by tokens.

An internal batch is what goes through the model at once; the batch that ctxflow sent may be many of them. How much fits
is estimated from free memory, and corrected by what did not fit (`ctxflow.models.batch_limits`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ctxflow.errors import ItemRefused
from ctxflow.host.gpu_copies import as_bytes, copy_bytes
from ctxflow.models.batch_limits import BatchLimits, Ceiling, Result, alike
from ctxflow.models.model_checks import dtype_problem, why_not_loaded
from ctxflow.models.model_folder import check_ability, locate_model
from ctxflow.models.reading import Read, Tokens
from ctxflow.models.weight_reading import tell_weights
from ctxflow.on_worker import load_part


@dataclasses.dataclass(eq=False)
class LoadedModel:
    """A model and its tokenizer on one device. Dropping the last reference frees both; `close()` does it now.

    On a GPU, its process does without cuDNN's attention from then on: that plans for each shape of a batch anew, for
    some 60 ms, and batches seldom have the shape of another (docs/engines.md). torch's other kernels are as fast.
    """

    name: str  # As it was asked for, for messages.
    folder: Path  # Where the files came from.
    model: Any
    tokenizer: Any
    device: torch.device

    def __post_init__(self) -> None:
        """Have torch choose another attention than cuDNN's, where it has that (2.4 and newer)."""
        choose = getattr(torch.backends.cuda, "enable_cudnn_sdp", None)
        if self.device.type == "cuda" and choose is not None:
            choose(False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.dtype

    @property
    def pad_id(self) -> int:
        """The token that short rows are padded with; attention masks hide it, so any will do that the model knows."""
        known = self.known_tokens
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((i for i in candidates if isinstance(i, int) and (known is None or i < known)), 0)

    @property
    def known_tokens(self) -> int | None:
        """How many tokens the model has embeddings for; None if it does not say."""
        try:
            size = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        except (AttributeError, NotImplementedError):
            return None
        return size if isinstance(size, int) else None

    def check_tokens(self, ids: Sequence[int], what: str) -> None:
        """Raise `ItemRefused` for tokens that the model does not know: it would fail at them, for all rows.

        A tokenizer has such ones where tokens were added to it, and the model's embeddings not resized.
        """
        known, largest = self.known_tokens, max(ids, default=0)
        if known is not None and largest >= known:
            text = self.tokenizer.convert_ids_to_tokens(largest)
            raise ItemRefused(
                f"{what} has the token {largest} ({text!r}), but the model knows only {known}: leave that text out, "
                "or resize the model's embeddings"
            )

    def check_read(self, read: Sequence[Read], what: str) -> None:
        """Check the tokens of all inputs that were read, as `check_tokens`."""
        for number, each in enumerate(read):
            if isinstance(each, Tokens):
                self.check_tokens(each.ids, f"{what}[{number}]")

    def close(self) -> None:
        """Free the memory of the model now; it cannot be used afterwards. Closing twice does nothing."""
        self.model = self.tokenizer = None
        self.release()

    def release(self) -> None:
        """Give unused memory back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def load_language_model(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    options: Mapping[str, Any] | None = None,
    task: str = "generate",
) -> LoadedModel:
    """Load a causal language model with its head.

    :param model: a folder, `package:NAME` or a hub id; see `ctxflow.models.model_folder`.
    :param dtype: of the weights: "float32", "float64", "float16", "bfloat16", or "auto": as they were saved,
        but float32 in place of a half type on a CPU, and float16 in place of bfloat16 on a GPU too old for it.
    :param device: "cuda", "cuda:1", "cpu", "mps", or "auto": the first GPU if there is one, else the CPU.
    :param options: further arguments of transformers' `from_pretrained`, such as `attn_implementation`.
    :param task: what it is for: "chat" takes a chat template.
    :raises WrongModelError: if it cannot do that, before its weights are read.
    :raises ModelNotFoundError: if the model is not reachable from here.
    :raises ValueError: for an unknown dtype or device, or a folder that holds no such model.
    """
    place = resolve_device(device)
    check_dtype(dtype)
    folder = locate_model(model, revision=revision)
    check_ability(os.fspath(model), folder, task)
    options = dict(options or {})
    trusted = {key: value for key, value in options.items() if key == "trust_remote_code"}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **trusted)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, **trusted)
        began = time.perf_counter()
        with load_part("weights"), without_progress_bars():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=resolve_dtype(dtype, _saved_dtype(config), place), **options
            )
    except Exception as error:
        why = why_not_loaded(os.fspath(model), folder, error)
        if why is None:
            raise
        raise ValueError(f"{folder} could not be loaded as an AutoModelForCausalLM: {why}") from error
    loaded.eval().requires_grad_(False)
    if loaded.device != place:  # quantised weights are loaded where they stay, and refuse to be moved
        with load_part("weights"):
            move_module(loaded, place)
    tell_weights(os.fspath(model), folder, loaded, time.perf_counter() - began)
    return LoadedModel(os.fspath(model), folder, loaded, tokenizer, place)


def move_module(module: Any, device: torch.device) -> None:
    """Have a module on a device, as by `module.to(device)`, which copies to a GPU at a fraction of the bus's speed.

    What is mapped from files goes from the page cache to the GPU, with no other copy in memory. Tied weights stay tied.

    >>> layer = torch.nn.Linear(3, 2)
    >>> move_module(layer, torch.device("cpu"))
    >>> layer.weight.device
    device(type='cpu')
    """
    if device.type == "cuda":
        copy_module(module, device)
    module.to(device)


def copy_module(module: Any, device: torch.device) -> None:
    """Have a module's parameters and buffers in new memory on a device; what is not dense stays where it is."""
    here = {
        id(each): each.detach()
        for each in itertools.chain(module.parameters(), module.buffers())
        if each.device.type == "cpu" and each.layout is torch.strided and each.is_contiguous()
    }
    there = {key: torch.empty_like(each, device=device) for key, each in here.items()}
    copy_bytes(torch, [(as_bytes(torch, here[key]), as_bytes(torch, there[key])) for key in here], to_host=False)
    module._apply(lambda tensor: there.get(id(tensor), tensor))


def check_dtype(dtype: str) -> None:
    """Raise `ValueError` for a type in which weights cannot be loaded."""
    if (problem := dtype_problem(dtype)) is not None:
        raise ValueError(problem)


def _saved_dtype(config: Any) -> torch.dtype:
    saved = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, saved) if isinstance(saved, str) else saved


def resolve_device(device: str) -> torch.device:
    """Return the device of that name; for "auto" the first GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is unknown: give auto, cpu, cuda, cuda:1 or mps") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            "devices; give the context a GPU with .options(gpus=1), or device='auto'"
        )
    return torch.device("cuda:0") if device == "cuda" else place


def resolve_dtype(dtype: str, saved: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to load weights in that were saved as `saved`; "auto" as `load_language_model` says."""
    if dtype != "auto":
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    if device.type == "cpu" and saved in (torch.float16, torch.bfloat16):
        return torch.float32
    if device.type == "cuda" and saved == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return saved


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep the progress bars of transformers out of a library process's log."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def left_padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Any, Any]:
    """Return rows of token ids as a matrix filled up on the left, and its mask; both of shape (rows, longest)."""
    ids, mask = right_padded([row[::-1] for row in rows], pad_id, device)
    return ids.flip(1), mask.flip(1)


def right_padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Any, Any]:
    """Return rows as `left_padded`, but filled up on the right."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.to(device), mask.to(device)


# Tokens of an internal batch on a CPU where a model only reads: its caches hold no more (measured).
CPU_READING_TOKENS = 1024
CPU_WRITING_TOKENS = 4096  # The same where it writes, since each step's pass over the weights serves all rows.
CPU_RUNNING_TOKENS = 16_384  # The same in a running batch, where no row waits for others and nothing is padded.
CPU_CACHE_BYTES = 2 << 30  # What those take at most, unless they are CPU_WRITING_TOKENS or fewer.
GPU_BATCH_TOKENS = 131_072  # The most on a GPU by default: more rows gain nothing, but wait for the slowest among them.


class InternalBatches:
    """The size of one model's internal batches, and running them.

    :param max_batch_tokens: tokens of an internal batch, padding included; None takes what fits in free memory.
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
        self._ceiling = Ceiling()

    def run(self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]]) -> list[Result]:
        """Run rows of these lengths (tokens, those to be written too) in internal batches, without gradients.

        :param run: takes rows' numbers, gives a result for each.
        :returns: the results in the order of the rows.
        :raises OutOfMemoryError: if one row alone does not fit.
        """
        return self._limits().run_batches(lengths, self._inferring(lengths, run))

    def run_each(
        self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]], ahead: int | None = None
    ) -> Iterator[Result]:
        """Run rows as `run` does, but yield each result as soon as it and all before it are there.

        :param ahead: how many internal batches' rows are looked at to find some of similar lengths, by default `AHEAD`.
        """
        return self._limits().run_each(lengths, self._inferring(lengths, run), ahead)

    def most_tokens(self) -> int:
        """Return the tokens that were chosen for an internal batch, or fit in the memory that is free now."""
        return self._chosen or self._fitting()

    def next_batch(self, lengths: Sequence[int]) -> list[int]:
        """Return which of the rows that wait go next: the first, and those that are most like it in length."""
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
        limits = self._limits()
        return alike(order.index(0), order, [lengths[row] for row in order], limits.max_tokens, limits.max_rows)

    def _limits(self) -> BatchLimits:
        most = self._ceiling.limit(self.most_tokens())
        return BatchLimits(most, self._max_rows, torch.cuda.OutOfMemoryError, self._shrink)

    def _fitting(self) -> int:
        """Return how many tokens of an internal batch should fit in the memory that is free on the device now."""
        device = self._loaded.device
        config, itemsize = getattr(self._loaded.model, "config", None), getattr(self._loaded.dtype, "itemsize", 4)
        if device.type == "cpu" and self._keeps_cache:
            itemsize = max(itemsize, 4)  # Half types are kept as float32 there.
        per_token = _bytes_per_token(config, itemsize, self._keeps_cache)
        if device.type != "cuda":
            least = min(self._cpu_tokens, CPU_WRITING_TOKENS)
            return max(least, min(self._cpu_tokens, CPU_CACHE_BYTES // per_token))
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(1, min(int(0.7 * (free + unused) / per_token), GPU_BATCH_TOKENS))

    def _shrink(self, tokens: int) -> None:
        self._ceiling.lower(2 * tokens, tokens)
        self._loaded.release()

    def _inferring(
        self, lengths: Sequence[int], run: Callable[[list[int]], Sequence[Result]]
    ) -> Callable[[list[int]], Sequence[Result]]:
        """Return the function with gradients off while it runs, and only then; the ceiling learns what fits."""
        most = self.most_tokens()

        def inferring(rows: list[int]) -> Sequence[Result]:
            with torch.inference_mode():
                results = run(rows)
            if 2 * len(rows) * max(lengths[row] for row in rows) > self._ceiling.limit(most):
                self._ceiling.fitted(most)
            return results

        return inferring


def _bytes_per_token(config: Any, itemsize: int, keeps_cache: bool) -> int:
    """Return an estimate of the memory that one token of a batch takes while it goes through a model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(config, "hidden_size", 4096)
    passing = 8 * hidden + 3 * (getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or hidden // heads
    kept_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = getattr(config, "num_hidden_layers", 32) + 1  # one more: a layer's cache is copied when it grows
    kept = 2 * layers * kept_heads * head_size if keeps_cache else 0
    return itemsize * (passing + kept)
