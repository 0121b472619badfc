"""What a scheduler is set up with: its policies, and its failure thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ctxflow.option_values import number, whole
from ctxflow.policies.protocols import (
    BatchingPolicy,
    HealthPolicy,
    PlacementPolicy,
    PlanningPolicy,
    PreemptionPolicy,
    RoutingPolicy,
    ScalingPolicy,
    SessionPolicy,
    WarmingPolicy,
)
from ctxflow.policies.registry import DEFAULTS, described, having, make


@dataclasses.dataclass(frozen=True)
class Policies:
    """The policies of a run.

    :ivar choices: family -> how its policy was chosen, as data (see `ctxflow.policies.registry.described`).
    :ivar warming: the routing policy, if it also loads contexts ahead of demand; None if not.
    :ivar planning: the placement policy, if its plans are computed beside the run; None if not.
    :ivar coalescing: who says how many sessions a step serves: the batching policy, if it has an opinion.
    """

    routing: RoutingPolicy
    batching: BatchingPolicy
    placement: PlacementPolicy
    preemption: PreemptionPolicy
    scaling: ScalingPolicy
    sessions: SessionPolicy = dataclasses.field(default_factory=lambda: make("sessions", DEFAULTS["sessions"]))
    health: HealthPolicy = dataclasses.field(default_factory=lambda: make("health", DEFAULTS["health"]))
    choices: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    warming: WarmingPolicy | None = dataclasses.field(init=False, compare=False, repr=False)
    planning: PlanningPolicy | None = dataclasses.field(init=False, compare=False, repr=False)
    coalescing: BatchingPolicy = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._set("warming", having(self.routing, "warm"))
        self._set("planning", having(self.placement, "planning", "planned"))
        self._set("coalescing", having(self.batching, "coalesced") or make("batching", "coalescing"))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def chosen(cls, choices: Mapping[str, Any]) -> Policies:
        """Make policies of what a site or a person chose of each family: a name, a table with options, or an object.

        :param choices: a family that is not in it has its default.
        :raises ValueError: for a choice that makes no sense, saying what to write.

        >>> Policies.chosen({"batching": "opportunistic"}).choices["routing"]
        {'policy': 'context-affinity'}
        """
        complete = {family: choices.get(family, default) for family, default in DEFAULTS.items()}
        made = {family: make(family, choice) for family, choice in complete.items()}
        return cls(**made, choices={family: described(family, choice) for family, choice in complete.items()})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Failure thresholds: how many failures are tolerated, and how long is waited.

    :ivar losses: times in a row that an item's workers may be lost, for no known reason, before it is suspected.
    :ivar crashes: crashes that an item alone may cause before it is dead.
    :ivar failures: hosts on which a context may fail before it is declared broken; workers, where all are on one host.
    :ivar retry_seconds: the first pause before a suspect worker is asked to build the context again.
    :ivar verdict: seconds that are waited, before a context is declared broken, for those who still build it.
    """

    losses: int = 3
    crashes: int = 2
    failures: int = 3
    retry_seconds: float = 5.0
    verdict: float = 600.0

    def __post_init__(self) -> None:
        for name in ("losses", "crashes", "failures"):
            whole(name, getattr(self, name), "how many failures are tolerated, 1 or more", 1)
        for name in ("retry_seconds", "verdict"):
            number(name, getattr(self, name), "seconds, 0 or more")
