#!/usr/bin/env python3
"""What a build made, for the next: a compiled model on one worker, then on its successor on the same host.

    benchmarks/artifacts.py --json

An encoder of six layers with random weights (transformers' BERT, in the shape of all-MiniLM-L6-v2), compiled by
`torch.compile` (Inductor, with the machine's C++ compiler) on an embedded worker; with `--block` one layer of PyTorch's
own, whose imports take longer than its compiling. The build is timed with its first call, which compiles. With
artifacts, and in turns without (`artifacts=False`, and a folder of its own for each process's compile cache, as workers
on other hosts, or in jobs with a /tmp of their own, have). Figures:

- `compiled_same_host`: seconds of the second worker's build and first call, over the first's;
- `compiled_same_host_no_imports`: the same without starting the process and importing, as the parts of the loads say;
- `..._without`: both without artifacts: what a zygote saves alone;
- `compiled_next_run`, `compiled_next_run_no_imports`: of the first worker of another run, over that of the first run;
- `first_s`, `second_s`: the seconds themselves; `second_result_s`: from the loss of the first worker to a result.

As root beside the testbed (`testbed/up --with-torch`), also with TaskVine (artifacts_inside.py is the part in it):
the first worker is on one host and the second on another, to which what the first made comes over the network.

- `compiled_other_host`, `..._no_imports`, `..._without`: likewise;
- `other_host_sent_mb`: bytes that were sent to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import inside

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.testing.evictions import Evictions

WIDTH, HEADS, TOKENS = 256, 4, 64
IMPORTED = ("process", "imports")


def block() -> Any:
    """Build a block of a transformer, and compile it."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True).eval()
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
    compiled = torch.compile(model)

    def call() -> None:
        with torch.no_grad():
            compiled(torch.ones(1, TOKENS, WIDTH))

    return call


def encoder() -> Any:
    """Build an encoder like all-MiniLM-L6-v2, and compile it."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    compiled = torch.compile(BertModel(BertConfig(vocab_size=2000, **shape)).eval())

    def call() -> None:
        with torch.no_grad():
            compiled(input_ids=torch.ones(4, TOKENS, dtype=torch.long))

    return call


def compiled_model(kept: bool, small: bool) -> Any:
    """The context; without artifacts each process has a compile cache of its own, as on hosts of their own."""

    @context(artifacts={} if kept else False)
    def compiled(kept: bool, small: bool) -> Any:
        import os
        import tempfile

        if not kept:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["CTXFLOW_LIBRARY_SCRATCH"])
        return block() if small else encoder()

    return compiled(kept, small)


def loads(run: Path) -> list[dict[str, float]]:
    """Return the parts of each load of the context, of a run's event log."""
    found = []
    [log] = run.glob("**/events.jsonl")
    for line in log.read_text().splitlines():
        event = json.loads(line)
        event = event.get("event", event)
        if event.get("parts"):
            found.append(event["parts"])
    return found


def rounds(kept: bool, small: bool) -> dict[str, float]:
    """Two workers one after the other, and with artifacts one of another run: seconds of each one's build and call."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        found: dict[str, float] = {}
        for names in (("first", "second"), ("next",)) if kept else (("first", "second"),):
            executor = ContextExecutor(workers=1)
            executor.run_dir = os.path.join(folder, names[0])
            with executor:

                @batch_app(compiled_model(kept, small))
                def work(model: Any, items: Any) -> Any:
                    import time

                    began = time.monotonic()
                    model()
                    return [time.monotonic() - began for _ in items]

                for name in names:
                    began = time.monotonic()
                    called = float(next(iter(work.map([1]))))
                    found[f"{name}_result"] = time.monotonic() - began
                    found[f"{name}_call"] = called
                    if name == "first":
                        time.sleep(2.0)  # What it made is being copied; a worker that is killed would end that.
                        with Evictions(executor, per_minute=60_000, at_most=1) as evictions:
                            while not evictions.count:
                                time.sleep(0.001)
            for name, parts in zip(names, loads(Path(folder, names[0])), strict=True):
                found |= seconds_of(name, parts, found.pop(f"{name}_call"))
        return found


def seconds_of(name: str, parts: dict[str, float], call: float) -> dict[str, float]:
    """Seconds of a build and its first call, with the imports and without."""
    whole = sum(parts.values()) + call
    return {name: whole, f"{name}_no_imports": whole - sum(parts.get(part, 0.0) for part in IMPORTED)}


def other_host(kept: bool, small: bool) -> dict[str, float]:
    """The same with TaskVine, on two hosts."""
    words = [*([] if kept else ["--without"]), *(["--block"] if small else [])]
    command = inside.command("python", f"{inside.CHECKOUT}/benchmarks/artifacts_inside.py", *words)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["hosts"] == ["host1", "host2"] and said["took"] == [False, kept], said
    found = {"sent": sum(said["artifacts"][-1:]) / 1e6}
    for name, parts, call in zip(("first", "second"), said["loads"], said["calls"], strict=True):
        found |= seconds_of(name, parts, call)
    return found


def ratio(ours: list[float], theirs: list[float]) -> Any:
    """What is less is better."""
    return dataclasses.replace(common.ratio(ours, theirs), better="lower")


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", action="store_true", help="one layer of PyTorch's own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    why_not = inside.why_not()
    if why_not is not None:
        common.progress(f"without another host: {why_not}")
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(options.rounds):
        for kept in (True, False):
            common.progress(f"round {number + 1}, {'with' if kept else 'without'} artifacts")
            found[kept].append(rounds(kept, options.block))
            if why_not is None:
                found[kept][-1] |= {f"other_{name}": value for name, value in other_host(kept, options.block).items()}

    def samples(kept: bool, name: str) -> list[float]:
        return [each[name] for each in found[kept]]

    figures = {}
    for kept, end in ((True, ""), (False, "_without")):
        for part in ("", "_no_imports"):
            seconds = samples(kept, f"second{part}"), samples(kept, f"first{part}")
            figures[f"compiled_same_host{part}{end}"] = ratio(*seconds)
            if why_not is None:
                seconds = samples(kept, f"other_second{part}"), samples(kept, f"other_first{part}")
                figures[f"compiled_other_host{part}{end}"] = ratio(*seconds)
    for part in ("", "_no_imports"):
        seconds = samples(True, f"next{part}"), samples(True, f"first{part}")
        figures[f"compiled_next_run{part}"] = ratio(*seconds)
    for name in ("first", "second", "second_result"):
        figures[f"{name}_s"] = common.figure(samples(True, name), "s", "lower")
    if why_not is None:
        figures["other_host_sent_mb"] = common.figure(samples(True, "other_sent"), "MB", "lower")
    common.report("artifacts", figures, common.versions(["torch", "transformers"]), options.json)


if __name__ == "__main__":
    main()
