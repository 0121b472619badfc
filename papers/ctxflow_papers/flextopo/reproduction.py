"""FlexTopo's tables and figures, ours beside the paper's.

The paper's numbers are transcribed here; its times are of a scheduler in Go with one CPU, so ratios and counts of
feasibility checks tell more than milliseconds. Where the instances are at the start, and whether preemptions take
effect, it does not say: each hit rate's name has its layout (workloads.py) and whether preemptions are independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ctxflow.policies.flextopo.cluster import Node
from ctxflow.simulator.experiments import ExperimentRequest, Figure, Tell, median, quantile, rounded
from ctxflow_papers.flextopo.experiments import (
    WAYS,
    Step,
    Tallies,
    Tally,
    churn,
    crossing,
    independent,
    scaling,
    sequential,
    sourcing,
)
from ctxflow_papers.flextopo.pictures import draw_all
from ctxflow_papers.flextopo.workloads import LAYOUTS, A, B, Workload

HIT_RATES = {"standard": 44.5, "imp": 100.0}
"""Table 4, in per cent: Gödel's standard preemption, and with FlexTopo."""

LATENCIES = {
    ("standard", "B"): (6.4210, 62.3086),
    ("exhaustive", "B"): (268.0110, 416.7806),
    ("imp", "B"): (180.0195, 275.5758),
    ("standard", "C"): (1.8010, 2.4915),
    ("exhaustive", "C"): (2.2820, 20.6246),
    ("imp", "C"): (2.1150, 4.8531),
}
"""Table 5, in ms: P50 and P90. FlexTopo without IMP is the exhaustive way."""

IMP_SAVES = {"B": (32.8, 33.9), "C": (7.3, 76.5)}
"""Table 5, in per cent of the exhaustive way's time."""

CROSSING_BEFORE = 4.0
"""Figure 8: the nodes that the text names for instances across sockets before; afterwards there is none."""

NODES, SNAPSHOT_NODES = 100, 41
TIMED_LAYOUT = "random"
EVENTS = ((B, 20), (A, 10))
IMP, STANDARD = WAYS[1], WAYS[0]


def reproduce(request: ExperimentRequest) -> Mapping[str, Figure]:
    """All of the paper's evaluation but the production cluster: an `Experiment`."""
    cycles, each, rounds, draws = (1, 10, 5, 2) if request.quick else (100, 50, 20, 10)
    shares = {f"independent {layout}": 2.0 for layout in LAYOUTS}
    shares |= {f"sequential {layout}": 2.0 for layout in LAYOUTS} | {"snapshots": 1.0}
    steps = _Steps(request.progress, shares)
    alone, after = {}, {}
    for layout in LAYOUTS:
        name = f"independent {layout}"
        alone[layout] = independent(NODES, layout, cycles * each, request.seed, WAYS, steps.of(name))
    for layout in LAYOUTS:
        name = f"sequential {layout}"
        after[layout] = sequential(NODES, layout, cycles, each, request.seed, WAYS, steps.of(name))
    tell = steps.of("snapshots")
    seeds = range(request.seed, request.seed + draws)
    snapshots = {w.name: [churn(SNAPSHOT_NODES, rounds, seed, w) for seed in seeds] for w in (STANDARD, IMP)}
    tell(0.5)
    events = tuple((workload, 2 if request.quick else more) for workload, more in EVENTS)
    histories = {way.name: scaling(NODES, "random", request.seed, events, way) for way in (STANDARD, IMP)}
    by_workload = sourcing(NODES, TIMED_LAYOUT, 1 if request.quick else 5, request.seed)
    tell(1.0)
    figures = dict(_hit_rates(alone, "independent")) | dict(_hit_rates(after, "sequential"))
    figures |= dict(_latencies(alone[TIMED_LAYOUT])) | dict(_crossings(snapshots))
    figures |= dict(_instances(histories, events)) | dict(_workloads(by_workload))
    if request.pictures is not None:
        ends = {way: draws_of[0][1] for way, draws_of in snapshots.items()}
        draw_all(request.pictures, ends, histories, by_workload, alone[TIMED_LAYOUT])
    return figures


