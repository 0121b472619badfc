"""The view that policies get: read-only in fact, all of it."""

import contextlib
import random
from collections.abc import KeysView, Mapping, Sequence

import pytest
from scheduler_bench import Bench, only

from ctxflow.policies import views
from ctxflow.policies.protocols import View
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.topology import to_graph
from ctxflow.topology.hardware import Topology

PLAIN = (str, int, float, bool, type(None), frozenset, random.Random, Topology)
GRAPH = {**to_graph(Topology("m1")), "more": [1, {"deep": 2}]}


def members(protocol):
    """The names of what a protocol says, those with arguments apart."""
    found = [name for name in vars(protocol) if not name.startswith("_")]
    plain = [name for name in found if isinstance(vars(protocol)[name], property)]
    return plain, sorted(set(found) - set(plain))


def a_run():
    """A scheduler that has some of everything a view can give."""
    bench = Bench(preemption="standard", routing="torta", batching="coalescing")
    bench.tell(ev.RegionOffered, ev.RegionSpec("north", {"south": 0.1}, {"south": 1e6}, 0.1, ["gpu"], home=True))
    bench.tell(ev.TierOffered, ev.TierSpec("gpu", 0, 4, gpus=1, machine_gpus=4))
    for name in ("model", "other"):
        bench.tell(ev.ContextDeclared, ev.ContextSpec(name, name))
    bench.tell(ev.ContextDeclared, ev.ContextSpec("wide", "wide", gpus=2, affinity="guaranteed"))
    bench.tell(ev.AppDeclared, ev.AppSpec("verify", "verify", context="model", deadline=9.0))
    bench.tell(ev.AppDeclared, ev.AppSpec("broad", "broad", context="wide"))
    bench.tell(ev.AppDeclared, ev.AppSpec("talk", "talk", context="model", sessions=True, chunk_target=1.0))
    for name in ("w1", "w2", "gone"):
        spec = ev.WorkerSpec(name, f"h-{name}", "gpu", "north", 2, 1, "A10", devices=[f"GPU-{name}"], topology=GRAPH)
        bench.tell(ev.WorkerJoined, spec)
    bench.now = 5.0
    bench.tell(ev.WorkerLost, "gone", evicted=True)
    bench.submit("verify", 40)
    bench.submit("broad", 1)
    for time in range(6, 60, 6):
        bench.now = float(time)
        bench.submit("verify", 3)
        bench.tell(ev.Tick)
    bench.tell(ev.MachinesFound, "gpu", {"m1": to_graph(Topology("m1"))})
    [first, _] = only(bench.ready("w1", "model"), cmd.Run)
    bench.tell(ev.BatchFinished, "w1", first.attempt, 0.5)
    bench.tell(ev.SessionOpened, 1, "talk", 10)
    bench.tell(ev.Tick)
    bench.state.reservations.reserved
    return bench


@pytest.fixture
def bench():
    return a_run()


def walk(view):
    """Yield everything that a view gives, with where it was found, each object and container once."""
    kinds = {
        "workers": views.WorkerView,
        "free": views.WorkerView,
        "apps": views.AppView,
        "attempts": views.AttemptView,
        "tiers": views.TierView,
        "machines": views.MachineView,
        "regions": views.RegionView,
        "sessions": views.SessionView,
        "contexts": views.ContextOnWorkerView,
        "running": views.AttemptView,
    }
    seen = set()

    def visit(path, value, protocol):
        if id(value) in seen and not isinstance(value, PLAIN):
            return
        seen.add(id(value))
        yield path, value, protocol
        if protocol is not None:
            for name in members(protocol)[0]:
                inner = getattr(value, name)
                yield from visit(f"{path}.{name}", inner, None)
                if isinstance(inner, Mapping) and name in kinds:
                    for key, each in inner.items():
                        yield from visit(f"{path}.{name}[{key!r}]", each, kinds[name])

    yield from visit("view", view, View)


def told_of(bench):
    state = bench.state
    rows = [state.workers, state.apps, state.tiers, state.streams.open, state.attempts, state.regions]
    more = [list(state.free), list(state.ready), state.surveys.machines, state.now, state.plan, state.copies]
    return repr((rows, more, state.arrivals.forecast(), state.reservations.reserved, GRAPH))


def test_a_run_shows_some_of_everything(bench):
    view = bench.view
    shown = {type(value).__name__ for _, value, protocol in walk(view) if protocol is not None}
    proxies = {"ShownWorker", "ShownContext", "ShownSession", "ShownApp", "ShownTier"}
    assert shown == proxies | {"RunView", "Attempt", "Machine", "RegionSpec"}
    worker = view.workers["w1"]
    assert worker.contexts and worker.running and view.forecast and view.tiers["gpu"].lifetimes and worker.topology
    assert view.apps["verify"].waiting_since is not None and len(view.workers) == 2
    assert view.tiers["gpu"].lifetimes is view.tiers["gpu"].lifetimes, "they may be thousands: it is no copy"


