"""Workers on GPUs of one's choice in an HTCondor pool: its machines, and how a job says where it goes.

What does not live here: asking the collector (condor_survey.py), and which GPUs to choose (policies/preemption).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ctxflow.factory.condor_machines import Need, machines_of
from ctxflow.sites.tier import Tier
from ctxflow.topology import Topology
from ctxflow.topology.condor import from_ads

PRIORITY = 10
"""How much more urgent such a job is than others of its tier, which must not take the GPUs that were made free."""


def pinned(tier: Tier, pin: int, machine: str, devices: Sequence[str]) -> Tier:
    """A tier whose one worker is on this machine, with these GPUs and as much of the rest as workers of so many have.

    :param pin: the number by which the worker says what it was asked for.
    :param devices: UUIDs.

    >>> there = pinned(Tier(cores=2, require_gpus="Capability > 7"), 3, "n1.pool", ["GPU-0a1b2c3d-4e", "GPU-5f"])
    >>> there.gpus, there.cores, there.requirements
    (2, 4, '(Machine == "n1.pool")')
    """
    share = -(-len(devices) // max(1, tier.gpus))
    return tier.model_copy(
        update={
            "gpus": len(devices),
            "cores": tier.cores * share,
            "memory_gb": tier.memory_gb * share,
            "disk_gb": None if tier.disk is None else tier.disk * share / 1e9,
            "requirements": _both(tier.requirements, f'Machine == "{machine}"'),
            "require_gpus": _both(tier.require_gpus, these_gpus(devices)),
            "priority": (tier.priority or 0) + PRIORITY,
            "variables": {**tier.variables, "CTXFLOW_PIN": str(pin)},
        }
    )


def unpinned(tier: Tier) -> Tier:
    """A tier whose workers leave the place alone that a worker with more GPUs has had.

    HTCondor gives the claim of a job that has ended to the next that fits: one with a single GPU would keep all of it.

    >>> unpinned(Tier(machine_gpus=8)).requirements
    '(DynamicSlot =!= true || TARGET.GPUs <= MY.RequestGPUs)'
    """
    if not tier.machine_gpus or not tier.gpus:
        return tier
    alone = _both(tier.requirements, "DynamicSlot =!= true || TARGET.GPUs <= MY.RequestGPUs")
    return tier.model_copy(update={"requirements": alone})


def these_gpus(devices: Sequence[str]) -> str:
    """The condition on a GPU that it is one of these, by their UUIDs: with "GPU-" or without, as HTCondor has them.

    Its `Id` will not do: the negotiator knows it, but not the startd when it binds devices, which then refuses the job.

    >>> print(these_gpus(["GPU-0a1b2c3d-4e5f"]))
    DeviceUuid =?= "GPU-0a1b2c3d-4e5f" || DeviceUuid =?= "0a1b2c3d-4e5f"
    """
    names = [name for device in devices for name in (device, device.removeprefix("GPU-"))]
    return " || ".join(f'DeviceUuid =?= "{name}"' for name in names)


def _both(one: str | None, other: str) -> str:
    return f"({one}) && ({other})" if one else f"({other})"


def places_of(ads: Sequence[Any], need: Need) -> list[Topology]:
    """The topologies of the machines, of those that slot ads are of, on which such a worker may be at all.

    A machine whose GPUs are in no ad just now (which happens for a moment after a job) has fewer of them. GPUs that
    will not do for the worker are left out, and so are those without UUIDs, by which to name them.
    """
    fitting = [each for each in machines_of(ads) if all(need.holds(one, each.whole) for one in need.criteria)]
    names = {str(machine.now.get("Machine")) for machine in fitting}
    unfit = [_uuid(gpu.ad) for machine in fitting for gpu in machine.gpus if not need.gpu_will_do(gpu.ad)]
    found = from_ads([ad for ad in ads if ad.get("Machine") in names]) if names else []
    kept = [
        tuple(gpu for gpu in each.gpus if gpu.uuid is not None and not gpu.uuid.startswith(tuple(filter(None, unfit))))
        for each in found
    ]
    return [dataclasses.replace(each, groups=(), gpus=gpus) for each, gpus in zip(found, kept, strict=True)]


def _uuid(gpu: Any) -> str:
    """What the UUID of a GPU begins with, as topologies have it; "" if its ad does not tell."""
    told = str(gpu.get("DeviceUuid") or gpu.get("Id") or "")
    return told if not told or told.startswith(("GPU-", "MIG-")) else f"GPU-{told}"
