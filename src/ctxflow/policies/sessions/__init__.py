"""Which worker carries which session."""

from ctxflow.policies.sessions.simple import LeastLoadedSessions
from ctxflow.policies.sessions.turboserve import TurboServe

__all__ = ["LeastLoadedSessions", "TurboServe"]
