"""The tables of items against plain ones."""

import collections

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxflow.scheduler.open_items import ItemQueue, OpenItems

NEW = st.one_of(
    st.integers(0, 3000).map(range),
    st.lists(st.integers(0, 50), unique=True),
)


@given(st.lists(st.tuples(st.sampled_from(["add", "close", "move"]), NEW, st.booleans(), st.sampled_from("ab"))))
@example([("add", range(3000), False, "a"), ("close", range(1000, 2100), False, "a"), ("add", [1024], False, "b")])
def test_open_items_are_those_of_a_dictionary(steps):
    table, expected, base = OpenItems(), {}, 0
    for what, new, as_list, app in steps:
        if what == "add":
            items = [base + item for item in new]
            base = max([base, *(item + 1 for item in items)])
        else:  # Some of those that are there, in whatever order they were drawn.
            there = list(expected)
            items = [there[n] for n in new if n < len(there)]
        given = items if as_list else tuple(items)
        assert table.has_all(given) == all(item in expected for item in items)
        if what == "close":
            table.close(given)
            for item in items:
                del expected[item]
        else:
            table.add(given, app)
            expected.update(dict.fromkeys(items, app))
        assert len(table) == len(expected) and bool(table) == bool(expected)
        assert table == expected and list(table) == sorted(expected)
        assert base not in table
    with pytest.raises(KeyError):
        table[base]
    table.close(sorted(expected))
    assert not table._pages and not table._counts, "nothing is kept of what is over"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("extend"), NEW),
            st.tuples(st.just("take"), st.integers(1, 300)),
            st.tuples(st.just("pop"), st.integers(0, 130)),
            st.tuples(st.just("back"), st.integers(1, 5)),
            st.tuples(st.just("clear"), st.none()),
        )
    )
)
def test_a_queue_has_the_order_of_a_list(steps):
    queue, expected, base = ItemQueue(), collections.deque(), 0
    for what, value in steps:
        if what == "extend":
            new = range(base, base + len(value)) if isinstance(value, range) else [base + item for item in value]
            base += len(value) if isinstance(value, range) else 60
            queue.extend(new)
            expected.extend(new)
        elif what in ("take", "back"):
            taken = queue.take(value)
            assert taken == tuple(expected.popleft() for _ in range(min(value, len(expected))))
            if what == "back":
                queue.put_back(taken)
                expected.extendleft(reversed(taken))
        elif what == "pop" and value < len(expected):
            assert queue.pop(value) == expected[value]
            del expected[value]
        elif what == "clear":
            queue.clear()
            expected.clear()
        assert len(queue) == len(expected) and list(queue) == list(expected)
