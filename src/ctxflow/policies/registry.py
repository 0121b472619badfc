"""Policies by name: ctxflow's own, and those that other packages offer through entry points.

A package adds a policy with an entry point in the group `ctxflow.policies`, named `FAMILY.NAME`:

    [options.entry_points]
    ctxflow.policies =
        routing.nearest = my_package.routing:Nearest

docs/extending.md writes one from nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from ctxflow.errors import closest

GROUP = "ctxflow.policies"
_OWN = {
    "routing": {
        "context-affinity": "ctxflow.policies.simple:ContextAffinity",
        "least-loaded": "ctxflow.policies.simple:LeastLoaded",
        "round-robin": "ctxflow.policies.simple:RoundRobin",
        "sdib": "ctxflow.policies.baselines:Sdib",
        "skylb": "ctxflow.policies.baselines:SkyLB",
        "torta": "ctxflow.policies.torta.routing:Torta",
    },
    "batching": {
        "coalescing": "ctxflow.policies.simple:Coalescing",
        "fixed": "ctxflow.policies.simple:Fixed",
        "opportunistic": "ctxflow.policies.opportunistic:Opportunistic",
    },
    "placement": {
        "agh": "ctxflow.policies.agh.placement:AdaptivePlacement",
        "everywhere": "ctxflow.policies.simple:Everywhere",
    },
    "preemption": {
        "exact": "ctxflow.policies.flextopo.preemption:ExactPreemption",
        "imp": "ctxflow.policies.flextopo.preemption:IncrementalMinimalPreemption",
        "none": "ctxflow.policies.simple:NoPreemption",
        "standard": "ctxflow.policies.flextopo.preemption:StandardPreemption",
    },
    "scaling": {
        "activation": "ctxflow.policies.torta.scaling:Activation",
        "closed-loop": "ctxflow.policies.turboserve.scaling:ClosedLoop",
        "fixed": "ctxflow.policies.simple:FixedWorkers",
        "queue-proportional": "ctxflow.policies.simple:QueueProportional",
    },
    "health": {
        "none": "ctxflow.policies.simple:NoQuarantine",
        "sequential": "ctxflow.policies.health:SequentialTest",
    },
    "sessions": {
        "least-loaded": "ctxflow.policies.simple:LeastLoadedSessions",
        "turboserve": "ctxflow.policies.turboserve.session_placement:TurboServe",
    },
}
_METHODS = {
    "routing": ("assign",),
    "batching": ("size", "duplicate", "linger"),
    "placement": ("plan",),
    "preemption": ("victims", "reserves", "patience", "grace", "idle"),
    "scaling": ("target",),
    "health": ("observe", "doubts", "judge", "probation"),
    "sessions": ("place",),
}
FAMILIES = tuple(_OWN)
DEFAULTS = {
    "routing": "context-affinity",
    "batching": "fixed",
    "placement": "everywhere",
    "preemption": "none",
    "scaling": "fixed",
    "health": "sequential",
    "sessions": "least-loaded",
}
"""The policy of each family where nobody chooses."""


def names(family: str) -> list[str]:
    """Return the policies of a family that can be chosen by name."""
    prefix = f"{family}."
    offered = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return sorted({*_OWN[family], *(name.removeprefix(prefix) for name in offered if name.startswith(prefix))})


def known(family: str, name: str) -> bool:
    """Return whether a policy can be chosen by a name; other packages are only asked where it is not ours."""
    return name in _OWN[family] or bool(importlib.metadata.entry_points(group=GROUP, name=f"{family}.{name}"))


def make(family: str, choice: Any) -> Any:
    """Make a policy of what a site or a user chose.

    :param family: one of `FAMILIES`.
    :param choice: a name, a mapping with "policy" and the policy's options, or a policy object, which is
        given back as it is.
    :raises ValueError: for an unknown name or option, saying which there are, or what is no policy.

    >>> make("batching", {"policy": "fixed", "size": 10}).linger
    0.0
    """
    if isinstance(choice, str):
        choice = {"policy": choice}
    if not isinstance(choice, dict):
        return _checked(family, choice)
    options = dict(choice)
    try:
        name = options.pop("policy")
    except KeyError:
        raise ValueError(f'the {family} policy has no name: write {{policy = "...", ...}}') from None
    maker = _find(family, name)
    if not callable(maker):
        raise ValueError(f"the {family} policy {name!r} cannot be made so: {maker!r} is neither a class nor a function")
    taken = list(inspect.signature(maker).parameters)
    if unknown := sorted(set(options) - set(taken)):
        close = closest(unknown[0], taken)
        offered = f"{', '.join(taken)}; write one of these" if taken else "none; write its name alone"
        hint = f" (did you mean {close!r}?)" if close else ""
        raise ValueError(f"the {family} policy {name!r} has no option {unknown[0]!r}: it takes {offered}{hint}")
    try:
        policy = maker(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {family} policy {name!r} cannot be made so: {error}") from error
    return _checked(family, policy)


def described(family: str, choice: Any) -> dict[str, Any]:
    """Return a choice as data from which `make` makes the same policy elsewhere: its name, and every option.

    Options that were not given are written with their defaults, which another version may have changed. An object is
    described by its class, under the key "object", and cannot be made again.

    >>> described("batching", {"policy": "fixed", "size": 10})
    {'policy': 'fixed', 'size': 10, 'linger': 0.0, 'share': True, 'window': 64}
    >>> described("batching", make("batching", "fixed"))
    {'object': 'ctxflow.policies.simple:Fixed'}
    """
    if isinstance(choice, str):
        choice = {"policy": choice}
    if not isinstance(choice, dict):
        kind = type(choice)
        return {"object": f"{kind.__module__}:{kind.__qualname__}"}
    parameters = inspect.signature(_find(family, choice["policy"])).parameters.values()
    plain = {p.name: p.default for p in parameters if isinstance(p.default, (str, int, float, type(None)))}
    return {"policy": choice["policy"], **plain, **{key: value for key, value in choice.items() if key != "policy"}}


def having(policy: Any, *methods: str) -> Any:
    """Return a policy if it has these methods, which its protocol leaves open, else None.

    >>> having(make("batching", "fixed"), "coalesced") is None, having(make("routing", "round-robin"), "warm")
    (False, None)
    """
    return policy if all(hasattr(policy, name) for name in methods) else None


def _checked(family: str, policy: Any) -> Any:
    missing = [name for name in _METHODS[family] if not hasattr(policy, name)]
    if missing or isinstance(policy, type):
        made = not isinstance(policy, type)
        what = f"{policy!r}, which has no {missing[0]!r}" if made else f"the class {policy.__name__}"
        raise ValueError(
            f"the {family} policy cannot be {what}: give a name ({', '.join(names(family))}), "
            "a table with the key policy, or an object of the protocol"
        )
    return policy


def _find(family: str, name: str) -> Any:
    place = _OWN[family].get(name)
    if place is not None:
        module, _, attribute = place.partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in importlib.metadata.entry_points(group=GROUP, name=f"{family}.{name}"):
        return point.load()
    raise ValueError(f"there is no {family} policy {name!r}: choose one of {', '.join(names(family))}")
