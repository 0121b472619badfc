"""What an event costs does not grow with the workers, and stays within its budget: counted, and no clock is read."""

import contextlib
import sys

import pytest
from cost_budgets import DEFAULT, FILES, POLICIES

from ctxflow.executors.kept_files import EventLog, WorkerTable
from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.policies import registry
from ctxflow.policies.simple import ContextAffinity
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.simulation import tiers_of
from suite.depth import some

WARM = 60.0  # Seconds after which all workers have joined and built what they need.
SECONDS = 6.0  # That are counted, or more with fewer workers: what is done once a second is in it.
COUNTED = some(2e3, deeply=5e3)  # Seconds times workers.
SIZES = some((400,), deeply=(100, 1000))  # A look at each of 400 workers is noticed, as below.


class Steps:
    """Counts calls and lines while it is entered."""

    def __init__(self):
        self.count = 0

    def _profile(self, frame, event, value):
        if event in ("call", "c_call"):
            self.count += 1

    def _trace(self, frame, event, value):
        if event == "line":
            self.count += 1
        return self._trace

    def __enter__(self):
        self._before = sys.getprofile(), sys.gettrace()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before[1])
        sys.setprofile(self._before[0])


class Counted(Simulation):
    """A run of which the steps of its scheduler, or of what else handles its events, are counted from a time on."""

    def __init__(self, *given, handler=None, **named):
        super().__init__(*given, **named)
        self.steps, self.events = Steps(), 0
        scheduler, handle = self.scheduler, self.scheduler.handle
        before, after = handler or (None, None)

        def handled(event):
            self.events += event.time >= WARM
            if handler is None:
                return self._counted(event, handle, event)
            self._counted(event, before, event, self)
            commands = handle(event)
            self._counted(event, after, event, commands, self)
            return commands

        scheduler.handle = handled

    def _counted(self, event, action, *values):
        if event.time < WARM:
            return action(*values)
        with self.steps:
            return action(*values)


