"""What HTCondor says when its queue takes fewer jobs than are asked for. Pure.

What does not live here: asking (condor.py).
"""

from __future__ import annotations

import re

_NAMES = {2: "MAX_JOBS_SUBMITTED", 3: "MAX_JOBS_PER_OWNER", 4: "MAX_JOBS_PER_SUBMISSION"}
_LEFT = re.compile(r"expected next ProcId to be (\d+), but Schedd says -([234])\b")
_NONE = re.compile(r"\b(MAX_JOBS_\w+) exceeded")


def room_left(complaint: str) -> tuple[int, str] | None:
    """Return how many jobs it takes now, and what the limit is called; None if it complains of something else.

    >>> room_left("expected next ProcId to be 4, but Schedd says -3")
    (4, 'MAX_JOBS_PER_OWNER')
    >>> room_left("Failed to create new cluster.SCHEDD:22:MAX_JOBS_SUBMITTED exceeded. Current=2, Limit=2")
    (0, 'MAX_JOBS_SUBMITTED')
    >>> room_left("Failed to create new cluster")
    """
    if found := _LEFT.search(complaint):
        return int(found[1]), _NAMES[int(found[2])]
    return (0, found[1]) if (found := _NONE.search(complaint)) else None


def none_left(limit: str) -> str:
    """Return what to tell where it takes none.

    >>> none_left("MAX_JOBS_PER_OWNER").partition(":")[0]
    "HTCondor's queue takes no more jobs of this user now, by its limit MAX_JOBS_PER_OWNER"
    """
    whose = "of this user" if limit == "MAX_JOBS_PER_OWNER" else "at all"
    return (
        f"HTCondor's queue takes no more jobs {whose} now, by its limit {limit}: the run goes on with the workers that "
        "it has, and asks again"
    )
