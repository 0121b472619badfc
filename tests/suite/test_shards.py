"""The suite is split, and ordered, without losing a test."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from suite import shards

ROOT = shards.RECORDED.parents[2]
SECONDS = st.dictionaries(st.sampled_from("abcdefghij"), st.floats(0, 100), min_size=1)


@given(SECONDS, st.integers(1, 5), st.lists(st.sampled_from("abcdefghijkl"), unique=True))
def test_each_module_is_in_one_part_and_no_part_is_much_dearer(seconds, parts, modules):
    dealt = shards.deal(modules, seconds, parts)
    assert dealt.keys() == set(modules) and all(0 <= part < parts for part in dealt.values())
    costs = {module: seconds.get(module, shards.UNKNOWN_SECONDS) for module in modules}
    loads = [sum(costs[module] for module, part in dealt.items() if part == own) for own in range(parts)]
    assert max(loads) - min(loads) <= max(costs.values(), default=0) + 1e-6


@given(st.lists(st.lists(st.integers(), min_size=1)), st.lists(st.integers()), st.integers(1, 4))
def test_the_order_is_of_the_same_tests(longest, others, processes):
    ordered = shards.longest_first(longest, others, processes)
    assert sorted(ordered) == sorted([*(each for block in longest for each in block), *others])


def test_what_is_recorded_is_of_modules_that_exist():
    kept = shards.Record.read()
    assert [name for name in [*kept.modules, *kept.long] if not (ROOT / name).exists()] == []


def test_a_newer_record_replaces_what_it_has_of_a_module():
    this, other = (str(Path(each).relative_to(ROOT)) for each in (__file__, shards.__file__))
    kept = shards.Record({this: 1.0, other: 2.0, "gone.py": 3.0}, {this: ["test_a"], other: ["test_b"]})
    kept.update(shards.Record({this: 4.0}, {}))
    assert kept == shards.Record({this: 4.0, other: 2.0}, {other: ["test_b"]})
