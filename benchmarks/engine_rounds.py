"""What the suites of engines.py share: what is measured, contenders that take turns, and what was found."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import common
from engine_runs import Measured, Missing, Place
from engine_workload import QUICK, Scale

Figures = dict[str, common.Figure]
NEAREST = 2
"""So many windows of a sweep are measured in all rounds, besides the one that was chosen."""
SLOW = 100.0
"""Tokens a second below which a quarter of the rows is enough."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Everything that the suites share.

    :ivar engine: the Python that has vLLM; `own`: this one; `without`: why there is no such Python, or "".
    :ivar gpu: the GPU's name, or "".
    """

    folder: Path
    model: Path
    dtype: str
    scale: Scale
    rounds: int
    engine: Place
    own: Place
    without: str
    gpu: str
    before: str
    llama: str

    def rows(self, count: int) -> Path:
        """The first so many rows, as a file."""
        path = self.folder / f"rows-{count}.jsonl"
        lines = (self.folder / "rows.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:count]))
        return path

    def options(self) -> dict[str, Any]:
        """What vLLM is told, by us and alone: without a GPU, not to compile, and how large its cache is."""
        if self.gpu:
            return {"max_model_len": self.scale.context}
        cache = 1 << (28 if self.scale is QUICK else 32)
        return {"max_model_len": self.scale.context, "enforce_eager": True, "kv_cache_memory_bytes": cache}


@dataclasses.dataclass
class Found:
    """Figures, and sentences in place of those that there are not."""

    figures: Figures = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def ratio(self, name: str, samples: Mapping[str, list[Measured]], ours: str, theirs: str) -> None:
        """A ratio of two contenders, round by round, or why there is none."""
        for contender in (ours, theirs):
            if not samples.get(contender):
                self.missing[name] = self.missing.get(contender, f"{contender} was not measured.")
                return
        rates = [[each.rate for each in samples[contender]] for contender in (ours, theirs)]
        self.figures[name] = common.ratio(rates[0], rates[1])

    def rates(self, samples: Mapping[str, list[Measured]], unit: str = "tokens/s") -> None:
        """How fast each contender was."""
        for name, each in samples.items():
            if each:
                self.figures[f"{name}_per_s"] = common.figure([one.rate for one in each], unit)

    def equal(self, name: str, samples: Mapping[str, list[Measured]], ours: str, theirs: str) -> None:
        """The share of rows with equal texts, round by round."""
        if samples.get(ours) and samples.get(theirs):
            pairs = [zip(a.texts, b.texts, strict=True) for a, b in zip(samples[ours], samples[theirs], strict=True)]
            shares = [[a == b for a, b in pair] for pair in pairs]
            self.figures[name] = common.figure([sum(each) / len(each) for each in shares], "of the rows")


def take_turns(
    contenders: Mapping[str, Callable[[], Measured]], rounds: int, what: str, found: Found
) -> dict[str, list[Measured]]:
    """Measure each once a round; one that cannot be measured is left out, with its sentence in `found.missing`."""
    samples: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = [name for name in contenders if name in samples]
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            common.progress(f"{what}: round {number + 1} of {rounds}, {name}")
            try:
                samples[name].append(contenders[name]())
                common.progress(f"{what}: round {number + 1} of {rounds}, {name}: {samples[name][-1].rate:,.4g}/s")
            except Missing as reason:
                found.missing[name] = str(reason)
                common.progress(f"{what}: {name}: {reason}")
                del samples[name]
    return samples


def enough_rows(bench: Bench, measure: Callable[[Path], Measured]) -> Path:
    """All rows, or a quarter of them where that engine is slow."""
    few = bench.rows(max(4, bench.scale.rows // 4))
    common.progress("how fast the engine is")
    return bench.rows(bench.scale.rows) if measure(few).rate >= SLOW else few


def windows(bench: Bench, name: str, rows: Path, ours: Callable[[str], Measured], chosen: int, found: Found) -> None:
    """Measure fixed windows, and how good the one is that was chosen."""
    if not bench.scale.windows:
        found.missing[f"{name}_window_vs_sweep"] = "It was not asked for: --no-windows."
        return
    if not chosen:
        found.missing[f"{name}_window_vs_sweep"] = "No window was chosen: the rows were not given one by one."
        return
    count = len(rows.read_text().splitlines())
    tried = sorted({min(count, size) for size in (*bench.scale.windows, chosen)})
    contenders = {
        str(size): (lambda size=size: ours(f'[batching]\npolicy = "fixed"\nwindow = {size}\n')) for size in tried
    }
    samples = take_turns(contenders, 1, f"{name}: windows", found)
    if missing := [size for size in map(str, tried) if size not in samples]:
        found.missing[f"{name}_window_vs_sweep"] = found.missing[missing[0]]
        return
    # What is far from the best is so after one round; those near it, and the one that was chosen, take all rounds.
    near = sorted(contenders, key=lambda size: -samples[size][0].rate)[:NEAREST]
    again = {size: contenders[size] for size in dict.fromkeys([str(min(count, chosen)), *near])}
    for size, more in take_turns(again, bench.rounds - 1, f"{name}: the best windows again", found).items():
        samples[size] += more
    rates = {int(size): [each.rate for each in samples[size]] for size in again}
    best = max(rates, key=lambda size: statistics.median(rates[size]))
    found.figures[f"{name}_window_chosen"] = common.figure([chosen], "items in flight")
    found.figures[f"{name}_window_best"] = common.figure([best], "items in flight")
    found.figures[f"{name}_window_vs_sweep"] = common.ratio(rates[min(count, chosen)], rates[best])
