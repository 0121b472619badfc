"""How many items a worker's next batch takes."""

from ctxflow.policies.batching.coalescing import Coalescing
from ctxflow.policies.batching.fixed import Fixed
from ctxflow.policies.batching.opportunistic import Opportunistic

__all__ = ["Coalescing", "Fixed", "Opportunistic"]
