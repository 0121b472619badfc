"""What the ready-made contexts cost on a GPU, beside a plain loop over transformers.

    benchmarks/models_gpu.py --json

Backs the README's lines on models: "as fast as a plain transformers loop at the same batch size" and "unloading a
context gives its GPU memory back". The model is of SmolLM2-1.7B's architecture and size with random weights, in
bfloat16: speed and memory do not depend on what the weights say. Every contender gets the same prompts in the same
batches, in rounds that take turns:

- `plain`: the tokenizer with left padding, `model.generate`, the tokenizer again.
- `generate`: `ctxflow.models.TextGenerator` in this process, on the very same model.
- `map`: `batch_app.map` over one worker of the embedded engine, whose library process holds a copy of its own.

`freed_percent` is the share of the GPU memory that the worker's library process took which is free again after the
run has ended, as the driver counts it; `close_freed_percent` the same of what torch had allocated in this process,
after `TextGenerator.close()`. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch

from ctxflow import ContextExecutor, batch_app
from ctxflow.models import TextGenerator, generator
from ctxflow.testing.small_models import make_causal_lm

NAME = "models_gpu"
SENTENCE = "Which worker should take which batch, and what is lost when a worker is taken away? "


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured: prompts in batches of that size, each continued by that many tokens."""

    prompts: int = 256
    batch_size: int = 64
    new_tokens: int = 128
    loads: int = 3
    full_size: bool = True


QUICK = Scale(prompts=6, batch_size=3, new_tokens=4, loads=1, full_size=False)


def prompts_of(scale: Scale) -> list[str]:
    """Prompts of mixed lengths, a tenth to about ten times the sentence, the same each time."""
    return [(SENTENCE * 10)[: 60 + (number * 97) % 780] for number in range(scale.prompts)]


def plain_loop(loaded: TextGenerator, prompts: Sequence[str], scale: Scale) -> int:
    """What a person would write with transformers alone; the number of tokens written."""
    model, tokenizer = loaded.loaded.model, loaded.loaded.tokenizer
    tokenizer.padding_side = "left"
    tokens = 0
    for start in range(0, len(prompts), scale.batch_size):
        inputs = tokenizer(list(prompts[start : start + scale.batch_size]), padding=True, return_tensors="pt")
        written = model.generate(**inputs.to(model.device), do_sample=False, max_new_tokens=scale.new_tokens)
        new = written[:, inputs["input_ids"].shape[1] :]
        tokenizer.batch_decode(new, skip_special_tokens=True)
        tokens += sum(_until_end(row, tokenizer.eos_token_id) for row in new.tolist())
    return tokens


def _until_end(row: list[int], end: int) -> int:
    return row.index(end) + 1 if end in row else len(row)


def generate_loop(built: TextGenerator, prompts: Sequence[str], scale: Scale) -> int:
    """The same batches through ctxflow's class in this process."""
    tokens = 0
    for start in range(0, len(prompts), scale.batch_size):
        answers = built.generate(prompts[start : start + scale.batch_size], max_new_tokens=scale.new_tokens)
        tokens += sum(answer.completion_tokens for answer in answers)
    return tokens


def tokens_per_second(run: Callable[[], int]) -> Callable[[], float]:
    """A measurement of something that returns how many tokens it wrote."""

    def measure() -> float:
        started = time.perf_counter()
        tokens = run()
        return tokens / (time.perf_counter() - started)

    return measure


def measure(folder: Path, device: str, rounds: int, scale: Scale) -> dict[str, common.Figure]:
    """All figures."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": device}
    loads, built = measure_loads(folder, settings, scale)
    figures = {"load_s": common.figure(loads, "s", "lower")}
    samples, freed = measure_speed(folder, settings, built, rounds, scale)
    figures |= {f"{name}_tokens_per_s": common.figure(each, "tokens/s") for name, each in samples.items()}
    figures["generate_vs_plain"] = common.ratio(samples["generate"], samples["plain"])
    figures["map_vs_plain"] = common.ratio(samples["map"], samples["plain"])
    if device.startswith("cuda"):
        figures["freed_percent"] = common.figure([freed], "%")
        taken = torch.cuda.memory_allocated()
        built.close()
        figures["close_freed_percent"] = common.figure([100 * (1 - torch.cuda.memory_allocated() / taken)], "%")
    return figures


def measure_loads(folder: Path, settings: dict[str, Any], scale: Scale) -> tuple[list[float], TextGenerator]:
    """Seconds to build the context, from files that the system has in its cache; and the last one built."""
    TextGenerator(folder, **settings).close()
    samples = []
    for number in range(scale.loads):
        common.progress(f"load {number + 1} of {scale.loads}")
        started = time.perf_counter()
        built = TextGenerator(folder, **settings)
        samples.append(time.perf_counter() - started)
        if number < scale.loads - 1:
            built.close()
    return samples, built


def measure_speed(
    folder: Path, settings: dict[str, Any], built: TextGenerator, rounds: int, scale: Scale
) -> tuple[dict[str, list[float]], float]:
    """Tokens a second of each contender, and the percentage of the worker's GPU memory that was given back."""
    prompts = prompts_of(scale)
    gpus = int(settings["device"].startswith("cuda"))
    recipe = generator.options(gpus=gpus)(str(folder), **settings)
    new_tokens = scale.new_tokens

    @batch_app(recipe, batch_size=scale.batch_size)
    def write(model: TextGenerator, texts: list[str]) -> list[int]:
        return [answer.completion_tokens for answer in model.generate(texts, max_new_tokens=new_tokens)]

    before = used_memory()
    with ContextExecutor(workers=1):
        list(write.map(prompts[: scale.batch_size]))  # builds the context
        plain_loop(built, prompts[: scale.batch_size], scale)
        torch.cuda.empty_cache()
        during = used_memory()
        contenders = {
            "plain": tokens_per_second(lambda: plain_loop(built, prompts, scale)),
            "generate": tokens_per_second(lambda: generate_loop(built, prompts, scale)),
            "map": tokens_per_second(lambda: sum(write.map(prompts))),
        }
        samples = common.interleaved(contenders, rounds, "speed")
    torch.cuda.empty_cache()
    freed = 100 * (during - used_memory()) / (during - before) if gpus else 0.0
    return samples, freed


def used_memory() -> int:
    """Bytes in use on the first GPU by all processes; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What model contexts cost on a GPU, beside a plain transformers loop.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each measurement is taken (5)")
    parser.add_argument(
        "--quick", action="store_true", help="a round of a tiny model, on the CPU if need be: to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is how often each measurement is taken: give 1 or more")
    if not torch.cuda.is_available() and not given.quick:
        reason = f"torch {torch.__version__} sees no CUDA device on this machine"
        found = {"machine": common.machine(), "versions": common.versions(PACKAGES), "figures": {}}
        print(
            json.dumps({"benchmark": NAME, **found, "unmeasured": reason})
            if given.json
            else f"{NAME} is unmeasured: {reason}"
        )
        return
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    scale = QUICK if given.quick else Scale()
    with tempfile.TemporaryDirectory() as folder:
        common.progress("making the model")
        path = make_causal_lm(folder, full_size=scale.full_size, dtype="bfloat16", device=device)
        figures = measure(path, device, 1 if given.quick else given.rounds, scale)
    gpu = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda} if device != "cpu" else {}
    common.report(NAME, figures, {**common.versions(PACKAGES), **gpu}, given.json)


PACKAGES = ("torch", "transformers")

if __name__ == "__main__":
    sys.exit(main())
