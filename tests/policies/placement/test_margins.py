"""Limits on delays and errors that are kept also when these turn out above what was known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.planning.job_file import Speed
from ctxflow.planning.job_problem import SiteOffer, problem_of
from ctxflow.policies.agh import Solution, check, solve
from ctxflow.policies.agh.margins import with_margins
from ctxflow.policies.agh.problem import Arrays, Model, QueryType, paper_instance
from ctxflow_papers.gh_agh.instances import draw
from suite.depth import some

TABLES = ("compute_seconds_per_token", "communication_seconds_per_token", "error")


def worse(problem, factor):
    """The problem as it turns out: delays and errors are `factor` of what was known."""
    tables = {
        name: tuple(tuple(tuple(min(1.0, factor * v) if name == "error" else factor * v for v in row) for row in plane)
                    for plane in getattr(problem, name))
        for name in TABLES
    }  # fmt: skip
    return problem.model_copy(update=tables)


@settings(max_examples=some(6, deeply=15), deadline=None)
@given(
    seed=st.integers(0, 300), margin=st.sampled_from([0.05, 0.25]), method=st.sampled_from(["gh", "agh", "improved"])
)
def test_limits_are_kept_where_delays_and_errors_are_off_by_the_margin(seed, margin, method):
    problem = draw(seed, (4, 3, 4))
    found = solve(problem, method, margins=[margin] * 4)
    kept = {kind.name for kind, each in zip(problem.query_types, found.margins, strict=True) if each}
    broken = {
        each.where for each in check(worse(problem, 1 + margin), found.allocation) if each.constraint in ("5i", "5j")
    }
    assert not broken & kept
    assert not found.violations


def test_without_a_margin_they_are_broken():
    broken = 0
    for seed in some(range(2), deeply=range(6)):
        problem = draw(seed)
        broken += len(check(worse(problem, 1.25), solve(problem).allocation))
    assert broken > 0


def test_a_type_that_cannot_be_served_with_its_margin_is_planned_without():
    """It can be fast enough, but not faster than that by the margin."""
    problem = paper_instance()
    fastest = Arrays.of(problem).delay[0].min()
    kinds = (problem.query_types[0].model_copy(update={"max_delay_seconds": fastest * 1.01}), *problem.query_types[1:])
    asked = problem.model_copy(update={"query_types": kinds, "budget_dollars": 1e5, "storage_gb": 1e5})
    found = solve(asked, margins=[0.25] * 6)
    assert isinstance(found, Solution) and found.margins == (0.0, *[0.25] * 5)
    assert found.allocation.unserved == pytest.approx(solve(asked).allocation.unserved)


def test_margins_that_keep_another_type_from_being_served_are_given_up():
    """With its margin the first needs the one fast worker, which the second cannot do without."""
    kinds = [
        QueryType(name=name, queries_per_hour=rate, input_tokens=1, output_tokens=0, max_delay_seconds=1.1, max_error=1,
                  unserved_dollars=price)
        for name, rate, price in (("first", 1800.0, 1e6), ("second", 3000.0, 1e5))
    ]  # fmt: skip
    offers = [SiteOffer("fast", 1, 1.0, 24.0), SiteOffer("slow", 9, 1.0, 24.0)]
    speeds = [[[Speed(0.5, 1.0), Speed(1.0, 1.0)]], [[Speed(0.5, 1.0), None]]]
    problem = problem_of("p", kinds, [Model(name="m", weights_gb=3)], offers, speeds, hours=1)
    found = solve(problem, margins=[0.25, 0.25])
    assert found.allocation.unserved == pytest.approx((0.0, 0.0)) and found.margins == (0.0, 0.0)
    alone = problem.model_copy(
        update={"query_types": (kinds[0], kinds[1].model_copy(update={"queries_per_hour": 1.0}))}
    )
    assert solve(alone, margins=[0.25, 0.25]).margins == (0.25, 0.25)


def test_margins_have_to_make_sense():
    with pytest.raises(ValueError, match="2 margins are given for 6 query types"):
        with_margins(paper_instance(), [0.1, 0.1])
    with pytest.raises(ValueError, match="has to be a number, 0 or more"):
        with_margins(paper_instance(), [-0.1] * 6)
    same = with_margins(paper_instance(), np.zeros(6).tolist())
    assert same == paper_instance()
