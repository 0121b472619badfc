"""The core: events in, commands out; no I/O, no clock, no threads, no randomness of its own."""

from ctxflow.scheduler.core import Scheduler
from ctxflow.scheduler.run_state import Limits, Policies

__all__ = ["Limits", "Policies", "Scheduler"]
