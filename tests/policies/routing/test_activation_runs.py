"""The scaling policy `activation` in whole runs: as many workers as Eq. 6 says, gradually fewer, cheap ones first."""

import dataclasses
import math
import random

import pytest
from simulated_runs import REGIONS, Run, machine

from ctxflow.policies.torta.scaling import LEAST_SAFETY, MOST_SAFETY, Activation, _Demand, _Work
from ctxflow.scheduler import events as ev

STREAM = [(1.0 * n, "a0", 2) for n in range(300)]  # Two workers' work, until 300 s.


def run(machines, arrivals, regions=(), tiers=None, **options):
    return Run(
        "torta", machines, arrivals, contexts=1, load=5.0, regions=regions, scaling={"policy": "activation", **options},
        tiers=tiers or [ev.TierSpec("default", 0, len(machines), gpus=1, boot_seconds=10.0)],
    )  # fmt: skip


def asked_at(found, time, tier="default"):
    return [workers for when, name, workers in found.asked if name == tier and when <= time][-1]


def test_a_stream_gets_what_eq_6_says_and_gives_it_back_gradually():
    found = run([machine(f"m{n}") for n in range(10)], [*STREAM, (400.0, "a0", 1)])
    # 90 items in a slot of 45 s, one second each: (90 + sqrt(90) + what is under way) / 45.
    assert 3 <= asked_at(found, 250) <= 4
    assert asked_at(found, 302) >= 2, "who has just worked is kept"
    assert asked_at(found, 390) == 0, "in the end nobody is needed"
    assert found.outcome.done == found.outcome.items


def test_a_burst_gets_workers_at_once_and_no_more_than_its_calls():
    found = run([machine(f"m{n}") for n in range(10)], [(0.0, "a0", 10), (200.0, "a0", 400)])
    assert asked_at(found, 1) <= 3, "ten items in batches of four, of unknown length"
    assert asked_at(found, 203) >= math.ceil(400 / 45), "400 s of work in 45 s"


def test_the_buffer_asks_for_more_when_it_fills():
    machines = [machine(f"m{n}") for n in range(20)]
    arrivals = [(0.0, "a0", 4), (103.5, "a0", 200)]
    usual, full = (run(machines, arrivals, buffer=size) for size in (1000, 200))
    assert asked_at(full, 105) > asked_at(usual, 105) == math.ceil(200 / 45)


def test_cheap_regions_are_activated_first():
    """The tiers of the far region, where power is cheap, have room for all of the stream."""
    tiers = [ev.TierSpec(name, 0, 6, gpus=1, boot_seconds=10.0) for name in ("here", "there")]
    campus, north = (
        ev.RegionSpec(r.name, r.latency, r.bandwidth, r.power_price, (tier,), r.home)
        for r, tier in zip(REGIONS, ("here", "there"), strict=True)
    )
    machines = [machine(f"{tier}{n}", region, tier=tier) for tier, region in (("here", "campus"), ("there", "north"))
                for n in range(6)]  # fmt: skip
    found = run(machines, STREAM, [campus, north], tiers)
    assert (asked_at(found, 250, "here"), asked_at(found, 250, "there")) == (0, 3) or asked_at(found, 250, "there") == 4
    later = [found.regions[worker] for time, worker, _ in found.calls if time > 100]
    assert set(later) == {"north"}


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_forecast_that_is_no_number_counts_as_none(rate):
    found = run([machine("m0")], [(0.0, "a0", 4)])
    view = found.simulation.scheduler.view
    found.simulation.scheduler.state.arrivals._forecast = {"a0": rate}
    assert Activation().target(view) == {"default": 0}


@pytest.mark.parametrize("option", ["slot_seconds", "buffer", "safety", "boot_seconds", "patience", "batch_size"])
def test_options_that_make_no_sense_are_refused(option):
    with pytest.raises(ValueError, match=option):
        Activation(**{option: -1})


