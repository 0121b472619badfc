"""Later preemptors: which of them a decision leaves without a place, and how much room that is whole it breaks.

It tells candidates apart that Equation 1 of FlexTopo holds equal; the paper looks at the preemptor at hand alone.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ctxflow.policies.flextopo.candidates import Fit, Fits
from ctxflow.policies.flextopo.cluster import Affinity, Domain, Node, Preemptor

MOST_KINDS = 8
"""Of more kinds of later preemptors the most common ones are looked at: each costs a look at all nodes."""

_Open = tuple[int, tuple[tuple[int, int | None], ...]]
"""How many places a node has for a kind, and for each domain where they can be its GPUs, as a mask, and how many of
the free ones no place has; None where cores are scarcer than GPUs."""


class Kind:
    """Later preemptors that are alike.

    :ivar wanted: one of them.
    :ivar count: how many are to be expected.
    :ivar total: how many would find a place now.
    """

    __slots__ = ("_fits", "_known", "_places", "count", "total", "wanted")

    def __init__(self, wanted: Preemptor, count: int, nodes: Iterable[Node]) -> None:
        self.wanted, self.count, self._fits = wanted, count, Fits(wanted)
        self._known: dict[tuple[int, int], _Open] = {}
        self._places: dict[int, tuple[Fit, tuple[Domain, ...]]] = {}
        free = ((node, node.below(wanted.priority)) for node in nodes)
        self.total = sum(self.open(node, mask)[0] for node, mask in free if mask)

    def left_out(self, node: Node, taken: int) -> int:
        """Return how many more of them find no place once this part of a node is taken."""
        free = node.below(self.wanted.priority)
        return self._without(self.open(node, free)[0] - self.open(node, free & ~taken)[0]) if free & taken else 0

    def fewest_left_out(self, node: Node, domain: Domain, free: int, among: int, gpus: int) -> int:
        """Return how many more find no place at least, whichever of the GPUs `among` those of a domain are taken.

        :param free: what is free for them on the node.
        """
        here = free & domain.gpus
        taken = gpus - (among & domain.gpus).bit_count() + here.bit_count()
        if taken <= 0 or not self.wanted.gpus:
            return 0
        for place, spare in self.open(node, free)[1]:
            if place & domain.gpus:
                if spare is None:
                    return 0
                taken -= spare
                here &= ~place
        return self._without(max(-(-(taken - here.bit_count()) // self.wanted.gpus), 0))

    def share(self, gpus: int, cores: int) -> float:
        """Return what part of a place so many GPUs or cores are."""
        wanted = self.wanted
        return max(gpus / wanted.gpus if wanted.gpus else 0.0, cores / wanted.cores if wanted.cores else 0.0)

    def _without(self, places: int) -> int:
        """Return how many find no place if there are so many places fewer."""
        return min(self.count, self.total) - min(self.count, self.total - places)

    def open(self, node: Node, free: int) -> _Open:
        """Return what a node has for them if this is free."""
        key = id(node.hardware), free
        found = self._known.get(key)
        if found is None:
            places = self._places.get(key[0])
            if places is None:
                fit = self._fits[node]
                domains = tuple(domain for domain in fit.domains if domain.level == fit.required)
                places = self._places[key[0]] = fit, domains
            found = self._known[key] = _open(*places, free)
        return found


def _open(fit: Fit, domains: Iterable[Domain], free: int) -> _Open:
    """Return how many requests fit side by side into what is free of each domain, and what they leave of its GPUs."""
    total, parts = 0, []
    for domain in domains:
        gpus, count = (free & domain.gpus).bit_count(), 0
        spare: int | None = None
        if fit.gpus:
            count = gpus // fit.gpus
            spare = gpus - count * fit.gpus
        if fit.cores and (count or not fit.gpus):
            by_cores = fit.hardware.cores(free & domain.groups) // fit.cores
            if by_cores < count or not fit.gpus:
                count, spare = by_cores, None
        total += count
        parts.append((domain.gpus, spare))
    return total, tuple(parts)


class LaterPreemptors:
    """What later preemptors, of no higher priority than the one at hand, would find after a decision.

    A place is room as close together as a later preemptor must have it, of what is idle or held by preemptible
    instances of lower priority. Those of a higher priority may preempt the one at hand, and are not asked; nor are
    those like it, whose place it takes wherever it goes.

    :param later: those to be expected; None if nobody knows: then one more of each instance of several GPUs that runs,
        as close together as the hardware allows. One GPU is never apart.
    """

    def __init__(self, nodes: Sequence[Node], preemptor: Preemptor, later: Iterable[Preemptor] | None) -> None:
        self._nodes, self._preemptor, self._later = nodes, preemptor, later
        self._broken: dict[tuple[int, int, int], int] = {}

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Those who find places now, of the most common kinds."""
        mine = self._preemptor
        own, counts = (mine.priority, mine.gpus, mine.cores), self._expected()
        asked = [each for each in counts if each[0] <= mine.priority and each[:3] != own]
        common = heapq.nsmallest(MOST_KINDS, asked, key=lambda each: (-counts[each], -each[0]))
        found = (Kind(Preemptor("", *each), counts[each], self._nodes) for each in common)
        return tuple(kind for kind in found if kind.total)

    def _expected(self) -> Mapping[tuple[int, int, int, Affinity | None], int]:
        """Return the later preemptors, by what they want."""
        if self._later is not None:
            return Counter((each.priority, each.gpus, each.cores, each.affinity) for each in self._later)
        held: dict[tuple[int, int, int], int] = {}
        for node in self._nodes:
            for alike, count in node.held:
                held[alike] = held.get(alike, 0) + count
        return {(*alike, "guaranteed"): count for alike, count in held.items()}

    def left_out(self, node: Node, taken: int) -> list[tuple[Kind, int]]:
        """Return those who find no place any more once this part of a node is taken, and how many of each kind."""
        lost = ((kind, kind.left_out(node, taken)) for kind in self.kinds)
        return [(kind, count) for kind, count in lost if count]

    def exposed(self, node: Node) -> list[tuple[Kind, int]]:
        """Return the kinds of later preemptors who have places on a node, and what is free for them."""
        free = ((kind, node.below(kind.wanted.priority)) for kind in self.kinds)
        return [(kind, mask) for kind, mask in free if mask and kind.open(node, mask)[0]]

    def broken(self, node: Node, taken: int) -> int:
        """Return how many blocks of 2, 4, 8 and so on GPUs that are close together there are fewer afterwards.

        Those are counted that the preemptor at hand could have, so that it goes where least is whole.
        """
        free = node.below(self._preemptor.priority)
        key = id(node.hardware), free, taken
        found = self._broken.get(key)
        if found is None:
            found = 0
            for block, count in node.hardware.blocks:
                here = free & block
                found += here.bit_count() // count - (here & ~taken).bit_count() // count
            self._broken[key] = found
        return found

    def least_broken(self, node: Node, domain: int, free: int) -> int:
        """Return how many such blocks are broken at least if the preemptor at hand gets its GPUs in a domain.

        :param domain: a mask of its GPUs.
        :param free: what the preemptor at hand could have on the node.
        """
        gpus, found = self._preemptor.gpus, 0
        for block, count in node.hardware.around(domain):
            here = (free & block).bit_count()
            found += here // count - (here - gpus) // count
        return found
