"""The simulated engine: workers in virtual time.

- `machines.py`: what can be had of a resource manager, and when.
- `market.py`: machines that come, go and are given to workers.
- `faults.py`: what may be wrong with hosts.
- `models.py`: the protocols of what takes time: matching, staging, loading, running.
- `engine.py`: the engine, which does with each command what a worker would do.

How long things take at a real site is in ctxflow.simulator.
"""

from ctxflow.executors.simulated.engine import Account, SimulatedEngine
from ctxflow.executors.simulated.faults import Fault
from ctxflow.executors.simulated.machines import Availability, Machine, always
from ctxflow.executors.simulated.models import NoStaging, Staging, Timers, Times

__all__ = [
    "Account",
    "Availability",
    "Fault",
    "Machine",
    "NoStaging",
    "SimulatedEngine",
    "Staging",
    "Timers",
    "Times",
    "always",
]
