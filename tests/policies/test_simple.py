"""The simple policies, on views made by hand."""

import dataclasses
import types

import pytest

from ctxflow.policies.simple import (
    ContextAffinity,
    Everywhere,
    Fixed,
    FixedWorkers,
    LeastLoaded,
    NoPreemption,
    RoundRobin,
)


@dataclasses.dataclass
class App:
    id: str
    context: str
    backlog: int
    priority: int = 0
    deadline: float | None = None
    order: int = 0
    batch_size: int | None = None
    concurrency: int | None = None
    waiting_since: float | None = 0.0
    overlaps: bool = False
    keeps_context: bool = True

    @property
    def unclaimed(self):
        return self.backlog


@dataclasses.dataclass
class Worker:
    id: str
    holds: tuple[str, ...] = ()
    free_slots: int = 1
    slots: int = 1
    parked: tuple[str, ...] = ()
    running: tuple[int, ...] = ()
    noticed: float | None = None
    draining: bool = False

    @property
    def slots_used(self):
        return self.slots - self.free_slots

    @property
    def contexts(self):
        return {name: types.SimpleNamespace(context=name, state="ready") for name in self.holds}

    def seconds_per_item(self, app):
        return None

    load_seconds = stage_seconds = seconds_per_item

    def in_flight(self, context):
        return 0


class View:
    def __init__(self, *workers, size=10, now=0.0):
        self.workers = self.free = {worker.id: worker for worker in workers}
        self.size, self.now, self.asked, self.apps, self.attempts = size, now, 0, {}, {}

    def batch_size(self, app, worker):
        return self.size

    room = batch_size

    def drains(self, app, worker):
        return False

    def full_window(self, app, worker):
        return self.size if app.overlaps else 1

    def gives_way(self, app, worker):
        return ()

    def free_holders(self, context):
        return [worker for worker in self.free.values() if context in worker.contexts]

    def free_parked(self, context):
        return [worker for worker in self.free.values() if context in worker.parked]

    def free_by_load(self):
        return sorted(self.free.values(), key=lambda worker: len(worker.contexts))

    @property
    def free_slots(self):
        return sum(worker.free_slots for worker in self.free.values())

    @property
    def in_flight(self):
        return sum(len(worker.running) for worker in self.free.values())

    def holding(self, context):
        return [worker for worker in self.workers.values() if context in worker.contexts]

    def built_on(self, context):
        return ()

    measured_on = built_on

    def can_run(self, app, worker):
        self.asked += 1
        return "fussy" not in worker.id or app.context in worker.contexts

    def holders(self, context):
        return sum(context in worker.contexts for worker in self.workers.values())


def pairs(policy, view, *apps):
    return [(a.worker, a.app) for a in policy.assign(view, apps)]


def test_affinity_sends_work_where_its_context_is():
    view = View(Worker("w1", ("b",)), Worker("w2", ("a",)))
    assert pairs(ContextAffinity(), view, App("A", "a", 5), App("B", "b", 5, order=1)) == [("w2", "A"), ("w1", "B")]


def test_affinity_spreads_what_is_left_to_those_that_hold_least():
    view = View(Worker("full", ("x", "y")), Worker("holder", ("a",)), Worker("empty"))
    assert pairs(ContextAffinity(), view, App("A", "a", 25)) == [("holder", "A"), ("empty", "A"), ("full", "A")]
    assert pairs(ContextAffinity(), view, App("A", "a", 10)) == [("holder", "A")], "one batch needs one worker"


def test_affinity_spreads_nothing_that_overlaps_where_all_have_its_context():
    view = View(*(Worker(f"w{n}", ("a",), free_slots=2, slots=2) for n in range(4)), size=1)
    those = [(f"w{n}", "A") for n in range(4)]
    assert pairs(ContextAffinity(), view, App("A", "a", 1000, overlaps=True)) == those and view.asked == 4
    view.workers["new"] = Worker("new")
    assert pairs(ContextAffinity(), view, App("A", "a", 1000, overlaps=True))[:5] == [*those, ("new", "A")]


def test_affinity_fills_who_has_room_before_anybody_is_drained():
    class Filled(View):
        in_flight = 1

        def drains(self, app, worker):
            return worker.id == "filled"

    view = Filled(Worker("filled", ("a",)), Worker("roomy", ("a",), free_slots=3, slots=3))
    assert pairs(ContextAffinity(), view, App("A", "a", 30)) == [("roomy", "A")] * 3
    assert pairs(ContextAffinity(), view, App("A", "a", 40)) == [("roomy", "A")] * 3 + [("filled", "A")]


