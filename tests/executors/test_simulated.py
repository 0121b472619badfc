"""The simulated engine's own: what its clock and its machines do beyond the contract."""

import pytest

from ctxflow.executors.simulated import Fault, SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, pools

TIMES = GpuTimes({"": 1.0}, dispatched=Drawn(0.5), loading=Drawn(20.0), matching=Drawn(3.0))


def all_of(engine, until):
    events = []
    while engine.now < until:
        events += engine.poll(until - engine.now)
    return events


def kinds(events):
    return [type(event).__name__ for event in events]


def test_polling_advances_the_clock_to_what_is_next_or_by_the_timeout():
    engine = SimulatedEngine([SimulatedMachine("m")], TIMES)
    assert engine.poll(10.0) == []
    assert engine.now == 10.0
    engine.execute([cmd.Acquire("default", 1)])
    joined = engine.poll(1e9)
    assert (kinds(joined), engine.now) == (["JobStarted", "WorkerJoined"], 13.0)
    assert joined[0].waited == 13.0
    assert engine.idle


def test_calls_on_one_context_take_turns():
    engine = SimulatedEngine([SimulatedMachine("m", slots=2)], TIMES)
    engine.execute([cmd.Acquire("default", 1)])
    engine.poll(60.0)
    engine.execute([cmd.Load("m-1", "c")])
    engine.poll(60.0)
    engine.execute([cmd.Run("m-1", n, "a", "c", range(4)) for n in (1, 2)])
    found = [(e.attempt, e.time - 23.0, e.seconds) for e in all_of(engine, 60.0)]
    assert found == [(1, 4.5, 4.0), (2, 8.5, 4.0)]
    with pytest.raises(ValueError, match="not built"):
        engine.execute([cmd.Run("m-1", 3, "a", "other", range(4))])


def test_calls_on_a_context_that_bears_two_overlap_as_two():
    engine = SimulatedEngine([SimulatedMachine("m")], TIMES, concurrency={"c": 2})
    engine.execute([cmd.Acquire("default", 1)])
    engine.poll(60.0)
    engine.execute([cmd.Load("m-1", "c")])
    engine.poll(60.0)
    engine.execute([cmd.Run("m-1", n, "a", "c", range(4)) for n in (1, 2, 3, 4)])
    engine.execute([cmd.Interrupt("m-1", 1, "c")])
    found = [(type(e), e.attempt, e.time - 23.0) for e in all_of(engine, 60.0)]
    assert found == [
        (ev.BatchFailed, 1, 0.0),
        (ev.BatchFinished, 2, 4.5),
        (ev.BatchFinished, 3, 8.5),
        (ev.BatchFinished, 4, 8.5),
    ]


def test_an_eviction_comes_with_notice_and_what_ran_is_lost():
    machine = SimulatedMachine("m", available=pools.during(0.0, 100.0))
    engine = SimulatedEngine([machine], TIMES, notice=30.0)
    engine.execute([cmd.Acquire("default", 1)])
    engine.poll(60.0)
    engine.execute([cmd.Load("m-1", "c")])
    engine.poll(60.0)
    engine.execute([cmd.Run("m-1", 1, "a", "c", range(500))])
    events = all_of(engine, 200.0)
    assert [(type(e), e.time) for e in events] == [
        (ev.EvictionNotice, 70.0),
        (ev.JobEvicted, 100.0),
        (ev.WorkerLost, 100.0),
    ]
    assert engine.account.lost_seconds == pytest.approx(100 - 23.5)
    assert engine.account.lost_items == 500
    engine.execute([cmd.Run("m-1", 2, "a", "c", range(5))])
    assert all_of(engine, 1000.0) == [], "a worker that is gone does nothing"


def salvaging(notice, until, items=100):
    """A worker that is evicted while it runs a batch of an app that answers its items one by one."""
    machine = SimulatedMachine("m", available=pools.during(0.0, until))
    engine = SimulatedEngine([machine], TIMES, notice=notice, salvage={"a"})
    engine.execute([cmd.Acquire("default", 1)])
    engine.poll(60.0)
    engine.execute([cmd.Load("m-1", "c")])
    engine.poll(60.0)
    engine.execute([cmd.Run("m-1", 1, "a", "c", range(items))])  # From 23.5 s on.
    return engine, all_of(engine, 300.0)


