"""What of the demand no plan can meet, which constraint makes it so, and what is planned for instead.

Sentences have no measured figures in them: what is said again is the same, and is not told twice.

What does not live here: plans. (The reasons of a problem given as data are in `reasons`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ctxflow.policies.agh.asked import SERVED
from ctxflow.policies.agh.demand import Wanted


def without_impossible(wanted: Sequence[Wanted]) -> tuple[list[Wanted], list[str]]:
    """What can be planned for, and a sentence for each limit that had to be left out.

    >>> from ctxflow.policies.agh.demand import ContextOption
    >>> large = ContextOption("large", {"a10": 4.0}, 10.0)
    >>> left, reasons = without_impossible([Wanted("ask", 9.0, (large,), 2.0, None)])
    >>> left[0].max_delay, reasons
    (None, ['ask: (5i) no tier answers an item within max_delay = 2 s: it is planned for without the limit'])
    """
    found, reasons = [], []
    for each in wanted:
        best = min(seconds for candidate in each.candidates for seconds in candidate.seconds.values())
        if each.max_delay is None or best <= each.max_delay:
            found.append(each)
            continue
        found.append(dataclasses.replace(each, max_delay=None))
        limit = f"max_delay = {each.max_delay:g} s"
        reasons.append(f"{each.app}: (5i) no tier answers an item within {limit}: it is planned for without the limit")
    return found, reasons


def too_much(unserved: Sequence[float]) -> list[str]:
    """That there are not workers enough, if so.

    :param unserved: of each query type, a share.
    """
    late = "(5g) all workers together do not answer in time all that waits: all of them are used"
    return [late] if max(unserved) > SERVED else []


def unable(apps: Sequence[str]) -> list[str]:
    """That no tier can run some apps."""
    return [f"{app}: (5f) no tier has the GPUs, and the memory on each, that its context needs" for app in apps]
