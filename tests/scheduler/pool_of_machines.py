"""Machines of 8 GPUs, 2 sockets and 8 NUMA nodes, as workers and surveys tell of them."""

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.topology import Gpu, NumaNode, Topology, to_graph

GPUS = 8
SOCKETS = 2


def device(machine, number):
    """The id of a GPU."""
    return f"GPU-{machine}-{number}"


def graph(machine, users=(), known=True):
    """A machine as a survey tells of it: `users` by the number of the GPU."""
    nodes = tuple(NumaNode(number, number * SOCKETS // GPUS) for number in range(GPUS))
    users = dict(users)
    gpus = tuple(
        Gpu(number, device(machine, number), "NVIDIA A10", numa=number if known else None, used_by=users.get(number))
        for number in range(GPUS)
    )
    return to_graph(Topology(machine, tuple(range(SOCKETS)), nodes if known else (), (), gpus))


def tier(workers=16, name="default", gpus=1):
    return ev.TierSpec(name, 0, workers, gpus=gpus, machine_gpus=GPUS)


def place(bench, machine, number, context="", **options):
    """A worker on one GPU, that runs what waits; gives the commands once its context is built."""
    name = f"{machine}-{number}"
    bench.join(name, host=machine, gpus=1, devices=(device(machine, number),), **options)
    return bench.ready(name, context)


def answer(bench, commands, **machines):
    """Answer the survey that the commands ask for; by default of one machine that our own workers fill."""
    [survey] = [command for command in commands if isinstance(command, cmd.Survey)]
    return bench.tell(ev.MachinesFound, survey.tier, machines)


def full(machine, users=()):
    """A machine all of whose GPUs somebody uses: ours, unless `users` says who."""
    return graph(machine, {**dict.fromkeys(range(GPUS), "alice"), **dict(users)})
