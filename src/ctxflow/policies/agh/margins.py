"""Plan within limits on delay and error that are tighter than those given, as what is known of both is not exact."""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.policies.agh.problem import Problem

USUAL = 0.25
"""By which share delays and errors may be above what is known, where nothing says how exactly they are known."""


def with_margins(problem: Problem, margins: Sequence[float]) -> Problem:
    """Return the problem with each query type's limits divided by 1 plus its margin.

    :param margins: by query type; 0 for the limits as they are.
    :raises ValueError: for a margin under 0, or another number of margins than query types.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> kinds = paper_instance().query_types
    >>> planned = with_margins(paper_instance(), [1.0] * len(kinds)).query_types
    >>> planned[0].max_error == kinds[0].max_error / 2
    True
    """
    if len(margins) != len(problem.query_types):
        raise ValueError(
            f"{len(margins)} margins are given for {len(problem.query_types)} query types: give one of each"
        )
    if any(not 0 <= margin < float("inf") for margin in margins):
        raise ValueError(f"the margins are {list(margins)}: each has to be a number, 0 or more")
    kinds = tuple(
        kind.model_copy(
            update={
                "max_delay_seconds": kind.max_delay_seconds / (1 + margin),
                "max_error": kind.max_error / (1 + margin) if kind.max_error < 1 else 1.0,
            }
        )
        for kind, margin in zip(problem.query_types, margins, strict=True)
    )
    return problem.model_copy(update={"query_types": kinds})
