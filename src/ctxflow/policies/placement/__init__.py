"""Which contexts go on which tiers.

The planner of the paper on GH and AGH (docs/placement.md): a `Problem`, `solve` with one
of `METHODS`, and the independent `check` of an `Allocation`.
"""

from ctxflow.policies.placement.allocation import Allocation, Costs, Deployment, Route
from ctxflow.policies.placement.check import Violation, check
from ctxflow.policies.placement.draft import Mechanisms
from ctxflow.policies.placement.problem import Model, Problem, QueryType, Tier
from ctxflow.policies.placement.reasons import Reason, reasons
from ctxflow.policies.placement.solution import METHODS, Solution, solve

__all__ = [
    "METHODS",
    "Allocation",
    "Costs",
    "Deployment",
    "Mechanisms",
    "Model",
    "Problem",
    "QueryType",
    "Reason",
    "Route",
    "Solution",
    "Tier",
    "Violation",
    "check",
    "reasons",
    "solve",
]
