"""Where a preemptor goes and whom it preempts there: `decide` (FlexTopo's Algorithm 1), and the live run's policies.

In a live run an instance is a worker of this run, of the priority of what it does; GPUs that somebody else uses belong
to instances that are not preemptible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ctxflow.policies.flextopo.candidates import (
    Basis,
    Fits,
    Rank,
    Scorer,
    Scoring,
    allocate,
    feasible_sets,
    minimal_sets,
    reprieve,
)
from ctxflow.policies.flextopo.cluster import Affinity, Hardware, Instance, Level, Node, Preemptor
from ctxflow.policies.flextopo.covering import best_candidate
from ctxflow.policies.flextopo.later import LaterPreemptors
from ctxflow.policies.helpers import work_at_stake
from ctxflow.policies.protocols import PlaceRequest, Room, View
from ctxflow.policies.views import MachineView, WorkerView
from ctxflow.topology import Topology, device_id, from_graph
from ctxflow.topology import position as position_of

METHODS = ("standard", "imp", "exhaustive", "exact")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What was decided.

    :ivar node: where the preemptor goes.
    :ivar victims: the ids of the instances to preempt; none if there was room.
    :ivar level: how close together the preemptor's resources will be; `target`, the closest that the hardware allows.
    :ivar score: Equation 1, None without victims.
    :ivar gpus, core_groups: the numbers that it gets, neighbours beside each other.
    :ivar checks: how many feasibility checks were made; by the exact method, searches for a cover.
    """

    node: str
    victims: tuple[str, ...]
    level: Level
    target: Level
    score: float | None
    gpus: tuple[int, ...]
    core_groups: tuple[int, ...]
    checks: int

    @property
    def hit(self) -> bool:
        """Return whether it is as close together as the hardware allows."""
        return self.level == self.target

    def to_json(self) -> dict[str, Any]:
        """Return the decision as data."""
        data = dataclasses.asdict(self) | {"hit": self.hit}
        return data | {"level": self.level.name.lower(), "target": self.target.name.lower()}


