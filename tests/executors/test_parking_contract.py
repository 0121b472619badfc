"""Contexts that are parked: the engines' contract, embedded and simulated; and apps that take turns on a worker."""

import contextlib
import logging
import os
import random
import signal
import time

from executor_helpers import started
from test_contract import TestEmbedded as Embedded

from ctxflow import context, context_app
from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.host.linux import machine_memory
from ctxflow.scheduler.log import replay
from ctxflow.simulator import Drawn, GpuTimes
from ctxflow.testing.parking_contract import ParkingContract
from waiting import finished


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


class Slow:
    """What takes its time to park and to wake, so that whoever ends it may meet it at that."""

    def __init__(self, name):
        self.name = name
        time.sleep(0.3)

    def park(self):
        time.sleep(0.02)

    def wake(self):
        time.sleep(0.02)


@context(memory=machine_memory() * 3 // 5)
def slow(name):
    """One of them at a time is all that one worker of this machine can have take calls."""
    return Slow(name)


def told(made, item):
    return made.name, os.getpid(), item


def apps_of(*names, **options):
    return {name: context_app(slow.options(**options)(name))(told) for name in names}


def test_apps_take_turns_on_one_worker_without_another_build(tmp_path):
    apps = apps_of("a", "b")
    with started(tmp_path / "run", workers=1) as executor:
        answers = [answer for _ in range(3) for app in apps.values() for answer in [finished(app(1)).result()]]
        status = executor.status()
    assert [name for name, _, _ in answers] == ["a", "b"] * 3
    assert len({pid for _, pid, _ in answers}) == 2
    assert status.loads == 2
    assert status.contexts["slow"] == {"ready": 1, "parked": 1}


def test_what_is_not_to_be_parked_is_built_again(tmp_path):
    apps = apps_of("a", "b", park=False)
    with started(tmp_path / "run", workers=1) as executor:
        answers = [answer for _ in range(2) for app in apps.values() for answer in [finished(app(1)).result()]]
        assert executor.status().loads == 4
    assert len({pid for _, pid, _ in answers}) == 4


def test_whatever_is_killed_where_it_is_parked_parking_or_waking_no_answer_is_lost(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "ctxflow")  # Of workers that are lost, and what follows from that.
    luck, apps, pids = random.Random(7), apps_of("a", "b"), {}
    with started(tmp_path / "run", workers=1) as executor:
        for number in range(60):
            name, other = ("a", "b") if number % 2 else ("b", "a")
            future = apps[name](number)
            time.sleep(luck.uniform(0, 0.06))
            match luck.choice(["the one that gives way", "the one that is wanted", "the host", *["nothing"] * 6]):
                case "the one that gives way":
                    _kill(pids.get(other))
                case "the one that is wanted":
                    _kill(pids.get(name))
                case "the host":
                    executor.engine.evict(seconds=0.1)
            made, pids[name], item = finished(future).result()
            assert (made, item) == (name, number)
        assert executor.status().items_dead == 0
        last = [finished(apps[name](0)).result() for name in apps]
    assert [made for made, _, _ in last] == ["a", "b"]
    [log] = tmp_path.rglob("events.jsonl")
    text = log.read_text()
    assert text.count('"is":"ContextWoken"') > 5, "it is about contexts that are parked and woken"
    assert text.count('"is":"ParkFailed"') + text.count('"is":"ContextUnloaded"') > 2, "and about those that are killed"
    assert replay(text.splitlines(keepends=True)) > 100


def _kill(pid):
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
