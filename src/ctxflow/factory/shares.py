"""How a tier's workers are shared among runs. Pure.

What does not live here: what runs want (exchange.py), and asking for it (service.py).
"""

from __future__ import annotations

from collections.abc import Mapping


def shares(wants: Mapping[str, int], maximum: int) -> dict[str, int]:
    """Who gets how many: each the same, but nobody more than it wants; what one leaves over goes to the others.

    No run that gets less than it wants has fewer than another, but for the one worker that cannot be halved; that goes
    to the first.

    >>> shares({"a": 2, "b": 20, "c": 20}, 11)
    {'a': 2, 'b': 5, 'c': 4}
    """
    given = dict.fromkeys(wants, 0)
    left = min(maximum, sum(wants.values()))
    while left > 0:
        hungry = [run for run, want in wants.items() if given[run] < want]
        each = max(1, left // len(hungry))
        for run in hungry[:left]:
            more = min(each, wants[run] - given[run])
            given[run] += more
            left -= more
    return given


def grants(wants: Mapping[str, int], held: Mapping[str, int], maximum: int) -> dict[str, int]:
    """How many jobs each run may hold now: its share, as soon as there is room for it.

    Nobody is granted a job beyond the maximum while others still hold more than their share.

    :param held: how many jobs each has, also those of runs that want nothing any more.

    >>> grants({"old": 8, "new": 8}, {"old": 7, "new": 0}, 8)
    {'old': 4, 'new': 1}
    """
    share = shares(wants, maximum)
    lacking = {run: max(0, share[run] - held.get(run, 0)) for run in wants}
    room = max(0, maximum - sum(held.values()))
    more = shares(lacking, room)
    return {run: min(share[run], held.get(run, 0) + more[run]) for run in wants}


def bounds(
    wants: Mapping[str, int], held: Mapping[str, int], leaving: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """How many workers each run is told that it may have: all there may be, unless there are too many.

    That is so after the maximum was lowered: then a run that has more than its share has the others leave, when they
    have done what they run.

    :param leaving: what runs that are over still hold.

    >>> bounds({"a": 8, "b": 1}, {"a": 7, "b": 1}, {}, 4), bounds({"a": 8, "b": 1}, {"a": 3, "b": 1}, {}, 4)
    ({'a': 3, 'b': 4}, {'a': 4, 'b': 4})
    """
    share = shares(wants, maximum)
    too_many = sum(held.values()) + sum(leaving.values()) > maximum
    return {run: share[run] if too_many and held.get(run, 0) > share[run] else maximum for run in wants}


def to_give(
    wants: Mapping[str, int], held: Mapping[str, int], running: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """How many running workers each run must give up, so that others get their share.

    None, where nobody lacks any: after the maximum was lowered, workers leave as `bounds` says, when they have done
    what they run. None of a run that wants no more than its share either: it releases what it does not need by itself.

    :param running: how many of the jobs held run; the others are taken back without this.

    >>> to_give({"old": 8, "new": 8}, {"old": 8, "new": 0}, {"old": 8, "new": 0}, 8)
    {'old': 4, 'new': 0}
    """
    share = shares(wants, maximum)
    lacking = sum(max(0, share[run] - held.get(run, 0)) for run in wants)
    waiting = {run: min(held.get(run, 0) - running.get(run, 0), held.get(run, 0) - share[run]) for run in wants}
    free = maximum - sum(held.values()) + sum(max(0, count) for count in waiting.values())
    surplus = {run: max(0, running.get(run, 0) - share[run]) if want > share[run] else 0 for run, want in wants.items()}
    return shares(surplus, max(0, lacking - free)) if lacking else dict.fromkeys(wants, 0)
