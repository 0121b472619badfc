"""TurboServe's placement and autoscaling as functions on plain data, beside the exhaustive optimum and the theorems."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.turboserve.autoscaling import (
    BY_CHANCE,
    DEVIATIONS,
    PAPER,
    STEEP,
    WINDOW,
    Anticipated,
    Levels,
    Parameters,
    Replayed,
    Turnover,
    anticipated,
    cheapest,
    decide,
    decide_ahead,
    levels,
    profile,
    target_gpus,
)
from ctxflow.policies.turboserve.rebalancing import (
    MigrationCost,
    Move,
    MoveCosts,
    PowerCurve,
    assign,
    balanced_groups,
    limit_of,
    most_sessions,
    rebalance,
)
from ctxflow_papers.turboserve.bounds import best_placement, cheapest_schedule, tuned

LINEAR = PowerCurve(0.0, 1.0)
counts = st.lists(st.integers(0, 4), min_size=1, max_size=4)
steps = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=24, max_size=24)


def residents(numbers):
    return {gpu: [(gpu, n) for n in range(number)] for gpu, number in enumerate(numbers)}


def after(before, moves):
    found = {gpu: list(sessions) for gpu, sessions in before.items()}
    for move in moves:
        found[move.source].remove(move.session)
        found[move.target].append(move.session)
    return found


def everyone(placed):
    return sorted(session for sessions in placed.values() for session in sessions)


def longest(placed, curve, speeds=None):
    return max(curve(len(each)) / (speeds or {}).get(gpu, 1.0) for gpu, each in placed.items())


def curve_of(rises):
    """A curve that has plateaus."""
    return lambda n: sum(rises[:n]) + (1.0 if n else 0.0)


@given(st.integers(0, 500), st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 3))
def test_what_is_anticipated_is_bounded_however_often_sessions_come_and_go(sessions, turns, share, deviations):
    found = anticipated(sessions, turns, turns, share, deviations)
    assert sessions <= found.sessions <= sessions + deviations * math.sqrt(2 * max(1, sessions))


@given(st.integers(0, 200), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1), st.integers(0, 400))
def test_idle_sessions_are_anticipated_at_the_pace_of_those_that_go(sessions, came, went, share, idle):
    without = anticipated(sessions, came, went, share, 0.0).sessions
    found = anticipated(sessions, came, went, share, 0.0, idle).sessions
    assert without <= found <= max(without, sessions, idle), "no more come back than there are"
    assert anticipated(sessions, came, went, share, 0.0, idle + 1).sessions >= found
    if idle <= sessions or not went * share:
        assert found == without


@settings(max_examples=150, deadline=None)
@given(counts.filter(lambda each: sum(each) <= 6), steps, st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=4))
def test_rebalancing_reaches_the_exhaustive_optimum(numbers, rises, speeds):
    before, curve = residents(numbers), curve_of(rises)
    speed = dict(enumerate(speeds))
    found = after(before, rebalance(before, curve, speeds=speed))
    sessions = [session for each in before.values() for session in each]
    assert longest(found, curve, speed) == best_placement(sessions, list(before), curve, speeds=speed)[0]


@given(counts, st.integers(4, 6), steps)
def test_rebalancing_keeps_sessions_and_capacity(numbers, capacity, rises):
    before, curve = residents(numbers), curve_of(rises)
    moves = rebalance(before, curve, capacity=capacity)
    found = after(before, moves)
    assert everyone(found) == everyone(before)
    assert len({move.session for move in moves}) == len(moves)
    assert max(map(len, found.values())) <= capacity
    assert longest(found, curve) <= longest(before, curve)


@given(counts, st.floats(0, 3), st.lists(st.floats(0, 1), min_size=16, max_size=16))
def test_migration_cost_bounds_what_is_lost(numbers, weight, seconds):
    before = residents(numbers)
    sessions = [session for each in before.values() for session in each]
    costs = MoveCosts(dict(zip(sessions, seconds, strict=False)), weight)
    found = after(before, rebalance(before, LINEAR, costs))
    best = math.ceil(sum(numbers) / len(numbers))
    assert longest(found, LINEAR) <= best + weight * max(seconds) + 1e-9


def fewest_moves(before, curve, longest_chunk, capacity=None, speeds=None, fixed=()):
    """The fewest moves to any placement whose longest chunk is no longer, by trying all placements."""
    home = {session: gpu for gpu, there in before.items() for session in there}
    free = [session for session in home if session not in fixed]
    best = math.inf
    for places in itertools.product(before, repeat=len(free)):
        moves = sum(home[session] != place for session, place in zip(free, places, strict=True))
        found = Counter(dict.fromkeys(before, 0))
        found.update([*places, *(home[session] for session in fixed)])
        fits = all(n <= max(limit_of(capacity, gpu), len(before[gpu])) for gpu, n in found.items())
        if moves < best and fits:
            longest_now = max(curve(n) / (speeds or {}).get(gpu, 1.0) for gpu, n in found.items())
            best = moves if longest_now <= longest_chunk else best
    return best


@settings(max_examples=150, deadline=None)
@given(
    counts.filter(lambda each: sum(each) <= 6),
    steps,
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=4, max_size=4),
    st.one_of(st.none(), st.lists(st.integers(1, 6), min_size=4, max_size=4)),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from([0.0, 0.3]),
)
def test_rebalancing_takes_the_fewest_moves_that_reach_its_longest_chunk(numbers, rises, speeds, limits, fixed, weight):
    before, curve, speed = residents(numbers), curve_of(rises), dict(enumerate(speeds))
    capacity = limits and dict(enumerate(limits))
    everybody = [session for there in before.values() for session in there]
    stay = [session for n, session in enumerate(everybody) if n in fixed]
    costs = MoveCosts({session: n / 10 for n, session in enumerate(everybody)}, weight)
    moves = rebalance(before, curve, costs, capacity, speeds=speed, fixed=stay)
    found = after(before, moves)
    assert not {move.session for move in moves} & set(stay)
    assert all(len(there) <= max(limit_of(capacity, gpu), numbers[gpu]) for gpu, there in found.items())
    assert longest(found, curve, speed) <= longest(before, curve, speed)
    assert len(moves) == fewest_moves(before, curve, longest(found, curve, speed), capacity, speed, stay)


def test_nobody_moves_by_way_of_a_third_gpu_or_where_the_longest_chunk_stays():
    # The fast GPU takes three at last: each was moved to the middle one, and another from there.
    before, speed = {"slow": ["a", "b", "c", "d", "e"], "middle": [], "fast": []}, {"middle": 2.0, "fast": 6.0}
    moves = rebalance(before, LINEAR, speeds=speed)
    assert len(moves) == len({move.session for move in moves}) == 5 - len(after(before, moves)["slow"])
    # Three GPUs have the longest chunk, and one of them could be relieved.
    assert rebalance(residents([2, 2, 2, 0]), LINEAR) == []


def test_a_gpu_that_has_room_for_few_keeps_nobody_from_the_others():
    found = assign([1, 2, 3, 4], {"new": [], "known": []}, LINEAR, {"new": 1, "known": 8})
    assert sorted(Counter(found.placed.values()).values()) == [1, 3] and not found.waiting


def test_the_printed_rule_stalls_where_two_share_the_longest_chunk():
    before = residents([3, 3, 0, 0])
    assert rebalance(before, LINEAR, rule="printed") == []
    assert longest(after(before, rebalance(before, LINEAR)), LINEAR) == 2
    assert rebalance(residents([3, 1]), LINEAR, rule="printed") == [Move((0, 0), 0, 1)]
    with pytest.raises(ValueError, match="plateau-aware or printed"):
        rebalance(before, LINEAR, rule="none")


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_the_printed_rule_ends_where_no_single_move_helps(numbers):
    before = residents(numbers)
    found = after(before, rebalance(before, LINEAR, rule="printed"))
    top = longest(found, LINEAR)
    sizes = sorted(map(len, found.values()))
    assert sizes.count(top) > 1 or top - sizes[0] <= 1


def test_cost_can_forbid_a_move_and_the_cheapest_session_goes():
    before = {0: ["big", "small", "other"], 1: []}
    seconds = {"big": 9.0, "small": 1.0, "other": 5.0}
    assert [move.session for move in rebalance(before, LINEAR, MoveCosts(seconds, 0.5))] == ["small"]
    assert rebalance(before, LINEAR, MoveCosts(seconds, 2.5)) == []


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=10, max_size=40))
def test_sub_groups_keep_to_themselves_and_are_close(numbers):
    before = residents(numbers)
    groups = balanced_groups(before, group_size=4, one_group=8)
    found = after(before, [move for group in groups for move in rebalance(group, LINEAR)])
    assert longest(found, LINEAR) <= math.ceil(sum(numbers) / len(numbers)) + 3
    assert longest(found, LINEAR) <= longest(before, LINEAR)


@given(counts, st.integers(0, 12), st.integers(4, 6))
def test_assignment_is_even_and_waits_only_where_all_is_full(numbers, new, capacity):
    before = residents(numbers)
    found = assign([("new", n) for n in range(new)], before, LINEAR, capacity)
    room = capacity * len(before) - sum(numbers)
    assert len(found.placed) == min(new, room) and len(found.placed) + len(found.waiting) == new
    loads = [len(each) + sum(place == gpu for place in found.placed.values()) for gpu, each in before.items()]
    assert max(loads) <= max(*numbers, min(loads) + 1)


def test_assignment_prefers_the_faster_gpu():
    assert assign(["a", "b"], {0: [], 1: []}, LINEAR, speeds={1: 3.0}).placed == {"a": 1, "b": 1}


def test_targets_are_table_10_s_oracle():
    peaks = (38, 18, 8, 28, 58, 77, 13, 68, 23, 73)
    rho = (0.60, 0.88, 0.95, 0.72, 0.55, 0.55, 0.92, 0.55, 0.80, 0.55)
    found = [target_gpus(n, 5, each, most=16) for n, each in zip(peaks, rho, strict=True)]
    assert found == [13, 5, 2, 8, 16, 16, 3, 16, 6, 16]


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 12), st.floats(0.1, 1.0), st.floats(0.0, 0.2))
def test_hysteresis_moves_one_way_and_within_bounds(sessions, gpus, capacity, utilization, tolerance):
    rho = math.ceil(sessions / gpus) / capacity
    wish = decide(rho, sessions, gpus, capacity, Parameters(utilization, tolerance), most=64)
    if rho > utilization + tolerance + 1e-6:
        assert wish >= gpus
    elif rho < utilization - tolerance - 1e-6:
        assert 1 <= wish <= gpus
    if abs(rho - utilization) < tolerance:
        assert wish == gpus


@given(st.floats(0, 300), st.integers(1, 80), st.integers(1, 12), st.floats(0.1, 1.2), st.floats(0.0, 9.0))
def test_what_is_expected_is_covered_and_not_given_back_without_room_for_some_more(
    expected, gpus, capacity, utilization, spare
):
    wish = decide_ahead(expected, gpus, capacity, utilization, 64, spare=spare)
    wanted = target_gpus(expected, capacity, utilization, 64)
    assert wanted <= wish <= max(wanted, gpus)
    assert decide_ahead(expected, wish, capacity, utilization, 64, spare=spare) == wish
    if wanted < wish < min(gpus, 64):
        assert (wish - 1) * capacity * utilization < expected + spare + 1e-6


@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 5), st.integers(0, 5)), max_size=30),
    st.integers(1, 50),
    st.floats(0, 120),
)
def test_what_came_and_went_in_the_window_is_anticipated(changes, sessions, ahead):
    turnover, now, found = Turnover(0.0, reserve=0.0), 0.0, []
    for wait, came, went in changes:
        now += wait
        turnover.add(now, came, went)
        found.append((now, came, went))
        recent = [each for each in found if each[0] > now - WINDOW]
        share = ahead / max(ahead, min(WINDOW, now)) if ahead else 0.0
        expected = anticipated(sessions, sum(c for _, c, _ in recent), sum(w for _, _, w in recent), share)
        new = [each for each in found if each[0] > now - STEEP * ahead]
        lately, gone = sum(c for _, c, _ in new), sum(w for _, _, w in new)
        steep = 0.0
        if now >= STEEP * ahead:
            steep = max(0.0, lately - gone - BY_CHANCE * math.sqrt(lately + gone)) / STEEP
        least = max(expected.sessions, sessions + steep + DEVIATIONS * expected.deviation)
        assert turnover.anticipated(now, sessions, ahead).sessions == pytest.approx(least if ahead else sessions)
    assert turnover.anticipated(now + 2 * WINDOW, sessions, ahead, idle=9) == Anticipated(sessions)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 5), st.floats(0, 300))
def test_the_dynamic_program_is_the_optimum(needs, initial, boot):
    """GPUs are alike: the k-th is kept over a gap, or booted anew, by itself."""
    found = cheapest_schedule(needs, 60.0, boot, initial)
    assert all(have >= need for have, need in zip(found.gpus, needs, strict=True))
    best = 0.0
    for k in range(1, max([initial, *needs]) + 1):
        slots = [n for n, need in enumerate(needs) if need >= k]
        best += 60.0 * len(slots)
        last = -1 if k <= initial else None
        for slot in slots:
            best += boot if last is None else min(boot, 60.0 * (slot - last - 1))
            last = slot
    assert found.gpu_seconds == pytest.approx(best)
    billed = sum(60.0 * have for have in found.gpus)
    billed += sum(boot * max(0, b - a) for a, b in zip((initial, *found.gpus), found.gpus, strict=False))
    assert billed == pytest.approx(found.gpu_seconds)


def test_bounds_say_what_cannot_be():
    with pytest.raises(ValueError, match="needs 3 GPUs, and there are 2"):
        cheapest_schedule([1, 3], 60.0, 0.0, most=2)
    with pytest.raises(ValueError, match="1 GPU cannot hold 3 sessions"):
        best_placement("abc", [0], LINEAR, capacity=2)


def test_profiling_takes_the_cheapest_that_is_valid():
    candidates = [Parameters(rho) for rho in (0.25, 0.5, 0.8)]

    def replay(burst, each):
        return Replayed(1 / each.utilization, each.utilization * burst)

    rows = profile([(3.0, 4.0), (1.0, 1.0), (2.0, 1.2), (9.0, 100.0)], candidates, replay, target=1.0)
    assert [row.parameters.utilization for row in rows] == [0.8, 0.8, 0.25, 0.25]
    assert [row.valid for row in rows] == [True, True, True, False]
    table = levels(rows)
    assert table.bounds == (2.5,) and table.at(2.4).utilization == 0.8 and table.at(2.6).utilization == 0.25
    with pytest.raises(ValueError, match="one candidate or more"):
        cheapest([], lambda each: Replayed(1, 1), 1.0)


replays = st.builds(Replayed, st.floats(1, 9), st.sampled_from([0.5, 1.0, 2.0, 2.4]), st.floats(0, 9))


@given(st.lists(replays, min_size=1, max_size=6), st.sampled_from([0.1, 0.7, 3.0]))
def test_the_cheapest_that_keeps_the_target_is_chosen_or_the_one_that_exceeds_it_least(found, target):
    candidates = [Parameters(0.1 * (n + 1)) for n in range(len(found))]
    rows = dict(zip(candidates, found, strict=True))
    chosen, replayed, valid = cheapest(candidates, rows.__getitem__, target)
    assert replayed == rows[chosen] and valid == (min(each.worst for each in found) <= target)
    if valid:
        assert replayed.worst <= target
        assert replayed.cost == min(each.cost for each in found if each.worst <= target)
    else:
        mildest = [each for each in found if each.worst == replayed.worst]
        assert replayed.worst == min(each.worst for each in found)
        assert replayed.over == min(each.over for each in mildest)
        assert replayed.cost == min(each.cost for each in mildest if each.over == replayed.over)


def test_the_oracle_knows_the_windows():
    bursts = [1.0, 3.0, 1.5]
    candidates = [Parameters(rho) for rho in (0.25, 0.5, 0.8)]

    def replay(chosen):
        rows = zip(bursts, chosen, strict=True)
        return [Replayed(1 / each.utilization, burst * each.utilization) for burst, each in rows]

    assert [each.utilization for each in tuned(3, candidates, replay, 0.8)] == [0.8, 0.25, 0.5]


def test_levels_are_table_6_s():
    volatilities = (0.86, 1.32, 1.92, 2.66, 3.15, 3.77, 4.39, 5.14, 5.51, 6.38)
    found = [PAPER.at(each).utilization for each in volatilities]
    assert found == [0.80, 0.80, 0.65, 0.65, 0.65, 0.50, 0.50, 0.50, 0.25, 0.25]
    assert PAPER.scaled(0.5).at(0.0).utilization == 0.4
    with pytest.raises(ValueError, match="ascending bounds"):
        Levels((2.0, 1.0), (Parameters(),) * 3)


def test_curves_and_costs():
    curve = PowerCurve(0.0, 0.1336)
    assert most_sessions(curve, 0.668) == 5 and most_sessions(curve, 0.1) == 0 and curve(0) == 0.0
    assert MigrationCost(0.02, 1e9).seconds(1e7) == pytest.approx(0.03)
    for wrong in (lambda: PowerCurve(-1.0, 1.0), lambda: Parameters(0.0), lambda: Parameters(0.5, -1.0)):
        with pytest.raises(ValueError, match="give"):
            wrong()
