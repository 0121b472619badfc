"""The checker names each constraint that is broken, and no other; the costs are those of (5a)."""

import dataclasses

import pytest

from ctxflow.policies.agh import Allocation, Deployment, Problem, Route, check

PROBLEM = Problem.from_data({
    "name": "two",
    "horizon_hours": 10,
    "budget_dollars": 100,
    "storage_gb": 100,
    "storage_dollars_per_gb_hour": 0.01,
    "utilization": 0.5,
    "query_types": [
        {
            "name": "a", "queries_per_hour": 1000, "input_tokens": 100, "output_tokens": 100, "max_delay_seconds": 2,
            "max_error": 0.1, "delay_dollars_per_ms": 0.001, "unserved_dollars": 50, "storage_kb_per_token": 10,
        },
        {
            "name": "b", "queries_per_hour": 500, "input_tokens": 50, "output_tokens": 150, "max_delay_seconds": 4,
            "max_error": 0.1, "unserved_dollars": 70, "max_unserved": 0.5, "storage_kb_per_token": 20,
        },
    ],
    "models": [
        {"name": "small", "weights_gb": 10, "kv_bytes_per_token": 1e6},
        {"name": "large", "weights_gb": 30, "kv_bytes_per_token": 1e6},
    ],
    "tiers": [{"name": "gpu", "memory_gb": 20, "tflops": 1, "dollars_per_hour": 1, "gpus": 4}],
    "compute_seconds_per_token": [[[0.01], [0.02]], [[0.01], [0.02]]],
    "communication_seconds_per_token": [[[0.001], [0.001]], [[0.001], [0.001]]],
    "error": [[[0.08], [0.02]], [[0.16], [0.04]]],
    "gflop_per_token": [[[1], [2]], [[1], [2]]],
    "resident_queries": [[[10], [10]], [[10], [10]]],
})  # fmt: skip
GOOD = Allocation(
    (Deployment(0, 0, 2, 1, 2), Deployment(1, 0, 2, 1, 2)),
    (Route(0, 0, 0, 1.0), Route(1, 0, 0, 0.4), Route(1, 1, 0, 0.6)),
    (0.0, 0.0),
)


def names(allocation, **limits):
    return {found.constraint for found in check(PROBLEM.model_copy(update=limits), allocation)}


def test_a_good_allocation():
    assert check(PROBLEM, GOOD) == []


def test_costs():
    costs = GOOD.costs(PROBLEM)
    assert costs.rental == pytest.approx(10 * 4 * 1)
    assert costs.model_storage == pytest.approx(10 * 0.01 * (10 + 10 + 30))
    assert costs.data_storage == pytest.approx(10 * 0.01 * (10e-6 * 200 * 1000 + 20e-6 * 200 * 500))
    # D = 0.01 * 200 / 2 + 1 * 0.001 * 100 seconds at 1 $ a second; the other type's delay has no price.
    assert costs.delay == pytest.approx(1.1)
    assert costs.unserved == 0
    parts = dataclasses.astuple(costs)
    assert costs.total == pytest.approx(sum(parts))


def replaced(**fields):
    return dataclasses.replace(GOOD, **fields)


def deployed(**fields):
    return replaced(deployments=(dataclasses.replace(GOOD.deployments[0], **fields), GOOD.deployments[1]))


SLOW = replaced(deployments=(Deployment(0, 0, 1, 1, 1), Deployment(1, 0, 2, 1, 2)))


@pytest.mark.parametrize(
    ("allocation", "limits", "constraint"),
    [
        (replaced(unserved=(0.1, 0.0)), {}, "5b"),
        (GOOD, {"budget_dollars": 45.0}, "5c"),
        (deployed(tensor_parallel=3, gpus=3), {}, "5d"),
        (replaced(deployments=(*GOOD.deployments, GOOD.deployments[0])), {}, "5d"),
        (deployed(gpus=1), {}, "5e"),
        (GOOD, {"tiers": (PROBLEM.tiers[0].model_copy(update={"memory_gb": 15.5}),)}, "5f"),
        (GOOD, {"utilization": 0.03}, "5g"),
        (GOOD, {"storage_gb": 53.0}, "5h"),
        (SLOW, {}, "5i"),
        (replaced(routes=(Route(0, 0, 0, 1.0), Route(1, 0, 0, 0.6), Route(1, 1, 0, 0.4))), {}, "5j"),
        (replaced(deployments=GOOD.deployments[:1]), {}, "5k"),
        (replaced(routes=(*GOOD.routes[:2], Route(1, 1, 0, 0.3), Route(1, 1, 0, 0.3))), {}, "5k"),
        (replaced(routes=(Route(0, 0, 0, 1.2), Route(0, 1, 0, -0.2), *GOOD.routes[1:])), {}, "5k"),
        (replaced(routes=(GOOD.routes[0], Route(1, 1, 0, 0.4)), unserved=(0.0, 0.6)), {}, "unserved"),
        (deployed(tensor_parallel=4, gpus=4), {"budget_dollars": 200.0}, "gpus"),
    ],
)
def test_each_constraint_is_named(allocation, limits, constraint):
    assert constraint in names(allocation, **limits)
    assert names(allocation, **limits) - {constraint} <= ({"5e", "gpus"} if constraint == "5d" else set())


def test_kv_caches_count():
    """(5f): 15 GB of weights a GPU, and 1 MB a token of 200 tokens of 10 queries of 60 % of a type, halved: 0.6 GB."""
    tier = PROBLEM.tiers[0].model_copy(update={"memory_gb": 15.59})
    (found,) = check(PROBLEM.model_copy(update={"tiers": (tier,)}), GOOD)
    assert (found.constraint, found.value) == ("5f", pytest.approx(15.6))


def test_a_hair_over_is_not_over():
    assert names(GOOD, budget_dollars=GOOD.costs(PROBLEM).rental + 5.4 - 1e-6) == set()


def test_text():
    found = check(PROBLEM, deployed(gpus=1))
    assert str(found[0]) == "(5e) GPUs of a deployment are TP times PP: 1 against 2 for small on gpu"
