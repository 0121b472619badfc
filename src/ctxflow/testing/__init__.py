"""What tests and benchmarks need: evictions on purpose, slow workers, small models, the engines' contract suite.

Slow workers: `ContextExecutor(slowdowns=[1, 2.5])` makes the second worker 2.5 times slower. Small models of random
weights: `ctxflow.testing.small_models`, not imported here because it needs torch.
"""

from ctxflow.testing.evictions import Evictions

__all__ = ["Evictions"]