class _Steps:
    """Progress over several parts, each of a share of the time."""

    def __init__(self, progress: Tell, shares: Mapping[str, float]) -> None:
        self._progress, self._shares = progress, shares

    def of(self, part: str) -> Step:
        """What one part tells."""
        names = list(self._shares)
        before = sum(self._shares[name] for name in names[: names.index(part)])
        total, mine = sum(self._shares.values()), self._shares[part]
        return lambda done: self._progress((before + done * mine) / total, part)


def _hit_rates(found: Mapping[str, Tallies], how: str) -> Iterable[tuple[str, Figure]]:
    """Table 4, by layout. A preemptor that found no place is not a hit."""
    for way in WAYS:
        for layout, tallies in found.items():
            both = [tallies[way.name, workload] for workload in "BC"]
            asked = sum(tally.asked for tally in both)
            paper = HIT_RATES.get(way.name) if how == "independent" else None
            hits = rounded(100 * sum(tally.hits for tally in both) / asked)
            placed = rounded(100 * sum(tally.placed for tally in both) / asked)
            name = f"{way.name}_{layout}_{how}"
            yield f"hit_rate_{name}", Figure(hits, "% of preemptions", "higher", 0.0, asked, paper)
            if how == "sequential":
                yield f"placed_{name}", Figure(placed, "% of preemptions", "higher", 0.0, asked)


def _latencies(tallies: Tallies) -> Iterable[tuple[str, Figure]]:
    """Table 5 and the distributions of Figure 11."""
    unit = f"ms, {TIMED_LAYOUT} layout"
    for workload in "BC":
        for way in WAYS:
            tally = tallies[way.name, workload]
            papers = dict(zip((0.5, 0.9), LATENCIES.get((way.name, workload), (None, None)), strict=True))
            for share in (0.25, 0.5, 0.75, 0.9, 0.99):
                value = rounded(1000 * quantile(tally.seconds, share))
                name = f"latency_{workload}_{way.name}_p{share * 100:.0f}"
                yield name, Figure(value, unit, "lower", 0.0, tally.asked, papers.get(share))
            checks = "searches" if way.method == "exact" else "checks"
            for share in (0.5, 0.9):
                value = quantile(tally.checks, share)
                name = f"checks_{workload}_{way.name}_p{share * 100:.0f}"
                yield name, Figure(value, checks, "lower", 0.0, len(tally.checks))
        imp, full = tallies["imp", workload], tallies["exhaustive", workload]
        for share, paper in zip((0.5, 0.9), IMP_SAVES[workload], strict=True):
            saved = _saved(imp, full, share)
            yield (
                f"imp_saves_{workload}_p{share * 100:.0f}",
                Figure(rounded(saved), "% of the time", "higher", 0.0, imp.asked, paper),
            )


def _saved(imp: Tally, full: Tally, share: float) -> float:
    return 100 * (1 - quantile(imp.seconds, share) / quantile(full.seconds, share))


def _crossings(snapshots: Mapping[str, list[tuple[list[Node], list[Node]]]]) -> Iterable[tuple[str, Figure]]:
    """Figure 8: how many nodes have an instance across sockets that need not be. All start with none."""
    for name, draws in snapshots.items():
        counts = [float(len({node for node, _ in crossing(end)})) for _, end in draws]
        paper = {"standard": CROSSING_BEFORE, "imp": 0.0}.get(name)
        yield f"crossing_{name}", median(counts, f"of {SNAPSHOT_NODES} nodes", "lower", paper)


def _instances(
    histories: Mapping[str, list[dict[str, int]]], events: Iterable[tuple[Workload, int]]
) -> Iterable[tuple[str, Figure]]:
    """Figure 9: the paper only draws it."""
    marks, position = {"start": 0}, 0
    for workload, more in events:
        position += more
        marks[f"after_{workload.name}"] = position
    for way, history in histories.items():
        for mark, position in marks.items():
            for name, count in history[position].items():
                yield f"instances_{name}_{way}_{mark}", Figure(count, "instances", "higher")


def _workloads(tallies: Tallies) -> Iterable[tuple[str, Figure]]:
    """Figure 10: the paper only draws it."""
    for (way, workload), tally in sorted(tallies.items()):
        value = rounded(1000 * quantile(tally.seconds, 0.5))
        unit = f"ms, {TIMED_LAYOUT} layout"
        yield f"sourcing_{workload}_{way}", Figure(value, unit, "lower", 0.0, tally.asked)
