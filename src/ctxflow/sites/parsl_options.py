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
# Options that ctxflow has besides Parsl's.
_MORE = {"slurm": ("grace",), "grid-engine": ("parallel_environment",)}
# Every worker is a job of its own, and the factory counts them.
_OURS = {
    "nodes_per_block": "leave it out, since every worker is a job of its own",
    "init_blocks": "write minimum, at the tier's level",
    "min_blocks": "write minimum, at the tier's level",
    "max_blocks": "write workers, at the tier's level",
    "parallelism": "leave it out, since the scaling policy decides",
    "launcher": "leave it out, since every worker is a job of its own",
    "regex_job_id": "leave it out",
    "pod_name": "leave it out",
}
_VOLUMES = 'persistent_volumes = [["CLAIM", "/shared/runs"]]'


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
    return [*inspect.signature(maker).parameters, *_MORE.get(provider, ())]


def option_problems(tier: Tier) -> Iterator[Problem]:
    """What is wrong with a tier's options.

    >>> [problem.text for problem in option_problems(Tier(provider="slurm", options={"partion": "gpu"}))]
    ["options of tier gpu have no 'partion' for slurm: did you mean 'partition'?"]
    """
    if tier.provider == "kubernetes":
        yield from _kubernetes_problems(tier)
    known = takes(tier.provider)
    if known is None:
        return
    for key, value in tier.options.items():
        path = ("options", key)
        if key in _OURS:
            yield Problem(path, f"options of tier {tier.name} set {key!r}, which ctxflow does itself: {_OURS[key]}")
        elif key not in known:
            offered = [each for each in known if each not in _OURS]
            hint = suggestion(key, offered, f"it takes {', '.join(offered)}")
            yield Problem(path, f"options of tier {tier.name} have no {key!r} for {tier.provider}: {hint}")
        elif key == "walltime" and not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", str(value)):
            yield Problem(
                path,
                f"walltime in options of tier {tier.name} cannot be {shown(value)}: write hours, minutes and seconds, "
                'such as walltime = "04:00:00"',
            )


def _kubernetes_problems(tier: Tier) -> Iterator[Problem]:
    if not (tier.image or tier.options.get("image")):
        yield Problem(("provider",), f'tier {tier.name} needs a container image: write image = "HOST/NAME:TAG"')
    volumes = tier.options.get("persistent_volumes")
    pairs = isinstance(volumes, (list, tuple)) and all(isinstance(v, (list, tuple)) and len(v) == 2 for v in volumes)
    if not (volumes and pairs):
        yield Problem(
            ("options", "persistent_volumes") if volumes else ("provider",),
            f"tier {tier.name} needs a volume that pods and this machine both mount, and the run's directory on it: "
            f"write options = {{{_VOLUMES}}}",
        )
