"""GH and AGH: which models and contexts go on which tiers, at the least cost (docs/placement.md).

For data: a `Problem`, `solve` with one of `METHODS`, and the independent `check` of an `Allocation`. For a live run:
the placement policy `agh` (`placement`).
"""

from ctxflow.policies.agh.allocation import Allocation, CostTerms, Deployment, Route, Violation, check
from ctxflow.policies.agh.draft import Mechanisms
from ctxflow.policies.agh.problem import GpuTier, Model, Problem, QueryType
from ctxflow.policies.agh.solution import METHODS, Solution, solve
from ctxflow.policies.agh.unserved import Reason, Unserved, judge

__all__ = [
    "METHODS",
    "Allocation",
    "CostTerms",
    "Deployment",
    "GpuTier",
    "Mechanisms",
    "Model",
    "Problem",
    "QueryType",
    "Reason",
    "Route",
    "Solution",
    "Unserved",
    "Violation",
    "check",
    "judge",
    "solve",
]
