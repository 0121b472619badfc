"""AGH and improved beside the optimum where another limit binds than in the paper's draws."""

import numpy as np
import pytest

from ctxflow.policies.agh import solve
from ctxflow_papers.gh_agh.instances import BOUND_BY, draw, tightened
from suite.depth import for_release


def gaps(limit, shape, seeds):
    """How far AGH and improved are above the optimum, by method."""
    found = {"agh": [], "improved": []}
    for seed in seeds:
        problem = tightened(draw(seed, shape), limit, seed)
        best = solve(problem, "exact")
        assert best.proven and not best.violations
        for method, over in found.items():
            solution = solve(problem, method)
            assert not solution.violations
            over.append(solution.costs.total / best.costs.total - 1)
    return found


@pytest.mark.parametrize("limit", BOUND_BY)
@pytest.mark.parametrize(
    ("shape", "seeds"),
    [((3, 3, 3), range(3)), *for_release(((3, 3, 3), range(8)), ((4, 4, 5), range(4)), ((5, 4, 7), range(6)))],
)
def test_agh_is_near_the_optimum_whatever_binds(limit, shape, seeds):
    found = gaps(limit, shape, seeds)
    assert np.mean(found["agh"]) <= 0.02 and max(found["agh"]) <= 0.10
    assert np.mean(found["improved"]) <= 0.003 and max(found["improved"]) <= 0.03


@pytest.mark.release
@pytest.mark.parametrize("seed", range(3))
def test_agh_at_twenty_of_each_leaves_nothing_that_more_search_serves(seed):
    problem = tightened(draw(seed, (20, 20, 20)), "throughput", seed)
    found, better = (solve(problem, method) for method in ("agh", "improved"))
    more = np.array(found.allocation.unserved) - np.array(better.allocation.unserved)
    assert 100 * more.mean() <= 1.0
