"""Say how large a model is, by its folder: parameters, weights, KV cache of a token. Loads nothing.

How fast it is follows from that in planning/roofline.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter by precision."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model its speed depends on: parameters, the weights' size, and a token's KV cache."""

    parameters: float
    weights_gb: float
    kv_bytes_per_token: float


def shape_of(config: Path, precision: str | None = None) -> Shape:
    """Return a model's size.

    The weights are those in the folder, if they are there and no other precision is asked for; else parameters, which
    are counted from config.json, times the precision's bytes.

    :param config: a model's folder, or its config.json.
    :param precision: one of `BYTES`; by default the one in which the model was saved.
    :raises ValueError: if it cannot be told, saying what is missing.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    data = data.get("text_config", data) if isinstance(data, dict) else {}
    saved = str(data.get("torch_dtype") or data.get("dtype") or "float32").removeprefix("torch.")
    width = BYTES[precision] if precision is not None else BYTES.get(saved, 2.0)
    try:
        parameters, cache = parameters_of(data), cache_values(data)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}, so that the model's size cannot be told from it") from None
    files = _weight_bytes(path.parent) if precision in (None, saved) else 0
    kept = max(width, 2.0)  # Quantised weights keep a cache of half precision.
    return Shape(float(parameters), (files or parameters * width) / 1e9, cache * min(kept, 4.0))


def parameters_of(config: dict[str, Any]) -> int:
    """Return how many parameters a transformer has by its config.json; biases and norms, under 1 %, are left out.

    :raises KeyError: for what it does not say.

    >>> parameters_of({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 49152,
    ...     "intermediate_size": 8192, "tie_word_embeddings": True, "hidden_act": "silu"}) / 1e9
    1.711276032
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kept = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * heads * size + 2 * hidden * kept * size
    gated = config.get("hidden_act", "silu") == "silu"
    feed = (3 if gated else 2) * hidden * (config.get("intermediate_size") or 4 * hidden)
    feed *= config.get("num_local_experts") or 1
    alone = gated and not config.get("tie_word_embeddings", False)
    return int(layers * (attention + feed) + config["vocab_size"] * hidden * (2 if alone else 1))


def cache_values(config: dict[str, Any]) -> int:
    """Return how many numbers a token has in the KV cache; none in an encoder, which keeps no cache.

    >>> cache_values({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32})
    98304
    """
    if config.get("position_embedding_type") == "absolute" and not config.get("is_decoder", False):
        return 0
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size)


def _weight_bytes(folder: Path) -> int:
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        if found := sum(path.stat().st_size for path in folder.glob(pattern)):
            return found
    return 0
