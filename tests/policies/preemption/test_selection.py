"""Victim selection against a reference written a second time, on random nodes."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.flextopo.candidates import (
    BASES,
    Fits,
    Scorer,
    Scoring,
    allocate,
    feasible_sets,
    minimal_sets,
    reprieve,
)
from ctxflow.policies.flextopo.cluster import Hardware, Instance, Location, Node, Preemptor
from ctxflow.policies.flextopo.covering import best_candidate
from ctxflow.policies.flextopo.later import MOST_KINDS, LaterPreemptors
from ctxflow.policies.flextopo.preemption import METHODS, decide

sys.path.insert(0, str(Path(__file__).parent))
import preemption_reference as reference

MANY = settings(max_examples=150, deadline=None)
SOME = settings(max_examples=100, deadline=None)
NUMA_4090 = Hardware.regular(sockets=2, numa_nodes=8, gpus=8, cores=64)


def levels(sets):
    return {victims: int(level) for victims, level in sets}


@MANY
@given(reference.nodes(), reference.requests())
def test_imp_finds_all_feasible_sets_of_the_least_size(node, want):
    found, _ = minimal_sets(node, want, Fits(want)[node])
    expected = reference.all_minimal(node, want)
    assert levels(found) == {victims: reference.level_without(node, victims, want) for victims in expected}
    assert len(found) == len(expected)


@MANY
@given(reference.nodes(), reference.requests())
def test_the_exhaustive_method_finds_all_feasible_sets(node, want):
    found, _ = feasible_sets(node, want, Fits(want)[node])
    assert sorted(victims for victims, _ in found) == sorted(reference.all_feasible(node, want))


@MANY
@given(reference.nodes(), reference.requests())
def test_the_standard_selection_is_drop_all_then_reprieve(node, want):
    found = reprieve(node, want, Fits(want)[node])
    assert (None if found is None else found[0]) == reference.reprieved(node, want)


@st.composite
def clusters(draw):
    kinds = st.sampled_from(draw(st.lists(reference.hardwares(), min_size=1, max_size=2)))
    return [draw(reference.nodes(name=f"n{number}", kinds=kinds)) for number in range(draw(st.integers(1, 3)))]


@MANY
@given(
    clusters(), reference.requests(), st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.sampled_from(["allocation", "victims"])
)
def test_the_exact_search_is_as_good_as_trying_all_sets(cluster, want, alpha, basis):
    """With nobody to come later: by the score, the highest priority, their sum and number."""
    scorer = Scorer(cluster, want, Scoring(alpha, basis))
    best, _ = best_candidate(cluster, want, Fits(want), scorer, LaterPreemptors(cluster, want, ()))
    orders = [
        reference.order(cluster, node, victims, want, alpha, basis)
        for node in cluster
        for victims in reference.all_feasible(node, want)
    ]
    if best is None:
        assert not orders
        return
    order, position, victims, level = best
    assert victims in reference.all_feasible(cluster[position], want)
    assert order[:4] == pytest.approx(min(orders)[:4])
    found = reference.order(cluster, cluster[position], victims, want, alpha, basis)
    assert (*order[:4], order[5]) == pytest.approx(found)
    assert level == reference.level_without(cluster[position], victims, want)


LATER = st.lists(reference.requests(), max_size=6)


@MANY
@given(clusters(), reference.requests(), st.none() | LATER, st.sampled_from([0.0, 0.4]), st.sampled_from(BASES))
def test_whoever_comes_later_the_score_is_the_best_of_all_sets(cluster, want, later, alpha, basis):
    scoring = Scoring(alpha, basis)
    exact = decide(cluster, want, "exact", scoring, later)
    best = decide(cluster, want, "exhaustive", scoring)
    assert (exact is None) == (best is None)
    if exact is not None and best is not None:
        assert bool(exact.victims) == bool(best.victims)
        assert exact.score == (pytest.approx(best.score) if best.victims else None)


@MANY
@given(clusters(), reference.requests(), LATER)
def test_no_more_are_left_without_a_place_than_if_nobody_looked_ahead(cluster, want, later):
    """In the order in which those who are left without a place count as victims."""
    ahead, blind = decide(cluster, want, "exact", later=later), decide(cluster, want, "exact", later=())
    if ahead is None or not ahead.victims:
        return

    def order(decision):
        node = next(each for each in cluster if each.name == decision.node)
        victims = tuple(n for n, each in enumerate(node.instances) if each.id in decision.victims)
        return reference.order_with(cluster, node, victims, (decision.gpus, decision.core_groups), want, later)

    assert order(ahead) <= order(blind)


def socket_of(name, *held, gpus=4):
    kind = Hardware.regular(sockets=1, numa_nodes=1, gpus=gpus)
    return Node(name, kind, tuple(Instance(f"{name}-{n}", *each) for n, each in enumerate(held)))


SMALL = socket_of("small", *((200, (gpu,)) for gpu in range(4)))
MIDDLE = socket_of("middle", (500, (0, 1)), (500, (2, 3)))
FOUR = Preemptor("four", 1000, gpus=4, affinity="guaranteed")
TWO = Preemptor("two", 500, gpus=2, affinity="guaranteed")


def test_the_only_places_of_later_preemptors_are_kept():
    """Two of 500 give way, and not four of 200, which are the only ones that others of 500 may preempt."""
    assert decide([SMALL, MIDDLE], FOUR, later=[TWO, TWO]).node == "middle"
    assert decide([SMALL, MIDDLE], FOUR).node == "middle", "others like those that run are to be expected"
    assert decide([SMALL, MIDDLE], FOUR, "exhaustive").node == "small"


def test_places_that_nobody_needs_are_not_kept():
    assert decide([SMALL, MIDDLE], FOUR, later=()).node == "small"
    more = [SMALL, socket_of("other", *((200, (gpu,)) for gpu in range(4))), MIDDLE]
    assert decide(more, FOUR, later=[TWO, TWO]).node in ("small", "other"), "there are two places beside"
    assert decide(more, FOUR, later=[TWO, TWO, TWO]).node == "middle"
    above = Preemptor("above", 1001, gpus=2)
    assert decide([SMALL, MIDDLE], FOUR, later=[above] * 9).node == "small", "they may preempt this one"


def test_no_more_kinds_of_later_preemptors_are_looked_at_than_the_most_common():
    """A cluster of as many priorities as instances takes a decision no longer."""
    kinds = [Preemptor("", 201 + n, gpus=2) for n in range(MOST_KINDS + 5)]
    asked = LaterPreemptors([SMALL, MIDDLE], FOUR, [*kinds, *kinds[:3]]).kinds
    assert [kind.wanted.priority for kind in asked[:4]] == [203, 202, 201, 201 + MOST_KINDS + 4]
    assert len(asked) == MOST_KINDS


def test_nobody_of_more_weight_gives_way_than_is_left_without_a_place():
    heavy = socket_of("heavy", (900, (0, 1, 2, 3)))
    assert decide([SMALL, heavy], FOUR, later=[TWO]).node == "small"


def test_among_equals_the_place_is_where_least_is_whole():
    """Started later, and so first to give way but for this, on a machine of which the other half is held."""
    kind = Hardware.regular(sockets=2, numa_nodes=2, gpus=4)

    def node(name, *held):
        return Node(name, kind, tuple(Instance(f"{name}-{n}", *each) for n, each in enumerate(held)))

    broken = node("broken", (200, (0,)), (200, (1,)), (2000, (2, 3)))
    whole = node("whole", *((200, (gpu,), (), 50.0) for gpu in range(4)))
    assert decide([whole, broken], TWO, later=()).node == "broken"
    assert decide([whole, broken], TWO, "exhaustive").node == "whole"


def test_a_victim_that_frees_nothing_may_be_the_best_where_nothing_lacks():
    """It is looked for on the second node too, whose other instance started before the one of the first."""
    hardware = Hardware((Location(None, None),))

    def node(name, *starts):
        first = Instance("i0", -5, (0,), (), starts[0])
        others = [Instance(f"i{n}", -5, (), (), start) for n, start in enumerate(starts[1:], 1)]
        return Node(name, hardware, (first, *others))

    cluster, want = [node("n0", 1.0), node("n1", 0.0, 2.0)], Preemptor("p", 0, 0, 1, None)
    scorer = Scorer(cluster, want, Scoring(0.0, "allocation"))
    best, _ = best_candidate(cluster, want, Fits(want), scorer, LaterPreemptors(cluster, want, ()))
    assert best[1:3] == (1, (1,))


def expected_order(cluster, want, method, scoring):
    sources = {"imp": reference.all_minimal, "exhaustive": reference.all_feasible, "exact": reference.all_feasible}
    if method == "standard":
        candidates = [(node, victims) for node in cluster if (victims := reference.reprieved(node, want))]
        return [reference.order(cluster, node, victims, want, blind=True) for node, victims in candidates]
    return [
        reference.order(cluster, node, victims, want, scoring.alpha, scoring.basis)
        for node in cluster
        for victims in sources[method](node, want)
    ]


@SOME
@given(clusters(), reference.requests(), st.sampled_from(METHODS), st.sampled_from([0.0, 0.5]))
def test_decisions_take_what_is_free_and_then_the_best_candidate(cluster, want, method, alpha):
    decision = decide(cluster, want, method, Scoring(alpha), later=())
    aware = method != "standard"

    def suits(node):
        if aware and want.affinity == "guaranteed":
            return reference.level_without(node, (), want) >= max(reference.best_possible(node, want), 1)
        return reference.level_without(node, (), want) >= 1

    free = [node for node in cluster if suits(node)]
    if decision is None:
        assert not free
        assert not expected_order(cluster, want, method, Scoring(alpha))
        return
    node = next(each for each in cluster if each.name == decision.node)
    victims = tuple(n for n, each in enumerate(node.instances) if each.id in decision.victims)
    check_allocation(node, victims, decision, want)
    if free:
        assert victims == () and node in free
        if aware and want.affinity:
            assert decision.level == max(reference.level_without(each, (), want) for each in free)
        return
    found = reference.order(cluster, node, victims, want, alpha if aware else 0.0, blind=not aware)
    best = min(expected_order(cluster, want, method, Scoring(alpha)))
    terms = 4 if method == "exact" else 5  # It asks for room that is whole before it asks for starts.
    assert found[:terms] == pytest.approx(best[:terms])


def check_allocation(node, victims, decision, want):
    """What is given is free, enough, and as close together as the decision says."""
    gpus, groups = reference.idle(node)
    for victim in victims:
        gpus |= set(node.instances[victim].gpus)
        groups |= set(node.instances[victim].core_groups)
    got, got_groups = set(decision.gpus), set(decision.core_groups)
    assert got <= gpus and got_groups <= groups
    assert len(decision.gpus) == len(got) == want.gpus
    assert reference.enough(node.hardware, got, got_groups, want)
    assert reference.closest(node.hardware, got, got_groups, want) == decision.level
    assert decision.level == reference.level_without(node, victims, want)
    assert decision.target == reference.best_possible(node, want)
    assert decision.hit == (decision.level == decision.target)


@SOME
@given(clusters(), reference.requests())
def test_the_exact_search_is_never_worse_than_the_others(cluster, want):
    exact = decide(cluster, want, "exact")
    for method in ("imp", "standard"):
        other = decide(cluster, want, method)
        if other is None or not other.victims or exact is None or not exact.victims:
            continue
        node = next(each for each in cluster if each.name == other.node)
        victims = tuple(n for n, each in enumerate(node.instances) if each.id in other.victims)
        if want.affinity == "guaranteed" and not reference.feasible(node, victims, want):
            continue  # The standard selection may miss: it is no candidate then.
        assert exact.score >= -reference.order(cluster, node, victims, want)[0] - 1e-9


def test_an_aligned_larger_set_beats_a_small_unaligned_one_where_affinity_is_best_effort():
    # Two instances of two GPUs across the sockets, or four of one GPU: IMP stops at one victim of two GPUs.
    wide = Instance("wide", 200, gpus=(3, 4))
    narrow = [Instance(f"narrow-{gpu}", 200, gpus=(gpu,)) for gpu in (0, 1, 2, 5, 6, 7)]
    node = Node("n", Hardware.regular(sockets=2, numa_nodes=8, gpus=8), (wide, *narrow))
    want = Preemptor("p", 1000, gpus=2, affinity="best-effort")
    imp, exact = decide([node], want, "imp"), decide([node], want, "exact")
    assert (imp.victims, imp.level.name) == (("wide",), "MACHINE")
    assert len(exact.victims) == 2 and exact.hit
    assert exact.score > imp.score


def test_equal_candidates_are_told_apart_as_the_paper_code_does():
    kind = Hardware.regular(sockets=1, numa_nodes=1, gpus=2)

    def node(name, *instances):
        return Node(name, kind, tuple(Instance(f"{name}{n}", *each) for n, each in enumerate(instances)))

    want = Preemptor("p", 1000, gpus=2, affinity="guaranteed")
    high = node("high", (300, (0,)), (1, (1,)))
    costly = node("costly", (200, (0,)), (200, (1,)))
    two = node("two", (200, (0,)), (100, (1,)))
    early = node("early", (200, (0,), (), 5.0), (100, (1,), (), 90.0))
    for method in ("standard", "imp", "exhaustive", "exact"):
        assert decide([high, costly], want, method).node == "costly", "the lowest highest priority first"
        assert decide([costly, two], want, method).node == "two", "then the lowest sum"
        assert decide([two, early], want, method).node == "early", "then the latest start of the highest"


def test_alpha_weighs_priorities_against_topology():
    # One low-priority victim across the sockets, or one of high priority in a socket.
    across = Instance("across", 100, gpus=(3, 4))
    beside = Instance("beside", 900, gpus=(0, 1))
    node = Node(
        "n", Hardware.regular(sockets=2, numa_nodes=8, gpus=8), (across, beside, Instance("x", 2000, (2, 5, 6, 7)))
    )
    want = Preemptor("p", 1000, gpus=2, affinity="best-effort")
    for method in ("imp", "exhaustive", "exact"):
        assert decide([node], want, method, Scoring(0.0)).victims == ("beside",)
        assert decide([node], want, method, Scoring(1.0)).victims == ("across",)


def test_the_printed_basis_overlooks_idle_neighbours():
    # GPU 0 is idle: with GPU 1 it is one socket. The victims' own places rank a pair across sockets no lower.
    kind = Hardware.regular(sockets=2, numa_nodes=2, gpus=4)
    node = Node("n", kind, (Instance("near", 300, (1,)), Instance("far", 200, (2,)), Instance("stays", 2000, (3,))))
    want = Preemptor("p", 1000, gpus=2, affinity="best-effort")
    assert decide([node], Preemptor("q", 1000, 1, 0, "best-effort"), "exact").victims == ()
    busy = Node("n", kind, (*node.instances, Instance("also-stays", 2000)))
    for method in ("imp", "exhaustive", "exact"):
        by_allocation = decide([busy], want, method, Scoring(0.0, "allocation"))
        by_victims = decide([busy], want, method, Scoring(0.0, "victims"))
        assert (by_allocation.victims, by_allocation.hit) == (("near",), True)
        assert (by_victims.victims, by_victims.hit) == (("far",), False)


def test_only_lower_priorities_give_way():
    kind = Hardware.regular(sockets=1, numa_nodes=1, gpus=1)
    node = Node("n", kind, (Instance("i", 500, (0,)),))
    for method in METHODS:
        assert decide([node], Preemptor("p", 500, 1), method) is None
        assert decide([node], Preemptor("p", 501, 1), method).victims == ("i",)
        kept = Node("n", kind, (Instance("i", 500, (0,), preemptible=False),))
        assert decide([kept], Preemptor("p", 501, 1), method) is None


def test_what_the_hardware_cannot_hold_is_placed_nowhere():
    node = Node("n", NUMA_4090, (Instance("i", 1, (0, 1, 2, 3, 4, 5, 6, 7)),))
    for method in METHODS:
        for affinity in ("guaranteed", "best-effort", None):
            assert decide([node], Preemptor("p", 9, 9, affinity=affinity), method) is None


def test_too_many_victims_to_try_say_so_and_the_exact_search_goes_on():
    kind = Hardware.regular(sockets=2, numa_nodes=8, gpus=0, cores=64, group_size=1)
    node = Node("n", kind, tuple(Instance(f"i{n}", 1 + n % 3, (), (n,)) for n in range(64)))
    want = Preemptor("p", 10, 0, cores=32, affinity="guaranteed")
    for method in ("imp", "exhaustive"):
        with pytest.raises(ValueError, match="choose exact"):
            decide([node], want, method)
    decision = decide([node], want, "exact")
    assert len(decision.victims) == 32 and decision.hit


def test_gpus_come_in_topology_order_with_cores_beside_them():
    fit = Fits(Preemptor("p", 1, 2, 16))[Node("n", NUMA_4090)]
    gpus, groups = allocate(fit, NUMA_4090.mask((1, 6, 7), (0, 1, 2, 5, 6, 7)))
    assert (gpus, groups) == ((6, 7), (6, 7))
    assert allocate(fit, NUMA_4090.mask((1, 6), (0, 1, 6, 7))) == ((1, 6), (1, 6))
    assert allocate(fit, NUMA_4090.mask((1,), (0, 1))) is None


def test_an_unknown_method():
    with pytest.raises(ValueError, match="standard, imp, exhaustive, exact"):
        decide([], Preemptor("p", 1, 1), "magic")
