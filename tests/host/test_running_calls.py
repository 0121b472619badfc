"""Calls that are to be interrupted, by themselves; tests/host/test_host.py has them in a library process."""

import os
import signal

import pytest

from ctxflow.host.linux import CALL_NUMBER_BYTES, INTERRUPT_SIGNAL
from ctxflow.host.running_calls import CallInterrupted, Interrupts


@pytest.fixture
def asked():
    """The pipe in which calls' numbers come, and the interrupts that hear of them."""
    handler = signal.getsignal(INTERRUPT_SIGNAL)
    reads, writes = os.pipe2(os.O_NONBLOCK)
    running = os.memfd_create("running")
    os.truncate(running, CALL_NUMBER_BYTES)
    yield lambda call: os.write(writes, call.to_bytes(CALL_NUMBER_BYTES, "little")), Interrupts(reads, running)
    signal.signal(INTERRUPT_SIGNAL, handler)
    for descriptor in (reads, writes, running):
        os.close(descriptor)


def test_a_signal_while_numbers_are_read_costs_none_of_them(asked, monkeypatch):
    ask, interrupts = asked
    read, others = os.read, [1]

    def interrupted_read(*arguments):
        block = read(*arguments)
        if others:  # The second call's number has been read, and nobody has it yet.
            ask(others.pop())
            signal.raise_signal(INTERRUPT_SIGNAL)
        return block

    monkeypatch.setattr(os, "read", interrupted_read)
    ask(2)
    with pytest.raises(CallInterrupted):
        interrupts.begin(1)
        signal.raise_signal(INTERRUPT_SIGNAL)
    interrupts.end()
    with pytest.raises(CallInterrupted):
        interrupts.begin(2)
    interrupts.end()
    interrupts.begin(3)
