"""Contexts that are parked: the engines' contract, embedded and simulated; and apps that take turns on a worker."""

from test_contract import TestEmbedded as Embedded

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.simulator import Drawn, GpuTimes
from ctxflow.testing.parking_contract import ParkingContract


class TestEmbedded(ParkingContract):
    make = Embedded.make


class ParkingTimes(GpuTimes):
    """Of contexts that take a tenth of a second to park and a fifth to wake."""

    def park(self, context):
        return 0.1, 0.2, 1000


class TestSimulated(ParkingContract):
    executes, tier = False, "default"

    def make(self):
        times = ParkingTimes({"": 0.01}, loading=Drawn(0.25), matching=Drawn(0.5))
        return SimulatedEngine([SimulatedMachine("a"), SimulatedMachine("b")], times)
