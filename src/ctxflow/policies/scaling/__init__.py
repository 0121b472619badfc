"""How many workers of each tier to hold; and where sessions go and how many GPUs they want, as functions on data.

The functions are TurboServe's: assignment, rebalancing and consolidation place sessions, autoscaling and volatility
say how many GPUs to hold, profiling and bounds look back (docs/scaling.md).
"""

from ctxflow.policies.scaling.closed_loop import ClosedLoop
from ctxflow.policies.scaling.fixed import FixedWorkers
from ctxflow.policies.scaling.queue_proportional import QueueProportional

__all__ = ["ClosedLoop", "FixedWorkers", "QueueProportional"]
