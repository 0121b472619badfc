"""Workers in proportion to the queue, on views made by hand."""

import dataclasses
import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.registry import make
from ctxflow.policies.simple import QueueProportional


@dataclasses.dataclass
class Tier:
    name: str
    minimum: int = 0
    maximum: int = 10
    price: float | None = None


@dataclasses.dataclass
class Worker:
    tier: str
    acquired: bool = True
    draining: bool = False
    noticed: float | None = None
    pin: int | None = None
    gpu_model: str | None = None
    contexts: tuple[str, ...] = ()


@dataclasses.dataclass
class App:
    id: str
    backlog: int = 0
    batch_size: int | None = 1
    overlaps: bool = False
    concurrency: int | None = None
    context: str = "model"
    tiers: frozenset[str] | None = None  # None: anywhere.


class View:
    """Calls are of one item unless an app says otherwise; `running` has the app of each."""

    def __init__(self, tiers, apps, workers=(), running=(), now=0.0, preferred=()):
        self.tiers = {tier.name: tier for tier in tiers}
        self.apps = {app.id: app for app in apps}
        self.workers = dict(enumerate(workers))
        self.attempts = {n: types.SimpleNamespace(app=app, items=(0,)) for n, app in enumerate(running)}
        self.sessions = {}
        self.preferred = preferred
        self.now = now

    def batch_size(self, app, worker):
        return app.batch_size

    def full_window(self, app, worker):
        return app.concurrency or 1

    def permits(self, app, tier):
        return app.tiers is None or tier.name in app.tiers


def wanted(view, **options):
    return dict(QueueProportional(**{"calls_per_worker": 4, **options}).target(view))


def of(**counts):
    return [Worker(name) for name, count in counts.items() for _ in range(count)]


# --- how many, and where


def test_a_worker_for_every_so_many_calls_queued_or_running():
    assert wanted(View([Tier("a")], [App("x", 9)])) == {"a": 3}
    assert wanted(View([Tier("a")], [App("x", 4)], of(a=1), running=["x", "x"])) == {"a": 2}
    assert wanted(View([Tier("a", maximum=99)], [App("x", 90, batch_size=10)], of(a=1))) == {"a": 3}
    assert wanted(View([Tier("a", maximum=2)], [App("x", 900)])) == {"a": 2}
    assert wanted(View([Tier("a", minimum=2)], [App("x", 0)])) == {"a": 2}


def test_without_a_worker_the_size_of_a_call_is_the_apps_or_the_options():
    assert wanted(View([Tier("a")], [App("x", 800, batch_size=None)])) == {"a": 2}
    assert wanted(View([Tier("a")], [App("x", 800, batch_size=None)]), batch_size=50) == {"a": 4}
    assert wanted(View([Tier("a")], [App("x", 800, batch_size=0)], of(a=1))) == {"a": 1}, "it waits to become a batch"


def test_every_tier_is_asked_and_what_comes_first_counts():
    tiers, apps = [Tier("dear", price=2.0), Tier("cheap", price=1.0), Tier("unpriced")], [App("x", 32)]
    assert wanted(View(tiers, apps)) == {"dear": 8, "cheap": 8, "unpriced": 8}
    assert wanted(View(tiers, apps, of(dear=5))) == {"dear": 8, "cheap": 3, "unpriced": 3}
    assert wanted(View(tiers, apps, of(dear=5, cheap=3))) == {"dear": 5, "cheap": 3, "unpriced": 0}
    too_many = of(dear=4, cheap=7, unpriced=1)
    assert wanted(View(tiers, apps, too_many)) == {"dear": 1, "cheap": 7, "unpriced": 0}, "the cheapest are kept"


def test_a_minimum_is_there_anyway_and_counts():
    tiers = [Tier("cheap", price=1.0), Tier("dear", price=2.0, minimum=2)]
    assert wanted(View(tiers, [App("x", 12)], of(dear=2))) == {"cheap": 1, "dear": 3}
    assert wanted(View(tiers, [App("x", 12)], of(dear=2, cheap=3))) == {"cheap": 1, "dear": 2}


