"""Whole workers as a placement problem."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.planning.job_file import Speed
from ctxflow.planning.job_problem import SiteOffer, problem_of, staffing
from ctxflow.policies.agh.problem import Model, QueryType
from ctxflow.policies.agh.solution import solve


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(10, 20_000), min_size=2, max_size=2), st.lists(st.integers(1, 20), min_size=2, max_size=3))
def test_the_workers_of_a_plan_are_there_and_do_what_is_routed_to_them(rates, counts):
    queries = [
        QueryType(name=f"q{n}", queries_per_hour=rate, input_tokens=1, output_tokens=0, max_delay_seconds=10,
                  max_error=1, unserved_dollars=1e6)
        for n, rate in enumerate(rates)
    ]  # fmt: skip
    models = [Model(name="small", weights_gb=3), Model(name="large", weights_gb=16)]
    offers = [SiteOffer(f"t{n}", count, 1.0 + n, 12.0 if n == 0 else 24.0) for n, count in enumerate(counts)]
    speeds = [[[Speed(1.0, 0.5 * (1 + j)) if i == j else None for _ in offers] for j in range(2)] for i in range(2)]
    problem = problem_of("p", queries, models, offers, speeds, hours=1)
    found = solve(problem, "agh")
    assert found.feasible
    staff = staffing(problem, offers, speeds, found.allocation)
    for number, offer in enumerate(offers):
        assert sum(each.workers for each in staff if each.offer == number) <= offer.workers
    for each in staff:
        assert (each.model, each.offer) != (1, 0), "the large one does not fit there"
        busy = sum(share * rates[q] * speeds[q][each.model][each.offer].seconds / 3600 for q, share in each.shares)
        assert busy <= problem.utilization * each.workers * (1 + 1e-6)
        assert each.workers == 1 or busy > problem.utilization * (each.workers - 1) - 1e-6
    for query, share in enumerate(found.allocation.unserved):
        assert abs(share + sum(s for each in staff for q, s in each.shares if q == query) - 1) < 1e-6
