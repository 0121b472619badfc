"""Whether calls wait for a cheaper worker: whole runs in virtual time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import Run, machine

from ctxflow.policies.torta.routing import HOLD
from ctxflow.scheduler import events as ev
from suite.depth import for_release, some

POWERED = [ev.RegionSpec("campus", {}, power_price=0.2, home=True)]
ITEM, LOAD = 10.0, 5.0
SHORT, UNTIL = some((450.0, 1200.0), deeply=(900.0, 1800.0))


def tiers(cheap, dear):
    return [ev.TierSpec("cheap", 0, cheap, gpus=1, price=1.0), ev.TierSpec("dear", 0, dear, gpus=1, price=4.0)]


def stream(seed, rate, apps=1, until=900.0):
    """Return what arrives by chance, so many items a second."""
    chance, time, arrivals = random.Random(seed), 0.0, []
    while (time := time + chance.expovariate(rate)) < until:
        arrivals.append((time, f"a{chance.randrange(apps)}", 1))
    return arrivals


class Watched(Run):
    """A run in which it is seen how long calls wait beside a free worker that could take them."""

    def __init__(self, hold, arrivals, cheap=6, dear=6, regions=POWERED, prewarm=True, **options):
        self.beside, self._given = 0.0, {}
        machines = [machine(f"{tier[0]}{n}", tier=tier) for tier, n in _workers(cheap, dear)]
        super().__init__(
            {"policy": "torta", "hold": hold, "prewarm": prewarm}, machines, arrivals, load=LOAD, item=ITEM, size=1,
            regions=regions, tiers=tiers(cheap, dear), **options,
        )  # fmt: skip

    def _heard(self, event, commands):
        super()._heard(event, commands)
        self._given.update({app: time for time, _, app in self.calls[-20:]})
        view = self.simulation.scheduler.view
        for app in view.apps.values():
            if app.backlog and app.waiting_since is not None and list(view.free_holders(app.context)):
                since = max(app.waiting_since, self._given.get(app.id, 0.0))
                self.beside = max(self.beside, view.now - since)

    def needless(self, begin, end, cheap=6):
        """The share of calls between two times that dear workers do, though cheap ones without a pause could."""
        calls = [worker for time, worker, _ in self.calls if begin < time <= end]
        least = len(calls) - cheap * (end - begin) / ITEM
        return (sum(worker.startswith("d") for worker in calls) - least) / len(calls)


def _workers(cheap, dear):
    return [("cheap", n) for n in range(cheap)] + [("dear", n) for n in range(dear)]


@pytest.mark.parametrize("seed", [0, *for_release(1, 2)])
def test_dear_workers_do_less_where_calls_wait_for_cheap_ones(seed):
    arrivals = stream(seed, rate=1.0, until=UNTIL)
    kept, hasty = (Watched(hold, arrivals, contexts=1) for hold in (HOLD, 0.0))
    spans = (300.0, UNTIL)  # Once it was seen how much is free usually.
    assert kept.needless(*spans) < 0.75 * hasty.needless(*spans)
    assert kept.beside > 1.0 >= hasty.beside, "nobody waits if told not to"
    assert kept.outcome.done == hasty.outcome.done == len(arrivals)


def test_nobody_waits_where_workers_are_paid_by_the_hour():
    arrivals = stream(1, rate=1.0, until=SHORT)
    runs = [Watched(hold, arrivals, contexts=1, regions=()).calls for hold in (HOLD, 0.0)]
    assert runs[0] == runs[1]


def test_nobody_waits_while_much_of_the_pool_is_free():
    """Seven of twelve are at work, more than the cheap ones."""
    arrivals = [(0.0, "a0", 12)] + [(40.0 + 1.43 * number, "a0", 1) for number in range(400)]
    runs = [Watched(hold, arrivals, contexts=1).calls for hold in (HOLD, 0.0)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("seed", [0, *for_release(1, 2)])
def test_nobody_waits_in_a_burst_where_half_of_the_pool_is_free_usually(seed):
    arrivals = stream(seed, rate=0.6)
    runs = [Watched(hold, arrivals, contexts=1) for hold in (HOLD, 0.0)]
    assert runs[0].calls == runs[1].calls


@pytest.mark.parametrize("prewarm", [True, False])
def test_nobody_waits_where_a_worker_without_work_would_load_another_context(prewarm):
    """A GPU has room for one of two contexts."""
    arrivals = stream(2, rate=0.9, apps=2, until=SHORT)
    runs = [Watched(hold, arrivals, contexts=2, prewarm=prewarm).calls for hold in (HOLD, 0.0)]
    assert runs[0] == runs[1]


@settings(max_examples=some(5, deeply=15), deadline=None)
@given(
    hold=st.sampled_from([0.1, 0.5, 1.0, HOLD]),
    cheap=st.integers(0, 5),
    dear=st.integers(1, 5),
    busy=st.floats(0.2, 1.3),
    seed=st.integers(0, 9),
)
def test_no_call_waits_beside_a_worker_for_longer_than_it_may(hold, cheap, dear, busy, seed):
    """Ticks of a second, on which it is decided again, come late by one. It takes minutes until anybody may wait."""
    run = Watched(hold, stream(seed, busy * (cheap + dear) / ITEM, until=900.0), cheap, dear, contexts=1)
    assert run.outcome.done == run.outcome.items
    assert run.beside <= min(hold, 2.0) * ITEM + 2.0