def test_those_started_by_hand_count_and_are_not_asked_for():
    by_hand = [Worker("a", acquired=False)] * 3
    assert wanted(View([Tier("a"), Tier("b")], [App("x", 20)], by_hand)) == {"a": 2, "b": 2}
    assert wanted(View([Tier("a")], [App("x", 4)], by_hand)) == {"a": 0}


def test_those_about_to_go_do_not_count():
    going = [Worker("a", draining=True), Worker("a", noticed=1.0), Worker("a")]
    assert wanted(View([Tier("a"), Tier("b")], [App("x", 16)], going)) == {"a": 4, "b": 3}


def test_only_tiers_that_can_run_an_app_are_asked_for_it():
    tiers = [Tier("cpu", price=0.1), Tier("gpu", price=1.0)]
    apps = [App("model", 8, tiers=frozenset({"gpu"})), App("plain", 4)]
    assert wanted(View(tiers, apps)) == {"cpu": 1, "gpu": 3}
    assert wanted(View(tiers, apps, of(gpu=2))) == {"cpu": 1, "gpu": 3}, "the GPUs are for the model"
    assert wanted(View(tiers, apps, of(gpu=2, cpu=1))) == {"cpu": 1, "gpu": 2}
    assert wanted(View(tiers, [App("nowhere", 100, tiers=frozenset())])) == {"cpu": 0, "gpu": 0}


def test_less_must_be_wanted_for_a_while():
    policy, tiers = QueueProportional(linger=60), [Tier("a")]

    def ask(now, backlog):
        return policy.target(View(tiers, [App("x", backlog)], of(a=3), now=now))["a"]

    assert [ask(0, 12), ask(10, 0), ask(50, 4), ask(60, 0), ask(69, 0)] == [3, 3, 3, 3, 3]
    assert [ask(70, 0), ask(119, 0), ask(120, 0)] == [1, 1, 0], "the pause ended for a call at 50"
    assert ask(121, 40) == 10, "more is wanted at once"


def test_calls_that_move_to_another_app_are_not_counted_twice():
    policy = QueueProportional(linger=60)
    for now, first in enumerate([40, 20, 0]):
        apps = [App("x", first), App("y", 40 - first)]
        assert policy.target(View([Tier("a", maximum=99)], apps, now=now)) == {"a": 10}


@pytest.mark.parametrize(
    "options", [{"calls_per_worker": 0}, {"calls_per_worker": math.nan}, {"linger": -1}, {"batch_size": 0}]
)
def test_impossible_options(options):
    with pytest.raises(ValueError, match=r"give (more than 0|0 or more|1 or more)"):
        make("scaling", {"policy": "queue-proportional", **options})


NAMES = ("a", "b", "c")
TIERS = st.tuples(*[
    st.builds(
        lambda name, low, more, price: Tier(name, low, low + more, price),
        st.just(name), st.integers(0, 3), st.integers(0, 20), st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    )
    for name in NAMES
])  # fmt: skip
APPS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 7), st.frozensets(st.sampled_from(NAMES)) | st.none()), max_size=4
).map(lambda apps: [App(str(n), backlog, size, tiers) for n, (backlog, size, tiers) in enumerate(apps)])
WORKERS = st.lists(
    st.builds(Worker, st.sampled_from(NAMES), st.booleans(), st.booleans(), st.none() | st.just(0.0)), max_size=25
)
PER_WORKER = st.sampled_from([0.5, 1, 1.5, 3, 4])


