"""The two problems that `ctxflow plan --problem` knows by name."""

from __future__ import annotations

import functools
from importlib import resources

from ctxflow.policies.placement.problem import Problem


def paper_instance() -> Problem:
    """The instance that every table names: `paper_instance.json`, which is `draw(1)`: all six, six and ten.

    Seed 1 is the first from 0 whose draw can be served whole, as the paper's can, which says no more of its numbers.
    """
    return _stored("paper_instance.json")


def azure_instance() -> Problem:
    """The instance whose lengths and rates come from the Azure trace: `azure_instance.json`."""
    return _stored("azure_instance.json")


@functools.cache
def _stored(name: str) -> Problem:
    return Problem.from_json((resources.files(__package__) / name).read_text())
