"""Places for workers of several GPUs in virtual time: the scheduler, its policies and the simulated engine together."""

from collections import Counter

import pytest

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, pools
from ctxflow.topology import Gpu, NumaNode, Topology, to_graph

TIMES = GpuTimes({"": 1.0}, dispatched=Drawn(0.1), loading=Drawn(5.0), matching=Drawn(2.0))
LOW = 300


def graph(host, gpus=8):
    nodes = tuple(NumaNode(number, number * 2 // gpus) for number in range(gpus))
    cards = tuple(Gpu(number, f"GPU-{host}-{number}", numa=number) for number in range(gpus))
    return to_graph(Topology(host, (0, 1), nodes, gpus=cards))


def machines(*hosts, **available):
    """A machine for each GPU; those named in `available` are somebody else's at times."""
    return [
        SimulatedMachine(
            f"{host}-{n}",
            host=host,
            devices=(f"GPU-{host}-{n}",),
            topology=graph(host),
            available=available.get(f"{host}_{n}", pools.during(0.0, 1e9)),
        )
        for host in hosts
        for n in range(8)
    ]


class Played:
    """A run to its end: low-priority work on all GPUs, and urgent work that needs four from second 60 on."""

    def __init__(self, places, policy="exact", **options):
        chosen = {"policy": policy, "patience": 20, "grace": 30, "idle": 10, **options}
        self.scheduler = Scheduler(Policies.chosen({"preemption": chosen, "batching": {"policy": "fixed", "size": 8}}))
        self.engine = SimulatedEngine(places, TIMES)
        self.delivered = Counter()
        self.joined: dict[str, ev.WorkerSpec] = {}
        self.commands: list[tuple[float, cmd.Command]] = []
        self.feed(ev.TierOffered(0.0, ev.TierSpec("default", 0, len(places), gpus=1, machine_gpus=8)))
        for name, gpus, priority, affinity in (("low", 1, 0, None), ("urgent", 4, 5, "guaranteed")):
            self.feed(ev.ContextDeclared(0.0, ev.ContextSpec(name, name, gpus=gpus, affinity=affinity)))
            self.feed(ev.AppDeclared(0.0, ev.AppSpec(name, name, context=name, priority=priority)))
        self.feed(ev.ItemsSubmitted(0.0, "low", range(LOW)))
        self.until(60.0)
        self.feed(ev.ItemsSubmitted(60.0, "urgent", range(LOW, LOW + 10)))
        self.until(2000.0)
        self.until(self.engine.now + 5.0)

    def feed(self, event):
        commands = self.scheduler.handle(event)
        self.scheduler.validate()
        for command in commands:
            self.commands.append((event.time, command))
            if isinstance(command, cmd.Deliver):
                self.delivered.update(command.items)
        self.engine.execute(commands)

    def until(self, time):
        """Go on until a time, or until all is done."""
        while self.engine.now < time:
            for event in self.engine.poll(1.0):
                if isinstance(event, ev.WorkerJoined):
                    self.joined[event.worker.id] = event.worker
                self.feed(event)
            self.feed(ev.Tick(self.engine.now))
            if (
                60.0 < self.engine.now < time - 5.0
                and not self.scheduler.state.open
                and not self.scheduler.state.reservations.all
            ):
                return

    def only(self, kind):
        return [command for _, command in self.commands if isinstance(command, kind)]

    @property
    def pinned(self):
        return [worker for worker in self.joined.values() if worker.pin is not None]


@pytest.mark.parametrize("policy", ["exact", "imp"])
def test_four_of_one_socket_and_everything_is_answered_once(policy):
    played = Played(machines("m1", "m2"), policy)
    [worker] = played.pinned
    sockets = {int(name.rpartition("-")[2]) // 4 for name in worker.devices}
    assert len(worker.devices) == 4 and len(sockets) == 1
    assert played.delivered == Counter(range(LOW + 10))
    assert played.scheduler.state.counters.evicted == 0
    assert len(played.joined) == 16 + 1 + 4, "those that gave way are there again afterwards"


def test_somebody_else_comes_first_and_it_gets_another_place():
    # The first socket of the only machine with room is somebody else's, from a second after it was asked for.
    first = Played(machines("m1"))
    [acquire] = first.only(cmd.AcquireAt)
    asked = next(time for time, command in first.commands if isinstance(command, cmd.AcquireAt))
    number = acquire.devices[1].rpartition("-")[2]
    played = Played(machines("m1", **{f"m1_{number}": pools.during(0.0, asked + 0.5)}))
    first_try, second = played.only(cmd.AcquireAt)
    assert first_try.devices == acquire.devices and not set(second.devices) & set(acquire.devices)
    assert [note.trouble for note in played.only(cmd.Note)].count(True) == 1
    assert played.delivered == Counter(range(LOW + 10))


def test_a_place_that_is_taken_away_costs_nothing():
    first = Played(machines("m1", "m2"))
    [worker] = first.pinned
    joined = next(
        time for time, command in first.commands if isinstance(command, cmd.Load) and command.context == "urgent"
    )
    host, _, number = worker.devices[0].removeprefix("GPU-").partition("-")
    played = Played(machines("m1", "m2", **{f"{host}_{number}": pools.during(0.0, joined + 7.0)}))
    assert len(played.pinned) == 2 and played.scheduler.state.counters.evicted == 1
    assert played.delivered == Counter(range(LOW + 10))
