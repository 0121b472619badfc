"""What tests and benchmarks need: evictions on purpose, slow workers, small models, the contract suites.

Slow workers: `ContextExecutor(load_site("local", slowdowns=[1, 2.5]))`, or the table `[embedded]` of a site file with
`slowdowns = [1, 2.5]`, makes the second worker 2.5 times slower. `ctxflow.testing.small_models` is not imported here
because it needs torch.
"""

from ctxflow.testing.evictions import Evictions

__all__ = ["Evictions"]
