"""How many workers of each tier to hold."""

from ctxflow.policies.scaling.fixed import FixedWorkers
from ctxflow.policies.scaling.queue_proportional import QueueProportional

__all__ = ["FixedWorkers", "QueueProportional"]
