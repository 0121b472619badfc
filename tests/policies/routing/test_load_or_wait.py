"""`context-affinity` waits for a worker that holds a context where that is sooner than to load it on another."""

import collections
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_runs import Run, machine

from ctxflow.policies.load_or_wait import SAMPLE, LoadOrWait
from ctxflow.policies.simple import ContextAffinity
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneAttempt, SceneContext, SceneWorker
from suite import depth

LOAD = 20.0
AFFINITY = "context-affinity"


def scene(*holding, busy=(), **measured):
    """Workers w0, w1, ... that hold a context each, "" for none; those that are busy are so for ten seconds more."""
    found = Scene(now=100.0, items=4, tiers={})
    for number, context in enumerate(holding):
        worker = found.workers[f"w{number}"] = SceneWorker(f"w{number}", **measured)
        worker.pace = {"a": (1.0, 50), "b": (1.0, 50)}
        worker.loading = {"ca": LOAD, "cb": LOAD}
        if context:
            worker.contexts[context] = SceneContext(context, "ready", 0.0, 0.0)
        if number in busy:
            worker.running[number] = SceneAttempt(number, context[1:], worker.id, range(20), found.now - 10.0)
    for order, name in enumerate("ab"):
        found.apps[name] = SceneApp(name, f"c{name}", call_seconds=0.0, order=order, arrived=100)
    return found


def queue(found, app, items, since=0.0):
    found.apps[app].backlog, found.apps[app].waiting_since = items, found.now - since


def given_in(found, policy=None):
    return [(each.worker, each.app) for each in (policy or ContextAffinity()).assign(found, found.ready)]


@pytest.mark.parametrize(("items", "loads"), [(10, 0), (11, 1)])
def test_what_a_holder_begins_in_the_time_of_a_load_waits_for_it(items, loads):
    """It comes free in 10 s, so that it has begun 10 s of work when a load that begins now is over."""
    found = scene("ca", "", busy=[0])
    queue(found, "a", items)
    assert given_in(found) == [("w1", "a")] * loads


@pytest.mark.parametrize("missing", ["pace", "loading"])
def test_what_was_not_measured_is_tried(missing):
    found = scene("ca", "", "", "", busy=[0])
    queue(found, "a", 12)
    for worker in found.workers.values():
        getattr(worker, missing).clear()
    assert given_in(found) == [("w1", "a"), ("w2", "a"), ("w3", "a")]


def test_nobody_waits_for_a_context_that_is_built_for_each_call():
    found = scene("ca", "", "", busy=[0])
    queue(found, "a", 8)
    assert given_in(found) == []
    found.apps["a"].keeps_context = False
    assert given_in(found) == [("w1", "a"), ("w2", "a")]


@pytest.mark.parametrize("leaves", [{"draining": True}, {"noticed": 90.0}])
def test_nobody_waits_for_a_worker_that_leaves(leaves):
    found = scene("ca", "", busy=[0])
    queue(found, "a", 1)
    for name, value in leaves.items():
        setattr(found.workers["w0"], name, value)
    assert given_in(found) == [("w1", "a")]


def test_nobody_waits_for_a_worker_that_does_not_end():
    """It should have been done long ago, and is given as long again."""
    found = scene("ca", "", busy=[0])
    queue(found, "a", 1)
    found.workers["w0"].running[0] = SceneAttempt(0, "a", "w0", range(20), found.now - 20.0 - LOAD)
    assert given_in(found) == [("w1", "a")]


def test_a_worker_that_loads_the_context_takes_work_too_once_it_has_it():
    found = scene("ca", "ca", "", busy=[0])
    found.workers["w1"].contexts["ca"] = SceneContext("ca", "loading", found.now - 15.0, 0.0)
    found.can_run = lambda app, worker: worker.id == "w2"
    queue(found, "a", 25)
    assert given_in(found) == []
    queue(found, "a", 26)
    assert given_in(found) == [("w2", "a")]


