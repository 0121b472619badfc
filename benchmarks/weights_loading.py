#!/usr/bin/env python3
"""How fast a model's weights are loaded, beside `cat` of their file, with the page cache cold and warm.

    benchmarks/weights_loading.py [--json] [--quick] [--rounds 5] [--folder DIR]

A causal language model of 1.1 GB of random weights is saved as float32, and one as bfloat16. A load is timed in a new
process that has loaded a small model of the same architecture before, so that imports and what transformers prepares
once are done; it ends when every byte of the weights has been read once more, by as many threads as torch uses. Cold
means that the file was written to disk and dropped from the page cache (posix_fadvise); warm, that it was read after
that, as other programs read; again, that ctxflow read it ahead, as an earlier worker on this machine did.
Nothing here uses a GPU. Figures, all with `_cold`, `_warm` or `_again`:

- `cat_gb_per_s`, `load_gb_per_s`, `from_pretrained_gb_per_s`: of `cat FILE >/dev/null`; of `load_language_model` with
  `read_ahead` begun just before; of transformers' `from_pretrained` alone;
- `load_vs_cat`, `from_pretrained_vs_cat`: times cat's, round by round;
- `converted_gb_per_s`: the same load of bfloat16 weights to float32, which is what a CPU gets by default;
- `start_s`, `start_s_plain`: from the start of Python until every byte was read, by the ready-made context `generator`,
  which reads ahead while it imports, and by the class that it builds, which does not;
- `copied_share`, `copied_share_converted`: memory that is this process's alone (anonymous) after a load, in file sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

from ctxflow.host.context_building import seldom_collecting
from ctxflow.models.model_folder import weight_files
from ctxflow.models.weight_reading import read_ahead

PACKAGES = ("torch", "transformers", "safetensors")
STATES = ("cold", "warm", "again")


def make(folder: Path, quick: bool) -> None:
    """Save the models: the small one, and those of 1.1 GB."""
    from ctxflow.testing.small_models import make_causal_lm

    width = 512 if quick else 2048
    make_causal_lm(folder / "small", head_size=64)
    make_causal_lm(folder / "float32", hidden_size=width, head_size=64, layers=4)
    make_causal_lm(folder / "bfloat16", hidden_size=width, head_size=64, layers=8, dtype="bfloat16")


def prepare(folder: Path, state: str) -> int:
    """Have the weights in the page cache, or not, and return their size in bytes."""
    files = weight_files(folder)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while state == "warm" and opened.read(1 << 22):
                pass
    if state == "again":
        for thread in read_ahead(folder):
            thread.join()
    return sum(file.stat().st_size for file in files)


def touch(model: Any) -> None:
    """Read every byte of a model's weights."""
    import numpy as np
    import torch

    step, parts = 1 << 26, []  # In pieces of 1 MB most of the time would be Python's, between threads.
    for weight in model.parameters():
        values = weight.detach().reshape(-1).view(torch.uint8).numpy()
        parts += [values[start : start + step] for start in range(0, len(values), step)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda part: int(np.bitwise_xor.reduce(part.view(np.int64))), parts))


