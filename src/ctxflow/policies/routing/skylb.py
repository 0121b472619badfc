"""SkyLB as a baseline: home first, forward what does not fit; in a region, where the longest prefix was seen.

After Xia et al., "SkyLB: A Locality-aware Cross-Region Load Balancer for LLM Inference". A replica (a server here) has
at most ten requests at once; a request with no known prefix, or whose replicas are full, goes to the least loaded one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ctxflow.policies.routing.arrays import Ints, amounts, prices
from ctxflow.policies.routing.matching import NOWHERE

AT_ONCE = 10
"""Requests that a replica has at a time, at most."""


def forward(demand: npt.ArrayLike, room: npt.ArrayLike, latency: npt.ArrayLike) -> Ints:
    """How many tasks of each region go where: home while there is room, then to the nearest region with room.

    Regions forward in their order, as far as there is room; what is left then waits at home, or in the nearest region
    that has not vanished.

    :param demand: (R,) tasks that arrived.
    :param room: (R,) tasks that each region can take at once; less than nothing or NaN if it has vanished.
    :param latency: (R, R) from row to column.

    >>> forward([5, 0, 1], [2, 2, 9], [[0, 1, 2], [1, 0, 1], [2, 1, 0]]).tolist()
    [[2, 2, 1], [0, 0, 0], [0, 0, 1]]
    """
    wanted = np.floor(amounts(demand)).astype(np.int64)
    given = np.asarray(room, dtype=np.float64)
    free = np.floor(amounts(room)).astype(np.int64)
    alive = given >= 0 if (given >= 0).any() else np.ones(len(given), dtype=bool)
    near = prices(latency)
    flows = np.diag(np.minimum(wanted, free))
    free -= flows.diagonal()
    for origin in np.flatnonzero(wanted > flows.sum(axis=1)).tolist():
        order = np.argsort(near[origin], kind="stable")
        over = int(wanted[origin] - flows[origin].sum())
        taken = np.minimum(np.cumsum(free[order]), over)
        given_now = np.diff(taken, prepend=0)
        flows[origin, order] += given_now
        free[order] -= given_now
        home = origin if alive[origin] else int(np.where(alive, near[origin], np.inf).argmin())
        flows[origin, home] += over - int(taken[-1])
    return flows


class PrefixTree:
    """Which replicas have seen which prefixes.

    >>> tree = PrefixTree()
    >>> tree.insert(["be", "brief"], 3)
    >>> tree.longest(["be", "kind"], {3, 4}), tree.longest(["no"], {3, 4})
    ([3], [])
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], dict[int, None]] = {}

    def insert(self, prefix: Sequence[object], replica: int) -> None:
        """A replica has it now, and all that it begins with."""
        for length in range(1, len(prefix) + 1):
            self._seen.setdefault(tuple(prefix[:length]), {})[replica] = None

    def longest(self, prefix: Sequence[object], among: set[int]) -> list[int]:
        """Those of some replicas that have seen the longest part of its beginning; none if nobody saw any."""
        for length in range(len(prefix), 0, -1):
            found = [replica for replica in self._seen.get(tuple(prefix[:length]), ()) if replica in among]
            if found:
                return found
        return []


def replicas(
    prefixes: Sequence[Sequence[object]], tree: PrefixTree, running: Ints, allowed: Sequence[int], limit: int = AT_ONCE
) -> Ints:
    """The replica of each request: of those that know its prefix best the least loaded, else the least loaded of all.

    :param prefixes: what each request begins with, in steps, such as its model and its user.
    :param tree: what has been seen; these requests are added to it, and nothing is ever forgotten.
    :param running: (S,) requests that each replica has.
    :param allowed: the replicas that are there.
    :param limit: requests that a replica has at once.
    :returns: (N,) `NOWHERE` for those that wait because all are full.

    >>> replicas([["a"], ["b"], ["a"]], PrefixTree(), np.array([0, 0]), [0, 1]).tolist()
    [0, 1, 0]
    """
    held = running.astype(np.int64).tolist()
    open_to = {replica for replica in allowed if held[replica] < limit}
    where = np.full(len(prefixes), NOWHERE, dtype=np.int64)
    for number, prefix in enumerate(prefixes):
        if not open_to:
            break
        known = tree.longest(prefix, open_to)
        chosen = min(known or open_to, key=lambda replica: (held[replica], replica))
        where[number] = chosen
        held[chosen] += 1
        tree.insert(prefix, chosen)
        if held[chosen] >= limit:
            open_to.discard(chosen)
    return where