def test_room_for_one_more_is_taken_sooner_than_another_context_is_unloaded():
    """What has to be loaded again costs that load too: the holder begins 30 s of work in twice the time."""
    found = scene("ca", "cb", busy=[0])
    queue(found, "a", 15)
    assert given_in(found) == [("w1", "a")], "there is room beside the other one"
    found.gives_way = lambda app, worker: ("cb",)
    assert given_in(found) == []
    queue(found, "a", 31)
    assert given_in(found) == [("w1", "a")]
    queue(found, "a", 15)
    del found.apps["b"]
    assert given_in(found) == [("w1", "a")], "nobody needs the other one any more"


def test_nobody_waits_for_a_worker_that_may_not_run_what_waits():
    found = scene("ca", "")
    queue(found, "a", 1)
    found.can_run = lambda app, worker: worker.id != "w0"
    assert given_in(found) == [("w1", "a")]


def test_a_queue_that_lasts_is_worth_one_load_at_a_time():
    found, policy = scene("ca", "", "", busy=[0]), ContextAffinity()
    queue(found, "a", 1, since=LOAD / 4 + 1)
    assert given_in(found, policy) == [("w1", "a")]
    found.now += 1.0
    assert given_in(found, policy) == []
    found.now += LOAD / 4
    assert given_in(found, policy) == [("w1", "a")]


def test_calls_that_overlap_leave_their_slot_to_others():
    found = scene("ca", "")
    found.apps["a"].overlaps, found.apps["a"].batch_size = True, 1
    found.fly("a", "w0", found.window, found.now)
    queue(found, "a", int(LOAD))
    assert given_in(found) == []
    queue(found, "a", int(LOAD) + 1)
    assert given_in(found) == [("w1", "a")]


def test_a_sample_is_looked_at_once_for_as_many_questions_as_there_are_workers(monkeypatch):
    """Two hundred workers, of which half are free and half hold what waits."""
    found = scene(*["ca"] * 100, *["cb"] * 100, busy=range(100))
    found.gives_way = lambda app, worker: ("cb",)
    queue(found, "a", 10)
    looks, free_in = [], LoadOrWait._free_in
    monkeypatch.setattr(LoadOrWait, "_free_in", lambda *given: looks.append(0) or free_in(*given))
    policy = ContextAffinity()
    for _ in range(200):
        found.now += 1e-4
        assert given_in(found, policy) == []
    assert 0 < len(looks) <= 2 * SAMPLE


def test_holders_that_are_lost_are_subtracted_without_another_look(monkeypatch):
    """A hundred begin 10 s of work each in the time of a load."""
    found, policy = scene(*["ca"] * 100, "", busy=range(100)), ContextAffinity()
    looks, free_in = [], LoadOrWait._free_in
    monkeypatch.setattr(LoadOrWait, "_free_in", lambda *given: looks.append(0) or free_in(*given))
    queue(found, "a", 900)
    assert given_in(found, policy) == [] and len(looks) <= SAMPLE
    for number in range(20):
        del found.workers[f"w{number}"]
    looked = len(looks)
    assert given_in(found, policy) == [("w100", "a")] and len(looks) == looked


# --- whole runs


def eager(monkeypatch):
    """Have whoever is free load what waits, as it was."""
    monkeypatch.setattr(LoadOrWait, "pays", lambda *given: True)


def waits(run, arrivals):
    """The mean seconds from an item's arrival to its call."""
    came = {app: collections.deque() for app in {app for _, app, _ in arrivals}}
    for time, app, count in sorted(arrivals):
        came[app].extend([time] * count)
    taken = [time - came[app].popleft() for time, app, items in run.begun for _ in range(items)]
    return sum(taken) / len(taken)


class Watched(Run):
    """A run of which it is known when which items were begun, and that checks that nobody idles beside a long wait."""

    def __init__(self, *given, load=8.0, **named):
        self.begun, self._came, self._load, self._began = [], {}, load, {}
        super().__init__(*given, load=load, **named)

    def _heard(self, event, commands):
        super()._heard(event, commands)
        if isinstance(event, ev.ItemsSubmitted):
            self._came.update(dict.fromkeys(event.items, event.time))
        self.begun += [(event.time, c.app, len(c.items)) for c in commands if isinstance(c, cmd.Run)]
        self._began.update({c.context: event.time for c in commands if isinstance(c, cmd.Load)})
        state = self.simulation.scheduler.state
        for app in state.apps.values():
            if not app.queue:
                continue
            came = min(self._came[item] for item in app.queue)
            if event.time > came + 2 * self._load and self._began.get(app.context, -math.inf) < came:
                able = [name for name, worker in state.view.free.items() if state.view.can_run(app.shown, worker)]
                assert not able, f"{able} idle, and an item waits since {came}"


