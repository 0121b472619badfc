"""Every policy that is shipped, of each family, with every kind of work beside each other on the embedded engine."""

import time

import parsl
import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app, idle, session_app
from ctxflow.policies.registry import FAMILIES, names
from suite.depth import for_release
from waiting import finished

_NAMES = {family: list(names(family)) for family in FAMILIES}
# Each policy once, in as many runs as the largest family has.
_TOGETHER = [
    {family: known[number % len(known)] for family, known in _NAMES.items()}
    for number in range(max(map(len, _NAMES.values())))
]
_ALONE = [{family: name} for family, known in _NAMES.items() for name in known]
_QUICK = {"batching": "opportunistic"}  # Once ended the whole run beside any session.


@context
def base():
    return 100


@batch_app(base(), batch_size=2)
def add(there, numbers):
    time.sleep(0.05)
    for number in numbers:
        yield there + number


@context_app(base())
def plus(there, number):
    return there + number


@session_app
def count(states, prompts):
    # As long as it takes that workers are idle beside a step when the policies are asked, on ticks too.
    time.sleep(0.4)
    for state, new in zip(states, prompts, strict=True):
        left = (new[0] if new else state) - 1
        yield (left if left else idle("end")), left


@parsl.python_app
def double(number):
    return 2 * number


def _work():
    """Some of each kind at the same time; gives what came of it."""
    with count.open(3) as early, count.open(4) as late:
        mapped = add.map(range(8))
        calls = [plus(number) for number in range(4)]
        apps = [double(number) for number in range(3)]
        chained = double(apps[-1])  # Which waits for a future of Parsl's.
        found = {
            "map": list(mapped),
            "calls": [finished(each).result() for each in calls],
            "apps": [finished(each).result() for each in [*apps, chained]],
            "early": list(early),
            "late": list(late),
        }
        late.prompt(2)
        return found, list(late)


@pytest.mark.parametrize(
    "chosen",
    [
        _QUICK,
        *_TOGETHER,
        *for_release(*(each for each in _ALONE if each != _QUICK)),
    ],
    ids=lambda chosen: "-".join(chosen.values()),
)
def test_every_kind_of_work_is_answered_by_every_policy(chosen, tmp_path):
    with parsl.load(ContextExecutor.config(workers=2, run_dir=str(tmp_path), **chosen)):
        found, again = _work()
    assert found == {
        "map": [*range(100, 108)],
        "calls": [*range(100, 104)],
        "apps": [0, 2, 4, 8],
        "early": [2, 1, "end"],
        "late": [3, 2, 1, "end"],
    }
    assert again == [1, "end"]
