"""This machine's GPUs, dealt out in shares to the embedded engine's workers, or given to one on demand.

What does not live here: the workers (local_workers.py, local_worker.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxflow.host.facts import Device
from ctxflow.topology import Topology, of_gpus, ordered, position, to_graph, used_by
from ctxflow.topology.machine import read_machine

Share = list[Device]


class GpuShares:
    """Who may have which GPUs.

    :param devices: all there are; neighbours in the machine's topology are dealt out together.
    :param workers: how many shares there are, of `each` GPUs.
    :ivar devices: those that are dealt out.

    >>> shares = GpuShares([Device("a"), Device("b"), Device("c")], workers=3, each=1)
    >>> first = shares.take()
    >>> shares.ask(7, ["b", "a"])
    >>> list(shares.granted())
    []
    >>> shares.give_back([first])
    >>> [(pin, [device.id for device in devices]) for pin, devices, _ in shares.granted()]
    [(7, ['b', 'a'])]
    """

    def __init__(self, devices: Sequence[Device], workers: int, each: int) -> None:
        by_id = {device.id: device for device in devices}
        in_order = [by_id[name] for name in ordered(topology_of(devices), by_id)]
        self._free = [in_order[n * each : (n + 1) * each] for n in range(workers)]
        self.devices = in_order[: workers * each]
        self._topology = topology_of(self.devices)
        self._asked: dict[int, Sequence[str]] = {}

    def take(self) -> Share:
        """Return a share for a worker; one without GPUs if all are taken."""
        return self._free.pop(0) if self._free else []

    def give_back(self, shares: Sequence[Share]) -> None:
        """Shares of a worker that is gone."""
        self._free += shares

    def ask(self, pin: int, names: Sequence[str]) -> None:
        """Want these GPUs for one worker, once nobody has them."""
        self._asked[pin] = names

    def forgo(self, pin: int) -> None:
        """They are not wanted any more."""
        self._asked.pop(pin, None)

    def granted(self) -> Iterator[tuple[int, Share, list[Share]]]:
        """Yield what was asked for and can be had: the number, the GPUs in the order asked for, their shares."""
        for pin, names in list(self._asked.items()):
            by_id = {device.id: device for device in self.devices if device.id in names}
            shares = [share for share in self._free if any(device.id in by_id for device in share)]
            if by_id and {device.id for share in shares for device in share}.issuperset(by_id):
                del self._asked[pin]
                self._free = [share for share in self._free if share not in shares]
                yield pin, [by_id[name] for name in names if name in by_id], shares

    def machine(self, users: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """Return the machine's topology as data, with the GPUs that are dealt out; None if there are none.

        :param users: who uses them, by the GPU's id.
        """
        return to_graph(used_by(self._topology, users or {})) if self.devices else None


def topology_of(devices: Sequence[Device]) -> Topology:
    """This machine's, with these devices and no others, by their ids; one that no driver knows is near no NUMA node."""
    names = [device.id for device in devices]
    try:
        found = read_machine() if names else Topology("")
    except ValueError:  # The kernel tells nothing, as in some containers.
        found = Topology("")
    known = of_gpus(found, names)
    chosen = {position(known, name): name for name in names}
    gpus = [(known.gpus[place], name) for place, name in chosen.items() if place is not None]
    named = tuple(dataclasses.replace(gpu, uuid=None if name.isdigit() else name) for gpu, name in gpus)
    return dataclasses.replace(known, gpus=tuple(sorted(named, key=lambda gpu: gpu.index)))
