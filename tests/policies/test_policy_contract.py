"""Our own policies keep the contract that those of others are held to."""

import inspect
import random

import pytest

from ctxflow.policies.protocols import Assignment, Plan
from ctxflow.policies.registry import make, names
from ctxflow.policies.simple import Fixed, LeastLoaded
from ctxflow.testing.policies import (
    SEEDS,
    BatchingContract,
    HealthContract,
    PlacementContract,
    PreemptionContract,
    RoutingContract,
    ScalingContract,
    SessionsContract,
)
from suite.depth import for_release

OPTIONS = {
    "fixed": [{}],
    "torta": [{}, {"macro": "lookahead"}, {"macro": "transport", "prewarm": False}],
    "round-robin": [{}, {"keep": True}],
    "sdib": [{}, {"keep": True}],
    "closed-loop": [{}, {"levels": [[0.5, 0.8], [0.4]]}],
    "agh": [{"period": 20.0, "clear": 100.0}],
    "imp": [{}, {"basis": "victims", "alpha": 0.5}],
    "turboserve": [{}, {"rule": "printed"}],
}


def choices(family):
    return [
        pytest.param(
            {"policy": name, **options}, id=f"{name}{number or ''}", marks=[pytest.mark.release] * bool(number)
        )
        for name in names(family)
        for number, options in enumerate(OPTIONS.get(name, [{}]))
    ]


class Ours:
    @pytest.fixture(autouse=True)
    def _choice(self, choice):
        self.choice = choice

    def make(self):
        return make(self.family, self.choice)

    @pytest.mark.parametrize("seed", [0, 1, *for_release(2, 3)])
    def test_a_run_with_windows_answers_every_item_and_leaves_no_place_free(self, seed):
        super().test_a_run_with_windows_answers_every_item_and_leaves_no_place_free(seed)


def ours(contract):
    """The contract for all policies of ctxflow that are of its family."""
    made = type(f"Test{contract.__name__}", (Ours, contract), {})
    return pytest.mark.seeded(pytest.mark.parametrize("choice", choices(contract.family))(made))


TestRouting = ours(RoutingContract)
TestBatching = ours(BatchingContract)
TestPlacement = ours(PlacementContract)
TestPreemption = ours(PreemptionContract)
TestScaling = ours(ScalingContract)
TestSessions = ours(SessionsContract)
TestHealth = ours(HealthContract)


# --- what is no policy does not pass


class Broken:
    """A routing policy that gives the first app to the first worker, whatever they are."""

    def assign(self, view, ready):
        yield Assignment(next(iter(view.workers)), ready[0].id)


class Writing(LeastLoaded):
    def assign(self, view, ready):
        ready[0].backlog -= 1
        return []


class Wayward(LeastLoaded):
    def assign(self, view, ready):
        return random.sample(found := list(super().assign(view, ready)), len(found))


class Idle:
    def assign(self, view, ready):
        return []


class Withholding(Fixed):
    def size(self, view, app, worker):
        return 0


class Windowless(Fixed):
    def window(self, view, app, worker):
        return 0


class Forgetful(Fixed):
    def window(self, view, app, worker):
        return 64 - sum(each.in_flight(app.context) for each in view.workers.values()) // 10


class Boundless:
    def target(self, view):
        return {name: tier.maximum + 1 for name, tier in view.tiers.items()}


class Elsewhere:
    def plan(self, view):
        return Plan(tiers={context: frozenset({"nowhere"}) for context in view.contexts})


@pytest.mark.parametrize(
    ("contract", "policy", "test"),
    [
        (RoutingContract, Broken, "test_what_it_decides_is_possible"),
        (RoutingContract, Writing, "test_what_it_decides_is_possible"),
        (RoutingContract, Wayward, "test_it_decides_the_same_for_the_same"),
        (RoutingContract, Idle, "test_work_is_given_to_who_is_free"),
        (RoutingContract, Idle, "test_a_run_is_the_same_for_a_seed"),
        (BatchingContract, Withholding, "test_a_run_is_the_same_for_a_seed"),
        (BatchingContract, Windowless, "test_what_it_decides_is_possible"),
        (BatchingContract, Forgetful, "test_a_window_is_asked_for_before_each_item"),
        (ScalingContract, Boundless, "test_what_it_decides_is_possible"),
        (PlacementContract, Elsewhere, "test_what_it_decides_is_possible"),
        (RoutingContract, Boundless, "test_it_is_a_policy_of_its_family"),
    ],
)
def test_what_breaks_the_contract_is_found(contract, policy, test):
    suite = type("Suite", (contract,), {"make": lambda self: policy()})()
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        for seed in SEEDS:
            getattr(suite, test)(*([seed] if "seed" in inspect.signature(getattr(suite, test)).parameters else []))
