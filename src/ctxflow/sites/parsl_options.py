"""A tier's `options`: what Parsl's providers take, by their signatures.

What does not live here: the providers (factory/).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from ctxflow.sites.problem import Problem, shown, suggestion
from ctxflow.sites.tier import Tier

_CLASSES = {
    "slurm": "parsl.providers.slurm.slurm:SlurmProvider",
    "pbs": "parsl.providers.pbspro.pbspro:PBSProProvider",
    "grid-engine": "parsl.providers.grid_engine.grid_engine:GridEngineProvider",
    "kubernetes": "parsl.providers.kubernetes.kube:KubernetesProvider",
}
# Every worker is a job of its own, and the factory counts them; its size is the tier's.
_OURS = {
    "nodes_per_block": "leave it out, since every worker is a job of its own",
    "init_blocks": "write minimum",
    "min_blocks": "write minimum",
    "max_blocks": "write workers",
    "parallelism": "leave it out, since the scaling policy decides",
    "cores_per_node": "write cores",
    "cpus_per_node": "write cores",
    "mem_per_node": "write memory_gb",
    "gpus_per_node": "write gpus",
    "max_cpu": "write cores",
    "init_cpu": "write cores",
    "max_mem": "write memory_gb",
    "init_mem": "write memory_gb",
}


def takes(provider: str) -> list[str] | None:
    """The options that a provider of Parsl takes; None where Parsl does not say.

    >>> "partition" in takes("slurm")
    True
    """
    module, _, name = _CLASSES.get(provider, "").partition(":")
    if not module:
        return None
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return [each for each in inspect.signature(maker).parameters if each != "self"]


def option_problems(tier: Tier) -> Iterator[Problem]:
    """What is wrong with a tier's options.

    >>> [problem.text for problem in option_problems(Tier(provider="slurm", options={"partion": "gpu"}))]
    ["options of tier gpu have no 'partion' for slurm: did you mean 'partition'?"]
    """
    if tier.provider == "kubernetes" and not (tier.image or tier.options.get("image")):
        yield Problem(("provider",), f'tier {tier.name} needs a container image: write image = "HOST/NAME:TAG"')
    known = takes(tier.provider)
    if known is None:
        return
    for key, value in tier.options.items():
        path = ("options", key)
        if key in _OURS:
            yield Problem(
                path, f"options of tier {tier.name} set {key!r}, for which a tier has its own keys: {_OURS[key]}"
            )
        elif key not in known:
            offered = [each for each in known if each not in _OURS]
            hint = suggestion(key, offered, f"it takes {', '.join(offered)}")
            yield Problem(path, f"options of tier {tier.name} have no {key!r} for {tier.provider}: {hint}")
        elif key == "walltime" and not re.fullmatch(r"(\d+-)?\d+:\d\d(:\d\d)?", str(value)):
            yield Problem(
                path,
                f"walltime in options of tier {tier.name} cannot be {shown(value)}: write hours, minutes and seconds, "
                'such as walltime = "04:00:00"',
            )
