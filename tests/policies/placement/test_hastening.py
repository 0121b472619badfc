"""More workers than a plan has, where what waits is then answered sooner for the same dollars."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.agh.hastening import hastened
from ctxflow.policies.agh.live_work import ContextWork, Offer

GAIN, PERIOD = 0.05, 300.0


def task(name, seconds, queued, load=10.0, measured=None, max_delay=None):
    """`seconds`: of an item, by tier."""
    found = ContextWork(name, load, 100.0, max_delay, queued=queued)
    found.work.update({tier: 100.0 * each for tier, each in seconds.items()})
    found.measured = set(seconds if measured is None else measured)
    if max_delay is not None:
        found.urgent, found.urgent_work = 100.0, found.work
    return found


def test_a_worker_is_added_where_an_item_costs_no_more():
    offers = [Offer("good", 8, 1.0), Offer("dear", 8, 3.0)]
    work = task("c", {"good": 20.0, "dear": 10.0}, 400.0)
    assert hastened([work], offers, {("c", "good"): 2}, {}, PERIOD, GAIN) == {("c", "good"): 8}
    alike = [Offer("good", 8, 1.0), Offer("dear", 8, 2.05)]
    found = hastened([work], alike, {("c", "good"): 2}, {}, PERIOD, GAIN)
    assert found["c", "good"] == 8 and found["c", "dear"] > 0


def test_none_is_added_that_would_mostly_load_or_has_nothing_to_do():
    offers = [Offer("good", 8, 1.0)]
    plan = {("c", "good"): 2}
    assert hastened([task("c", {"good": 20.0}, 400.0, load=1e4)], offers, plan, {}, PERIOD, GAIN) == plan
    assert hastened([task("c", {"good": 20.0}, 400.0, load=1e4)], offers, plan, {("c", "good"): 5}, PERIOD, GAIN) == {
        ("c", "good"): 5
    }, "these have loaded it"
    assert hastened([task("c", {"good": 20.0}, 0.0)], offers, plan, {}, PERIOD, GAIN) == plan
    assert hastened([task("c", {"good": 20.0}, 20.0)], offers, plan, {}, PERIOD, GAIN) == plan, "it is done soon"


def test_none_is_added_where_the_context_was_not_measured_or_is_too_slow():
    offers = [Offer("good", 8, 1.0)]
    plan = {("c", "good"): 2}
    assert hastened([task("c", {"good": 20.0}, 400.0, measured=())], offers, plan, {}, PERIOD, GAIN) == plan
    assert hastened([task("c", {"good": 20.0}, 400.0, max_delay=9.0)], offers, plan, {}, PERIOD, GAIN) == plan


def test_who_would_be_longest_at_it_gets_workers_first():
    offers = [Offer("good", 9, 1.0)]
    works = [task("long", {"good": 20.0}, 900.0), task("short", {"good": 20.0}, 100.0)]
    found = hastened(works, offers, {("long", "good"): 1, ("short", "good"): 1}, {}, PERIOD, GAIN)
    assert found == {("long", "good"): 8, ("short", "good"): 1}


drawn = st.integers(1, 3).flatmap(
    lambda tiers: st.tuples(
        st.lists(st.tuples(st.integers(0, 12), st.floats(0.1, 4)), min_size=tiers, max_size=tiers),
        st.lists(
            st.tuples(
                st.lists(st.floats(0.2, 40), min_size=tiers, max_size=tiers),
                st.floats(0, 5000), st.floats(0, 200), st.integers(0, 4),
            ),
            min_size=1, max_size=3,
        ),
    )
)  # fmt: skip


@given(drawn)
def test_whatever_is_added_costs_hardly_more_and_is_there(case):
    tiers, works = case
    offers = [Offer(f"t{n}", workers, price) for n, (workers, price) in enumerate(tiers)]
    left = {offer.name: offer.workers for offer in offers}
    tasks, counts = [], {}
    for number, (seconds, queued, load, planned) in enumerate(works):
        names = {f"t{n}": each for n, each in enumerate(seconds)}
        tasks.append(task(f"c{number}", names, queued, load))
        for tier in names:
            if got := min(planned, left[tier]):
                counts[f"c{number}", tier] = got
                left[tier] -= got
    found = hastened(tasks, offers, counts, {}, PERIOD, GAIN)
    assert all(found[pair] >= workers for pair, workers in counts.items())
    for offer in offers:
        assert sum(n for (_, tier), n in found.items() if tier == offer.name) <= offer.workers
    for each in tasks:
        prices = {offer.name: offer.price / 3600 * each.item_seconds(offer.name) for offer in offers if offer.workers}
        least, loads = min(prices.values(), default=math.inf), 0.0
        for offer in offers:
            more = found.get((each.context, offer.name), 0) - counts.get((each.context, offer.name), 0)
            if more:
                assert prices[offer.name] <= (1 + GAIN) * least * (1 + 1e-9)
                loads += more * each.load_seconds * offer.price / 3600
        assert loads <= GAIN * least * each.queued * (1 + 1e-6) if loads else True
