"""What a library process finds in its environment about the machine that it stands for."""

import pytest

from ctxflow.host.library import _slowdown


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1.0),
        ({"CTXFLOW_SLOWDOWN": "3"}, 3.0),
        ({"CTXFLOW_TESTBED_SPEED": "0.50"}, 1.0),
        ({"CTXFLOW_TESTBED_SLOW": "1"}, 1.0),
        ({"CTXFLOW_TESTBED_SLOW": "1", "CTXFLOW_TESTBED_SPEED": "5.58"}, 1.0),
        ({"CTXFLOW_TESTBED_SLOW": "1", "CTXFLOW_TESTBED_SPEED": "0.50", "CTXFLOW_SLOWDOWN": "3"}, 11.16),
    ],
)
def test_a_slow_card_is_played_only_where_that_is_asked_for(environment, expected):
    assert _slowdown(environment) == pytest.approx(expected)
