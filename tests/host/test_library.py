"""What a library process finds in its environment about the machine that it stands for."""

import gc
import signal
import subprocess
import sys

import pytest

from ctxflow.host.context_building import seldom_collecting
from ctxflow.testing.worker_calls import slowdown
from waiting import patience


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
    assert slowdown(environment) == pytest.approx(expected)


NOTICED = """
import os, signal, time
from ctxflow.host.call_surroundings import leave_notice_to_host
@early@
leave_notice_to_host()
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(20):
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize(
    "early", ["", "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))"]
)
def test_a_notice_to_all_processes_does_not_end_it_but_what_users_fork_obeys(early):
    program = NOTICED.replace("@early@", early)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=patience()
    )
    assert done.stdout.splitlines() == [f"{-signal.SIGTERM} set()"] * 20


@pytest.fixture
def threshold():
    """How often Python looks for garbage, put back afterwards."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_garbage_is_looked_for_less_often_while_a_context_is_built(threshold):
    with pytest.raises(ImportError), seldom_collecting():
        assert gc.get_threshold()[0] > 10 * threshold[0]
        raise ImportError
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("said", [(5, 6, 7), (0, 10, 10)])
def test_how_often_a_context_says_that_garbage_is_looked_for_holds(threshold, said):
    with seldom_collecting():
        gc.set_threshold(*said)
    assert gc.get_threshold()[:2] == said[:2]
    gc.set_threshold(0)
    with seldom_collecting():
        assert gc.get_threshold()[0] == 0, "never, where it was so before"
