"""Preemptors one after the other on machines of many kinds: who finds no place, and what it costs the others.

Not the paper's: its one cluster says little of others. Drawn are the machines (one or two kinds), how instances lie on
them, workloads with priorities, GPUs and cores, and who is scaled up. In one case of four the machines are full of
instances of one GPU, and the preemptors are of workloads that do not run yet; in another the cores bind.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable, Sequence

from ctxflow.policies.flextopo.candidates import Fit, allocate
from ctxflow.policies.flextopo.cluster import Affinity, Hardware, Instance, Node, Preemptor
from ctxflow.policies.flextopo.preemption import decide
from ctxflow_papers.flextopo.workloads import LAYOUTS, beside, without

MACHINES = {
    "2 sockets of 4 NUMA nodes": Hardware.regular(sockets=2, numa_nodes=8, gpus=8, cores=64),
    "2 NUMA nodes": Hardware.regular(sockets=2, numa_nodes=2, gpus=8, cores=128),
    "4 pairs": Hardware.regular(sockets=4, numa_nodes=4, gpus=8, cores=64, group_size=4),
    "2 pairs in a socket": Hardware.regular(sockets=1, numa_nodes=2, gpus=4, cores=32, group_size=4),
    "nothing apart": Hardware.regular(sockets=1, numa_nodes=1, gpus=8, cores=64),
}
"""Machines of eight or four GPUs, by what is close together."""

SIZES = (1, 2, 2, 4, 4, 8)
PRIORITIES = (100, 200, 300, 400, 500, 700, 1000, 1500, 2000)


@dataclasses.dataclass(frozen=True)
class Gang:
    """A workload: what each of its instances holds.

    :ivar share: its part of the GPUs at the start.
    """

    name: str
    priority: int
    gpus: int
    cores: int
    share: float
    preemptible: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """A cluster, and who is scaled up, one after the other."""

    nodes: Sequence[Node]
    asked: Sequence[Gang]
    affinity: Affinity

    def preemptors(self) -> list[Preemptor]:
        """Those who are scaled up."""
        return [Preemptor(g.name, g.priority, g.gpus, g.cores, self.affinity) for g in self.asked]


def drawn(seed: int, nodes: int = 12, count: int = 16) -> Case:
    """Draw a case."""
    chance = random.Random(f"{seed} drawn")
    kinds = [MACHINES[name] for name in chance.sample(sorted(MACHINES), chance.choice((1, 1, 2)))]
    machines = [chance.choice(kinds) for _ in range(nodes)]
    layout = chance.choice(("aligned", *LAYOUTS))
    most = max(len(kind.gpus) for kind in kinds)
    affinity: Affinity = chance.choice(("guaranteed", "guaranteed", "best-effort"))
    new = seed % 4 == 3
    gangs = _new(most, chance) if new else _running(most, chance, cores_bind=seed % 4 == 2)
    cluster = _filled(machines, layout, gangs, chance)
    scaled = [gang for gang in gangs if not gang.share] if new else gangs[:-1]
    return Case(cluster, [chance.choice(scaled) for _ in range(count)], affinity)


def _running(most: int, chance: random.Random, cores_bind: bool) -> list[Gang]:
    """Return three to five workloads, the most important first, mostly those that need most."""
    count = chance.randint(3, 5)
    priorities = sorted(chance.sample(PRIORITIES, count), reverse=True)
    sizes = [min(chance.choice(SIZES), most) for _ in range(count)]
    if chance.random() < 0.7:
        sizes.sort(reverse=True)
    cores = [chance.choice((8, 16) if cores_bind else (0, 4, 8)) for _ in range(count)]
    return [
        Gang(f"{n}", priority, size, each * size, chance.choice((0.1, 0.2, 0.3, 0.5)), n > 1 or chance.random() < 0.6)
        for n, (priority, size, each) in enumerate(zip(priorities, sizes, cores, strict=True))
    ]


def _new(most: int, chance: random.Random) -> list[Gang]:
    """Return workloads of one GPU that run, and such as need more and do not run yet."""
    low = [Gang(f"low-{n}", 100 + 50 * n, 1, 4, 1.0) for n in range(chance.randint(1, 3))]
    sizes = [size for size in (1, 2, 4, 8) if size <= most and chance.random() < 0.7] or [2, 4]
    return low + [Gang(f"new-{size}", chance.choice(PRIORITIES[-3:]), size, 4 * size, 0.0) for size in sizes]


def _filled(machines: Sequence[Hardware], layout: str, gangs: Sequence[Gang], chance: random.Random) -> list[Node]:
    """Return a cluster of instances in their shares, filled up with the last workload that has one."""
    free = [machine.everything for machine in machines]
    held: list[list[Instance]] = [[] for _ in machines]
    total = sum(len(machine.gpus) for machine in machines)
    sharing = [gang for gang in gangs if gang.share]
    number = 0
    for gang in sharing:
        fits = {machine: Fit(machine, gang.gpus, gang.cores) for machine in set(machines)}
        part = gang.share / sum(each.share for each in sharing)
        for _ in range(total if gang is sharing[-1] else int(total * part) // gang.gpus):
            fitting = [n for n, machine in enumerate(machines) if fits[machine].level(free[n])]
            if not fitting:
                break
            node = fitting[0] if layout == "packed" else chance.choice(fitting)
            machine = machines[node]
            got = _anywhere(machine, free[node], gang, chance) if layout == "random" else None
            got = got or allocate(fits[machine], free[node])
            assert got is not None
            started = chance.uniform(0.0, 3600.0)
            held[node].append(Instance(f"{gang.name}-{number}", gang.priority, *got, started, gang.preemptible))
            free[node] &= ~machine.mask(*got)
            number += 1
    return [Node(f"node-{n}", machine, tuple(held[n])) for n, machine in enumerate(machines)]


def _anywhere(
    machine: Hardware, free: int, gang: Gang, chance: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return GPUs and core groups of a machine that are free, wherever they are."""
    cards = len(machine.gpus)
    gpus = [bit for bit in range(cards) if free >> bit & 1]
    groups = [bit for bit in range(len(machine.groups)) if free >> bit + cards & 1]
    chance.shuffle(groups)
    taken: list[int] = []
    while sum(machine.sizes[group] for group in taken) < gang.cores:
        taken.append(groups.pop())
    return tuple(chance.sample(gpus, gang.gpus)), tuple(taken)


