"""The experiments: preemptions evaluated one by one or one after the other, scaling events, and churn."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ctxflow.policies.flextopo.cluster import Affinity, Level, Node
from ctxflow.policies.flextopo.preemption import Decision, decide
from ctxflow_papers.flextopo.workloads import WORKLOADS, B, C, D, Workload, beside, saturated, without

Step = Callable[[float], None]
"""Told how much of an experiment is done, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to decide: a method and the affinity that the preemptor asks for."""

    name: str
    method: str
    affinity: Affinity = "guaranteed"


WAYS = (
    Way("standard", "standard"),
    Way("imp", "imp"),
    Way("imp_best_effort", "imp", "best-effort"),
    Way("exhaustive", "exhaustive"),
    Way("exact", "exact"),
    Way("exact_best_effort", "exact", "best-effort"),
)


@dataclasses.dataclass
class Tally:
    """What many preemptions of one workload, decided in one way, came to.

    :ivar hits: how many got the closest place that the empty hardware allows.
    :ivar placed: how many got any place.
    :ivar seconds: what each decision took.
    :ivar checks: how many feasibility checks each took.
    """

    asked: int = 0
    hits: int = 0
    placed: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    checks: list[int] = dataclasses.field(default_factory=list)

    def add(self, decision: Decision | None, seconds: float) -> None:
        """Count one."""
        self.asked += 1
        self.seconds.append(seconds)
        if decision is not None:
            self.placed += 1
            self.hits += decision.hit
            self.checks.append(decision.checks)


Tallies = dict[tuple[str, str], Tally]
"""By way and workload."""


def timed(nodes: Sequence[Node], workload: Workload, way: Way) -> tuple[Decision | None, float]:
    """A decision, and how long it took in seconds of process time, which others on the machine do not lengthen."""
    preemptor = workload.preemptor(way.affinity)
    started = time.process_time()
    decision = decide(nodes, preemptor, way.method)
    return decision, time.process_time() - started


def independent(
    nodes: int, layout: str, count: int, seed: int, ways: Iterable[Way] = WAYS, step: Step = lambda done: None
) -> Tallies:
    """Preemptions by B and C in turns, each on a saturated cluster of its own draw, decided in every way."""
    chance = random.Random(f"{seed} independent {layout}")
    tallies: Tallies = {}
    for number in range(count):
        cluster = saturated(nodes, layout, chance)
        workload = (B, C)[number % 2]
        for way in ways:
            tallies.setdefault((way.name, workload.name), Tally()).add(*timed(cluster, workload, way))
        step((number + 1) / count)
    return tallies


def sequential(
    nodes: int, layout: str, cycles: int, each: int, seed: int, ways: Iterable[Way] = WAYS, step: Step = lambda d: None
) -> Tallies:
    """Cycles of preemptions by B and C in turns, each of which takes effect before the next is decided.

    Every way goes on from its own decisions. A preemptor that finds no place counts as asked, not as placed.
    """
    chance = random.Random(f"{seed} sequential {layout}")
    tallies: Tallies = {}
    for cycle in range(cycles):
        start = saturated(nodes, layout, chance)
        for way in ways:
            cluster = {node.name: node for node in start}
            for number in range(each):
                workload = (B, C)[number % 2]
                decision, seconds = timed(list(cluster.values()), workload, way)
                tallies.setdefault((way.name, workload.name), Tally()).add(decision, seconds)
                if decision is not None:
                    _apply(cluster, decision, workload, 10_000 + number)
        step((cycle + 1) / cycles)
    return tallies


def _apply(cluster: dict[str, Node], decision: Decision, workload: Workload, number: int) -> None:
    """Carry out a decision: the victims go, the preemptor comes."""
    instance = workload.instance(number, decision.gpus, 3600.0 + number)
    instance = dataclasses.replace(instance, core_groups=decision.core_groups)
    cluster[decision.node] = beside(without(cluster[decision.node], decision.victims), instance)


def sourcing(nodes: int, layout: str, count: int, seed: int, ways: Iterable[Way] = WAYS) -> Tallies:
    """Preemptions by each of the four workloads (Figure 10)."""
    chance = random.Random(f"{seed} sourcing {layout}")
    tallies: Tallies = {}
    for _ in range(count):
        cluster = saturated(nodes, layout, chance)
        for workload in WORKLOADS:
            for way in ways:
                tallies.setdefault((way.name, workload.name), Tally()).add(*timed(cluster, workload, way))
    return tallies


def scaling(
    nodes: int, layout: str, seed: int, events: Sequence[tuple[Workload, int]], way: Way
) -> list[dict[str, int]]:
    """The number of instances of each workload, at the start and after each preemption of some events (Figure 9)."""
    cluster = {node.name: node for node in saturated(nodes, layout, random.Random(f"{seed} scaling {layout}"))}
    history = [_counts(cluster)]
    number = 10_000
    for workload, more in events:
        for _ in range(more):
            decision, _ = timed(list(cluster.values()), workload, way)
            if decision is not None:
                _apply(cluster, decision, workload, number)
                number += 1
            history.append(_counts(cluster))
    return history


def _counts(cluster: Mapping[str, Node]) -> dict[str, int]:
    names = [instance.id[0] for node in cluster.values() for instance in node.instances]
    return {workload.name: names.count(workload.name) for workload in WORKLOADS}


def churn(nodes: int, rounds: int, seed: int, way: Way) -> tuple[list[Node], list[Node]]:
    """A cluster before and after instances came and went, all of it saturated (Figure 8).

    At the start all are as close together as they can be. In every round four instances of B and C end, instances of D
    fill their GPUs, and as many of the same workloads are scaled up again, by preemption.
    """
    chance = random.Random(f"{seed} churn")
    start = saturated(nodes, "aligned", chance)
    cluster = {node.name: node for node in start}
    numbers = itertools.count(10_000)
    for _ in range(rounds):
        workloads = [B, C, C, C]
        for workload in workloads:
            running = [(node, i) for node in cluster.values() for i in node.instances if i.id[0] == workload.name]
            if running:
                node, ended = chance.choice(running)
                fill = [D.instance(next(numbers), (gpu,), chance.uniform(0.0, 3600.0)) for gpu in ended.gpus]
                cluster[node.name] = beside(without(node, (ended.id,)), *fill)
        for workload in workloads:
            decision, _ = timed(list(cluster.values()), workload, way)
            if decision is not None:
                _apply(cluster, decision, workload, next(numbers))
    return start, list(cluster.values())


def crossing(nodes: Iterable[Node]) -> list[tuple[str, str]]:
    """The instances that lie across sockets though their hardware could hold them in one, with their nodes."""
    found = []
    for node in nodes:
        for instance in node.instances:
            span = node.hardware.span(node.hardware.mask(instance.gpus, ()))
            if 1 < len(instance.gpus) <= 4 and span <= Level.MACHINE:
                found.append((node.name, instance.id))
    return found
