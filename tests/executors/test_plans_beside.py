"""Plans made beside a run: calls are answered meanwhile, and neither a failure nor the run's end harms anybody."""

import itertools
import logging
import threading
import time

from executor_helpers import started

from ctxflow import context, context_app, session_app
from ctxflow.policies.protocols import Plan
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler.log import replay
from waiting import eventually, finished, happened, joined, patience

TIER = "local"


class Slow:
    """Each plan waits until the test lets it go; `bounds` are planned one after the other, None fails."""

    def __init__(self, *bounds, free=False):
        self.begun, self.go = threading.Event(), threading.Event()
        self._left, self._plan = list(bounds), Plan()
        if free:
            self.go.set()

    def plan(self, view):
        return self._plan

    def planning(self, view):
        if not self._left or not view.workers:
            return None
        most = self._left.pop(0)

        def make():
            self.begun.set()
            self.go.wait()
            if most is None:
                raise ArithmeticError("no such number")
            return Plan(workers={TIER: (0, most)})

        return make

    def planned(self, made):
        self._plan = made


@context_app
def double(number):
    return 2 * number


def test_calls_are_answered_while_a_plan_is_made(tmp_path):
    policy = Slow(1)
    with started(tmp_path, workers=2, placement=policy) as executor:
        assert finished(double(1)).result() == 2
        happened(policy.begun)
        assert [finished(double(n)).result() for n in range(20)] == [2 * n for n in range(20)]
        assert not policy._plan.workers
        policy.go.set()
        eventually(lambda: executor.status().workers == 1)
        assert finished(double(3)).result() == 6
    lines = next(tmp_path.rglob("events.jsonl")).read_text().splitlines(keepends=True)
    assert sum('"is":"MakePlan"' in each for each in lines) == sum('"is":"PlanMade"' in each for each in lines) == 1
    again = Scheduler(Policies.chosen({"placement": Slow(1, free=True), "batching": "opportunistic"}))
    assert replay(lines[1:], again) == len(lines) - 1


def test_one_that_fails_is_told_once_and_the_next_is_followed(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ctxflow")
    with started(tmp_path, workers=2, placement=Slow(None, None, 1, free=True)) as executor:
        assert finished(double(1)).result() == 2
        eventually(lambda: executor.status().workers == 1)
        assert finished(double(2)).result() == 4
    told = [record.message for record in caplog.records if "ArithmeticError" in record.message]
    assert len(told) == 1 and "(ArithmeticError: no such number), and the one in place stays" in told[0]


def test_a_run_ends_while_a_plan_is_made(tmp_path):
    policy = Slow(1)
    with started(tmp_path, workers=1, placement=policy):
        assert finished(double(1)).result() == 2
        happened(policy.begun)
    maker = [each for each in threading.enumerate() if each.name == "ctxflow-plan"]
    policy.go.set()
    for each in maker:
        joined(each)
    assert maker and not policy._plan.workers


@context
def start():
    return 100


@session_app(start(), chunk_target=1.0)
def count_on(first, states, prompts):
    time.sleep(0.01)
    for state in states:
        made = state or 0
        yield first + made, made + 1


def test_a_plan_has_workers_for_sessions_that_go_on_under_it(tmp_path):
    placement = {"policy": "agh", "period": 1.5, "clear": 5.0}
    with started(tmp_path, workers=3, placement=placement) as executor:
        sessions = [count_on.open() for _ in range(3)]
        calls = [double(n) for n in range(50)]
        numbers = itertools.count(100)

        def planned():
            number = next(numbers)
            assert [session.take(patience()) for session in sessions] == [number] * 3
            state = executor.run._scheduler.state
            return any(state.contexts[context].spec.name == "start" for context, _ in state.plan.holders)

        eventually(planned)
        for _ in range(60):
            planned()
        assert [finished(call).result() for call in calls] == [2 * n for n in range(50)]
        for session in sessions:
            session.close()
    lines = next(tmp_path.rglob("events.jsonl")).read_text().splitlines(keepends=True)
    assert replay(lines) == len(lines) - 1
