"""Workers that are to go, with states of suspended sessions in their caches: nothing that was made is made again."""

import pytest
from pool_of_machines import GPUS, answer, device, full, graph, tier
from scheduler_bench import Bench, only
from test_steps import SessionBench, step_of

from ctxflow.policies.flextopo.preemption import ExactPreemption
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

BROUGHT_OUT = [cmd.Order(1, "frozen", 6, None, "leave")]


def asleep(keep_every=None, **bench_options):
    """A session of six chunks, whose state is in the cache of its worker alone."""
    bench = SessionBench(workers=(), keep_every=keep_every, **bench_options)
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.join("w1", host="m1", gpus=1, devices=(device("m1", 0),), memory=5)
    step = step_of(bench.open(1))
    for _ in range(5):
        step = step_of(bench.finish(step))
    bench.tell(ev.SessionSuspended, 1)
    bench.finish(step_of(bench.finish(step)))
    assert bench.state.sessions[1].frozen.made == 6
    return bench


def lend(bench, workers):
    """The tier has so many workers from now on."""
    return bench.tell(ev.TierOffered, tier(workers))


def tick(bench):
    bench.now += 1
    return bench.tell(ev.Tick)


def goes_on(bench):
    """The order by which the session goes on elsewhere, once its worker is gone."""
    bench.lose("w1", evicted=True)
    lend(bench, GPUS)
    bench.join("w2")
    [order] = step_of(bench.tell(ev.SessionResumed, 1)).orders
    return order


def test_a_state_is_kept_before_its_worker_is_given_back():
    bench = asleep()
    commands = lend(bench, 0)
    assert step_of(commands).orders == BROUGHT_OUT and only(commands, cmd.Release) == []
    assert only(tick(bench), cmd.Release) == [], "it is not there yet"
    bench.finish(step_of(commands))
    assert only(tick(bench), cmd.Release) == [cmd.Release("w1")]
    assert goes_on(bench) == cmd.Order(1, "kept", 6, 6, "")


def test_many_states_are_kept_a_few_at_a_time():
    bench = asleep()
    step = step_of(bench.finish(step_of(bench.open(*range(2, 41), wanted=1))))
    for number in range(2, 41):
        bench.tell(ev.SessionSuspended, number)
    bench.finish(step_of(bench.finish(step)))
    commands, steps = lend(bench, 0), []
    while only(commands, cmd.Step):
        steps.append(step_of(commands))
        commands = bench.finish(steps[-1])
    assert [len(step.orders) for step in steps] == [16, 16, 8]
    assert all(session.kept == session.made for session in bench.state.sessions.values())
    assert only(tick(bench), cmd.Release) == [cmd.Release("w1")]


def test_what_is_kept_already_keeps_no_worker():
    bench = asleep(keep_every=1)
    assert only(lend(bench, 0), cmd.Release) == [cmd.Release("w1")]
    assert goes_on(bench).thaw == "kept"


def test_a_session_that_is_resumed_meanwhile_goes_on_from_what_is_kept():
    bench = asleep()
    step = step_of(lend(bench, 0))
    bench.join("w2", acquired=False)
    assert only(bench.tell(ev.SessionResumed, 1), cmd.Carry) == [], "its state is on its way out"
    [order] = step_of(bench.finish(step)).orders
    assert order == cmd.Order(1, "kept", 6, 6, "")


def test_a_session_that_is_closed_meanwhile_is_over():
    bench = asleep()
    step = step_of(lend(bench, 0))
    assert only(bench.tell(ev.SessionClosed, 1), cmd.EndSession)
    bench.finish(step)
    assert not bench.state.sessions


def test_a_state_is_kept_when_its_worker_has_notice():
    bench = asleep()
    step = step_of(bench.tell(ev.EvictionNotice, "w1"))
    assert step.orders == BROUGHT_OUT
    bench.finish(step)
    assert goes_on(bench) == cmd.Order(1, "kept", 6, 6, "")


def test_a_worker_that_is_lost_first_takes_the_state_with_it():
    bench = asleep(keep_every=4)
    step_of(lend(bench, 0))
    assert goes_on(bench).made == 4


def test_the_context_is_built_again_where_that_is_what_the_state_needs():
    bench = asleep()
    bench.tell(ev.ContextUnloaded, "w1", "model")
    commands = lend(bench, 0)
    assert only(commands, cmd.Load) == [cmd.Load("w1", "model")] and only(commands, cmd.Release) == []
    bench.finish(step_of(commands))
    assert only(tick(bench), cmd.Release) == [cmd.Release("w1")]
    assert goes_on(bench) == cmd.Order(1, "kept", 6, 6, "")