def test_a_notice_ends_a_call_that_can_be_salvaged_with_the_item_in_flight():
    engine, events = salvaging(30.0, 113.25)
    assert [(type(e), e.time) for e in events] == [
        (ev.EvictionNotice, 83.25),
        (ev.ItemsFinished, 83.5),
        (ev.BatchEnded, 83.5),
        (ev.JobEvicted, 113.25),
        (ev.WorkerLost, 113.25),
    ]
    assert (events[1].first, events[1].count, events[2].seconds) == (0, 60, 60.0)
    assert (engine.account.call_seconds, engine.account.lost_items, engine.account.lost_seconds) == (60.0, 0, 0.0)


def test_an_eviction_before_the_item_in_flight_is_done_costs_what_was_not_sent_along():
    engine, events = salvaging(0.1, 83.3)
    assert [type(e) for e in events] == [ev.EvictionNotice, ev.JobEvicted, ev.ItemsFinished, ev.WorkerLost]
    assert events[2].count == 59, "and what was done in the last half second"
    assert (engine.account.call_seconds, engine.account.lost_items) == (59.0, 41)
    assert engine.account.lost_seconds == pytest.approx(83.3 - 82.5)


def test_a_call_that_has_not_begun_at_the_notice_does_not_begin_and_one_that_is_done_is_as_ever():
    _, events = salvaging(1.0, 24.25)
    assert [type(e) for e in events] == [ev.EvictionNotice, ev.BatchEnded, ev.JobEvicted, ev.WorkerLost]
    _, events = salvaging(0.1, 60.0, items=5)
    assert type(events[0]) is ev.BatchFinished


def test_no_more_workers_than_were_asked_for_and_they_are_given_up_on_their_way():
    engine = SimulatedEngine([SimulatedMachine(f"m{n}") for n in range(5)], TIMES)
    engine.execute([cmd.Acquire("default", 3), cmd.Acquire("default", 1)])
    assert kinds(all_of(engine, 60.0)).count("WorkerJoined") == 1
    engine.execute([cmd.Acquire("default", 9)])
    assert kinds(all_of(engine, 120.0)).count("WorkerJoined") == 4


def test_a_machine_that_is_down_while_its_worker_is_on_its_way_gives_none():
    machine = SimulatedMachine("m", available=lambda generator: iter([(0.0, 2.0), (50.0, 60.0)]))
    engine = SimulatedEngine([machine], TIMES)
    engine.execute([cmd.Acquire("default", 1)])
    events = all_of(engine, 100.0)
    assert [(type(e).__name__, e.time) for e in events if isinstance(e, (ev.WorkerJoined, ev.WorkerLost))] == [
        ("WorkerJoined", 53.0),
        ("WorkerLost", 60.0),
    ]
    assert engine.account.worker_seconds == pytest.approx(7.0)


def host_of_two(*faults, times=TIMES):
    """Workers a-1 and b-2 on a bad host n1, and c-3 on another, each with its context asked for."""
    machines = [SimulatedMachine("a", host="n1"), SimulatedMachine("b", host="n1"), SimulatedMachine("c", host="n2")]
    engine = SimulatedEngine(machines, times, faults=faults)
    engine.execute([cmd.Acquire("default", 3)])
    joined = [event.worker.id for event in all_of(engine, 4.0) if type(event) is ev.WorkerJoined]
    assert joined == ["a-1", "b-2", "c-3"]
    engine.execute([cmd.Load(worker, "c") for worker in joined])
    return engine


def answers(engine, until, attempts=1):
    engine.execute(
        [
            cmd.Run(worker, 10 * n + k, "a", "c", range(4))
            for k, worker in enumerate(("a-1", "b-2", "c-3"))
            for n in range(attempts)
        ]
    )
    return {event.attempt: event for event in all_of(engine, until)}


def test_a_black_hole_raises_at_once_from_a_time_on_in_all_workers_of_its_host():
    engine = host_of_two(Fault("n1", calls=1.0, begin=50.0, end=100.0))
    all_of(engine, 40.0)
    assert {type(event) for event in answers(engine, 50.0).values()} == {ev.BatchFinished}
    found = answers(engine, 60.0)
    assert [(type(found[n]), found[n].time) for n in (0, 1, 2)] == [
        (ev.BatchFailed, 50.5),
        (ev.BatchFailed, 50.5),
        (ev.BatchFinished, 54.5),
    ]
    failure = found[1].failure
    assert (failure.host, failure.worker, failure.machine) == ("n1", "b-2", True) and "ECC" in failure.message
    assert engine.account.raised == 2 and engine.account.lost_items == 0
    all_of(engine, 100.0)
    assert {type(event) for event in answers(engine, 110.0).values()} == {ev.BatchFinished}, "it is mended"


