"""Items that must run apart from others of their app, with the places where they failed.

What does not live here: where they may run (eligibility.py), and what becomes of them there (items.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

Place = tuple[str, tuple[str, ...]]
"""A host, and the ids of the GPUs that a worker has of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Items that run together, and with no others.

    :ivar failed_on: the places where they failed, alone or as a part of more.
    :ivar machines: those of them where it looked like the machine's fault: the last to try it on again.
    :ivar moves: how often they went elsewhere as they were, since it looked like the place's fault.
    :ivar since: when they came to wait.
    """

    items: tuple[int, ...]
    failed_on: frozenset[Place] = frozenset()
    machines: frozenset[Place] = frozenset()
    moves: int = 0
    since: float = 0.0


class Groups:
    """The groups of an app, by where they failed: so nobody has to look through all to find one for a worker."""

    def __init__(self) -> None:
        self._waiting: dict[frozenset[Place], collections.deque[Group]] = {}
        self.items = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Group]:
        return (group for groups in self._waiting.values() for group in groups)

    @property
    def firsts(self) -> Iterable[Group]:
        """Of those that failed at the same places, the one that comes next."""
        return (groups[0] for groups in self._waiting.values())

    def push(self, *groups: Group) -> None:
        """These come next, in this order."""
        for group in reversed(groups):
            self._waiting.setdefault(group.failed_on, collections.deque()).appendleft(group)
            self.items += len(group.items)

    def append(self, *groups: Group) -> None:
        """These come after others that failed at the same places, so that what fails at once puts none of them off."""
        for group in groups:
            self._waiting.setdefault(group.failed_on, collections.deque()).append(group)
            self.items += len(group.items)

    def pop(self, first: Group) -> Group:
        """Take one of the firsts; those that failed elsewhere are next, else one that fails at once would be all."""
        groups = self._waiting.pop(first.failed_on)
        group = groups.popleft()
        if groups:
            self._waiting[group.failed_on] = groups
        self.items -= len(group.items)
        return group

    def clear(self) -> list[Group]:
        """Take all."""
        groups = list(self)
        self._waiting.clear()
        self.items = 0
        return groups
