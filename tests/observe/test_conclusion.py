"""The page's first sentence: what most of the time went into, and why, from a run's own figures."""

import pytest
from observe_data import EVENTS
from played_run import Played

from ctxflow.observe.history_reader import read_history
from ctxflow.observe.summary import conclusion, presence_around, summarise
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line


def told(lines):
    history = read_history(lines)
    return conclusion(summarise(history), history)


class Run:
    """An event log of few events, with the commands that a scheduler would have given."""

    def __init__(self):
        self.lines = []
        self.attempts = 0
        self.tell(ev.ContextDeclared(0.0, ev.ContextSpec("c", "model")))
        self.tell(ev.AppDeclared(0.0, ev.AppSpec("a", "verify", "c")))

    def tell(self, event, *commands):
        self.lines.append(line(event, commands) + "\n")
        return self

    def submit(self, time, items=10):
        return self.tell(ev.ItemsSubmitted(time, "a", range(items)))

    def join(self, time, name="w", *commands):
        return self.tell(ev.WorkerJoined(time, ev.WorkerSpec(name)), *commands)

    def load(self, begin, end, name="w", then=()):
        self.tell(ev.Tick(begin), cmd.Load(name, "c"))
        return self.tell(ev.ContextReady(end, name, "c", end - begin), *then)

    def call(self, begin, end, name="w", items=range(10), seconds=None):
        self.attempts += 1
        self.tell(ev.Tick(begin), cmd.Run(name, self.attempts, "a", "c", items))
        finished = ev.BatchFinished(end, name, self.attempts, end - begin if seconds is None else seconds)
        return self.tell(finished, cmd.Deliver(self.attempts, items))

    def evicted(self, begin, end, name="w", items=range(10)):
        self.attempts += 1
        self.tell(ev.Tick(begin), cmd.Run(name, self.attempts, "a", "c", items))
        return self.tell(ev.WorkerLost(end, name, evicted=True))

    def end(self, time):
        return self.tell(ev.Tick(time))


def loading_again_and_again():
    run = Run().submit(0.0)
    for n in range(4):
        run.join(20.0 * n, f"w{n}").load(20.0 * n, 20.0 * n + 8, f"w{n}").evicted(20.0 * n + 8, 20.0 * n + 14, f"w{n}")
    return run.join(80.0).load(80.0, 88.0).call(88.0, 92.0)


def evictions():
    run = Run().submit(0.0)
    for n in range(3):
        run.join(50.0 * n, f"w{n}").load(50.0 * n, 50.0 * n + 1, f"w{n}").evicted(50.0 * n + 1, 50.0 * n + 40, f"w{n}")
    return run.join(150.0).load(150.0, 151.0).call(151.0, 190.0)


RUNS = {
    "useful": (
        Run().submit(0.0).join(0.0).load(0.0, 5.0).call(5.0, 100.0),
        "95 % of the time was useful; most of the rest, 5.0 %, went into loading, since a load took 5.00 s, and the "
        "run was over after 100 s.",
    ),
    "useful alone": (Run().submit(0.0).join(0.0).call(0.0, 100.0), "100 % of the time was useful."),
    "loading": (
        loading_again_and_again(),
        "59 % of the time went into loading, since a worker lived 13.6 s on average, and a load took 8.00 s; 5.9 % was "
        "useful.",
    ),
    "loading in a short run": (
        Run().submit(0.0).join(0.0).load(0.0, 9.0).call(9.0, 10.0),
        "90 % of the time went into loading, since a load took 9.00 s, and the run was over after 10.0 s; 10 % was "
        "useful.",
    ),
    "loading that never ends": (
        Run().submit(0.0).join(0.0, "w", cmd.Load("w", "c")).end(60.0),
        "100 % of the time went into loading, since no context was built to its end; nothing was useful.",
    ),
    "evictions": (
        evictions(),
        "73 % of the time went into calls that evictions ended, since a worker lived 40.0 s on average, and a call "
        "took 39.0 s: smaller batches lose less; 24 % was useful.",
    ),
    "idle after the last answer": (
        Run().submit(0.0).join(0.0).join(0.0, "w2").call(0.0, 20.0).end(100.0),
        "90 % of the time went into waiting, since workers stayed after the last answer, for 160 s together; 10 % was "
        "useful.",
    ),
    "idle before the first item": (
        Run().join(0.0).submit(90.0).call(90.0, 100.0),
        "90 % of the time went into waiting, since workers were there before the first item was, for 90.0 s together; "
        "10 % was useful.",
    ),
    "idle in between": (
        Run().submit(0.0).join(0.0).call(0.0, 5.0, items=range(5)).call(95.0, 100.0, items=range(5, 10)),
        "90 % of the time went into waiting, since too few items were there for all workers at a time; 10 % was "
        "useful.",
    ),
    "sending": (
        Run().submit(0.0).join(0.0).call(0.0, 10.0, seconds=0.5),
        "95 % of the time went into sending calls and answers, since a call took only 500 ms: larger batches are sent "
        "more rarely; 5.0 % was useful.",
    ),
    "nothing submitted": (
        Run().join(0.0).end(10.0),
        "Nothing was submitted: 100 % of the time went into waiting.",
    ),
    "no worker": (Run().submit(0.0).end(10.0), "No worker joined, so that nothing could run."),
    "nothing at all": (Run(), "No worker joined."),
}


@pytest.mark.parametrize(("run", "said"), RUNS.values(), ids=RUNS)
def test_what_the_time_went_into_and_why(run, said):
    assert told(run.lines) == said


def test_a_recorded_run_and_one_of_three_tiers():
    with EVENTS.open() as lines:
        assert told(lines) == (
            "60 % of the time was useful; most of the rest, 37 %, went into loading, since a worker lived 1.47 s on "
            "average, and a load took 645 ms."
        )
    lines = []
    Played(lines, 40_000).play()
    assert told(lines).startswith("87 % of the time was useful; most of the rest, 12 %, went into loading, since a ")


def test_a_summary_without_its_history_gives_no_reason():
    history = read_history(loading_again_and_again().lines)
    assert conclusion(summarise(history)) == "59 % of the time went into loading; 5.9 % was useful."


def test_presence_is_told_before_during_and_after():
    history = read_history(Run().join(0.0).join(5.0, "w2").tell(ev.WorkerLost(30.0, "w2")).end(40.0).lines)
    assert presence_around(history, 10.0, 20.0) == (15.0, 20.0, 30.0)
