"""Who gives way when a context that waits needs a worker of its own."""

from ctxflow.policies.preemption.live import ExactPreemption, IncrementalMinimalPreemption, StandardPreemption
from ctxflow.policies.preemption.none import NoPreemption

__all__ = ["ExactPreemption", "IncrementalMinimalPreemption", "NoPreemption", "StandardPreemption"]
