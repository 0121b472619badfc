"""Which ready work goes to which free slot: the simple routing policies."""

from ctxflow.policies.routing.simple import ContextAffinity, LeastLoaded, RoundRobin

__all__ = ["ContextAffinity", "LeastLoaded", "RoundRobin"]
