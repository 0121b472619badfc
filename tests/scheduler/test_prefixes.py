"""Items that begin alike go to one worker one after the other, nobody waits for ever, and nothing is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_attempts import Run

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.prefixes import LOOK_AHEAD


def reads(run, begin_of, items):
    """How often a worker had to read a beginning that it had not read before, in any order of answers."""
    seen: dict[str, set] = {}
    count = 0
    while run.running:
        for number in sorted(run.running):
            call = run.running[number]
            known = seen.setdefault(call.worker, set())
            for item in call.items:
                count += begin_of[item] not in known
                known.add(begin_of[item])
        run.finish(next(iter(run.running.values())).items[0])
    assert sorted(run.delivered) == list(items)
    return count


def test_what_begins_alike_is_read_by_one_worker():
    begin_of = {n: n % 20 for n in range(400)}  # Twenty rows of each of twenty beginnings, dealt out in turn.
    found = {}
    for told in (False, True):
        run = Run(window=4, workers=4)
        prefixes = [(7, 100 + begin_of[n]) for n in range(400)] if told else ()
        run.tell(ev.ItemsSubmitted, "ask", range(400), prefixes)
        found[told] = reads(run, begin_of, range(400))
    assert found[False] > 60, "in turn, each worker reads most of them"
    assert found[True] <= 30, "each is read about once"


def test_the_longer_beginning_counts_more_and_one_that_all_share_changes_nothing():
    run = Run(window=1, workers=2)
    same = [(1, 10), (1, 20), (1, 20), (1, 10), (1, 20), (1, 10)]
    run.tell(ev.ItemsSubmitted, "ask", range(6), same)
    assert (run.on("w0"), run.on("w1")) == ([0], [1])
    run.finish(0)
    assert run.on("w0") == [3]
    run.finish(1)
    assert run.on("w1") == [2]


def test_nobody_waits_for_more_than_the_look_ahead():
    run = Run(window=1)
    count = 3 * LOOK_AHEAD
    prefixes = [(1,), (2,), *[(1,)] * (count - 2)]
    run.tell(ev.ItemsSubmitted, "ask", range(count), prefixes)
    order = []
    while run.running:
        (item,) = run.on("w0")
        order.append(item)
        run.finish(item)
    assert LOOK_AHEAD <= order.index(1) <= LOOK_AHEAD + 2


@given(
    rows=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=60),
    window=st.integers(1, 5),
    workers=st.integers(1, 3),
    cancelled=st.sets(st.integers(0, 59)),
    data=st.data(),
)
def test_every_item_is_given_once(rows, window, workers, cancelled, data):
    run = Run(window=window, workers=workers)
    run.tell(ev.ItemsSubmitted, "ask", range(len(rows)), rows)
    gone = sorted(each for each in cancelled if each < len(rows))
    run.tell(ev.ItemsCancelled, gone)
    while run.running:
        number = data.draw(st.sampled_from(sorted(run.running)))
        run.finish(run.running[number].items[0])
    assert Counter(run.delivered) == Counter(each for each in range(len(rows)) if each not in gone)
    assert not run.state.prefixes, "what is over is forgotten"
