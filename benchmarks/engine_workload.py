"""What engines.py has engines do: a model of random weights, and rows of prompts with answers of given lengths."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BATCH_SIZES = (50, 100, 200, 400, 800)
WINDOWS = (8, 16, 32, 64, 128, 256)
REQUESTS = (8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured; on a slow engine a quarter of the rows."""

    rows: int = 256
    texts: int = 1600
    context: int = 1024
    prompt: tuple[float, float] = (math.log(100), 0.8)
    text: tuple[float, float] = (math.log(30), 0.8)
    answer: tuple[float, float] = (math.log(35), 0.8)
    longest: tuple[int, int] = (500, 200)
    windows: Sequence[int] = WINDOWS
    sizes: Sequence[int] = BATCH_SIZES
    requests: Sequence[int] = REQUESTS
    model: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"hidden_size": 576, "head_size": 64, "layers": 20}
    )


QUICK = Scale(
    rows=16, texts=40, context=256, longest=(60, 12), windows=(4, 16), sizes=(10, 40), requests=(4, 16),
    model={"hidden_size": 64, "head_size": 32, "layers": 2},
)  # fmt: skip


def make_model(folder: Path, scale: Scale, dtype: str, gpu: bool) -> Path:
    """A model of random weights that ends no answer early: special tokens score 0, and the best of all others more."""
    import torch
    from safetensors.torch import load_file, save_file

    from ctxflow.testing.small_models import make_causal_lm

    size: dict[str, Any] = {"full_size": True, "device": "cuda:0"} if gpu else dict(scale.model)
    path = make_causal_lm(folder / "model", dtype=dtype, **size)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], scale.context)
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    scores = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    scores[torch.tensor([config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")])] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_rows(folder: Path, model: Path, scale: Scale) -> None:
    """Rows with prompts and answers of log-normal lengths, the same each time, that begin differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(7)
    words = [word for word in map(tokenizer.decode, range(tokenizer.vocab_size)) if word.strip().isalpha()]

    def length(of: tuple[float, float], least: int, most: int) -> int:
        return max(least, min(most, round(draw.lognormvariate(*of))))

    def prompt(number: int, tokens: int) -> str:
        text = f"{draw.randrange(10**6)} {number}:"
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += " ".join(draw.choices(words, k=8))
        return text

    least = min(20, scale.longest[0])
    for name, count, of in (("rows", scale.rows, scale.prompt), ("texts", scale.texts, scale.text)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(count):
                text = prompt(number, length(of, least, scale.longest[0]))
                row = {"custom_id": f"row-{number}", "prompt": text}
                file.write(json.dumps(row | {"max_new_tokens": length(scale.answer, 5, scale.longest[1])}) + "\n")
