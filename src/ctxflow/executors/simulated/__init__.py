"""The simulated engine: workers in virtual time.

- `machine_models.py`: what a resource manager may lend and when, what takes how long there, and what may be wrong.
- `market.py`: machines that come, go and are given to workers.
- `engine.py`: the engine, which does with each command what a worker would do.

How long things take at a real site is in ctxflow.simulator.
"""

from typing import TYPE_CHECKING

from ctxflow.executors.simulated.engine import Account, SimulatedEngine
from ctxflow.executors.simulated.machine_models import (
    Availability,
    Fault,
    NoStaging,
    SimulatedMachine,
    Staging,
    Timers,
    Times,
    always,
)
from ctxflow.renamed import names_of

__all__ = [
    "Account",
    "Availability",
    "Fault",
    "NoStaging",
    "SimulatedEngine",
    "SimulatedMachine",
    "Staging",
    "Timers",
    "Times",
    "always",
]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__)
