"""What tests and benchmarks need: evictions on purpose, slow workers, the engines' contract suite.

Slow workers: `ContextExecutor(slowdowns=[1, 2.5])` makes the second worker 2.5 times slower.
"""

from ctxflow.testing.evictions import Evictions

__all__ = ["Evictions"]
