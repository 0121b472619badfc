"""Load a model and its tokenizer with the transformers library: dtype, device, padding.

What is done with them is in generate.py and classify.py. Importing this module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ctxflow.models.model_folder import check_ability, locate_model

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")


@dataclasses.dataclass(eq=False)
class LoadedModel:
    """A model and its tokenizer on one device. Dropping the last reference frees both; `close()` does it now.

    :ivar name: what was asked for, for messages.
    :ivar folder: where the files came from.
    """

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.dtype

    @property
    def pad_id(self) -> int:
        """The token that short rows are padded with; attention masks hide it, so any will do."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((i for i in candidates if isinstance(i, int)), 0)

    def close(self) -> None:
        """Free the memory of the model now; it cannot be used afterwards. Closing twice does nothing."""
        self.model = self.tokenizer = None
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
        but float32 in place of a half type on a CPU, and float16 in place of bfloat16 on a GPU too old for
        it.
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
    trusted = {key: options[key] for key in ("trust_remote_code",) if key in options}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **trusted)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trusted)
        with without_progress_bars():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=resolve_dtype(dtype, _saved_dtype(config), place), **options
            )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n", maxsplit=1)[0]
        raise ValueError(f"{folder} could not be loaded as an AutoModelForCausalLM: {first}") from error
    loaded.eval().requires_grad_(False)
    if loaded.device != place:  # quantised weights are loaded where they stay, and refuse to be moved
        loaded.to(place)
    return LoadedModel(os.fspath(model), folder, loaded, tokenizer, place)


def check_dtype(dtype: str) -> None:
    """Check that weights can be loaded in a type.

    :raises ValueError: naming those in which they can.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown: give one of {', '.join(DTYPES)}")


def _saved_dtype(config: Any) -> torch.dtype:
    saved = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, saved) if isinstance(saved, str) else saved


def resolve_device(device: str) -> torch.device:
    """Return the device of that name; for "auto" the first GPU if there is one, else the CPU.

    :raises ValueError: for a device that is not here.
    """
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
    """Keep the bars of transformers, which say nothing to a machine, out of a library process's log."""
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
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids.to(device), mask.to(device)


def right_padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Any, Any]:
    """Return rows as `left_padded`, but filled up on the right."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.to(device), mask.to(device)
