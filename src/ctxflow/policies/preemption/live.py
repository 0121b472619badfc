"""Who gives way in a live run: the selection on data, for the cluster as the run sees it.

An instance is a worker of this run, of the priority of what it does; GPUs that somebody else uses belong to instances
that do not give way. What does not live here: the selection itself (selection.py), and what becomes of the victims
(ctxflow.scheduler.reservations).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from ctxflow.policies.preemption.cluster import Affinity, Hardware, Instance, Node, Preemptor
from ctxflow.policies.preemption.scoring import Basis, Scoring
from ctxflow.policies.preemption.selection import decide
from ctxflow.policies.protocols import PlaceRequest, Room, View
from ctxflow.policies.views import MachineView, WorkerView
from ctxflow.topology import Topology, device_id, from_graph, position


class _Selecting:
    """A selection as a live policy.

    :param alpha: how much priorities weigh against topology, from 0 to 1.
    :param basis: what topology is judged on, "allocation" or "victims".
    :param patience: seconds that the batch system may take to give the GPUs that were made free, before they are
        taken to be somebody else's.
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
        """The place that costs least: where there is room, else where victims of lower priority make it."""
        affinity: Affinity | None = request.affinity  # type: ignore[assignment]
        preemptor = Preemptor(request.app, request.priority, request.gpus, affinity=affinity)
        cluster = [each for each in _cluster(view) if len(each[1].gpus) >= request.gpus]
        decision = decide([node for _, _, node in cluster], preemptor, self.method, self._scoring)
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


def _cluster(view: View) -> Iterator[tuple[MachineView, Topology, Node]]:
    """The machines with what they are made of, and as nodes."""
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
    """The machine's topology; where the batch system does not know where a GPU is, a worker's report may."""
    told = machine.topology
    if all(gpu.numa is not None for gpu in told.gpus):
        return told
    reports = [from_graph(worker.topology) for worker in workers if worker.topology]
    nodes = {node.id: node for each in (*reports, told) for node in each.numa_nodes}
    numa: dict[int, int | None] = {}
    for report in reports:
        for gpu in report.gpus:
            place = position(told, device_id(gpu))
            if place is not None and gpu.numa is not None:
                numa[place] = gpu.numa
    gpus = tuple(
        gpu if gpu.numa is not None else dataclasses.replace(gpu, numa=numa.get(place))
        for place, gpu in enumerate(told.gpus)
    )
    return dataclasses.replace(told, numa_nodes=tuple(nodes[number] for number in sorted(nodes)), gpus=gpus)


def _places(topology: Topology, names: Iterable[str]) -> set[int]:
    return {place for name in names if (place := position(topology, name)) is not None}


def _instance(view: View, worker: WorkerView, gpus: set[int], floor: int) -> Instance:
    ours = worker.acquired or worker.pin is not None  # One that was started by hand is nobody's to give back.
    leaving = worker.draining or worker.noticed is not None
    return Instance(
        worker.id, _priority(view, worker, floor), tuple(sorted(gpus)), (), worker.joined, ours and not leaving
    )


def _priority(view: View, worker: WorkerView, floor: int) -> int:
    """That of the most urgent work it does or gets ready for; `floor` if it does nothing."""
    building = {held.context for held in worker.contexts.values() if held.state in ("staging", "loading")}
    doing = [view.apps[attempt.app].priority for attempt in worker.running.values()]
    doing += [app.priority for app in view.apps.values() if app.context in building and app.backlog]
    doing += [view.apps[session.app].priority for session in worker.sessions.values()]
    return max(doing, default=floor)
