"""How many workers of each tier to hold."""

from ctxflow.policies.scaling.fixed import FixedWorkers

__all__ = ["FixedWorkers"]
