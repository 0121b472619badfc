import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_data import TIMES, play, policies, pool, prepared

from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.scheduler import Policies, Scheduler, log
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Deliver, Release
from ctxflow.simulator import Drawn, GpuTimes, Origin, Part, Simulation, TreeStaging, Workload, pools
from ctxflow.simulator.simulation import tiers_of


@settings(max_examples=25, deadline=None)
@given(
    batching=st.sampled_from([{"policy": "fixed", "size": 7}, {"policy": "fixed", "size": 60}, "opportunistic"]),
    up=st.sampled_from([None, 300.0, 40.0]),
    level=st.sampled_from(ev.LEVELS),
    notice=st.sampled_from([0.0, 5.0]),
    salvage=st.sampled_from([(), ("app",)]),
    seed=st.integers(0, 1000),
)
def test_all_is_done_with_every_invariant_and_never_before_the_fluid_bound(batching, up, level, notice, salvage, seed):
    available = pools.during(0.0) if up is None else pools.evicted(up, 10.0)
    staging = TreeStaging({"context": [Part("model", 5e8, "fs")]}, {"fs": Origin(1e9, 1e8, 100.0)}, 1e8)
    simulations = []
    events = []

    def listener(event, commands):
        events.append(event)
        if len(events) % 10 == 0:
            simulations[0].scheduler.validate()

    calm = GpuTimes(TIMES.item_seconds, loading=Drawn(2.0), matching=Drawn(1.0))
    workload = Workload.of(500, files=True, level=level)
    options = {"times": calm, "workload": workload, "staging": staging, "listener": listener}
    simulation = prepared(batching, pool(available), seed=seed, notice=notice, salvage=salvage, **options)
    simulations.append(simulation)
    outcome = simulation.run()
    simulation.scheduler.validate()
    assert (outcome.done, outcome.dead) == (500, 0)
    assert outcome.answered[-1] == 500
    assert list(outcome.times) == sorted(outcome.times)
    assert outcome.seconds >= outcome.fluid(calm.item) - 1e-6
    account = outcome.account
    assert account.call_seconds + account.lost_seconds <= account.worker_seconds + 1e-6
    assert [event.time for event in events] == sorted(event.time for event in events)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    def run(seed):
        outcome = play("opportunistic", pool(pools.evicted(60.0, 10.0)), seed=seed)
        return outcome.seconds, outcome.batches, outcome.account

    assert run(1) == run(1) != run(2)


def test_salvage_spares_the_work_of_long_batches():
    def lost(notice, salvage):
        machines, batching = pool(pools.evicted(60.0, 10.0)), {"policy": "fixed", "size": 200}
        account = play(batching, machines, seed=2, notice=notice, salvage=salvage).account
        return account.lost_seconds / account.evicted

    assert min(lost(0.0, ()), lost(5.0, ())) > 10.0
    assert lost(0.0, ("app",)) < 1.0, "half a second, and the item in flight"
    assert lost(5.0, ("app",)) < 0.1, "only who came after the notice loses anything"


def test_evictions_do_not_depend_on_what_is_decided():
    def evictions(size):
        outcome = play({"policy": "fixed", "size": size}, pool(pools.evicted(60.0, 10.0)), seed=3, items=3000)
        return [(time, machine.name) for time, machine, change in outcome.presence if change < 0 and time < 60]

    assert evictions(5) == evictions(20) != []


def test_a_run_is_replayed_from_its_log_to_the_same_decisions():
    lines = []
    batching = {"policy": "fixed", "size": 20}
    play(batching, pool(pools.evicted(30.0, 5.0)), items=600, listener=lambda e, c: lines.append(log.line(e, c) + "\n"))
    assert log.replay(lines, Scheduler(policies(batching))) == len(lines) > 50
    with pytest.raises(ValueError, match="now leads to"):
        log.replay(lines, Scheduler(policies({"policy": "fixed", "size": 21})))


def test_opportunistic_decisions_are_replayed_too():
    lines = []
    machines = pool(pools.evicted(60.0, 5.0))
    play("opportunistic", machines, items=2000, listener=lambda e, c: lines.append(log.line(e, c) + "\n"))
    assert log.replay(lines, Scheduler(policies("opportunistic"))) == len(lines)


def test_work_that_comes_later_waits_for_nobody():
    workload = Workload([ev.ContextSpec("c", "c")], [ev.AppSpec("a", "a", "c")], [(0.0, "a", 10), (500.0, "a", 10)])
    calm = GpuTimes({"": 1.0})
    outcome = play(
        {"policy": "fixed", "size": 1}, pools.machines(1, "x", pools.during(0.0)), times=calm, workload=workload
    )
    assert outcome.seconds == pytest.approx(510)


def test_calls_wait_for_the_share_of_workers_that_was_asked_for():
    machines = pools.joining(pool(pools.during(0.0)), [(0.0, 1), (100.0, 6)])
    outcome = play("fixed", machines, items=100, start_when=1.0)
    assert outcome.started >= 100


def test_a_run_that_cannot_end_says_so_or_ends_at_the_time_given():
    gone = pools.machines(1, "fast", pools.during(0.0, 50.0))
    with pytest.raises(RuntimeError, match="items left at"):
        play("fixed", gone, items=10_000)
    outcome = play("fixed", gone, items=10_000, until=200.0)
    assert outcome.seconds == 200.0
    assert 0 < outcome.done < 10_000


