"""Apps that name alternatives, planned and run on the simulated engine: shares as planned, errors within the limit."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of

TIERS = {"cheap": 8, "fast": 4}
PRICES = {"cheap": 0.3, "fast": 1.0}
SECONDS = {
    "large": {"cheap": 4.0, "fast": 1.0},
    "small": {"cheap": 0.4, "fast": 0.2},
    "middle": {"cheap": 1.2, "fast": 0.5},
}
ERRORS = {"large": 0.05, "small": 0.3, "middle": 0.12}
PERIOD = 200.0


class Divided:
    """A run of one app, whose own context is the large model."""

    def __init__(self, max_error, alternatives=("small",), batch=4, rate=3.0, until=1200.0, broken=None):
        self.seen: Counter[str] = Counter()
        self.since_plan: list[tuple[float, dict, Counter]] = []
        self._runs: dict[int, str] = {}
        machines = [
            SimulatedMachine(f"{tier}-{n}", tier, tier, gpus=1, available=pools.during(0.0))
            for tier, count in TIERS.items()
            for n in range(count)
        ]
        models = ("large", *alternatives)
        times = {
            f"ask-{model}": {(tier, tier): GpuTimes({tier: SECONDS[model][tier]}, 0.2) for tier in TIERS}
            for model in models
        }
        loads = {model: {(tier, tier): Drawn(10.0) for tier in TIERS} for model in models}
        engine = SimulatedEngine(machines, MixedTimes(times, loads, {tier: Drawn(2.0) for tier in TIERS}), None, 1)
        policies = Policies.chosen(
            {
                "placement": {"policy": "agh", "period": PERIOD, "clear": PERIOD},
                "batching": {"policy": "fixed", "size": batch},
            }
        )
        apps = [
            ev.AppSpec(
                f"ask-{model}", "ask", model, max_error=max_error, error=ERRORS[model],
                alternative_of="" if model == "large" else "ask-large",
            )
            for model in models
        ]  # fmt: skip
        arrivals = [(float(time), "ask-large", int(10 * rate)) for time in range(0, int(until), 10)]
        contexts = [ev.ContextSpec(model, model, gpus=1) for model in models]
        workload = Workload(contexts, apps, arrivals)
        tiers = [dataclasses.replace(tier, price=PRICES[tier.name]) for tier in tiers_of(machines)]
        self.simulation = Simulation(engine, policies, workload, tiers, listener=self._listen)
        self.outcome = self.simulation.run()
        self.simulation.scheduler.validate()

    def _listen(self, event, commands):
        for command in commands:
            if isinstance(command, cmd.Run):
                self._runs[command.attempt] = command.context
            elif isinstance(command, cmd.Deliver):
                context = self._runs[command.attempt]
                self.seen[context] += len(command.items)
                if self.since_plan:
                    self.since_plan[-1][2][context] += len(command.items)
            elif isinstance(command, cmd.Place):
                self.since_plan.append((event.time, {each: share for _, each, share in command.shares}, Counter()))

    @property
    def mean_error(self):
        return sum(ERRORS[name] * count for name, count in self.seen.items()) / self.seen.total()


@pytest.mark.parametrize(
    ("max_error", "alternatives", "saves"),
    [
        (0.1, ("small",), True),
        (0.06, ("small",), False),  # One item of 25 there: less than a worker is saved, so that either is a good plan.
        (0.15, ("small", "middle"), True),
    ],
    ids=str,
)
def test_shares_come_out_as_planned_and_errors_within_the_limit(max_error, alternatives, saves):
    run = Divided(max_error, alternatives)
    assert run.outcome.done == run.outcome.items and not run.outcome.dead
    assert run.mean_error <= max_error + 1e-9
    compared = 0
    for _, shares, seen in run.since_plan:
        assert sum(share * ERRORS[name] for name, share in shares.items()) <= max_error + 1e-6
        if seen.total() > 500:
            compared += 1
            for name, share in shares.items():
                assert abs(seen[name] / seen.total() - share) < 0.05, (shares, seen)
    assert compared
    assert not saves or any(run.seen[name] for name in alternatives), "the cheaper ones are of use"
    print(run.mean_error, run.seen, [(at, shares, dict(seen)) for at, shares, seen in run.since_plan])


def test_the_limit_is_used_to_the_full_where_that_is_cheaper():
    run = Divided(0.1)
    share = run.since_plan[-1][1]["small"]
    # 0.3 s + 0.05 (1 - s) = 0.1 has s = 0.2.
    assert share == pytest.approx(0.2, abs=0.01)


def test_nothing_is_divided_where_any_other_answers_too_much_wrong():
    run = Divided(0.05)
    assert run.seen == {"large": run.outcome.items}


def test_a_limit_that_all_keep_to_gives_all_to_the_cheapest():
    run = Divided(None)
    assert run.since_plan[-1][1] == {"small": 1.0}
    assert run.seen["small"] > 0.8 * run.seen.total()