def test_fewer_are_held_though_every_worker_is_used_in_turn():
    """Once fewer were enough for a warm-up, some go: a routing that lets no worker rest keeps none of them."""
    machines = [machine(f"m{n}") for n in range(10)]
    arrivals = [(0.5 * n, "a0", 4) for n in range(200)] + [(100.0 + 4 * n, "a0", 4) for n in range(100)]
    found = Run(
        {"policy": "round-robin", "keep": True}, machines, arrivals, contexts=1, load=5.0, regions=(), size=4,
        scaling={"policy": "activation"}, tiers=[ev.TierSpec("default", 0, 10, gpus=1, boot_seconds=10.0)],
    )  # fmt: skip
    assert asked_at(found, 90) >= 8, "eight items a second, a second each"
    assert asked_at(found, 390) <= 4, "an item a second"
    assert found.outcome.done == found.outcome.items


PRICED = [
    ev.TierSpec("cheap", 0, 4, gpus=1, price=1.0, boot_seconds=10.0),
    ev.TierSpec("dear", 0, 4, gpus=1, price=3.0, boot_seconds=10.0),
]


def priced(cheap, arrivals):
    machines = [machine(f"c{n}", tier="cheap") for n in range(cheap)]
    return run([*machines, *(machine(f"d{n}", tier="dear") for n in range(4))], arrivals, tiers=PRICED)


def test_the_cheapest_tier_is_asked_alone_while_it_gives():
    found = priced(4, STREAM)
    assert max(workers for _, tier, workers in found.asked if tier == "cheap") >= 3
    assert all(workers == 0 for time, tier, workers in found.asked if tier == "dear" and time > 100)


def test_what_a_tier_does_not_give_is_asked_of_the_next_after_three_boots():
    found = priced(1, STREAM)
    spilled = [time for time, tier, workers in found.asked if tier == "dear" and workers and time >= 30]
    assert spilled, "one of the cheap tier's four workers is there"
    assert asked_at(found, 250, "cheap") >= 3, "it is asked all the same, should it have one"
    assert asked_at(found, 250, "dear") >= 2


def test_the_safety_follows_how_wrong_the_forecast_was():
    """A stream without surprises needs the least; bursts that no trend shows need more."""
    even = _Demand(45.0)
    bursts = _Demand(45.0)
    for second in range(0, 2000, 5):
        work = _Work(items=8, calls=8.0, arrived={"a": 2 * second}, _seconds=4.0, _counted=1.0)
        even.look(float(second), work, 30.0, {})
        more = 12.0 if second % 100 < 10 else 0.0
        bursts.look(float(second), dataclasses.replace(work, calls=8.0 + more), 30.0, {})
    assert even.expected == pytest.approx(90.0, rel=0.05), "two a second"
    assert even.safety == LEAST_SAFETY and bursts.safety == MOST_SAFETY


def test_an_app_that_comes_from_another_group_is_no_surge():
    demand = _Demand(45.0)
    for second in range(0, 500, 5):
        arrived = {"a": second} if second < 300 else {"a": second, "b": 10**6}
        demand.look(float(second), _Work(calls=1.0, arrived=arrived, _seconds=1.0, _counted=1.0), 30.0, {})
    assert demand.expected == pytest.approx(45.0, rel=0.1)


def test_a_measured_safety_holds_more_and_waits_less():
    """A stream of single items: what runs at once varies more than what comes in a slot."""
    arrivals = [(0.0, "a0", 1)] + [(30 + time, "a0", 1) for time in poisson(1.0, 600.0)]
    runs = {
        safety: Run(
            "torta", [machine(f"m{n}") for n in range(12)], arrivals, contexts=1, load=5.0, item=3.0, size=1,
            regions=(), scaling={"policy": "activation", "safety": safety},
            tiers=[ev.TierSpec("default", 0, 12, gpus=1, boot_seconds=10.0)],
        )
        for safety in (1.0, "measured")
    }  # fmt: skip
    held = {safety: sum(asked_at(found, time) for time in range(200, 600, 20)) for safety, found in runs.items()}
    assert held["measured"] > held[1.0]
    with pytest.raises(ValueError, match="measured"):
        Activation(safety="guessed")


def poisson(rate, end):
    chance, now = random.Random(3), 0.0
    while (now := now + chance.expovariate(rate)) < end:
        yield now