def run(workers, busy=True, talks=0, handler=None, counted=COUNTED, **choices):
    """Count the steps of an event in a pool whose workers are evicted every two minutes on average.

    Where it is not busy, most workers idle, with the contexts of what comes or without.
    """
    machines = [
        machine
        for model in ("a10", "titan")
        for machine in pools.machines(workers // 2, model, pools.evicted(120.0, 20.0))
    ]
    times = GpuTimes({"a10": 0.2727, "titan": 0.3846}, item_spread=0.5, loading=Drawn(15.0, 5.0, 5.0))
    contexts = [ev.ContextSpec(name, name, gpus=1) for name in "ab"]
    apps = [ev.AppSpec("a", "a", "a"), ev.AppSpec("b", "b", "b"), ev.AppSpec("talk", "talk", "a", sessions=True)]
    end = WARM + max(SECONDS, counted / workers)
    arrivals = [(0.0, "a", 1000 * workers)] if busy else []
    arrivals += [(float(second), "ab"[second % 2], workers // 10) for second in range(1, int(end))]
    others = [ev.SessionOpened(30.0 + number, number, "talk", 10**6) for number in range(1, talks + 1)]
    simulation = Counted(
        SimulatedEngine(machines, times),
        Policies.chosen(choices),
        Workload(contexts, apps, arrivals),
        tiers_of(machines),
        others=others,
        handler=handler,
    )
    simulation.run(until=end)
    assert simulation.events >= SECONDS
    return round(simulation.steps.count / simulation.events)


SCENES = {"busy": {}, "idle": {"busy": False}, "sessions": {"talks": 20}}
OWN = {f"{family}.{name}" for family in registry.FAMILIES for name in registry._OWN[family]}


@contextlib.contextmanager
def files(folder):
    """What notes events in a run's files: before the scheduler handles one, and after."""
    table = WorkerTable(str(folder), lambda write: write())
    log = EventLog(str(folder / "events.jsonl"), "{}")

    def after(event, commands, simulation):
        log.add(event, commands)
        table.write(simulation.scheduler.state, event.time, simulation.engine)

    with contextlib.closing(log):
        yield lambda event, simulation: table.note(event, simulation.scheduler.state, simulation.engine), after


@pytest.mark.parametrize("workers", [100, *some((400,), deeply=(1000, 4000))])
@pytest.mark.parametrize("scene", sorted(DEFAULT))
def test_an_event_costs_as_much_with_more_workers(scene, workers):
    """With the default policies."""
    assert run(workers, **SCENES[scene]) <= DEFAULT[scene]


@pytest.mark.parametrize(("scene", "policy"), sorted(POLICIES))
def test_no_policy_makes_events_dearer(scene, policy):
    family, name = policy.split(".")
    allowed = POLICIES[scene, policy]
    period = 60.0 if policy == "placement.agh" else 0.0  # From one plan to the next.
    allowed = allowed if isinstance(allowed, dict) else dict.fromkeys(SIZES, allowed)
    for workers, most in list(allowed.items())[: some(1, deeply=None)]:
        counted = max(COUNTED, period * workers)
        assert run(workers, **SCENES[scene], counted=counted, **{family: name}) <= most, f"with {workers} workers"


def test_every_policy_has_a_budget():
    defaults = {f"{family}.{name}" for family, name in registry.DEFAULTS.items()}
    assert {policy for _, policy in POLICIES} | defaults == OWN


@pytest.mark.parametrize("workers", [100, some(400, deeply=1000)])
def test_the_files_of_a_run_cost_as_much_an_event(workers, tmp_path):
    with files(tmp_path) as handler:
        assert run(workers, handler=handler) <= FILES


@pytest.mark.parametrize("gpus", [0, 8], ids=["others can do it", "nobody can"])
def test_a_submission_costs_as_much_with_more_workers_while_some_are_in_quarantine(gpus):
    def steps(workers):
        scheduler = Scheduler(Policies.chosen({}))
        scheduler.handle(ev.ContextDeclared(0.0, ev.ContextSpec("model", "model", gpus=gpus)))
        scheduler.handle(ev.AppDeclared(0.0, ev.AppSpec("a", "a", "model")))
        for number in range(workers):
            spec = ev.WorkerSpec(f"w{number}", host=f"h{number // 4}", acquired=False)
            scheduler.handle(ev.WorkerJoined(0.0, spec))
        scheduler.handle(ev.HostDrained(1.0, "h0"))
        scheduler.handle(ev.ItemsSubmitted(1.0, "a", range(100_000)))
        with Steps() as counted:
            for item in range(100_000, 100_020):
                scheduler.handle(ev.ItemsSubmitted(1.0, "a", range(item, item + 1)))
        assert scheduler.state.wards.held
        return counted.count

    assert steps(400) <= 1.1 * steps(100)


def test_a_job_that_fails_costs_as_much_with_more_workers():
    def steps(workers):
        scheduler = Scheduler(Policies.chosen({}))
        scheduler.handle(ev.TierOffered(0.0, ev.TierSpec("default", 0, workers)))
        for number in range(workers):
            scheduler.handle(ev.WorkerJoined(0.0, ev.WorkerSpec(f"w{number}", host=f"h{number}", tier="default")))
        scheduler.handle(ev.JobFailed(1.0, "default", "0", "bad", "it ended"))
        scheduler.handle(ev.Tick(1.0))
        with Steps() as counted:
            for job in range(20):
                scheduler.handle(ev.JobFailed(1.0, "default", f"{job}", "bad", "it ended"))
        return counted.count

    assert steps(400) <= 1.1 * steps(100)


def test_a_look_at_all_workers_is_noticed(monkeypatch):
    """It is what these tests are for."""
    assign = ContextAffinity.assign

    def looks(self, view, ready):
        assert all(worker.slots for worker in view.workers.values())
        return assign(self, view, ready)

    monkeypatch.setattr(ContextAffinity, "assign", looks)
    assert run(SIZES[-1]) > DEFAULT["busy"]
