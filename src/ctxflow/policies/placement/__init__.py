"""Which contexts go on which tiers."""

from ctxflow.policies.placement.everywhere import Everywhere

__all__ = ["Everywhere"]