def decide(
    nodes: Sequence[Node],
    preemptor: Preemptor,
    method: str = "exact",
    scoring: Scoring | None = None,
    later: Iterable[Preemptor] | None = None,
) -> Decision | None:
    """Find the place for a preemptor that costs least.

    Where there is room without victims, that is taken: for "guaranteed" only as close together as the hardware
    allows, for others the closest that there is. The standard method takes the first room, whatever its topology.

    :param method: "standard" (knows no topology), "imp" (the smallest feasible sets of each node), "exhaustive" (all
        feasible sets) or "exact" (the best of all feasible sets, without trying them all).
    :param scoring: alpha and what topology is judged on; not asked by the standard method.
    :param later: the preemptors to expect after this one, whose places the exact method keeps; None if nobody knows:
        then one more of each instance of several GPUs that runs.
    :returns: None if it fits nowhere, whichever victims are preempted.
    :raises ValueError: for an unknown method, or if too many sets would have to be tried.

    >>> from ctxflow.policies.flextopo.cluster import Hardware, Instance, Preemptor
    >>> kind = Hardware.regular(sockets=2, numa_nodes=2, gpus=4)
    >>> busy = [Instance(f"c{gpu}", 200, gpus=(gpu,), started=gpu) for gpu in range(4)]
    >>> node = Node("machine-1", kind, tuple(busy))
    >>> wanted = Preemptor("b", 1000, gpus=2, affinity="guaranteed")
    >>> decide([node], wanted).victims, decide([node], wanted, "standard").victims
    (('c2', 'c3'), ('c2', 'c3'))
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: choose one of {', '.join(METHODS)}")
    fits = Fits(preemptor)
    room = _room(nodes, preemptor, fits, method)
    if room is not None:
        return _decision(nodes[room], fits, (), None, 0)
    scorer = Scorer(nodes, preemptor, Scoring() if scoring is None or method == "standard" else scoring)
    if method == "exact":
        found, checks = best_candidate(nodes, preemptor, fits, scorer, LaterPreemptors(nodes, preemptor, later))
        best = None if found is None else (found[0][0], *found[1:3])
    else:
        best, checks = _enumerated(nodes, preemptor, method, fits, scorer)
    if best is None:
        return None
    score, position, victims = best
    return _decision(nodes[position], fits, victims, None if method == "standard" else -score, checks)


def _room(nodes: Sequence[Node], preemptor: Preemptor, fits: Fits, method: str) -> int | None:
    """Return the position of the node with room for the preemptor as it is, the fullest of equally good ones."""
    best: tuple[int, int, int] | None = None
    for position, node in enumerate(nodes):
        fit = fits[node]
        level = fit.level(node.idle)
        if method == "standard":
            if level > Level.NONE:
                return position
        elif level >= fit.required:
            found = -level if preemptor.affinity else 0, node.idle.bit_count(), position
            best = found if best is None else min(best, found)
    return best[2] if best else None


def _enumerated(
    nodes: Sequence[Node], preemptor: Preemptor, method: str, fits: Fits, scorer: Scorer
) -> tuple[tuple[float, int, tuple[int, ...]] | None, int]:
    """Return the best candidate among those of each node: minus its score, the node's position, the victims'."""
    best: tuple[Rank, int, tuple[int, ...]] | None = None
    checks = 0
    for position, node in enumerate(nodes):
        fit = fits[node]
        if method == "standard":
            reprieved = reprieve(node, preemptor, fit)
            sets, made = ([(reprieved[0], Level.NONE)], reprieved[1]) if reprieved else ([], 1)
        else:
            sets, made = (minimal_sets if method == "imp" else feasible_sets)(node, preemptor, fit)
        checks += made
        for victims, level in sets:
            judged = level
            if scorer.basis == "victims":
                judged = node.hardware.span(node.without(victims) & ~node.idle)
            candidate = (scorer.rank([node.instances[n] for n in victims], judged), position, victims)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else (best[0][0], *best[1:]), checks


def _decision(node: Node, fits: Fits, victims: Sequence[int], score: float | None, checks: int) -> Decision:
    fit, free = fits[node], node.without(victims)
    got = allocate(fit, free)
    assert got is not None, "a set of victims was chosen that makes no room"
    names = tuple(node.instances[number].id for number in victims)
    return Decision(node.name, names, fit.level(free), fit.target, score, *got, checks)


class _Selecting:
    """A selection as a live policy.

    :param alpha: how much priorities weigh against topology, from 0 to 1.
    :param basis: what topology is judged on, "allocation" or "victims".
    :param patience: seconds that the batch system may take to give freed GPUs, before they count as somebody else's.
    :param grace: seconds that victims may take to finish what they run.
    :param idle: seconds without work after which the worker that took their place is given back.
    """

    method = "exact"
    reserves = True

    def __init__(
        self,
        alpha: float = 0.0,
        basis: Basis = "allocation",
        patience: float = 60.0,
        grace: float = 60.0,
        idle: float = 30.0,
    ) -> None:
        if not patience > 0:
            raise ValueError("patience is how many seconds the batch system may take: give more than 0")
        if grace < 0 or idle < 0:
            raise ValueError("grace and idle are seconds: give 0 or more")
        self._scoring = Scoring(alpha, basis)
        self.patience, self.grace, self.idle = patience, grace, idle

    def victims(self, view: View, request: PlaceRequest) -> Room | None:
        """Return the place that costs least: where there is room, else where victims of lower priority make it."""
        preemptor, later = _preemptor(request), tuple(map(_preemptor, request.later))
        cluster = [each for each in _cluster(view) if len(each[1].gpus) >= request.gpus]
        decision = decide([node for _, _, node in cluster], preemptor, self.method, self._scoring, later)
        if decision is None:
            return None
        machine, topology, _ = next(each for each in cluster if each[2].name == decision.node)
        devices = tuple(device_id(topology.gpus[number]) for number in decision.gpus)
        return Room(machine.name, machine.tier, devices, decision.victims, decision.hit)


class StandardPreemption(_Selecting):
    """Drops all of lower priority, then reprieves by priority and age; knows no topology (Kubernetes, Goedel)."""

    method = "standard"


class IncrementalMinimalPreemption(_Selecting):
    """The smallest sets of victims that make aligned room (FlexTopo, Algorithm 2)."""

    method = "imp"


class ExactPreemption(_Selecting):
    """The best of all sets of victims in FlexTopo's Equation 2."""