def test_a_context_that_cannot_be_built_again_there_keeps_no_worker_and_is_not_broken():
    bench = asleep(keep_every=4)
    bench.tell(ev.ContextUnloaded, "w1", "model")
    assert only(Bench.tell(bench, ev.TierOffered, tier(0)), cmd.Load) == [cmd.Load("w1", "model")]
    assert only(bench.fail_context("w1", "model"), cmd.EndSession) == []
    commands = tick(bench)
    assert only(commands, cmd.Load) == [] and only(commands, cmd.Release) == [cmd.Release("w1")]
    assert goes_on(bench).made == 4


def test_nothing_is_built_on_a_worker_that_has_notice():
    bench = asleep()
    bench.tell(ev.ContextUnloaded, "w1", "model")
    assert only(bench.tell(ev.EvictionNotice, "w1"), cmd.Load) == []


def fails(bench, step):
    bench.tell(ev.BatchFailed, step.worker, step.attempt, ev.Failure("crash", "LibraryDied", "it died"))


def is_lost(bench, step):
    bench.tell(ev.StepFinished, step.worker, step.attempt, 0.1, [{"lost": "it cannot be read"}])


@pytest.mark.parametrize("happens", [fails, is_lost])
def test_a_state_that_cannot_be_had_keeps_no_worker(happens):
    bench = asleep(keep_every=4)
    happens(bench, step_of(lend(bench, 0)))
    commands = tick(bench)
    assert only(commands, cmd.Step) == [] and only(commands, cmd.Release) == [cmd.Release("w1")]
    assert goes_on(bench).made == 4


def test_a_library_process_that_ends_meanwhile_is_built_again():
    bench = asleep()
    lend(bench, 0)
    step = step_of(bench.tell(ev.ContextUnloaded, "w1", "model"))
    assert step.orders == BROUGHT_OUT
    bench.finish(step)
    assert goes_on(bench) == cmd.Order(1, "kept", 6, 6, "")


def test_a_worker_with_states_goes_after_one_without():
    bench = asleep()
    bench.join("w2", memory=5)
    assert only(lend(bench, 1), cmd.Release) == [cmd.Release("w2")]


def test_a_worker_that_is_wanted_again_goes_on():
    bench = asleep()
    step = step_of(lend(bench, 0))
    lend(bench, 1)
    assert not bench.state.workers["w1"].draining
    bench.tell(ev.SessionResumed, 1)
    [order] = step_of(bench.finish(step)).orders
    assert order == cmd.Order(1, "kept", 6, 6, "")


@pytest.mark.parametrize("notice", [True, False])
def test_who_is_taken_while_its_states_are_kept_was_not_given_back(notice):
    bench = asleep()
    lend(bench, 0)
    if notice:
        bench.tell(ev.EvictionNotice, "w1")
    bench.lose("w1", evicted=True)
    assert bench.state.counters.evicted == len(bench.state.tiers["default"].lifetimes or ()) == 1


def test_who_is_given_back_was_not_taken_though_it_had_notice_of_that():
    bench = asleep(keep_every=1)
    assert only(lend(bench, 0), cmd.Release)
    bench.tell(ev.EvictionNotice, "w1")
    bench.lose("w1", evicted=True)
    assert bench.state.counters.evicted == 0 and not bench.state.tiers["default"].lifetimes


# --- workers that give way, and those with places of their own


def exact():
    return ExactPreemption(patience=10.0, grace=20.0, idle=5.0)


def test_a_state_is_kept_before_its_worker_gives_way():
    bench = asleep(preemption=exact())
    bench.context("wide", gpus=8, affinity="guaranteed")
    bench.app("urgent", "wide", priority=10)
    commands = answer(bench, bench.submit("urgent", 1), m1=full("m1", dict.fromkeys(range(1, 8))))
    assert step_of(commands).orders == BROUGHT_OUT and only(commands, cmd.Release) == []
    assert only(bench.finish(step_of(commands)), cmd.Release) == [cmd.Release("w1")]
    assert only(bench.lose("w1", evicted=True), cmd.AcquireAt)
    assert bench.state.sessions[1].made == 6


def test_who_is_waited_for_longer_than_its_grace_waits_for_no_state():
    bench = asleep(preemption=exact())
    bench.context("wide", gpus=8, affinity="guaranteed")
    bench.app("urgent", "wide", priority=10)
    answer(bench, bench.submit("urgent", 1), m1=full("m1", dict.fromkeys(range(1, 8))))
    bench.now += 20
    assert only(bench.tell(ev.Tick), cmd.Release) == [cmd.Release("w1")]


def with_a_place_of_its_own(keep_every=None):
    """A session on a worker that has a place of its own for it, and its step."""
    bench = SessionBench(workers=(), preemption=exact(), keep_every=keep_every)
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("wide", gpus=4, affinity="guaranteed")
    bench.tell(ev.AppDeclared, ev.AppSpec("draw", "draw", "wide", batch=False, sessions=True, keep_every=keep_every))
    [place] = only(answer(bench, bench.tell(ev.SessionOpened, 1, "draw", 100), m1=graph("m1")), cmd.AcquireAt)
    return bench, step_of(
        bench.join("big", host="m1", gpus=4, devices=tuple(place.devices), pin=place.pin, tier=place.tier)
    )


