"""What nobody uses any more is forgotten, and many apps with a call each cost what one with many calls does."""

import pytest
from scheduler_bench import Bench, only, run_of

from ctxflow.policies.simple import ContextAffinity
from ctxflow.scheduler import app_state, context_moves
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line, replay


def used_once(bench, app, context="c"):
    """An app has one item, which is answered."""
    bench.app(app, context)
    commands = bench.submit(app, 1)
    for load in only(commands, cmd.Load):
        commands += bench.ready(load.worker, load.context)
    bench.finish(run_of(commands))


def test_an_app_that_nobody_uses_is_forgotten_everywhere_and_may_come_again():
    bench = Bench()
    bench.join("w1")
    used_once(bench, "a")
    used_once(bench, "b")
    bench.tell(ev.Retired, ["a", "nobody knows it"])
    assert [*bench.state.apps] == ["b"] == [*bench.state.contexts["c"].apps]
    assert bench.state.workers["w1"].paces.keys() == {"b"}
    used_once(bench, "a")
    assert bench.state.counters.done == 3
    assert bench.state.apps["a"].order > bench.state.apps["b"].order


@pytest.mark.parametrize("stage", ["queued", "claimed", "running", "cancelled but running"])
def test_an_app_with_work_stays(stage):
    bench = Bench()
    bench.app("a", "c")
    commands = bench.submit("a", 1)
    if stage != "queued":
        bench.join("w1")
    if "running" in stage:
        commands = bench.ready("w1", "c")
    if stage == "cancelled but running":
        bench.tell(ev.ItemsCancelled, [0])
    bench.tell(ev.Retired, ["a"], ["c"])
    assert "a" in bench.state.apps and "c" in bench.state.contexts
    if stage == "cancelled but running":
        bench.finish(run_of(commands))
        bench.tell(ev.Retired, ["a"])
        assert not bench.state.apps


def test_an_app_with_a_session_stays_until_its_worker_has_forgotten_the_state():
    bench = Bench()
    bench.app("a", "c", batch=False, sessions=True)
    bench.tell(ev.SessionOpened, 1, "a", 2)
    bench.join("w1")
    [step] = only(bench.ready("w1", "c"), cmd.Step)
    bench.tell(ev.Retired, ["a"])
    [step] = only(bench.tell(ev.StepFinished, "w1", step.attempt, 0.1, [{"made": 1}]), cmd.Step)
    bench.tell(ev.SessionClosed, 1)
    bench.tell(ev.Retired, ["a"])
    assert "a" in bench.state.apps, "it runs a step"
    [drop] = only(bench.tell(ev.StepFinished, "w1", step.attempt, 0.1, [{"made": 1}]), cmd.Step)
    bench.tell(ev.Retired, ["a"])
    assert "a" in bench.state.apps, "its state is taken away"
    bench.tell(ev.StepFinished, "w1", drop.attempt, 0.1, [{}])
    bench.tell(ev.Retired, ["a"])
    assert not bench.state.apps and not bench.state.workers["w1"].steps


def test_alternatives_go_with_the_app_whose_they_are():
    bench = Bench()
    bench.app("a", "c")
    bench.app("a-1", "small", alternative_of="a")
    bench.tell(ev.Retired, ["a-1"])
    assert len(bench.state.apps) == 2
    bench.tell(ev.Retired, ["a"], ["c", "small"])
    assert not bench.state.apps and not bench.state.contexts


def test_a_context_stays_where_a_worker_holds_it_and_with_its_apps():
    bench = Bench()
    bench.join("w1")
    used_once(bench, "a")
    bench.tell(ev.Retired, [], ["c"])
    assert "c" in bench.state.contexts, "it has an app"
    bench.tell(ev.Retired, ["a"], ["c"])
    assert "c" in bench.state.contexts, "a worker keeps it: it would have to be built again"
    bench.lose("w1")
    bench.tell(ev.Retired, [], ["c"])
    assert not bench.state.contexts


def test_a_worker_keeps_a_few_contexts_that_no_app_is_for_and_those_used_last():
    bench = Bench()
    bench.join("w1")
    used_once(bench, "plain", "")
    names = [f"c{number}" for number in range(context_moves.MOST_LEFT + 3)]
    for name in names:
        bench.now += 1
        used_once(bench, f"for {name}", name)
    unloads = only(bench.tell(ev.Retired, ["plain", *(f"for {name}" for name in names[1:])]), cmd.Unload)
    assert [each.context for each in unloads] == names[1:3], "the first has its app"
    assert len(bench.state.workers["w1"].contexts) == context_moves.MOST_LEFT + 2
    bench.tell(ev.Retired, [], names)
    assert names[0] in bench.state.contexts and names[1] not in bench.state.contexts


def test_a_run_with_forgotten_apps_is_replayed():
    bench, lines = Bench(), []
    lines.append(first_line(bench.scheduler) + "\n")
    handle = bench.scheduler.handle

    def recorded(event):
        commands = handle(event)
        lines.append(line(event, commands) + "\n")
        return commands

    bench.scheduler.handle = recorded
    bench.join("w1")
    for _ in range(3):
        used_once(bench, "a")
        used_once(bench, "b")
        bench.tell(ev.Retired, ["a"])
    assert replay(lines, Bench().scheduler) == len(lines) - 1 > 20


class Counting(ContextAffinity):
    """Counts the apps that it is shown."""

    def __init__(self):
        self.shown = []

    def assign(self, view, ready):
        self.shown.append(len(ready))
        return super().assign(view, ready)


def test_of_thousands_of_apps_a_policy_is_shown_the_most_urgent_few():
    routing, count = Counting(), 2000
    bench = Bench(routing=routing)
    bench.scheduler.validate = lambda: None  # Which looks at all of them at every event.
    for number in range(count):
        bench.app(f"a{number}", "c", priority=number % 7, deadline=float(number % 11))
        bench.submit(f"a{number}", 1)
    commands, served = bench.worker_with("c"), []
    routing.shown.clear()
    while runs := only(commands, cmd.Run):
        [run] = runs
        served.append(bench.state.apps[run.app])
        commands = bench.finish(run)
    assert len(served) == count and not bench.state.ready
    assert served == sorted(served, key=lambda app: (-app.priority, app.deadline, app.order))
    assert max(routing.shown) <= app_state.MANY and sum(routing.shown) < 4 * count


def test_among_many_apps_none_is_passed_over_for_those_that_others_load_for_or_that_are_held_back():
    bench = Bench(batching={"policy": "fixed", "size": 4})
    for number in range(3 * app_state.MANY):
        bench.app(f"a{number}", "c", priority=-number)
        bench.submit(f"a{number}", 1)
    bench.app("other", "d", priority=-1000)
    bench.submit("other", 1)
    names = [f"w{number}" for number in range(app_state.MANY)]
    loads = only(bench.join(*names), cmd.Load)
    assert len(loads) == len(names), "each takes an app that nobody loads for"
    state = bench.state
    first = next(iter(state.ready.values()))
    state.ready.hold(first, bench.now + 5.0)
    assert first not in state.ready.offered(bench.now, 1) and first in state.ready.waiting_for("c")
    assert first in state.ready.offered(bench.now + 5.0, 1)
    assert any(app.id == "other" for app in state.ready.offered(bench.now, 1)), "of each context some"