def _preemptor(request: PlaceRequest) -> Preemptor:
    affinity: Affinity | None = request.affinity  # type: ignore[assignment]
    return Preemptor(request.app, request.priority, request.gpus, affinity=affinity)


def _cluster(view: View) -> Iterator[tuple[MachineView, Topology, Node]]:
    """Yield the machines with what they are made of, and as nodes."""
    workers: dict[str, list[WorkerView]] = {}
    for worker in view.workers.values():
        if worker.devices:
            workers.setdefault(worker.machine, []).append(worker)
    floor = min((app.priority for app in view.apps.values()), default=0) - 1
    for key, machine in view.machines.items():
        here = workers.get(machine.name, [])
        topology = _topology(machine, here)
        held: set[int] = set()
        instances = []
        for worker in here:
            gpus = _places(topology, worker.devices) - held
            held |= gpus
            if gpus:
                instances.append(_instance(view, worker, gpus, floor))
        others = _places(topology, view.reserved.get(machine.name, ()))
        others |= _places(topology, (device_id(gpu) for gpu in machine.topology.gpus if gpu.used_by is not None))
        for number in sorted(others - held):
            instances.append(Instance(f"{device_id(topology.gpus[number])} is not ours", 0, (number,), (), 0.0, False))
        yield machine, topology, Node(key, Hardware.of(topology), tuple(instances))


def _topology(machine: MachineView, workers: Iterable[WorkerView]) -> Topology:
    """Return the machine's topology; a worker's report may say where a GPU is if the batch system does not."""
    known = machine.topology
    if all(gpu.numa is not None for gpu in known.gpus):
        return known
    reports = [from_graph(worker.topology) for worker in workers if worker.topology]
    nodes = {node.id: node for each in (*reports, known) for node in each.numa_nodes}
    numa: dict[int, int | None] = {}
    for report in reports:
        for gpu in report.gpus:
            place = position_of(known, device_id(gpu))
            if place is not None and gpu.numa is not None:
                numa[place] = gpu.numa
    gpus = tuple(
        gpu if gpu.numa is not None else dataclasses.replace(gpu, numa=numa.get(place))
        for place, gpu in enumerate(known.gpus)
    )
    return dataclasses.replace(known, numa_nodes=tuple(nodes[number] for number in sorted(nodes)), gpus=gpus)


def _places(topology: Topology, names: Iterable[str]) -> set[int]:
    return {place for name in names if (place := position_of(topology, name)) is not None}


def _instance(view: View, worker: WorkerView, gpus: set[int], floor: int) -> Instance:
    ours = worker.acquired or worker.pin is not None  # One that was started by hand is not ours to give back.
    leaving = worker.draining or worker.noticed is not None
    # Of equal ones those give way that lose the least work: a worker is there for long, what it runs began lately.
    began = view.now - work_at_stake(view, worker)
    return Instance(worker.id, _priority(view, worker, floor), tuple(sorted(gpus)), (), began, ours and not leaving)


def _priority(view: View, worker: WorkerView, floor: int) -> int:
    """Return the highest priority of the work that a worker does or gets ready for; `floor` if it does nothing."""
    building = {held.context for held in worker.contexts.values() if held.state in ("staging", "loading", "waking")}
    doing = [view.apps[attempt.app].priority for attempt in worker.running.values()]
    doing += [app.priority for app in view.apps.values() if app.context in building and app.backlog]
    doing += [view.apps[session.app].priority for session in worker.sessions.values()]
    return max(doing, default=floor)