def ticks(bench, seconds):
    return [command for _ in range(seconds) for command in tick(bench)]


def test_a_place_is_given_back_whose_sessions_have_nothing_to_do():
    bench, step = with_a_place_of_its_own()
    bench.finish(step, s1={"idle": 1})
    commands = ticks(bench, 6)
    assert step_of(commands).orders == [cmd.Order(1, "", 1, None, "leave")] and only(commands, cmd.Release) == []
    assert only(bench.finish(step_of(commands)), cmd.Release) == [cmd.Release("big")]
    bench.lose("big", evicted=True)
    assert only(bench.tell(ev.SessionPrompted, 1), cmd.Survey), "it waits for another"


def test_a_state_is_kept_before_its_place_is_given_back():
    bench, step = with_a_place_of_its_own()
    bench.tell(ev.SessionSuspended, 1)
    bench.finish(step_of(bench.finish(step)))
    commands = ticks(bench, 6)
    assert step_of(commands).orders == [cmd.Order(1, "frozen", 1, None, "leave")]
    assert only(commands, cmd.Release) == []
    assert only(bench.finish(step_of(commands)), cmd.Release) == [cmd.Release("big")]
    bench.lose("big", evicted=True)
    assert bench.state.sessions[1].made == 1


def test_a_place_is_kept_for_a_session_that_gets_something_to_do_meanwhile():
    bench, step = with_a_place_of_its_own()
    bench.finish(step, s1={"idle": 1})
    step = step_of(ticks(bench, 6))
    bench.tell(ev.SessionPrompted, 1)
    commands = bench.finish(step)
    assert only(commands, cmd.Release) == [] and step_of(commands).orders == [cmd.Order(1, "kept", 1, 1, "")]
    assert not bench.state.workers["big"].draining
    bench.finish(step_of(commands), s1={"idle": 1})
    assert only(ticks(bench, 4), cmd.Step) == [], "it has had something to do since"


def test_a_place_that_gives_way_to_another_is_not_given_up_before_that_has_it():
    bench, step = with_a_place_of_its_own()
    bench.context("wider", gpus=8)
    bench.app("most urgent", "wider", priority=20)
    bench.now += 1000
    commands = answer(bench, bench.submit("most urgent", 1), m1=full("m1", dict.fromkeys(range(4, 8))))
    assert bench.state.workers["big"].draining
    commands += ticks(bench, 3)
    assert only(commands, cmd.Forgo) == [] and not any("does not go" in note.text for note in only(commands, cmd.Note))
    step = step_of(bench.finish(step))
    assert [order.then for order in step.orders] == ["leave"]
    assert only(bench.finish(step), cmd.Release) == [cmd.Release("big")]
    assert {type(each) for each in bench.lose("big", evicted=True)} >= {cmd.Forgo, cmd.AcquireAt}


def test_a_library_process_that_keeps_ending_is_built_again_once():
    bench = asleep()
    lend(bench, 0)
    loads, released = 0, []
    for _ in range(4):
        commands = bench.tell(ev.ContextUnloaded, "w1", "model")
        loads += len(only(commands, cmd.Load))
        released += only(commands, cmd.Release) + only(tick(bench), cmd.Release)
        if released:
            break
    assert (loads, released) == (1, [cmd.Release("w1")])


def test_contexts_that_do_not_fit_together_take_turns_once_each():
    bench = SessionBench(workers=(), keep_every=None)
    bench.tell(ev.TierOffered, tier(1))
    bench.context("other", memory=4)
    bench.app("second", "other", batch=False, sessions=True, keep_every=None)
    bench.join("w1", memory=5)
    bench.state.contexts["model"].memory = 4

    def carried_out(commands):
        """All commands, once the steps among them have ended."""
        found = []
        while commands:
            command, *commands = commands
            if isinstance(command, cmd.Step):
                commands += bench.finish(
                    command, **{f"s{o.session}": {"idle": 1} for o in command.orders if o.chunk is not None}
                )
            found.append(command)
        return found

    for number in range(1, 81):
        carried_out(bench.tell(ev.SessionOpened, number, "talk" if number % 40 < 20 else "second", 100))
        carried_out(bench.tell(ev.SessionSuspended, number))
        bench.now += 1
        carried_out(bench.tell(ev.Tick))
    assert {session.state for session in bench.state.sessions.values()} == {"suspended"}
    commands = carried_out(lend(bench, 0))
    for _ in range(10):
        commands += carried_out(tick(bench))
    assert len(only(commands, cmd.Load)) == 1, "the context that is there is read from first, then the other"
    assert cmd.Release("w1") in commands