def test_what_duplicates_answer_second_is_counted():
    # One worker becomes a hundred times slower than it was when it was measured: its last batch is run again.
    class Stalling(GpuTimes):
        def call(self, app, machine, items, generator):
            slow = machine.name == "slow-0" and items[-1] > 300
            return super().call(app, machine, items, generator) * (100 if slow else 1)

    times = Stalling({"fast": 0.1, "slow": 0.1})
    outcome = play("opportunistic", pool(pools.during(0.0)), items=600, times=times)
    assert outcome.duplicates > 0
    assert outcome.seconds < 40
    assert outcome.done == 600


def test_seconds_are_drawn_within_their_bounds():
    with pytest.raises(ValueError, match="least <= mean"):
        Drawn(1.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="'other'"):
        GpuTimes({"a": 1.0}).item(pools.machines(1, "other", pools.during(0))[0])
    draws = [Drawn(10.0, 30.0, 2.0, 90.0).draw(random.Random(n)) for n in range(500)]
    assert 2.0 < min(draws) < 4.0 < 50 < max(draws) <= 90.0
    assert math.isfinite(sum(draws))


@pytest.mark.parametrize("linger", [0.0, 30.0, 300.0])
def test_idle_workers_are_given_back_in_the_seconds_that_linger_says(linger):
    """While one slow worker is at its last call, the others have nothing to do."""
    machines = pools.machines(3, "fast", pools.during(0.0)) + pools.machines(1, "slow", pools.during(0.0))
    times = GpuTimes({"fast": 1.0, "slow": 2000.0}, loading=Drawn(2.0), matching=Drawn(1.0))
    scaling = {"policy": "queue-proportional", "linger": linger, "calls_per_worker": 1, "batch_size": 1}
    chosen = Policies.chosen({"batching": {"policy": "fixed", "size": 1}, "scaling": scaling})
    released, finished = [], []

    def listener(event, commands):
        if isinstance(event, ev.BatchFinished):
            finished.append(event.time)
        released.extend(event.time for command in commands if isinstance(command, Release))

    engine = SimulatedEngine(machines, times, None, 0, 0.0, ())
    simulation = Simulation(engine, chosen, Workload.of(60), tiers_of(machines), listener=listener)
    assert simulation.run().done == 60
    *others, last = finished
    idle_since = max(others)
    early = [at for at in released if at < last]
    assert len(early) == 3
    # The policy is asked each second, and the peak that it remembers was seen a second before they were idle, or at it.
    assert all(idle_since + linger - 1 <= at <= idle_since + linger + 2 for at in early), (idle_since, early)


def test_what_happens_besides_is_told_at_its_time_and_the_run_goes_on_until_the_last_of_it():
    """A session is opened and closed beside items that are done long before, or with no items at all."""
    app = ev.AppSpec("talk", "talk", "model", batch=False, sessions=True)
    for items in (0, 40):
        heard = []
        engine = SimulatedEngine(pool(pools.during(0.0)), GpuTimes({"": 0.5}, loading=Drawn(2.0)))
        workload = Workload(
            [ev.ContextSpec("model", "model")],
            [app, ev.AppSpec("ask", "ask", "model")],
            [(1.0, "ask", items)] if items else [],
        )
        others = [ev.SessionOpened(5.0, 1, "talk", 10**9), ev.SessionClosed(300.0, 1)]
        chosen = Policies.chosen({"batching": {"policy": "fixed", "size": 1}})
        simulation = Simulation(
            engine,
            chosen,
            workload,
            tiers_of(pool(pools.during(0.0))),
            listener=lambda event, commands, to=heard: to.append((event, commands)),
            others=others,
        )
        outcome = simulation.run()
        assert [event for event, _ in heard if type(event) in (ev.SessionOpened, ev.SessionClosed)] == others
        chunks = [event.time for event, commands in heard for each in commands if type(each).__name__ == "DeliverChunk"]
        assert min(chunks) > 5.0 and 250.0 < max(chunks) < 302.0 and len(chunks) > 100
        assert (outcome.done, engine.now) == (items, 300.0)
        assert outcome.seconds == (300.0 if not items else pytest.approx(outcome.times[-1]))


def test_a_call_s_way_depends_on_where_its_app_s_items_come_from():
    """The way to the far region takes three seconds, in which its worker does nothing else."""

    class Ways(GpuTimes):
        def way(self, app, machine):
            return 0.0 if app == machine.region else 3.0

    machines = [dataclasses.replace(machine, region="north") for machine in pools.machines(1, "gpu", pools.during(0.0))]
    answered = {}

    def listener(event, commands):
        for command in commands:
            if isinstance(command, Deliver):
                answered[command.items[0]] = event.time

    apps = [ev.AppSpec(region, region, "context", batch_size=1, region=region) for region in ("north", "south")]
    workload = Workload([ev.ContextSpec("context", "context")], apps, [(10.0, "north", 1), (20.0, "south", 1)])
    times = Ways({"gpu": 2.0})
    regions = [ev.RegionSpec("north", home=True), ev.RegionSpec("south")]
    simulation = Simulation(
        SimulatedEngine(machines, times), Policies.chosen({}), workload, tiers_of(machines), listener=listener,
        regions=regions,
    )  # fmt: skip
    simulation.run()
    assert answered == {0: 12.0, 1: 25.0}
    assert [app.region for app in simulation.scheduler.view.apps.values()] == ["north", "south"]
