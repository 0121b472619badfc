"""Who gives way when an app that waits has no worker."""

from ctxflow.policies.preemption.none import NoPreemption

__all__ = ["NoPreemption"]