@dataclasses.dataclass
class Played:
    """What became of the preemptors of some cases, decided in one way.

    :ivar hits: how many are as close together as the empty machine allows.
    :ivar gpus: what those who found a place got.
    :ivar priorities: the sum of the victims'.
    :ivar seconds: of process time, of each decision.
    """

    asked: int = 0
    placed: int = 0
    hits: int = 0
    gpus: int = 0
    victims: int = 0
    priorities: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def without_place(self) -> int:
        """How many found none."""
        return self.asked - self.placed


def play(case: Case, method: str, into: Played | None = None) -> Played:
    """Let each preemptor of a case take its place before the next is decided on."""
    played = Played() if into is None else into
    cluster = {node.name: node for node in case.nodes}
    for number, (gang, preemptor) in enumerate(zip(case.asked, case.preemptors(), strict=True)):
        nodes = list(cluster.values())
        started = time.process_time()
        decision = decide(nodes, preemptor, method)
        played.seconds.append(time.process_time() - started)
        played.asked += 1
        if decision is None:
            continue
        node = cluster[decision.node]
        victims = [each for each in node.instances if each.id in decision.victims]
        played.placed += 1
        played.hits += decision.hit
        played.gpus += gang.gpus
        played.victims += len(victims)
        played.priorities += sum(each.priority for each in victims)
        name, started_at = f"{gang.name}-new-{number}", 3600.0 + number
        got = Instance(name, gang.priority, decision.gpus, decision.core_groups, started_at, gang.preemptible)
        cluster[node.name] = beside(without(node, decision.victims), got)
    return played


def play_all(cases: Iterable[Case], methods: Sequence[str]) -> dict[str, Played]:
    """Play cases in every way, the ways in turns."""
    played = {method: Played() for method in methods}
    for case in cases:
        for method in methods:
            play(case, method, played[method])
    return played
