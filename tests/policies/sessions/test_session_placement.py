"""Which worker carries which session, on a live scheduler's view."""

import pytest

from ctxflow.policies.registry import make
from ctxflow.policies.simple import measured
from ctxflow.policies.turboserve.session_placement import fitted
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


class Pool:
    """A scheduler, some workers whose contexts are built at once, and steps that take 0.1 s a session."""

    def __init__(self, placement, workers=2, chunk_target=None):
        self.scheduler = Scheduler(Policies.chosen({"sessions": placement}))
        self.now, self.steps, self.carries = 0.0, [], 0
        self.tell(ev.ContextDeclared, ev.ContextSpec("model", "model"))
        spec = ev.AppSpec("talk", "talk", "model", batch=False, sessions=True, chunk_target=chunk_target)
        self.tell(ev.AppDeclared, spec)
        self.join(*(f"w{number}" for number in range(workers)))

    @property
    def sessions(self):
        return self.scheduler.state.sessions

    def join(self, *names):
        for name in names:
            self.tell(ev.WorkerJoined, ev.WorkerSpec(name))

    def open(self, *numbers):
        for number in numbers:
            self.tell(ev.SessionOpened, number, "talk", 1_000_000)

    def tell(self, kind, *values, **named):
        for command in self.scheduler.handle(kind(self.now, *values, **named)):
            if isinstance(command, cmd.Load):
                self.tell(ev.ContextReady, command.worker, command.context, 1.0)
            elif isinstance(command, cmd.Carry):
                self.carries += 1
                self.tell(ev.StateArrived, command.worker, command.session, command.made)
            elif isinstance(command, cmd.Step):
                self.steps.append(command)
        self.scheduler.validate()

    def go(self, rounds=6):
        """Have all workers make so many steps."""
        for _ in range(rounds):
            self.now += 1.0
            steps, self.steps = self.steps, []
            for step in steps:
                outcomes = [
                    {
                        **({"made": 1} if order.chunk is not None else {}),
                        **({"frozen": ["", 5]} if order.then == "freeze" else {}),
                        **({"kept": 5} if order.then in ("keep", "leave") else {}),
                    }
                    for order in step.orders
                ]
                seconds = 0.1 * sum("made" in outcome for outcome in outcomes)
                self.tell(ev.StepFinished, step.worker, step.attempt, seconds, outcomes)
            self.tell(ev.Tick)

    def counts(self):
        return sorted(len(worker.sessions) for worker in self.scheduler.state.workers.values())


@pytest.mark.parametrize("placement", ["least-loaded", "turboserve"])
def test_sessions_are_shared_out(placement):
    pool = Pool(placement, workers=3)
    pool.open(*range(9))
    pool.go()
    assert pool.counts() == [3, 3, 3]
    assert pool.carries == 0


def test_least_loaded_moves_nobody_to_a_new_worker_and_turboserve_does():
    for placement, counts in (("least-loaded", [0, 3, 3]), ("turboserve", [2, 2, 2])):
        pool = Pool(placement)
        pool.open(*range(6))
        pool.go()
        pool.join("new")
        pool.go()
        assert pool.counts() == counts


def test_those_who_have_nothing_to_do_do_not_count():
    pool = Pool("least-loaded")
    pool.open(0, 1)
    for session in (0, 1):
        pool.tell(ev.SessionSuspended, session)
    pool.go(2)
    pool.open(2, 3)
    assert pool.counts() == [1, 1]


@pytest.mark.parametrize("placement", ["least-loaded", "turboserve"])
def test_sessions_leave_a_worker_that_is_about_to_go(placement):
    pool = Pool(placement)
    pool.open(*range(4))
    pool.go(3)
    pool.tell(ev.EvictionNotice, "w0")
    pool.go(3)
    assert {session.worker for session in pool.sessions.values()} == {"w1"}


def test_turboserve_keeps_no_more_than_k_on_a_worker():
    pool = Pool("turboserve", chunk_target=0.35)  # Three sessions.
    pool.open(*range(10))
    pool.go(12)
    assert pool.counts() == [3, 3]
    assert [session.state for session in pool.sessions.values()].count("waiting") == 4
    pool.join("new")
    pool.go(4)
    assert pool.counts()[0] > 0


def test_a_dear_migration_is_not_worth_it():
    pool = Pool({"policy": "turboserve", "weight": 1e9})
    pool.open(*range(4))
    pool.go()
    pool.join("new")
    pool.go()
    assert pool.carries == 0 and pool.counts() == [0, 2, 2]


def test_a_step_that_missed_the_target_is_not_made_larger():
    assert measured({4: 0.1, 8: 0.3}, 0.2) == 7  # Its time promises 8.
    assert measured({7: 0.19, 8: 0.3}, 0.2) == 7
    assert measured({1: 0.01, 64: 0.02}, 0.2) == 128


def test_the_line_through_what_was_measured_rises():
    assert fitted({2: 0.2}).each > 0
    assert fitted({1: 0.3, 8: 0.2}).each > 0  # Noise: chunks do not get shorter with more sessions.


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="there is no rule 'best'"):
        make("sessions", {"policy": "turboserve", "rule": "best"})
    with pytest.raises(ValueError, match="weight, alpha and every are numbers of 0 or more"):
        make("sessions", {"policy": "turboserve", "every": -1.0})
    with pytest.raises(ValueError, match="most is the number of sessions"):
        make("batching", {"policy": "coalescing", "most": 0})
