"""What is unserved and could be served, and the limits that keep the rest."""

import dataclasses

import numpy as np
import pytest

from ctxflow.policies.agh import Allocation, judge, solve
from ctxflow.policies.agh.problem import GpuTier, Model, Problem, QueryType, paper_instance
from ctxflow_papers.gh_agh.instances import draw
from suite.depth import some

SMALL = draw(1, (3, 3, 4))


def workers(count, rate, **changes):
    """One query type, one model, and a tier of so many workers, each of which serves 3,240 queries an hour."""
    kind = QueryType(name="ask", queries_per_hour=rate, input_tokens=1, output_tokens=0, max_delay_seconds=10,
                     max_error=1, unserved_dollars=1e4)  # fmt: skip
    tier = GpuTier(name="a10", memory_gb=24, tflops=1, dollars_per_hour=1, tensor_parallel=(1,),
                   pipeline_parallel=tuple(range(1, count + 1)), gpus=count)  # fmt: skip
    one, none = (((1.0,),),), (((0.0,),),)
    fields = {"name": "p", "horizon_hours": 1, "budget_dollars": 1e6, "storage_gb": 1e3, "query_types": (kind,),
              "models": (Model(name="m", weights_gb=3),), "tiers": (tier,), "compute_seconds_per_token": one,
              "communication_seconds_per_token": none, "error": none, "gflop_per_token": (((1e3,),),),
              "resident_queries": none}  # fmt: skip
    return Problem(**{**fields, **changes})


def test_demand_that_could_be_served_is_named_with_its_price():
    problem = workers(10, 3240 * 5)
    two = dataclasses.replace(solve(problem).allocation, unserved=(0.6,))
    two = dataclasses.replace(two, deployments=(dataclasses.replace(two.deployments[0], gpus=2, pipeline_parallel=2),))
    two = dataclasses.replace(two, routes=(dataclasses.replace(two.routes[0], share=0.4),))
    found = judge(problem, two)
    assert found.possible == {"ask": pytest.approx(0.6, abs=1e-3)} and found.settled and found.reasons == ()
    assert found.dollars == pytest.approx(3 - 6000, rel=1e-3)


def test_all_served_is_all_well():
    found = solve(workers(10, 3240 * 5))
    assert found.left.possible == {} and found.left.settled and found.reasons == ()


def test_too_few_workers_are_the_reason():
    found = solve(workers(3, 3240 * 5))
    assert found.allocation.unserved[0] == pytest.approx(0.4, abs=1e-4)
    assert found.left.possible == {} and found.left.settled
    assert [each.constraint for each in found.reasons] == ["gpus"]


def test_the_budget_is_the_reason_and_what_would_do_is_said():
    found = solve(workers(10, 3240 * 5, budget_dollars=3.0))
    assert [each.constraint for each in found.reasons] == ["5c"]
    assert "with 5.00 $ all of it could be served" in found.reasons[0].text


def test_several_limits_that_keep_it_only_together_are_said_to():
    """Each type has a model of its own; storage and budget have room for one model and one worker."""
    one = workers(10, 100)
    kind, model = one.query_types[0], one.models[0]
    both = ((0.0,), (1.0,)), ((1.0,), (0.0,))
    table = (((1.0,), (1.0,)),) * 2
    problem = one.model_copy(update={
        "query_types": tuple(kind.model_copy(update={"name": name, "max_error": 1e-6}) for name in ("a", "b")),
        "models": tuple(model.model_copy(update={"name": name}) for name in ("m", "n")),
        "error": both, "compute_seconds_per_token": table, "gflop_per_token": table,
        "communication_seconds_per_token": (((0.0,), (0.0,)),) * 2, "resident_queries": (((0.0,), (0.0,)),) * 2,
        "budget_dollars": 1.0, "storage_gb": 4.0,
    })  # fmt: skip
    found = solve(problem, "exact")
    assert sum(found.allocation.unserved) == pytest.approx(1.0)
    assert [each.constraint for each in found.reasons] == [""]
    assert "several limits together" in str(found.reasons[0])


def test_leaving_what_is_cheap_to_leave_is_said_to_be_possible_to_serve():
    problem = some(SMALL, deeply=paper_instance())
    kinds = tuple(kind.model_copy(update={"unserved_dollars": 0.001}) for kind in problem.query_types)
    cheap = problem.model_copy(update={"query_types": kinds})
    found = solve(cheap, "exact")
    assert min(found.allocation.unserved) > 0.5
    assert set(found.left.possible) == {kind.name for kind in problem.query_types} and found.left.dollars > 0


def test_a_storage_that_is_full_is_the_reason():
    problem = some(SMALL, deeply=paper_instance())
    problem = problem.model_copy(update={"storage_gb": some(60.0, deeply=120.0)})
    found = solve(problem, "exact")
    assert max(found.allocation.unserved) > 0.01
    assert found.left.possible == {} or not found.left.settled or found.left.dollars > 0
    rest = judge(problem, Allocation((), (), (1.0,) * len(problem.query_types)))
    assert sum(rest.possible.values()) >= len(problem.query_types) - sum(found.allocation.unserved) - 1e-3
    assert any(each.constraint == "5h" for each in rest.reasons)


def test_no_reason_is_given_that_was_not_proven():
    """Each limit that is named helps by itself: without it more is served than the answer serves."""
    problem = workers(3, 3240 * 5)
    found = solve(problem)
    more = problem.model_copy(update={"tiers": workers(6, 1).tiers})
    assert any(each.constraint == "gpus" for each in found.reasons)
    assert max(solve(more).allocation.unserved) < max(found.allocation.unserved) - 1e-3
    richer = problem.model_copy(update={"budget_dollars": 1e9})
    assert not any(each.constraint == "5c" for each in found.reasons)
    assert np.allclose(solve(richer).allocation.unserved, found.allocation.unserved)