def test_nothing_can_be_set_on_what_a_view_shows(bench):
    before = told_of(bench)
    count = 0
    for path, value, protocol in walk(bench.view):
        if protocol is None:
            continue
        for name in [*members(protocol)[0], *members(protocol)[1], "something_new"]:
            with pytest.raises((AttributeError, TypeError)):
                setattr(value, name, None)
            with pytest.raises((AttributeError, TypeError)):
                delattr(value, name)
            count += 1
        assert not hasattr(value, "__dict__"), path
    assert count > 100
    assert told_of(bench) == before
    bench.scheduler.validate()


def spoil(value):
    """Write to a container in every way that it has."""
    if isinstance(value, Mapping):
        key, nested = next(iter(value), "new"), list(value.values())
        ways = [("__setitem__", "new", 1), ("__setitem__", key, None), ("setdefault", "new", 1), ("pop", key)]
        ways += [("update", {key: None}), ("__delitem__", key), ("clear",)]
    else:
        nested = list(value)
        ways = [("append", 1), ("__setitem__", 0, None), ("reverse",), ("clear",)]
    for each in nested:
        if isinstance(each, list | dict):
            spoil(each)
    for name, *values in ways:
        with contextlib.suppress(AttributeError, TypeError, KeyError, IndexError):
            getattr(value, name)(*values)


def test_what_is_done_to_a_container_from_a_view_changes_nothing(bench):
    before = told_of(bench)
    kept = {"view.workers", "view.free", "view.apps", "view.attempts", "view.tiers", "view.regions", "view.sessions"}
    for path, value, protocol in list(walk(bench.view)):
        if protocol is None and not isinstance(value, PLAIN):
            assert isinstance(value, (Mapping, Sequence, KeysView)), (
                f"{path} is a {type(value).__name__}: can it be written?"
            )
            spoil(value)
            kept.discard(path)
    assert not kept
    worker, app = next(iter(bench.view.workers.values())), bench.view.apps["verify"]
    spoil(worker.step_seconds("talk"))
    spoil(bench.view.free_holders("model"))
    spoil(worker.topology)
    assert told_of(bench) == before
    assert worker.seconds_per_item(app.id) and worker.items_done(app.id)
    bench.scheduler.validate()


def test_a_region_is_shown_as_it_was_when_it_was_offered():
    latency, tiers = {"south": 0.1}, ["gpu"]
    scheduler = Scheduler(Policies.chosen({}))
    scheduler.handle(ev.RegionOffered(0.0, ev.RegionSpec("north", latency, {}, tiers=tiers)))
    latency["south"] = 9.0
    tiers.append("other")
    region = scheduler.view.regions["north"]
    assert (dict(region.latency), region.tiers) == ({"south": 0.1}, ("gpu",))


class Vandal:
    """A routing policy that empties whatever it is given, and then does as another does."""

    def __init__(self):
        self._kind = make("routing", "least-loaded")
        self.spoiled = 0

    def assign(self, view, ready):
        chosen = list(self._kind.assign(view, list(ready)))
        for _, value, protocol in list(walk(view)):
            if protocol is None and not isinstance(value, PLAIN):
                spoil(value)
                self.spoiled += 1
        ready.clear()
        return chosen


def test_a_policy_that_writes_to_all_it_gets_changes_no_decision():
    made = []
    vandal = Vandal()
    for routing in ("least-loaded", vandal):
        bench = Bench(routing=routing)
        bench.app("verify", "model")
        commands = bench.join("w1") + bench.join("w2") + bench.submit("verify", 9)
        commands += bench.ready("w1", "model")
        for _ in range(3):
            run = next(iter(bench.state.attempts.values()))
            bench.now += 1.0
            commands += bench.tell(ev.BatchFinished, run.worker, run.id, 1.0) + bench.tell(ev.Tick)
            if not bench.state.attempts:
                break
        made.append(commands)
    assert made[0] == made[1] and vandal.spoiled > 20


def test_the_members_of_each_proxy_are_those_of_its_protocol(bench):
    for path, value, protocol in walk(bench.view):
        if protocol is not None and type(value).__name__ not in ("Attempt", "Machine", "RegionSpec"):
            plain, callables = members(protocol)
            shown = {name for name in dir(type(value)) if not name.startswith("_")}
            assert shown == {*plain, *callables}, path