BURSTS = [(60.0 + 15.0 * n, f"a{n % 2}", 16) for n in range(60)]
WARM = [(0.0, "a0", 12), (0.0, "a1", 12)]


def test_bursts_of_two_models_load_nothing_once_their_workers_have_what_they_need(monkeypatch):
    """A burst takes its app's three workers 6 s; a load takes 15."""
    machines = [machine(f"m{n}") for n in range(6)]
    arrivals = [*WARM, *BURSTS]
    run = Watched(AFFINITY, machines, arrivals, load=15.0, regions=())
    eager(monkeypatch)
    before = Watched(AFFINITY, machines, arrivals, load=15.0, regions=())
    assert len(run.loads) == 6 and len(before.loads) > 60
    assert waits(run, arrivals) < 3.0 < waits(before, arrivals)


MACHINES = st.lists(
    st.tuples(st.sampled_from(["fast", "slow"]), st.sampled_from([0.0, 30.0, 90.0]), st.sampled_from([80.0, math.inf])),
    max_size=6,
)
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 200), st.sampled_from(["a0", "a1", "a2"]), st.integers(1, 60)), min_size=1, max_size=15
)


@settings(max_examples=depth.some(8, deeply=60), deadline=None)
@given(machines=MACHINES, arrivals=ARRIVALS, load=st.sampled_from([2.0, 15.0, 40.0]), size=st.sampled_from([1, 4, 50]))
def test_nobody_idles_while_an_item_has_waited_longer_than_loads_take(machines, arrivals, load, size):
    """Longer than the load, and the one of what gives way, without that a load was begun since it came."""
    some = [machine(f"m{n}", model=model, since=since, until=until) for n, (model, since, until) in enumerate(machines)]
    run = Watched(AFFINITY, [machine("last"), *some], arrivals, contexts=3, load=load, size=size, regions=())
    assert run.outcome.done == run.outcome.items == sum(count for _, _, count in arrivals)


@settings(max_examples=depth.some(8, deeply=60), deadline=None)
@given(
    machines=MACHINES,
    items=st.integers(1, 600),
    load=st.sampled_from([2.0, 15.0, 40.0]),
    size=st.sampled_from([1, 4, 50]),
)
@example(
    machines=[("fast", 0.0, 80.0), ("fast", 0.0, 80.0), ("fast", 90.0, math.inf), ("slow", 90.0, math.inf)],
    items=175,
    load=40.0,
    size=4,
)  # The last two join at once.
def test_one_job_is_done_as_soon_as_if_all_loaded(machines, items, load, size):
    some = [machine(f"m{n}", model=model, since=since, until=until) for n, (model, since, until) in enumerate(machines)]
    given = [machine("last"), *some], [(0.0, "a0", items)]
    run = Run(AFFINITY, *given, contexts=1, load=load, size=size, regions=())
    with pytest.MonkeyPatch.context() as patch:
        eager(patch)
        before = Run(AFFINITY, *given, contexts=1, load=load, size=size, regions=())
    assert run.outcome.seconds <= before.outcome.seconds + 1e-6


@pytest.mark.parametrize("routing", [AFFINITY, "torta"])
def test_another_app_of_a_context_is_no_reason_to_load_it(routing):
    """A second priority, or deadline, of the same function is an app that nobody measured: it was tried everywhere."""
    machines = [machine("m0"), *(machine(f"m{n}", since=50.0) for n in range(1, 4))]
    arrivals = [(0.0, "a0", 8), (100.0, "a1", 4)]
    run = Run(routing, machines, arrivals, load=LOAD, size=1, shared=True, regions=())
    assert [name for _, name, _ in run.loads] == ["m0-1"]
    more = Run(routing, machines, [(0.0, "a0", 8), (100.0, "a1", 400)], load=LOAD, size=1, shared=True, regions=())
    assert len(more.loads) == 4, "a long queue is"
