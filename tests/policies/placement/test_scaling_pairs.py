"""Every placement policy beside every scaling policy, against the better of either alone, on drawn sites.

The scaling policy decides how many workers there are, within the plan's bounds. No pair may cost 15 % more than the
cheaper of the two alone, or take 15 % and two periods of the plan longer than the faster for no fewer dollars.
"""

import pytest

from ctxflow_papers.gh_agh.live_pairs import compare_pairs, draw_site, slow_boot_site
from suite.depth import some

TOLERANCE, FINDING_OUT = 0.15, 600.0


@pytest.fixture(scope="module")
def text():
    return compare_pairs(slow_boot_site(minutes=some(20, deeply=60)))


def test_the_cheapest_tier_is_not_locked_out_by_a_scaling_policy_that_asks_for_few_workers(text):
    for pair, found in text.items():
        hours = found.pair.hours
        assert hours["cheap"] > 0.4 * sum(hours.values()), (pair, hours)
        assert found.worse(TOLERANCE, FINDING_OUT) == "", pair


@pytest.mark.release
@pytest.mark.parametrize("seed", range(10))
def test_a_pair_is_hardly_worse_than_the_better_of_the_two(seed):
    found = compare_pairs(draw_site(seed))
    assert len(found) >= 3
    assert {pair: worse for pair, each in found.items() if (worse := each.worse(TOLERANCE, FINDING_OUT))} == {}
