"""The batching policy opportunistic: its formula, what it does before it knows, at the end, and with stragglers."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.simulated import SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies.opportunistic import (
    PRIOR_EVICTIONS,
    PRIOR_SECONDS,
    SWING,
    Opportunistic,
    _long_turn,
    best_seconds,
)
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.simulator import GpuTimes, Simulation, Workload
from ctxflow.simulator.pools import MixedTimes


def useful(seconds, cost, rate):
    """Seconds of useful items a second, from the derivation."""
    return rate * seconds / math.expm1(rate * (cost + seconds))


@given(cost=st.floats(1e-3, 1e3), rate=st.floats(1e-6, 0.1))
def test_no_other_batch_does_more_useful_work(cost, rate):
    best = best_seconds(cost, rate)
    assert 0 < best <= 1 / rate * (1 + 1e-9)
    for other in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert useful(best, cost, rate) >= useful(best * other, cost, rate) * (1 - 1e-9)


@given(cost=st.floats(1e-3, 1.0), rate=st.floats(1e-6, 1e-4))
def test_it_meets_young_where_calls_cost_little(cost, rate):
    assert best_seconds(cost, rate) == pytest.approx(math.sqrt(2 * cost / rate), rel=0.01)


def test_without_evictions_or_cost_the_ends_are_plain():
    assert best_seconds(1.0, 0.0) == math.inf
    assert best_seconds(0.0, 0.1) == 0.0


@dataclass
class Worker:
    id: str
    seconds: float | None = None
    done: int = 0
    tier: str = "default"
    gpu_model: str | None = "A10"
    joined: float = 0.0
    beside: float = 1.0
    flying: int = 0
    contexts: dict = field(default_factory=lambda: {"c": SimpleNamespace(state="ready")})

    def seconds_per_item(self, app):
        return self.seconds

    def calls_beside(self, app):
        return self.beside

    def in_flight(self, context):
        return self.flying

    def items_done(self, app):
        return self.done


def app(backlog=10**6, cost=0.5, batch_size=None, error=0.0):
    known = {"call_seconds": cost, "call_seconds_error": error}
    return SimpleNamespace(id="a", context="c", backlog=backlog, overlaps=False, batch_size=batch_size, **known)


def view(workers, now=1000.0, the_app=None, attempts=(), tiers=None):
    return SimpleNamespace(
        now=now,
        workers={w.id: w for w in workers},
        apps={"a": the_app or app()},
        attempts={a.id: a for a in attempts},
        tiers=tiers or {},
        answered=lambda attempt: False,
    )


def test_the_first_batch_is_one_item_and_then_no_more_than_three_times_what_was_shown():
    policy = Opportunistic()
    worker = Worker("w")
    assert policy.size(view([worker]), app(), worker) == 1
    sizes = []
    for now in range(20):
        sizes.append(policy.size(view([worker], now=1000.0 + now), app(), worker))
        worker.done, worker.seconds = worker.done + sizes[-1], 0.1
    assert sizes[:4] == [1, 3, 9, 27]
    assert sizes[-1] > 100


def test_a_new_worker_begins_with_what_is_known_of_its_model():
    known, alike, other = Worker("k", 0.1, 5000), Worker("n"), Worker("o", gpu_model="H100")
    policy, seen = Opportunistic(), view([known, alike, other])
    full = best_seconds(0.5, PRIOR_EVICTIONS / (PRIOR_SECONDS + 3000.0)) / 0.1
    assert policy.size(seen, app(), alike) == pytest.approx(full / 3, abs=1)
    assert policy.size(seen, app(), other) == 1
    gone = view([alike], now=1100.0)
    assert policy.size(gone, app(), alike) > 100, "what a worker showed is known when it is gone"


def test_faster_workers_get_more_and_all_the_same_time():
    fast, slow = Worker("f", 0.1, 5000), Worker("s", 0.4, 5000, gpu_model="TITAN X")
    policy = Opportunistic()
    ratio = policy.size(view([fast, slow]), app(), fast) / policy.size(view([fast, slow]), app(), slow)
    assert ratio == pytest.approx(4, rel=0.05)


def test_the_more_evictions_the_smaller_the_batch():
    worker = Worker("w", 0.1, 5000)

    def size(evicted):
        tier = SimpleNamespace(lifetimes=[100.0] * evicted, eviction_rate=0.01 if evicted else None)
        return Opportunistic().size(view([worker], tiers={"default": tier}), app(), worker)

    assert size(0) > 2 * size(30) > 0


def test_batches_shrink_with_the_queue_to_half_of_each_workers_share():
    workers = [Worker(f"w{n}", 0.1, 5000) for n in range(10)]

    def size(backlog):
        return Opportunistic().size(view(workers), app(backlog), workers[0])

    assert size(10**6) > size(2000) == 100 > size(1000) == 50
    assert size(1) == pytest.approx(0.5 / 0.1), "a batch takes as long as its call costs"


def test_the_apps_own_batch_size_is_a_ceiling_and_so_is_the_policys():
    worker = Worker("w", 0.1, 5000)
    assert Opportunistic().size(view([worker]), app(batch_size=7), worker) == 7
    assert Opportunistic(most=5).size(view([worker]), app(batch_size=7), worker) == 5
    with pytest.raises(ValueError, match="1 or more"):
        Opportunistic(most=0)


def test_before_anything_was_evicted_an_hour_of_one_worker_counts_as_one_eviction():
    tier = SimpleNamespace(lifetimes=[100.0] * 36, eviction_rate=0.01)
    before, after = PRIOR_EVICTIONS / PRIOR_SECONDS, (PRIOR_EVICTIONS + 36) / (PRIOR_SECONDS + 3600.0)
    for tiers, rate in (({}, before), ({"default": tier}, after)):
        worker = Worker("w", 0.1, 100_000, joined=1000.0)
        seconds = 0.1 * Opportunistic().size(view([worker], tiers=tiers), app(), worker)
        swing = 1 + SWING if _long_turn(100_000) else 1 - SWING
        assert seconds == pytest.approx(swing * best_seconds(0.5, rate), abs=0.1)


def test_one_item_that_happened_to_be_short_leads_to_no_batch_of_hundreds():
    kind = [Worker(f"w{n}", 5.0, 200) for n in range(4)]
    lucky = Worker("lucky", 0.01, 1)
    usual = max(Opportunistic().size(view([*kind, lucky]), app(), worker) for worker in kind)
    assert Opportunistic().size(view([*kind, lucky]), app(), lucky) < 2 * usual, (
        "by its own item it is 400 times as fast"
    )


def test_some_batches_are_long_enough_to_find_a_cost_that_was_missed():
    done = next(number for number in range(1000, 2000) if _long_turn(number))
    worker = Worker("w", 4.0, done)
    assert Opportunistic().size(view([worker]), app(cost=0.001), worker) == 1
    assert Opportunistic().size(view([worker]), app(cost=0.001, error=0.5), worker) > 5


def test_who_has_lived_long_where_most_die_young_gets_longer_batches():
    tier = SimpleNamespace(lifetimes=[60.0] * 50 + [20_000.0] * 50, eviction_rate=100 / (50 * 60 + 50 * 20_000))
    young, old = Worker("y", 0.1, 100_000, joined=99_990.0), Worker("o", 0.1, 100_000, joined=90_000.0)
    policy, seen = Opportunistic(), view([young, old], now=100_000.0, tiers={"default": tier})
    assert policy.size(seen, app(), old) > 3 * policy.size(seen, app(), young)


def attempt(number, worker, items, started):
    return SimpleNamespace(id=number, app="a", worker=worker, items=items, started=started)


def test_the_batch_that_takes_longest_is_run_again_by_who_would_be_done_sooner():
    fast, slow = Worker("f", 0.1, 500), Worker("s", 1.0, 500, gpu_model="TITAN X")
    workers = [fast, slow, Worker("s2", 1.0, 500, gpu_model="TITAN X")]
    running = [attempt(1, "s", range(20), 999.0), attempt(2, "s2", range(20, 60), 999.0)]
    policy = Opportunistic()
    seen = view(workers, attempts=running, the_app=app(cost=0.0))
    assert policy.duplicate(seen, fast) == 2
    assert policy.duplicate(seen, fast) == 1
    assert policy.duplicate(seen, fast) is None, "each once"
    assert Opportunistic().duplicate(seen, Worker("n", 2.0, 500)) is None, "it would come later"
    cold = Worker("c", 0.1, 500, contexts={})
    assert Opportunistic().duplicate(seen, cold) is None


def test_what_is_run_twice_is_not_run_a_third_time():
    workers = [Worker("f", 0.1, 500), Worker("s", 1.0, 500, gpu_model="x"), Worker("t", 1.0, 500, gpu_model="x")]
    running = [attempt(1, "s", range(20), 999.0), attempt(2, "t", range(20), 999.0)]
    seen = view(workers, attempts=running, the_app=app(cost=0.0))
    assert Opportunistic().duplicate(seen, workers[0]) is None


def test_an_item_in_flight_takes_as_long_as_those_beside_it_make_it():
    fast, slow = Worker("f", 0.1, 500, beside=8.0), Worker("s", 0.2, 500, gpu_model="x", beside=2.0)
    running = [attempt(1, "s", (7,), 999.9)]
    seen = view([fast, slow], attempts=running, the_app=app(backlog=0, cost=None))
    assert Opportunistic().duplicate(seen, fast) is None, "0.8 s there, for 0.3 here"
    slow.beside = 8.0
    assert Opportunistic().duplicate(seen, fast) == 1, "0.8 s for 1.5"
    assert Opportunistic().duplicate(seen, slow) is None, "it runs it already"
    busy = Worker("f", 0.1, 500, beside=8.0, flying=1)
    assert Opportunistic().duplicate(seen, busy) is None, "those there would take the longer"
    new = Worker("n", None, gpu_model="A10", beside=None)
    assert Opportunistic().duplicate(view([fast, slow, new], attempts=running), new) == 1, "as others of its kind"


def at_the_end(seed, batching):
    """Seconds, and duplicates, of a queue of items on a fast worker and one that is 20 times slower."""
    fast, slow = ("fast", "NVIDIA A100"), ("slow", "TITAN X")
    times = MixedTimes(
        {"ask": {fast: GpuTimes({"": 0.1}), slow: GpuTimes({"": 2.0})}},
        shared={
            "ask": {
                fast: SharedPace(1000.0, 8.0, tokens=50.0, spread=0.5),
                slow: SharedPace(50.0, 8.0, tokens=50.0, spread=0.5),
            }
        },
    )
    machines = [SimulatedMachine(f"m-{tier}", model, tier, gpus=1) for tier, model in (fast, slow)]
    workload = Workload(
        [ev.ContextSpec("small", "small", gpus=1)],
        [ev.AppSpec("ask", "ask", "small", overlaps=True)],
        [(0.0, "ask", 600)],
    )
    tiers = [ev.TierSpec(name, 0, 1, gpus=1) for name in ("fast", "slow")]
    policies = Policies.chosen({"batching": batching})
    return Simulation(SimulatedEngine(machines, times, seed=seed), policies, workload, tiers, seed=seed).run(until=3600)


class Never(Opportunistic):
    """Runs nothing twice."""

    def duplicate(self, view, worker):
        return None


def test_items_that_straggle_on_a_slow_worker_are_run_again_on_an_idle_one_that_is_faster():
    pairs = [(at_the_end(seed, Opportunistic()), at_the_end(seed, Never())) for seed in range(6)]
    for twice, once in pairs:
        assert (twice.done, once.done, once.duplicates) == (600, 600, 0)
        assert 0 < twice.wasted_items < 100
        assert twice.seconds <= once.seconds
    assert sum(twice.seconds for twice, _ in pairs) < 0.75 * sum(once.seconds for _, once in pairs)


def test_what_is_overdue_counts_as_late_again_as_it_is():
    workers = [Worker("f", 0.1, 500), Worker("s", 0.1, 500)]
    running = [attempt(1, "s", range(20), 900.0)]
    seen = view(workers, attempts=running, the_app=app(cost=0.0))
    assert Opportunistic().duplicate(seen, workers[0]) == 1