def test_affinity_shares_workers_by_backlog_for_each_holder():
    view = View(Worker("w1"), Worker("w2"), Worker("w3"))
    assert pairs(ContextAffinity(), view, App("A", "a", 40), App("B", "b", 15, order=1)) == [
        ("w1", "A"),
        ("w2", "A"),
        ("w3", "B"),
    ]


@pytest.mark.parametrize("policy", [ContextAffinity(), LeastLoaded()])
def test_priority_goes_first_then_the_deadline(policy):
    apps = [App("old", "a", 1), App("due", "a", 1, deadline=5.0, order=1), App("urgent", "a", 1, priority=1, order=2)]
    view = View(Worker("w1", ("a",)), Worker("w2", ("a",)))
    assert pairs(policy, view, *apps) == [("w1", "urgent"), ("w2", "due")]


def test_least_loaded_takes_the_worker_with_the_fewest_calls():
    view = View(Worker("busy", ("a",), free_slots=1, slots=3), Worker("idle", free_slots=2, slots=2))
    assert pairs(LeastLoaded(), view, App("A", "a", 10)) == [("idle", "A")]


def test_round_robin_takes_apps_in_turn():
    policy, apps = RoundRobin(), [App("A", "a", 100), App("B", "b", 100)]
    view = View(Worker("w1"), Worker("w2"), Worker("w3"))
    assert [app for _, app in pairs(policy, view, *apps)] == ["A", "B", "A"]
    assert [app for _, app in pairs(policy, view, *apps)] == ["B", "A", "B"]


@pytest.mark.parametrize("policy", [ContextAffinity(), LeastLoaded(), RoundRobin()])
def test_no_policy_gives_more_than_there_is(policy):
    view = View(Worker("w1", free_slots=2, slots=2), Worker("fussy"), Worker("w2", ("a",)))
    given = pairs(policy, view, App("A", "a", 1000))
    assert sorted(worker for worker, _ in given) in (["w1", "w1", "w2"], ["w1", "w2"])
    assert len(pairs(policy, view, App("A", "a", 1))) == 1


def test_fixed_batches():
    view = View(Worker("w1"), Worker("w2"), now=10.0)
    worker = view.workers["w1"]
    assert Fixed(4).size(view, App("A", "a", 100), worker) == 4
    assert Fixed(4).size(view, App("A", "a", 100, batch_size=7), worker) == 7
    assert Fixed(100).size(view, App("A", "a", 9), worker) == 5, "a short queue is shared"
    assert Fixed(100, share=False).size(view, App("A", "a", 9), worker) == 100
    lingering = Fixed(4, linger=3.0, share=False)
    assert lingering.size(view, App("A", "a", 2, waiting_since=8.0), worker) == 0
    assert lingering.size(view, App("A", "a", 2, waiting_since=7.0), worker) == 4
    assert lingering.size(view, App("A", "a", 4, waiting_since=10.0), worker) == 4
    assert Fixed().duplicate(view, worker) is None
    for options in ({"size": 0}, {"linger": -1}):
        with pytest.raises(ValueError, match=r"give [01] or more"):
            Fixed(**options)


def test_fixed_workers_stay_within_the_bounds():
    view = types.SimpleNamespace(tiers={"gpu": types.SimpleNamespace(minimum=2, maximum=5)})
    assert FixedWorkers().target(view) == {"gpu": 5}
    assert [FixedWorkers(n).target(view)["gpu"] for n in (0, 3, 9)] == [2, 3, 5]
    with pytest.raises(ValueError, match="workers is how many to hold: give 0 or more"):
        FixedWorkers(-1)


def test_those_that_decide_nothing():
    plan = Everywhere().plan(View())
    assert plan.permits("any", "where") and not plan.workers
    assert not NoPreemption().victims(View(), App("A", "a", 1))


def test_affinity_wakes_a_context_where_it_is_parked():
    view = View(Worker("w1"), Worker("w2", holds=("b",), parked=("a",)), size=10)
    [assignment] = ContextAffinity().assign(view, [App("x", "a", 5)])
    assert assignment.worker == "w2"