@given(TIERS, APPS, WORKERS, PER_WORKER)
def test_the_bounds_hold_and_the_same_view_gives_the_same(tiers, apps, workers, per_worker):
    asked = wanted(View(tiers, apps, workers), calls_per_worker=per_worker)
    assert all(tier.minimum <= asked[tier.name] <= tier.maximum for tier in tiers)
    assert asked == wanted(View(tiers, apps, workers), calls_per_worker=per_worker)


@given(TIERS, APPS, WORKERS, PER_WORKER, st.integers(0, 3), st.integers(1, 50))
def test_a_longer_queue_never_lowers_what_is_asked_for(tiers, apps, workers, per_worker, which, more):
    before = wanted(View(tiers, apps, workers), calls_per_worker=per_worker)
    longer = [dataclasses.replace(app, backlog=app.backlog + more * (n == which)) for n, app in enumerate(apps)]
    after = wanted(View(tiers, longer, workers), calls_per_worker=per_worker)
    assert all(after[name] >= before[name] for name in NAMES)


@given(TIERS, APPS, WORKERS, st.floats(0, 100))
def test_nothing_outstanding_comes_down_to_the_minimum(tiers, apps, workers, linger):
    policy = QueueProportional(linger=linger)
    policy.target(View(tiers, apps, workers))
    idle = [dataclasses.replace(app, backlog=0) for app in apps]
    policy.target(View(tiers, idle, workers, now=1.0))
    assert policy.target(View(tiers, idle, workers, now=1.0 + linger)) == {tier.name: tier.minimum for tier in tiers}


@given(TIERS, st.integers(0, 200), PER_WORKER, st.data())
def test_whoever_gives_first_no_more_workers_come_than_are_wanted(tiers, backlog, per_worker, data):
    """Tiers give one worker after another, in any order, and none at once when nobody is asked any more."""
    policy, apps, workers = QueueProportional(per_worker), [App("x", backlog)], []
    target = math.ceil(backlog / per_worker)
    for _ in range(300):
        view = View(tiers, apps, workers)
        asked = policy.target(view)
        had = {name: sum(w.tier == name for w in workers) for name in NAMES}
        lacking = [name for name in NAMES if had[name] < asked[name]]
        if not lacking:
            break
        workers.append(Worker(data.draw(st.sampled_from(lacking))))
    assert not lacking
    forced = sum(tier.minimum for tier in tiers)
    offered = sum(tier.maximum for tier in tiers)
    assert min(target, offered) <= len(workers) <= max(target, forced) + forced
    if not forced:
        assert len(workers) == min(target, offered)
        assert sum(asked.values()) == len(workers), "the asks of others have dropped"


# --- with a plan that prefers tiers


def test_a_plan_s_order_takes_the_place_of_the_price():
    tiers = [Tier("cheap", price=1.0), Tier("dear", price=2.0)]
    few = View(tiers, [App("x", 8)], of(cheap=3, dear=3), preferred=("dear", "cheap"))
    assert wanted(few) == {"cheap": 0, "dear": 2}
    assert wanted(View(tiers, [App("x", 8)], of(cheap=3, dear=3))) == {"cheap": 2, "dear": 0}


def test_a_preferred_tier_is_asked_for_what_others_have_in_use():
    tiers = [Tier("cheap", price=1.0), Tier("dear", price=2.0)]
    held = View(tiers, [App("x", 12)], of(dear=3), preferred=("cheap", "dear"))
    assert wanted(held) == {"cheap": 3, "dear": 3}
    joined = View(tiers, [App("x", 12)], of(cheap=2, dear=3), preferred=("cheap", "dear"))
    assert wanted(joined) == {"cheap": 3, "dear": 1}, "those that are replaced are released"
    assert wanted(View(tiers, [App("x", 12)], of(dear=3))) == {"cheap": 0, "dear": 3}, "without a plan they stay"
    other = View(tiers, [App("x", 12, tiers=frozenset({"dear"}))], of(dear=3), preferred=("cheap", "dear"))
    assert wanted(other) == {"cheap": 0, "dear": 3}, "it cannot run there"
