"""The macro layer on views: valid shares whatever the regions, the forecast and the form of allocation say."""

import dataclasses
import math
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.torta.macro import Macro, by_lookahead, by_transport, region_costs
from ctxflow.policies.torta.quantities import Outlook
from ctxflow.policies.torta.transport import capped
from ctxflow.scheduler.events import RegionSpec

SETTINGS = settings(max_examples=60, deadline=None)
numbers = st.one_of(st.sampled_from([0.0, math.nan, math.inf, -1.0, 1e300]), st.floats(0, 1000))


@dataclasses.dataclass
class View:
    regions: dict[str, RegionSpec]
    apps: dict[str, object]
    forecast: dict[str, float] | None
    now: float = 0.0


def outlook(slots, seconds=1.0):
    found = Outlook()
    found.slots.update(slots)
    found._items = {} if seconds is None else {"a": seconds}
    return found


def view(regions, backlog, rate=0.0):
    app = types.SimpleNamespace(id="a", context="c", backlog=backlog, region="")
    return View({region.name: region for region in regions}, {"a": app}, {"a": rate})


def divided(macro, view, outlook):
    macro.divide(view, outlook)
    return macro.shares()


CHEAP_FAR = [
    RegionSpec("home", {"far": 0.04}, power_price=0.3, home=True),
    RegionSpec("far", {"home": 0.04}, power_price=0.1),
]


@SETTINGS
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(0, 100), min_size=n, max_size=n),
            st.lists(st.lists(st.floats(0, 9), min_size=n, max_size=n), min_size=n, max_size=n),
            st.integers(0, n - 1),
            st.floats(0, 300),
        )
    )
)
def test_one_region_s_demand_is_divided_as_the_solver_divides_it(world):
    """As cheap: where costs are equal there are several best plans."""
    capacity, cost, home, wanted = (np.array(part) for part in world)
    demand = np.zeros((1, len(capacity)))
    demand[0, int(home)] = wanted
    ours, best = by_transport(demand, capacity, cost, None), capped(demand[0], capacity, cost)
    assert np.allclose(ours.sum(axis=1), 1) and (ours >= 0).all()
    assert np.isclose((demand[0] @ (ours * cost)).sum(), (demand[0] @ (best * cost)).sum(), rtol=1e-6, atol=1e-9)


@SETTINGS
@given(
    slots=st.dictionaries(st.sampled_from(["home", "far", "elsewhere"]), st.integers(0, 9)),
    seconds=st.one_of(st.none(), st.floats(0.01, 100)),
    backlog=st.integers(0, 10_000),
    rate=numbers,
    price=st.one_of(st.none(), st.floats(0, 2)),
    form=st.sampled_from([by_transport, by_lookahead, lambda *world: np.full((9, 9), math.nan), lambda *world: None]),
)
def test_shares_are_on_the_simplex_or_work_may_go_anywhere(slots, seconds, backlog, rate, price, form):
    regions = [CHEAP_FAR[0], dataclasses.replace(CHEAP_FAR[1], power_price=price)]
    shares = divided(Macro(form, 45.0), view(regions, backlog, rate), outlook(slots, seconds))
    if shares is not None:
        assert math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6) and min(shares.values()) >= 0
        assert all(slots.get(name, 0) > 0 for name, share in shares.items() if share > 0)


def test_a_region_that_vanishes_has_its_work_divided_anew():
    macro, world = Macro(by_transport, 1e9), view(CHEAP_FAR, 40)
    assert divided(macro, world, outlook({"home": 4, "far": 4})) == {"home": 0.0, "far": 1.0}
    assert divided(macro, world, outlook({"home": 4})) == {"home": 1.0, "far": 0.0}


@pytest.mark.parametrize(
    ("regions", "backlog", "seconds"),
    [(CHEAP_FAR[:1], 40, 1.0), ([], 40, 1.0), (CHEAP_FAR, 10**9, 1.0), (CHEAP_FAR, 40, None)],
    ids=["one region", "none", "more work than can be done", "an unknown speed"],
)
def test_work_may_go_anywhere(regions, backlog, seconds):
    known = outlook({"home": 2, "far": 2}, seconds)
    assert divided(Macro(by_transport, 45.0), view(regions, backlog), known) is None


def test_calls_follow_the_shares():
    macro = Macro(by_transport, 10.0)
    # 20 s of work in a slot of 10 s: one worker's in the cheap region, the rest at home.
    macro.divide(view(CHEAP_FAR, 20), outlook({"home": 9, "far": 1}))
    order = []
    for _ in range(6):
        region = macro.next_region()
        macro.gave("", region)
        order.append(region)
    assert sorted(order) == ["far"] * 3 + ["home"] * 3 and order[:2] != order[1:3]


def test_an_app_without_work_hides_none_of_those_after_it():
    macro, world = Macro(by_transport, 10.0), view(CHEAP_FAR, 20)
    world.apps = {"idle": types.SimpleNamespace(id="idle", context="c", backlog=0, region=""), **world.apps}
    assert divided(macro, world, outlook({"home": 9, "far": 1})) == {"home": 0.5, "far": 0.5}


def test_what_the_site_does_not_say_is_dearer_than_what_it_says():
    silent = RegionSpec("silent")
    costs = region_costs([*CHEAP_FAR, silent])
    assert np.isfinite(costs).all() and costs[0].argmax() == 2 and costs[0].argmin() == 1


def test_each_region_s_work_has_shares_of_its_own():
    """Twenty seconds come from home, twenty from far, where one worker is cheap: what is nearer stays there."""
    apps = {
        name: types.SimpleNamespace(id=name, context="c", backlog=20, region=region)
        for name, region in (("a", "home"), ("b", "far"), ("c", "unheard of"))
    }
    known = outlook({"home": 9, "far": 4})
    known._items = dict.fromkeys("abc", 1.0)
    macro = Macro(by_transport, 10.0)
    macro.divide(View({region.name: region for region in CHEAP_FAR}, apps, None), known)
    home, far = macro.shares("home"), macro.shares("far")
    assert home == macro.shares("unheard of") == macro.shares()
    assert math.isclose(sum(home.values()), 1.0) and math.isclose(sum(far.values()), 1.0)
    assert math.isclose(40 * home["far"] + 20 * far["far"], 40.0), "the cheap region is full, and no fuller"
    macro.gave("far", macro.next_region("far"))
    assert macro._given.keys() == {"far"}, "one region's calls are no other's"
