"""The standard selection, which knows no topology: drop everybody of lower priority, then reprieve who may stay.

What Kubernetes and Gödel do, and what FlexTopo is compared with. Pure.
"""

from __future__ import annotations

from ctxflow.policies.preemption.cluster import Level, Node, Preemptor
from ctxflow.policies.preemption.fitting import Fit


def reprieve(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[tuple[int, ...], int] | None:
    """The victims on a node, as positions among its instances, and how many feasibility checks were made.

    All of lower priority are dropped. If the preemptor then fits, they are added back one by one, by priority
    descending and then the longest-running first, each of whom stays if the preemptor still fits beside it.

    :returns: None if the preemptor does not fit even then.
    """
    rungs = node.rungs(preemptor.priority)
    if not rungs or fit.level(rungs[-1].free) is Level.NONE:
        return None
    free = rungs[-1].free
    dropped = list(node.order[: rungs[-1].count])
    dropped.sort(key=lambda number: (-node.instances[number].priority, node.instances[number].started))
    victims = []
    for number in dropped:
        if fit.level(free & ~node.masks[number]) is Level.NONE:
            victims.append(number)
        else:
            free &= ~node.masks[number]
    return tuple(sorted(victims)), 1 + len(dropped)
