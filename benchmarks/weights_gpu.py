#!/usr/bin/env python3
"""How fast a model's weights come into a GPU, beside plain transformers and what the disk and the bus can do.

    benchmarks/weights_gpu.py [--json] [--quick] [--rounds 3] [--folder DIR]

A causal language model of SmolLM2-1.7B's size (3.4 GB in bfloat16) with random weights is loaded into the first GPU, in
a new process that has loaded a small one before, so that imports and CUDA's start are done. A load ends when the GPU
has every byte. Cold, warm and again are as in weights_loading.py. Figures, those of loads with `_cold`, `_warm` or
`_again`:

- `load_gb_per_s`, `from_pretrained_gb_per_s`: of `load_language_model` with `read_ahead` begun just before; of
  transformers' `from_pretrained(...).to("cuda")`;
- `load_vs_from_pretrained`: the second's seconds over the first's, round by round;
- `pcie_gb_per_s`: of one copy of 1 GB of pinned memory to the GPU; `pcie_share_warm` and `pcie_share_again` of it;
- `disk_gb_per_s`: of four readers of the file, cold; `disk_share_cold` of it.

Without a GPU it is skipped.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import inside
from weights_loading import PACKAGES, STATES, arguments, child, prepare

from ctxflow.models.model_folder import weight_files
from ctxflow.models.weight_reading import read_ahead

WAYS = ("load", "from_pretrained")
PIECE = 16 << 20


def load(folder: Path, way: str, state: str) -> float:
    """Load a model in this process, and return the seconds that it took."""
    import torch
    from transformers import AutoModelForCausalLM

    from ctxflow.models.transformers import load_language_model, without_progress_bars

    def run(where: Path) -> object:
        if way == "load":
            read_ahead(where)
            return load_language_model(where, device="cuda")
        with without_progress_bars():
            return AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16).to("cuda")

    run(folder.parent / "small")
    gc.collect()
    prepare(folder, state)
    torch.cuda.synchronize()
    began = time.perf_counter()
    loaded = run(folder)  # Else its end would be timed, too.
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del loaded
    return seconds


def in_child(folder: Path, way: str, state: str) -> float:
    """Take one of the loads in a new process."""
    done = subprocess.run(child(__file__, way, folder, state), stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


def bus() -> float:
    """Return the seconds of a copy of 1 GB of pinned memory to the GPU."""
    import torch

    here = torch.empty(1_000_000_000, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    there.copy_(here)
    torch.cuda.synchronize()
    began = time.perf_counter()
    there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def disk(folder: Path) -> float:
    """Return the seconds in which four readers have read the files of a model that are not in memory."""
    prepare(folder, "cold")
    parts = [(file, at) for file in weight_files(folder) for at in range(0, file.stat().st_size, PIECE)]

    def read(part: tuple[Path, int]) -> None:
        file, at = part
        with open(file, "rb", buffering=0) as source:
            os.pread(source.fileno(), PIECE, at)

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as readers:
        list(readers.map(read, parts))
    return time.perf_counter() - began


def figures_of(samples: dict[str, list[float]], size: int) -> dict[str, common.Figure]:
    """The figures of all rounds, of a file of so many bytes."""

    def rates(name: str, amount: float) -> list[float]:
        return [amount / 1e9 / seconds for seconds in samples[name]]

    found = {
        "pcie_gb_per_s": common.figure(rates("bus", 1e9), "GB/s"),
        "disk_gb_per_s": common.figure(rates("disk", size), "GB/s"),
    }
    for state in STATES:
        for way in WAYS:
            found[f"{way}_gb_per_s_{state}"] = common.figure(rates(f"{way}_{state}", size), "GB/s")
        theirs = samples[f"from_pretrained_{state}"]
        found[f"load_vs_from_pretrained_{state}"] = common.ratio(theirs, samples[f"load_{state}"])
        floor = samples["disk"] if state == "cold" else [size / 1e9 * seconds for seconds in samples["bus"]]
        limit = "disk" if state == "cold" else "pcie"
        found[f"{limit}_share_{state}"] = common.ratio(floor, samples[f"load_{state}"])
    return found


def main() -> None:
    """Measure and print."""
    given = arguments("Loading a model's weights into a GPU beside plain transformers.", rounds=3)
    if given.child:
        print(json.dumps(load(given.folder, given.child, given.state)))
        return
    import torch

    from ctxflow.testing.small_models import make_causal_lm

    if not torch.cuda.is_available():
        inside.skip(f"torch {torch.__version__} sees no CUDA device on this machine")
    with tempfile.TemporaryDirectory(prefix="ctxflow-weights-", dir=given.folder) as name:
        folder = Path(name) / "model"
        make_causal_lm(Path(name) / "small", head_size=64, dtype="bfloat16")
        shape = {"hidden_size": 512, "head_size": 64} if given.quick else {"full_size": True}
        make_causal_lm(folder, dtype="bfloat16", device="cuda", **shape)
        gc.collect()
        torch.cuda.empty_cache()
        size = prepare(folder, "cold")
        takes = {f"{way}_{state}": functools.partial(in_child, folder, way, state) for state in STATES for way in WAYS}
        takes |= {"bus": bus, "disk": functools.partial(disk, folder)}
        samples = common.interleaved(takes, 1 if given.quick else given.rounds, "weights into a GPU")
    facts = {**common.versions(PACKAGES), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    common.report("weights_gpu", figures_of(samples, size), facts, given.json)


if __name__ == "__main__":
    main()