def test_a_slow_host_takes_longer_and_a_flaky_gpu_raises_now_and_then():
    engine = host_of_two(Fault("n1", slower=10.0), Fault("c", calls=0.3, message="CUDA error: illegal access"))
    all_of(engine, 40.0)
    found = answers(engine, 5000.0, attempts=100)
    assert [found[n].seconds for n in (0, 1)] == [40.0, 40.0]
    raised = sum(type(found[10 * n + 2]) is ev.BatchFailed for n in range(100))
    assert 15 < raised < 45 and engine.account.raised == raised


def test_a_host_on_which_no_context_can_be_built_says_so_at_once():
    engine = host_of_two(Fault("n1", builds=1.0, seconds=1.0))
    events = all_of(engine, 40.0)
    assert [(type(event), event.worker, event.time) for event in events] == [
        (ev.ContextFailed, "a-1", 5.0),
        (ev.ContextFailed, "b-2", 5.0),
        (ev.ContextReady, "c-3", 24.0),
    ]
    assert (engine.account.loads, engine.account.raised) == (1, 2)
    with pytest.raises(ValueError, match="not built"):
        engine.execute([cmd.Run("a-1", 1, "a", "c", range(4))])


def test_no_worker_comes_from_a_host_that_is_left_out_until_it_is_not():
    machines = [
        SimulatedMachine("a", host="n1"),
        SimulatedMachine("b", host="n1"),
        SimulatedMachine("c"),
        SimulatedMachine("d", tier="other", host="n1"),
    ]
    engine = SimulatedEngine(machines, TIMES)
    engine.execute([cmd.Acquire("default", 3), cmd.Exclude("default", ["n1"]), cmd.Acquire("other", 1)])
    joined = [event.worker.id for event in all_of(engine, 100.0) if type(event) is ev.WorkerJoined]
    assert joined == ["c-1", "d-2"], "those on their way there turn back; tiers are told one by one"
    engine.execute([cmd.Exclude("default", [])])
    joined = [event.worker.id for event in all_of(engine, 200.0) if type(event) is ev.WorkerJoined]
    assert joined == ["a-3", "b-4"]
    engine.execute([cmd.Exclude("default", ["n1"])])
    assert all_of(engine, 300.0) == [], "those that are there stay"


def test_a_poisoned_item_raises_wherever_it_runs_and_the_machine_is_not_to_blame():
    engine = SimulatedEngine([SimulatedMachine("a"), SimulatedMachine("b")], TIMES, poison={"a": 5})
    engine.execute([cmd.Acquire("default", 2)])
    all_of(engine, 4.0)
    engine.execute([cmd.Load("a-1", "c"), cmd.Load("b-2", "c")])
    all_of(engine, 30.0)
    engine.execute(
        [
            cmd.Run("a-1", 1, "a", "c", range(5, 9)),
            cmd.Run("b-2", 2, "a", "c", [3, 4]),
            cmd.Run("a-1", 3, "a", "c", [4]),
        ]
    )
    events = {event.attempt: event for event in all_of(engine, 60.0)}
    assert [type(events[n]) for n in (1, 2, 3)] == [ev.BatchFinished, ev.BatchFailed, ev.BatchFailed]
    assert [events[n].failure.machine for n in (2, 3)] == [False, False]


def test_a_turn_ends_when_its_user_is_idle_and_states_have_sizes_that_take_time_to_carry():
    idle = {2}
    engine = SimulatedEngine(
        [SimulatedMachine("a"), SimulatedMachine("b")],
        TIMES,
        state_bytes=lambda session: 100 * session,
        carry_seconds=lambda size: size / 100,
        turn_over=idle.__contains__,
    )
    engine.execute([cmd.Acquire("default", 2)])
    workers = [event.worker.id for event in all_of(engine, 60.0) if isinstance(event, ev.WorkerJoined)]
    engine.execute([cmd.Load(worker, "model") for worker in workers])
    all_of(engine, 120.0)
    orders = [cmd.Order(1, "anew", 0, 0, "freeze"), cmd.Order(2, "anew", 0, 0, "keep"), cmd.Order(2, "", 1, None, "")]
    engine.execute([cmd.Step(workers[0], 1, "app", "model", (), orders)])
    (step,) = all_of(engine, 180.0)
    assert step.outcomes == [{"made": 1, "frozen": ["", 100]}, {"made": 1, "idle": True, "kept": 200}, {}]
    begun = engine.now
    engine.execute([cmd.Carry(workers[1], workers[0], 3, 1, "", 300)])
    (arrived,) = all_of(engine, 240.0)
    assert isinstance(arrived, ev.StateArrived) and arrived.time == begun + 3.0
