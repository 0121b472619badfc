"""Contexts that need several GPUs of one machine: who gives way, what is asked for, and what goes wrong on the way."""

from dataclasses import replace

import pytest
from pool_of_machines import GPUS, answer, device, full, graph, place, tier
from scheduler_bench import Bench, only, run_of

from ctxflow.policies.flextopo.preemption import ExactPreemption, StandardPreemption
from ctxflow.policies.protocols import PlaceRequest
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.context_moves import refused
from ctxflow.scheduler.reservations import PAUSE_SECONDS, SURVEY_SECONDS, TRIES
from ctxflow.topology import from_graph, to_graph


def saturated(policy=None, machines=("m1",), gpus=4, affinity="guaranteed", order=range(GPUS), tiers=None):
    """A bench whose every GPU runs a batch of `low`, and an app that wants several of them."""
    bench = Bench(preemption=policy or ExactPreemption(patience=10.0, grace=20.0, idle=5.0))
    for each in tiers or [tier(GPUS * len(machines))]:
        bench.tell(ev.TierOffered, each)
    bench.context("small", gpus=1)
    bench.app("low", "small")
    bench.context("wide", gpus=gpus, affinity=affinity)
    bench.app("urgent", "wide", priority=10)
    bench.submit("low", 400)
    bench.runs = {}
    for machine in machines:
        for number in order:
            bench.now += 1.0
            run = run_of(place(bench, machine, number, "small"))
            bench.runs[run.worker] = run
    return bench


def room_of(commands):
    """Who was told to give way."""
    return {command.worker for command in only(commands, cmd.Drain)}


def clear(bench, victims):
    """The victims finish, are released, and go; gives the commands at the end."""
    commands = []
    for name in sorted(victims):
        commands = bench.finish(bench.runs[name])
        assert cmd.Release(name) in commands
        assert not only(commands, cmd.Run), "it takes nothing new"
    for name in sorted(victims):
        assert not only(commands, cmd.AcquireAt), "not before all are gone"
        commands = bench.lose(name, evicted=True)
    return commands


def asked(bench):
    """Submit urgent work, and see it through to the worker that is asked for."""
    victims = room_of(answer(bench, bench.submit("urgent", 1), m1=full("m1")))
    [acquire] = only(clear(bench, victims), cmd.AcquireAt)
    return acquire


def join(bench, acquire, name="big"):
    return bench.join(
        name, host=acquire.machine, gpus=len(acquire.devices), devices=tuple(acquire.devices), pin=acquire.pin
    )


def test_the_policys_victims_give_way_and_the_context_gets_their_gpus_in_order():
    bench = saturated(order=(0, 5, 3, 6, 1, 7, 2, 4))
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1"))
    victims = room_of(commands)
    assert victims in ({f"m1-{n}" for n in range(4)}, {f"m1-{n}" for n in range(4, 8)}), "one socket"
    assert cmd.Acquire("default", 4) in commands, "nobody else is to get them"
    [acquire] = only(clear(bench, victims), cmd.AcquireAt)
    assert {f"m1-{each.rpartition('-')[2]}" for each in acquire.devices} == victims
    assert list(acquire.devices) == sorted(acquire.devices)
    assert join(bench, acquire)[-1] == cmd.Load("big", "wide")
    run = run_of(bench.ready("big", "wide"))
    assert (run.app, list(run.items)) == ("urgent", [400])
    assert bench.state.counters.evicted == 0, "what gave way was not taken"


def test_the_standard_selection_takes_the_latest_whatever_their_sockets():
    bench = saturated(StandardPreemption(), order=(0, 1, 6, 7, 2, 3, 4, 5))
    assert room_of(answer(bench, bench.submit("urgent", 1), m1=full("m1"))) == {f"m1-{n}" for n in (2, 3, 4, 5)}


def test_room_that_is_free_and_aligned_is_taken_first():
    bench = saturated()
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1"), m2=full("m2", dict.fromkeys((4, 5, 6, 7))))
    free = tuple(device("m2", number) for number in range(4, 8))
    assert not room_of(commands)
    assert only(commands, cmd.AcquireAt) == [cmd.AcquireAt(1, "default", "m2", free)]
    assert cmd.Acquire("default", 8) not in commands, "as many as there are, and no more, are asked for meanwhile"


def test_what_others_hold_does_not_give_way():
    bench = saturated(machines=("m1", "m2"))
    users = {0: "bob", 4: "bob"}
    for number in users:
        bench.lose(f"m1-{number}", evicted=True)
    victims = room_of(answer(bench, bench.submit("urgent", 1), m1=full("m1", users), m2=full("m2")))
    assert {name.partition("-")[0] for name in victims} == {"m2"}


