"""Items that begin alike go to one worker one after the other, nobody waits for ever, and nothing is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_attempts import Run

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.prefixes import LOOK_AHEAD, take
from ctxflow.scheduler.prefixes import note as take_note


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


class Counting(dict):
    """A table that counts how often it is asked."""

    asked = 0

    def get(self, *key):
        self.asked += 1
        return super().get(*key)


def test_what_a_window_takes_is_proportional_to_what_it_takes():
    run = Run(window=1024, workers=0)
    homes = run.state.apps["ask"].homes = Counting()
    run.tell(ev.ItemsSubmitted, "ask", range(4000), [(1, 2 + n % 50, 100 + n) for n in range(4000)])
    run.tell(ev.WorkerJoined, ev.WorkerSpec("w0", memory=100))
    assert len(run.running) == 1024
    assert homes.asked < 20 * 1024
    before = homes.asked
    run.finish(0)
    assert homes.asked - before <= 4 * LOOK_AHEAD


def test_what_begins_alike_costs_other_apps_nothing():
    run = Run(window=4)
    run.tell(ev.AppDeclared, ev.AppSpec("short", "short", "engine", batch=False, overlaps=True))
    run.tell(ev.ItemsSubmitted, "ask", range(50), [(1,)] * 50)
    run.submit(range(100, 150), "short")
    assert run.state.apps["ask"].alike and not run.state.apps["short"].alike


def naive(prefixes, homes, overtaken, queue, count, alive):
    """What `prefixes.take` chooses for w0, in the plainest way."""
    queue, chosen = list(queue), []

    def rank(item):
        numbers = prefixes.get(item, ())
        home = homes.get(numbers[-1]) if numbers else None
        return -sum(homes.get(each) == "w0" for each in numbers), home not in (None, "w0") and home in alive

    ahead = queue[: max(count, LOOK_AHEAD)]
    while ahead and len(chosen) < count:
        place = 0 if overtaken >= LOOK_AHEAD else min(range(len(ahead)), key=lambda n: (rank(ahead[n]), n))
        overtaken = overtaken + 1 if place else 0
        chosen.append(ahead.pop(place))
        homes.update(dict.fromkeys(prefixes.get(chosen[-1], ()), "w0"))
    return chosen


@given(
    rows=st.lists(st.lists(st.integers(1, 9), max_size=4, unique=True), min_size=1, max_size=200),
    homes=st.dictionaries(st.integers(1, 9), st.sampled_from(["w0", "w1", "gone"])),
    counts=st.lists(st.sampled_from([1, 1, 2, 5, 150]), min_size=1, max_size=30),
)
def test_it_chooses_as_if_it_ranked_all_each_time(rows, homes, counts):
    run = Run(window=1, workers=2)
    app, worker = run.state.apps["ask"], run.state.workers["w0"]
    app.queue.extend(range(len(rows)))
    run.state.open.add(range(len(rows)), app)
    take_note(run.state, app, range(len(rows)), rows)
    app.homes.update(homes)
    for count in counts:
        if app.queue:
            args = run.state.prefixes, dict(app.homes), app.overtaken, list(app.queue), count, run.state.workers
            expected = naive(*args)
            assert take(run.state, worker, app, count) == expected
