"""The engines' contract on plain calls that overlap, on the embedded engine and the simulated one."""

from test_item_contract import TestEmbedded as Embedded
from test_item_contract import TestSimulated as Simulated

from ctxflow.testing.thread_contract import ThreadContract


class TestEmbedded(ThreadContract):
    make = Embedded.make
    notify = Embedded.notify


class TestSimulated(ThreadContract):
    executes, tier = False, "default"
    make = Simulated.make
    notify = Simulated.notify
