"""Simulated engines with several items in flight: how they share its time, by commands, and in whole runs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.simulated import Fault, SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Simulation, Workload, pools
from ctxflow.simulator.simulation import tiers_of


class Times:
    """An engine of 100 tokens a second at most."""

    def __init__(self, dispatch=0.0, **pace):
        self._dispatch = dispatch
        self._pace = SharedPace(**{"best": 100.0, "knee": 4, "bend": 30, "tokens": 100.0, **pace})

    def match(self, machine, generator):
        return 0.0

    def load(self, context, machine, generator):
        return 0.0

    def dispatch(self, machine, generator):
        return self._dispatch

    def call(self, app, machine, items, generator):
        return 1.0

    def pace(self, app, machine):
        return self._pace if app == "ask" else None


def engine_of(times=None, **options):
    """An engine with a worker that has built the context."""
    engine = SimulatedEngine([SimulatedMachine("m")], times or Times(), **options)
    engine.execute([cmd.Acquire("default", 1)])
    engine.poll(1.0)
    engine.execute([cmd.Load("m-1", "c")])
    engine.poll(1.0)
    engine.now = 0.0
    return engine


def run(attempt, app="ask"):
    return cmd.Run("m-1", attempt, app, "c", range(attempt, attempt + 1))


def ends(engine, count):
    found = []
    while len(found) < count:
        found += [event for event in engine.poll(1e6) if type(event) is ev.BatchFinished]
    return {event.attempt: event for event in found}


def test_below_the_knee_items_do_not_slow_each_other():
    engine = engine_of()
    engine.execute([run(1), run(2)])
    found = ends(engine, 2)
    assert {round(event.time, 3) for event in found.values()} == {4.0}
    assert found[1].tokens == 100 and round(found[1].seconds, 3) == 4.0


def test_beyond_it_they_share_and_when_one_ends_or_comes_the_others_change_pace():
    engine = engine_of(Times(knee=0.01))
    engine.execute([run(1)])
    engine.poll(0.5)
    engine.execute([run(2)])  # 50 tokens are left of the first; both get 50 a second from here on.
    found = ends(engine, 2)
    assert round(found[1].time, 3) == 1.5
    assert round(found[2].time, 3) == 2.0, "alone again for the second half"
    assert round(found[2].seconds, 3) == 1.5
    assert round(engine.account.call_seconds, 3) == 2.0, "each second of the engine is counted once"
    assert engine.account.tokens == 200


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 400)), min_size=1, max_size=30))
def test_no_token_is_lost_whenever_calls_come(calls):
    pace = SharedPace(100.0, knee=0.01, bend=30)

    class Lengths(Times):
        def pace(self, app, machine):
            return pace

    engine = engine_of(Lengths())
    sizes = {number: tokens for number, (_, tokens) in enumerate(calls, 1)}
    for number, (begin, tokens) in enumerate(calls, 1):
        item = SharedPace(100.0, knee=0.01, bend=30, tokens=tokens)
        engine.at(begin, lambda number=number, item=item: engine._join_in(engine._workers["m-1"], run(number), item))
    found = ends(engine, len(calls))
    assert {number: event.tokens for number, event in found.items()} == sizes
    last = max(event.time for event in found.values())
    busy = engine.account.call_seconds
    assert busy == pytest.approx(sum(sizes.values()) / 100.0, rel=1e-6)
    assert last >= busy - 1e-6


def test_an_interrupted_call_makes_room_and_an_abandoned_context_ends_all():
    engine = engine_of(Times(knee=0.01))
    engine.execute([run(1), run(2)])
    engine.poll(1.0)
    engine.execute([cmd.Interrupt("m-1", 1, "c")])
    (cancelled,) = engine.poll(1e6)
    assert type(cancelled) is ev.BatchFailed and cancelled.attempt == 1
    assert round(ends(engine, 1)[2].time, 3) == 1.5
    assert engine.account.lost_items == 1 and round(engine.account.lost_seconds, 3) == 0.5
    engine.execute([run(3), run(4)])
    engine.execute([cmd.Abandon("m-1", 3, "c")])
    assert engine.poll(1e6) == [] and engine.account.lost_items == 3


def test_an_eviction_loses_what_is_in_flight_and_tells_its_share():
    engine = engine_of(Times(knee=0.01))
    engine.execute([run(number) for number in range(1, 5)])
    engine.poll(2.0)
    engine.evict("m-1")
    assert any(type(event) is ev.WorkerLost for event in engine.poll(0.0))
    assert engine.account.lost_items == 4
    assert round(engine.account.lost_seconds, 3) == 2.0


def test_calls_of_other_apps_take_turns_still_and_dispatch_counts():
    engine = engine_of(Times(dispatch=0.25, knee=0.01))
    engine.execute([run(1), run(2, "other"), run(3, "other")])
    found = ends(engine, 3)
    assert [round(found[number].time, 3) for number in (1, 2, 3)] == [1.25, 1.25, 2.25]


def test_slow_hosts_are_slow_and_poison_raises():
    engine = engine_of(Times(knee=0.01), faults=[Fault("m", slower=3.0)], poison={"ask": 5})
    engine.execute([run(1)])
    assert round(ends(engine, 1)[1].time, 3) == 3.0
    engine.execute([run(4)])
    assert any(type(event) is ev.BatchFailed for event in engine.poll(1e6))


def test_an_item_has_its_tokens_wherever_it_runs():
    pace = SharedPace(100.0, tokens=200.0, spread=1.0)
    drawn = [pace.draw(1, "ask", item) for item in range(3000)]
    assert drawn == [pace.draw(1, "ask", item) for item in range(3000)]
    assert sum(drawn) / 3000 == pytest.approx(200, rel=0.1)
    assert math.isclose(SharedPace(10.0, room=4, beyond=0.5, knee=0.01).rate(8), 5.0, rel_tol=0.05)


def simulated(policy, items=1500, evictions=0.0, **pace):
    available = pools.evicted(evictions, 5.0) if evictions else pools.during(0.0)
    machines = pools.machines(2, "A10", available)
    context = ev.ContextSpec("c", "c")
    workload = Workload([context], [ev.AppSpec("ask", "ask", "c", overlaps=True)], [(0.0, "ask", items)])
    times = Times(**{"best": 1000.0, "knee": 12, "bend": 2, "spread": 1.0, **pace})
    engine = SimulatedEngine(machines, times, seed=3)
    events = []
    policies = Policies.chosen({"batching": policy})
    outcome = Simulation(
        engine, policies, workload, tiers_of(machines), listener=lambda *each: events.append(repr(each))
    ).run()
    assert outcome.done == items
    return outcome, events


def test_a_run_keeps_windows_full():
    """Twice the best pace, but for what a window of so many leaves of it, and the end of the queue."""
    for window in (1, 4, 48):
        outcome, _ = simulated({"policy": "fixed", "window": window}, spread=0.3)
        rate = 2 * SharedPace(1000.0, knee=12, bend=2).rate(window)
        assert outcome.account.tokens / outcome.seconds == pytest.approx(rate, rel=0.1)


def test_the_learned_window_is_about_as_good_as_the_best_in_whole_runs():
    best = min(simulated({"policy": "fixed", "window": window}, 3000)[0].seconds for window in (8, 24, 64, 192))
    assert simulated("opportunistic", 3000)[0].seconds <= 1.05 * best


def test_a_run_with_evictions_loses_no_item_and_is_the_same_for_a_seed():
    first, events = simulated("opportunistic", 800, evictions=20.0)
    assert first.account.lost_items > 0
    assert simulated("opportunistic", 800, evictions=20.0)[1] == events


def test_random_paces_end():
    chance = random.Random(5)
    for _ in range(20):
        pace = {
            "knee": 2 ** chance.uniform(-2, 8),
            "bend": chance.choice([0.5, 1, 30]),
            "room": chance.choice([None, 3]),
        }
        simulated({"policy": "fixed", "window": chance.choice([1, 2, 7, 64])}, 100, **pace)
