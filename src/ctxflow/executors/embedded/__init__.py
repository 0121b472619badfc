"""The embedded engine: workers on this machine, each a context host process that is spoken to over a socket."""

from ctxflow.executors.embedded.engine import TIER, EmbeddedEngine, default_workers

__all__ = ["TIER", "EmbeddedEngine", "default_workers"]
