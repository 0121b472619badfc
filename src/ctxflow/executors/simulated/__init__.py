"""The simulated engine: workers in virtual time. How long things take at a real site is in ctxflow.simulator.

- `market.py`: machines, when they may be lent, what takes how long there, what may be wrong, and who has them.
- `shared_pace.py`: engines that divide their time among what is in flight.
- `engine.py`: the engine, which does with each command what a worker would do.
"""

from typing import TYPE_CHECKING

from ctxflow.executors.simulated.engine import Account, SimulatedEngine
from ctxflow.executors.simulated.market import (
    Availability,
    Fault,
    NoStaging,
    SimulatedMachine,
    Staging,
    Timers,
    Times,
    always,
)
from ctxflow.executors.simulated.shared_pace import SharedPace, SharingTimes
from ctxflow.renamed import names_of

__all__ = [
    "Account", "Availability", "Fault", "NoStaging", "SharedPace", "SharingTimes", "SimulatedEngine",
    "SimulatedMachine", "Staging", "Timers", "Times", "always",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__)