def test_only_lower_priorities_give_way_and_else_it_waits_and_says_so():
    bench = saturated()
    bench.app("equal", "wide", priority=0)
    commands = answer(bench, bench.submit("equal", 1), m1=full("m1"))
    [note] = only(commands, cmd.Note)
    assert note.trouble and "even if all workers of lower priority than 0 gave way" in note.text
    assert not room_of(commands) and not bench.state.reservations.all
    bench.now += PAUSE_SECONDS
    again = answer(bench, bench.tell(ev.Tick), m1=full("m1"))
    assert not only(again, cmd.Note), "it is told once"


def test_a_batch_that_takes_longer_than_its_grace_is_given_up_at_no_cost():
    bench = saturated()
    victims = room_of(answer(bench, bench.submit("urgent", 1), m1=full("m1")))
    slow = min(victims)
    bench.some(bench.runs[slow], 0, 1)
    for name in victims - {slow}:
        bench.finish(bench.runs[name])
    bench.now += 20.0
    commands = bench.tell(ev.Tick)
    assert cmd.Abandon(slow, bench.runs[slow].attempt, "small") in commands and cmd.Release(slow) in commands
    left = bench.runs[slow].items[1:]
    assert set(left) <= bench.state.open.keys(), "what was not answered waits again"
    assert bench.state.counters.retried == len(left) and not bench.state.losses and not bench.state.crashes


def test_idle_workers_give_way_first():
    bench = saturated()
    bench.tell(ev.ItemsCancelled, [item for item in range(400) if item in bench.state.open], stop=False)
    for number in range(4, 8):
        bench.finish(bench.runs[f"m1-{number}"])
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1"))
    assert {each.worker for each in only(commands, cmd.Release)} == {f"m1-{n}" for n in range(4, 8)}
    assert not room_of(commands), "they run nothing"


def test_somebody_else_takes_the_gpus_first_and_it_is_tried_again_elsewhere():
    bench = saturated(machines=("m1", "m2"))
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1"), m2=full("m2"))
    victims = room_of(commands)
    machine = min(victims).partition("-")[0]
    [acquire] = only(clear(bench, victims), cmd.AcquireAt)
    bench.now += 10.0
    commands = bench.tell(ev.Tick)
    assert cmd.Forgo(acquire.pin, "default") in commands
    [note] = only(commands, cmd.Note)
    assert note.trouble and "somebody else has taken them" in note.text and note.text.endswith("it is tried again")
    found = {each: full(each) for each in ("m1", "m2")}
    free = {each.rpartition("-")[2] for each in acquire.devices}
    found[machine] = full(machine, {int(n): "bob" for n in free})
    again = room_of(answer(bench, commands, **found))
    assert len(again) == 4 and not again & victims
    [second] = only(clear(bench, again), cmd.AcquireAt)
    assert second.pin != acquire.pin
    late = join(bench, acquire, "late")
    assert only(late, cmd.Release) == [cmd.Release("late")], "who comes after all has no place any more"
    assert join(bench, second)[-1] == cmd.Load("big", "wide")


def test_after_so_many_times_there_is_a_pause():
    bench = saturated(ExactPreemption(patience=10.0))
    commands = bench.submit("urgent", 1)
    for attempt in range(TRIES):
        commands = answer(bench, commands, m2=graph("m2"))
        assert only(commands, cmd.AcquireAt)
        bench.now += 10.0
        commands = bench.tell(ev.Tick)
        assert only(commands, cmd.Forgo) and bool(only(commands, cmd.Survey)) == (attempt < TRIES - 1)
    assert "it is tried again in 60 s" in only(commands, cmd.Note)[0].text
    bench.now += PAUSE_SECONDS
    assert only(bench.tell(ev.Tick), cmd.Survey)


def test_a_worker_whose_job_runs_may_take_longer_to_join():
    bench = saturated()
    acquire = asked(bench)
    bench.tell(ev.JobStarted, "default", "7.0", pin=acquire.pin)
    bench.now += 60.0
    assert not only(bench.tell(ev.Tick), cmd.Forgo)
    assert join(bench, acquire)[-1] == cmd.Load("big", "wide")