def anonymous() -> int:
    """Return the bytes of this process's memory that are no file's."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))


def load(folder: Path, way: str, state: str) -> dict[str, float]:
    """Load a model in this process, and return the seconds and the memory that it took."""
    import torch
    from transformers import AutoModelForCausalLM

    from ctxflow.models.transformers import load_language_model, without_progress_bars

    def plain(where: Path) -> Any:
        with without_progress_bars():
            return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)

    def ours(where: Path) -> Any:
        with seldom_collecting():  # As in a library process.
            read_ahead(where)
            return load_language_model(where, device="cpu").model

    run = plain if way == "from_pretrained" else ours
    touch(run(folder.parent / "small"))
    gc.collect()
    gc.freeze()  # As a library process has what its zygote imported.
    size, before = prepare(folder, state), anonymous()
    began = time.perf_counter()
    model = run(folder)
    touch(model)
    return {"seconds": time.perf_counter() - began, "copied": (anonymous() - before) / size}


def start(folder: Path, way: str) -> None:
    """Build a context from nothing."""
    if way == "start":
        from ctxflow.models import generator

        recipe = generator(str(folder), device="cpu")
        touch(recipe.function(*recipe.args, **recipe.kwargs).loaded.model)
    else:
        from ctxflow.models import TextGenerator

        touch(TextGenerator(folder, device="cpu").loaded.model)


def child(program: str, way: str, folder: Path, state: str) -> list[str]:
    """Return the words by which a program takes one of its measurements."""
    return [sys.executable, program, "--child", way, "--folder", str(folder), "--state", state]


def arguments(description: str, rounds: int) -> argparse.Namespace:
    """Read the options of a program that loads weights."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each is taken ({rounds})")
    parser.add_argument("--folder", type=Path, help="where models are saved: on the disk that is measured (a new one)")
    parser.add_argument("--quick", action="store_true", help="small models, one round: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_child(way: str, folder: Path, state: str) -> dict[str, float]:
    """Take one of the measurements in a new process."""
    words = ["cat", *map(str, weight_files(folder))] if way == "cat" else child(__file__, way, folder, state)
    prepare(folder, state)
    began = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.DEVNULL if way == "cat" else subprocess.PIPE, check=True)
    seconds = time.perf_counter() - began
    return json.loads(done.stdout) if way in ("load", "from_pretrained") else {"seconds": seconds}


def measurements(folder: Path, copied: dict[str, list[float]]) -> dict[str, Callable[[], float]]:
    """Return what is measured, by name: seconds each."""

    def measured(way: str, saved: str, state: str) -> Callable[[], float]:
        def take() -> float:
            found = in_child(way, folder / saved, state)
            if way == "load":
                copied[saved].append(found["copied"])
            return found["seconds"]

        return take

    taken = {}
    for state in STATES:
        for way in ("cat", "load", "from_pretrained", "start", "start_plain"):
            taken[f"{way}_{state}"] = measured(way, "float32", state)
        taken[f"converted_{state}"] = measured("load", "bfloat16", state)
    return taken


def figures_of(
    samples: dict[str, list[float]], copied: dict[str, list[float]], sizes: dict[str, int]
) -> dict[str, common.Figure]:
    """The figures of all rounds."""
    found: dict[str, common.Figure] = {}
    for state in STATES:
        for way, saved in (
            ("cat", "float32"),
            ("load", "float32"),
            ("from_pretrained", "float32"),
            ("converted", "bfloat16"),
        ):
            rates = [sizes[saved] / 1e9 / seconds for seconds in samples[f"{way}_{state}"]]
            found[f"{way}_gb_per_s_{state}"] = common.figure(rates, "GB/s")
        for way in ("load", "from_pretrained"):
            found[f"{way}_vs_cat_{state}"] = common.ratio(samples[f"cat_{state}"], samples[f"{way}_{state}"])
        found[f"start_s_{state}"] = common.figure(samples[f"start_{state}"], "s", "lower")
        found[f"start_s_plain_{state}"] = common.figure(samples[f"start_plain_{state}"], "s", "lower")
    found["copied_share"] = common.figure(copied["float32"], "file sizes", "lower")
    found["copied_share_converted"] = common.figure(copied["bfloat16"], "file sizes", "lower")
    return found


def main() -> None:
    """Measure and print."""
    given = arguments("Loading a model's weights beside cat, cold and warm.", rounds=5)
    if given.child in ("start", "start_plain"):
        start(given.folder, given.child)
        return
    if given.child:
        print(json.dumps(load(given.folder, given.child, given.state)))
        return
    packages = common.versions(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="ctxflow-weights-", dir=given.folder) as name:
        folder = Path(name)
        make(folder, given.quick)
        sizes = {saved: prepare(folder / saved, "cold") for saved in ("float32", "bfloat16")}
        copied: dict[str, list[float]] = {saved: [] for saved in sizes}
        samples = common.interleaved(measurements(folder, copied), 1 if given.quick else given.rounds, "weights")
    common.report("weights_loading", figures_of(samples, copied, sizes), packages, given.json)


if __name__ == "__main__":
    main()
