"""Plans that are made beside the run: asked for one at a time, adopted when they are there, and again in a replay."""

import pytest
from scheduler_bench import Bench, only

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import computed
from ctxflow.scheduler.log import line, replay


class Turns:
    """Wants the context on "even" and on "odd" in turn, whenever it is asked; counts how often."""

    def __init__(self):
        self.asked = self.adopted = 0
        self._plan = Plan()

    def plan(self, view):
        return self._plan

    def planning(self, view):
        self.asked += 1
        number = self.asked
        return lambda: Plan(tiers={"c": frozenset({"odd" if number % 2 else "even"})})

    def planned(self, made):
        self.adopted += 1
        self._plan = made


class ByHand(Bench):
    """A bench that has plans made when the test says so."""

    def tell(self, kind, *values, **named):
        commands = self.scheduler.handle(kind(self.now, *values, **named))
        self.scheduler.validate()
        return commands


def tiers(bench):
    return sorted(tier for those in bench.state.plan.tiers.values() for tier in those)


def test_one_is_made_at_a_time_and_holds_from_when_it_is_there():
    bench, turns = ByHand(placement=(policy := Turns())), policy
    [asked] = only(bench.tell(ev.Tick), cmd.MakePlan)
    assert not only([*bench.tell(ev.Tick), *bench.join("w")], cmd.MakePlan) and turns.asked == 1
    assert tiers(bench) == []
    commands = bench.tell(ev.PlanMade, results=asked.planning())
    assert [type(command) for command in commands[:2]] == [cmd.Place, cmd.MakePlan]
    assert tiers(bench) == ["odd"] and turns.asked == 2


def test_without_what_was_made_it_is_computed():
    bench = ByHand(placement=Turns())
    bench.tell(ev.Tick)
    bench.tell(ev.PlanMade)
    assert tiers(bench) == ["odd"]


def test_one_that_nobody_asked_for_is_without_effect():
    turns = Turns()
    bench = ByHand(placement=turns)
    assert bench.tell(ev.PlanMade, results=Plan(tiers={"c": frozenset({"odd"})})) == []
    other = ByHand()
    assert other.tell(ev.PlanMade, results=Plan(tiers={"c": frozenset({"odd"})})) == [] and tiers(other) == []
    assert turns.adopted == 0


def test_one_that_fails_is_told_once_and_the_plan_in_place_stays():
    bench = ByHand(placement=Turns())
    bench.tell(ev.Tick)
    bench.tell(ev.PlanMade)
    told = []
    for failure in ("ValueError: a", "ValueError: a", "ValueError: b", None, "ValueError: b"):
        told.append([note.text for note in only(bench.tell(ev.PlanMade, failure=failure), cmd.Note)])
        bench.tell(ev.Tick)
    assert [len(each) for each in told] == [1, 0, 1, 0, 1]
    assert "(ValueError: a), and the one in place stays" in told[0][0]
    assert bench.state.policies.placement.adopted == 2


def test_what_raises_is_an_answer_too():
    event = computed(lambda: {}["x"], 3.0)
    assert (event.time, event.results, event.failure) == (3.0, None, "KeyError: 'x'")


@pytest.mark.parametrize(("fails", "places"), [((), 6), ((2,), 4)])
def test_a_replay_makes_the_same_plans_from_the_log(fails, places):
    bench, lines = ByHand(placement=Turns()), []
    for number in range(6):
        bench.now += 1.0
        failure = "OSError: no" if number in fails else None
        made = bench.state.planning() if bench.state.planning is not None and failure is None else None
        for event in (ev.Tick(bench.now), ev.PlanMade(bench.now, made, failure)):
            lines.append(line(event, bench.scheduler.handle(event)) + "\n")
    assert replay(lines, Scheduler(Policies.chosen({"placement": Turns()}))) == len(lines)
    assert sum('"Place"' in each for each in lines) == places