def test_it_takes_nothing_else_and_is_given_back_when_it_has_nothing_to_do():
    bench = saturated()
    acquire = asked(bench)
    join(bench, acquire)
    run = run_of(bench.ready("big", "wide"))
    assert bench.finish(run) == [cmd.Deliver(run.attempt, run.items)], "items of other apps wait"
    assert bench.state.tiers["default"].asked == 4, "four workers gave way"
    bench.now += 5.0
    commands = bench.tell(ev.Tick)
    assert only(commands, cmd.Release) == [cmd.Release("big")]
    assert not only(commands, cmd.Acquire), "not while it is there"
    assert not only(bench.lose("big", evicted=True), cmd.Survey)
    assert cmd.Acquire("default", GPUS) in bench.tell(ev.Tick), "the tier is what it was"


def test_a_worker_that_is_taken_gets_another_place():
    bench = saturated()
    acquire = asked(bench)
    join(bench, acquire)
    run = run_of(bench.ready("big", "wide"))
    commands = bench.lose("big", evicted=True)
    assert cmd.Forgo(acquire.pin, "default") in commands, "its job must not start again by itself"
    free = {int(each.rpartition("-")[2]): None for each in acquire.devices}
    commands = answer(bench, commands, m1=full("m1", free))
    [second] = only(commands, cmd.AcquireAt)
    join(bench, second)
    assert run_of(bench.ready("big", "wide")).items == run.items


def test_work_that_is_called_off_stops_nobody_for_longer():
    bench = saturated()
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1"))
    bench.tell(ev.ItemsCancelled, [400])
    last = clear(bench, room_of(commands))
    assert not only(last, cmd.AcquireAt) and cmd.Acquire("default", GPUS) in last
    acquire = asked_again(bench)
    commands = bench.tell(ev.ItemsCancelled, list(bench.state.ready["urgent"].queue))
    assert only(commands, cmd.Forgo) == [cmd.Forgo(acquire.pin, "default")]


def asked_again(bench):
    """Room is there already."""
    users = dict.fromkeys(range(4)) if "m1-0" not in bench.state.workers else dict.fromkeys(range(4, 8))
    [acquire] = only(answer(bench, bench.submit("urgent", 1), m1=full("m1", users)), cmd.AcquireAt)
    return acquire


def test_one_place_for_a_context_however_many_apps_wait_for_it():
    bench = saturated(machines=("m1", "m2"))
    bench.app("other", "wide", priority=11)
    commands = bench.submit("urgent", 1)
    assert not only(bench.submit("other", 2), cmd.Survey), "it was asked for already"
    assert len(room_of(answer(bench, commands, m1=full("m1"), m2=full("m2")))) == 4


def test_a_more_urgent_context_may_take_a_place():
    bench = saturated(gpus=8)
    join(bench, asked(bench))
    run = run_of(bench.ready("big", "wide"))
    bench.context("wider", gpus=8)
    bench.app("most urgent", "wider", priority=20)
    assert room_of(answer(bench, bench.submit("most urgent", 1), m1=full("m1"))) == {"big"}
    assert cmd.Release("big") in bench.finish(run)
    commands = bench.lose("big", evicted=True)
    assert {type(each) for each in commands} >= {cmd.Forgo, cmd.AcquireAt}


def test_workers_started_by_hand_are_nobodys_to_give_back():
    bench = saturated()
    bench.join("by hand", host="m2", gpus=1, devices=(device("m2", 0),), acquired=False)
    commands = answer(bench, bench.submit("urgent", 1), m2=full("m2", dict.fromkeys(range(1, 4))))
    assert not room_of(commands) and only(commands, cmd.Note)[0].trouble


def test_a_worker_with_enough_gpus_needs_no_place_unless_they_must_be_close():
    for affinity, waits in ((None, False), ("best-effort", False), ("guaranteed", True)):
        bench = Bench(preemption="exact")
        bench.tell(ev.TierOffered, tier(gpus=4))
        bench.context("wide", gpus=4, affinity=affinity)
        bench.app("urgent", "wide")
        bench.join("w1", host="m1", gpus=4)
        commands = bench.submit("urgent", 1)
        assert (cmd.Load("w1", "wide") in commands, bool(only(commands, cmd.Survey))) == (not waits, waits)


def test_a_survey_that_fails_is_told_and_asked_for_again():
    bench = saturated()
    [survey] = only(bench.submit("urgent", 1), cmd.Survey)
    bench.now += SURVEY_SECONDS
    assert only(bench.tell(ev.Tick), cmd.Survey) == [survey], "it has been lost"
    commands = bench.tell(ev.MachinesFound, "default", {}, reason="the collector does not answer")
    assert "the collector does not answer" in only(commands, cmd.Note)[0].text


def test_no_preemption_asks_nobody():
    bench = saturated("none")
    assert bench.submit("urgent", 1) == []


