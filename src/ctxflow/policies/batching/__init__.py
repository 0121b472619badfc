"""How many items a worker's next batch takes."""

from ctxflow.policies.batching.fixed import Fixed

__all__ = ["Fixed"]
