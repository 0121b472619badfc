"""Items of an app divided among contexts: nothing is lost or doubled, and the shares are those of the plan."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import Deal

CONTEXTS = ("own", "worse", "better")
ERRORS = {"own": 0.1, "worse": 0.3, "better": 0.02}
SHARES = st.lists(st.integers(0, 4), min_size=3, max_size=3).map(lambda them: dict(zip(CONTEXTS, them, strict=True)))


class Divides:
    """A placement that says what it is told."""

    def __init__(self):
        self.shares = {}

    def plan(self, view):
        return Plan(shares=self.shares)


class Evenly:
    """A placement that has each alternative that there is answer as many items as the app itself."""

    def plan(self, view):
        own = [app.context for app in view.apps.values()]
        return Plan(shares={("app-own", context): 1 / len(own) for context in own})


class Bench:
    """A scheduler with an app of three contexts, whose workers do what they are told when a test says so."""

    def __init__(self, workers=3, batch_size=3, max_error=None, placement=None, early=0, errors=ERRORS):
        self.placement = placement or Divides()
        self.scheduler = Scheduler(
            Policies.chosen({"batching": {"policy": "fixed", "size": batch_size}, "placement": self.placement})
        )
        self.time = 0.0
        self.submitted = 0
        self.workers = 0
        self.running, self.loading = {}, []
        self.delivered, self.buried = Counter(), Counter()
        self.answered_by = Counter()
        for _ in range(early):
            self.join()
        for name in CONTEXTS:
            self.tell(ev.ContextDeclared, ev.ContextSpec(name, name))
            own = "" if name == "own" else "app-own"
            spec = ev.AppSpec(f"app-{name}", "app", name, error=errors[name], max_error=max_error, alternative_of=own)
            self.tell(ev.AppDeclared, spec)
        for _ in range(workers):
            self.join()

    @property
    def state(self):
        return self.scheduler.state

    def tell(self, event, *values, **named):
        self.time += 1.0
        commands = self.scheduler.handle(event(self.time, *values, **named))
        for command in commands:
            if isinstance(command, cmd.Run):
                self.running[command.attempt] = command
            elif isinstance(command, cmd.Deliver):
                self.delivered.update(command.items)
            elif isinstance(command, cmd.Bury):
                self.buried.update(command.items)
            elif isinstance(command, (cmd.Stage, cmd.Load)):
                self.loading.append((command.worker, command.context))
        self.scheduler.validate()
        return commands

    def join(self):
        self.workers += 1
        self.tell(ev.WorkerJoined, ev.WorkerSpec(f"w{self.workers}"))

    def submit(self, count):
        items = range(self.submitted, self.submitted + count)
        self.submitted = items.stop
        self.tell(ev.ItemsSubmitted, "app-own", items)

    def divide(self, shares):
        total = sum(shares.values())
        self.placement.shares = {("app-own", each): n / total for each, n in shares.items() if n}
        self.tell(ev.Tick)

    def finish(self, choice):
        """A call ends, or a context is built."""
        steps = [("ready", *each) for each in self.loading] + [("done", n) for n in self.running]
        if not steps:
            return False
        step = steps[choice % len(steps)]
        if step[0] == "ready":
            self.loading.remove(step[1:])
            self.tell(ev.ContextReady, step[1], step[2], 1.0)
        else:
            command = self.running.pop(step[1])
            self.answered_by[command.context] += len(command.items)
            self.tell(ev.BatchFinished, command.worker, command.attempt, 1.0)
        return True

    def lose(self, choice):
        names = list(self.state.workers)
        if names:
            lost = names[choice % len(names)]
            self.running = {n: each for n, each in self.running.items() if each.worker != lost}
            self.loading = [each for each in self.loading if each[0] != lost]
            self.tell(ev.WorkerLost, lost, evicted=True)

    def cancel(self, choice):
        if self.submitted:
            self.tell(ev.ItemsCancelled, [choice % self.submitted])

    def break_context(self, name):
        """The context fails where it is being built, until it is given up."""
        for worker, context in [each for each in self.loading if each[1] == name]:
            self.loading.remove((worker, context))
            self.tell(ev.ContextFailed, worker, context, ev.Failure("exception", "ValueError", "no"))

    def run_out(self):
        while self.finish(0):
            pass


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 12)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("lose"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("break_context"), st.sampled_from(["worse", "better"])),
    st.tuples(st.just("divide"), SHARES.filter(lambda shares: sum(shares.values()) > 0)),
    st.tuples(st.just("join"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_no_item_is_lost_or_answered_twice_however_it_is_divided(steps):
    bench = Bench()
    for name, value in steps:
        getattr(bench, name)(*([] if value is None else [value]))
    bench.placement.shares = {}
    bench.tell(ev.Tick)
    bench.join()
    bench.run_out()
    assert all(times == 1 for times in bench.delivered.values())
    assert not bench.buried, "the app's own context is sound"
    cancelled = bench.state.counters.cancelled
    assert bench.delivered.total() + cancelled == bench.submitted and not bench.state.open


@given(SHARES.filter(lambda shares: sum(shares.values()) > 0), st.integers(1, 200))
def test_no_beginning_of_a_deal_has_more_errors_than_all_of_it_is_to_have(shares, count):
    total = sum(shares.values())
    ordered = {name: shares[name] / total for name in ("worse", "own", "better") if shares[name]}
    deal = Deal(ordered)
    planned = sum(share * ERRORS[name] for name, share in ordered.items())
    dealt = Counter()
    for n in range(1, count + 1):
        dealt[deal.next()] += 1
        assert sum(ERRORS[name] * times for name, times in dealt.items()) <= planned * n + 1e-6
    for name, share in ordered.items():
        assert abs(dealt[name] - share * count) <= len(ordered)


def test_shares_hold_and_change_with_the_plan():
    bench = Bench(workers=3, batch_size=1)
    bench.divide({"own": 1, "worse": 1, "better": 2})
    bench.submit(400)
    bench.run_out()
    assert bench.answered_by == {"own": 100, "worse": 100, "better": 200}
    bench.submit(90)
    bench.divide({"own": 2, "better": 1})
    bench.run_out()
    assert bench.delivered.total() == 490 and bench.answered_by["better"] in range(228, 232)


def test_without_a_plan_that_divides_all_goes_to_the_own_context():
    bench = Bench()
    bench.submit(50)
    bench.run_out()
    assert bench.answered_by == {"own": 50}


def test_the_first_items_are_divided_though_all_workers_were_there_before_the_app():
    bench = Bench(early=2, workers=0, placement=Evenly())
    bench.submit(9)
    while bench.finish(0):
        pass
    assert bench.answered_by == {"own": 3, "worse": 3, "better": 3}


def test_what_waits_for_an_alternative_that_cannot_be_built_goes_to_the_own_context():
    bench = Bench(workers=1)
    bench.divide({"worse": 1})
    bench.submit(10)
    for _ in range(10):
        bench.break_context("worse")
        bench.tell(ev.Tick)
        bench.time += 100.0
    assert bench.state.contexts["worse"].broken is not None
    bench.submit(5)
    bench.run_out()
    assert bench.answered_by == {"own": 15} and not bench.buried


def test_an_own_context_that_cannot_be_built_has_its_items_fail():
    bench = Bench(workers=1)
    bench.submit(10)
    for _ in range(10):
        bench.break_context("own")
        bench.tell(ev.Tick)
        bench.time += 100.0
    assert bench.buried.total() == 10 and not bench.state.open


def waiting(*names, **options):
    """A bench whose items wait for three contexts, after some of these turned out to be broken."""
    bench = Bench(workers=0, **options)
    bench.divide(dict.fromkeys(CONTEXTS, 1))
    bench.submit(90)
    for name in names:
        while bench.state.contexts[name].broken is None:
            bench.join()
            bench.break_context(name)
    return bench


def shares_without(*names, **options):
    deal = waiting(*names, **options).state.deals.get("app-own")
    return {} if deal is None else deal.shares


def test_what_a_broken_alternative_was_to_answer_goes_to_those_that_are_wrong_no_more_often():
    assert shares_without("worse") == {"app-own": 0.5, "app-better": 0.5}
    assert shares_without("better") == {"app-worse": 1 / 3, "app-own": 2 / 3}
    assert shares_without("worse", "better") == {"app-own": 1.0}
    alike = {"own": 0.1, "worse": 0.3, "better": 0.3}
    assert shares_without("better", errors=alike) == {"app-worse": 0.5, "app-own": 0.5}
    assert waiting("worse").state.apps["app-better"].backlog == 45


def test_no_more_is_wrong_than_may_be_when_an_alternative_is_broken():
    assert shares_without("better", max_error=0.15) == {}
    assert shares_without("better", max_error=0.2) == {"app-worse": 1 / 3, "app-own": 2 / 3}


def test_a_broken_alternative_takes_nothing_from_others_where_the_own_context_is_broken_too():
    bench = waiting("own")
    assert bench.buried.total() == 30
    left = [item for item, app in bench.state.open.items() if app.id == "app-better"]
    while bench.state.contexts["worse"].broken is None:
        bench.join()
        bench.break_context("worse")
    assert len(left) == 30 and bench.buried.total() == 60 and not bench.buried.keys() & set(left)