def test_workers_tell_where_gpus_are_that_the_batch_system_does_not_know():
    bench = saturated()
    for name in list(bench.state.workers):
        bench.lose(name, evicted=True)
    for number in (0, 1, 6, 7, 2, 3, 4, 5):
        place(bench, "m1", number, "small", topology=graph("m1"))
    unknown = graph("m1", dict.fromkeys(range(GPUS), "alice"), known=False)
    victims = room_of(answer(bench, bench.submit("urgent", 1), m1=unknown))
    assert victims in ({f"m1-{n}" for n in range(4)}, {f"m1-{n}" for n in range(4, 8)})


@pytest.mark.parametrize("option", [{"patience": 0}, {"grace": -1}, {"alpha": 2}])
def test_options_that_make_no_sense(option):
    with pytest.raises(ValueError):
        ExactPreemption(**option)


def spec(gpus, affinity=None):
    return ev.ContextSpec("c", "model", gpus=gpus, affinity=affinity)


@pytest.mark.parametrize(
    ("wanted", "tiers", "reserves", "says"),
    [
        (spec(1), [tier()], False, None),
        (spec(2), [tier()], False, 'needs 2 GPUs, but a worker here has 1: set preemption = "exact" in the site'),
        (spec(8, "guaranteed"), [tier()], True, None),
        (spec(9), [tier()], True, "needs 9 GPUs, but a worker here has 1 and a machine 8: use a site whose workers"),
        (spec(2), [ev.TierSpec("t", gpus=1)], True, "needs 2 GPUs, but a worker here has 1: use a site whose"),
        (spec(2, "best-effort"), [ev.TierSpec("t", gpus=2)], False, None),
        (
            spec(2, "guaranteed"),
            [ev.TierSpec("t", gpus=2)],
            True,
            "close together, and nobody sees to that here: use a",
        ),
        (spec(2, "guaranteed"), [tier(gpus=2)], False, 'nobody sees to that here: set preemption = "exact"'),
        (spec(1, "guaranteed"), [ev.TierSpec("t", gpus=1)], False, None),
    ],
)
def test_what_a_site_can_never_give_is_refused(wanted, tiers, reserves, says):
    told = refused(wanted, tiers, reserves)
    assert told is None if says is None else says in told


def test_where_no_place_can_be_had_any_worker_with_enough_gpus_will_do():
    """As in a simulation whose machines are the workers that a run had."""
    bench = Bench(preemption="exact")
    bench.tell(ev.TierOffered, ev.TierSpec("default", gpus=1))
    bench.context("wide", gpus=4, affinity="guaranteed")
    bench.app("urgent", "wide")
    bench.submit("urgent", 1)
    assert bench.join("w1", gpus=4) == [cmd.Load("w1", "wide")]


def test_a_machine_of_two_tiers_has_other_gpus_for_each():
    bench = saturated(machines=(), tiers=[tier(8, "one"), tier(8, "two")])
    first, second = only(bench.submit("urgent", 1), cmd.Survey)
    parts = {name: from_graph(graph("m1")) for name in (first.tier, second.tier)}
    parts = {name: replace(each, gpus=each.gpus[n::2]) for n, (name, each) in enumerate(parts.items())}
    users = {3: "bob"}  # Of the second tier's.
    parts[second.tier] = replace(from_graph(graph("m1", users)), gpus=from_graph(graph("m1", users)).gpus[1::2])
    bench.tell(ev.MachinesFound, first.tier, {"m1": to_graph(parts[first.tier])})
    commands = bench.tell(ev.MachinesFound, second.tier, {"m1": to_graph(parts[second.tier])})
    [acquire] = only(commands, cmd.AcquireAt)
    assert (acquire.tier, list(acquire.devices)) == (first.tier, [device("m1", number) for number in (0, 2, 4, 6)])


def test_the_policy_is_told_what_other_contexts_may_ask_for_afterwards():
    """Each once, by its most urgent app, and not those that have room."""
    heard = []

    class Hears(ExactPreemption):
        def victims(self, view, request):
            heard.append(request)
            return super().victims(view, request)

    bench = saturated(Hears(patience=10.0, grace=20.0, idle=5.0))
    bench.context("pair", gpus=2, affinity="best-effort")
    bench.app("later", "pair", priority=3)
    bench.app("sooner", "pair", priority=5)
    answer(bench, bench.submit("urgent", 1), m1=full("m1"))
    answer(bench, bench.submit("sooner", 1), m1=full("m1"))
    assert [request.app for request in heard] == ["urgent", "sooner"]
    assert heard[0].later == (PlaceRequest("sooner", 5, 2, "best-effort"),)
    assert heard[1].later == (), "the other has GPUs that are kept for it"
