"""What goes to another process, and who is blamed where that cannot be done."""

import functools
import threading

import pytest

from ctxflow.pickling import blame, dumps

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.settings = {"guards": [1, threading.Lock()]}

    def use(self):
        return self.settings


def _places():
    local = threading.Lock()
    holder = Holder()

    def closure():
        return local

    def nested():
        return closure()

    def in_global():
        return LOCK

    def in_inner():
        return [LOCK for _ in range(3)]

    def default(guard=LOCK):
        return guard

    def keyword(*, guard=LOCK):
        return guard

    def recursive(n):
        return recursive(n - 1) if n else local

    def other(n):
        return another(n)

    def another(n):
        return other(n) or local

    class Guarded:
        guard = local

        def use(self):
            return self.guard

    def makes():
        return Guarded()

    return {
        "closure": (closure, "closure() closure variable local"),
        "nested": (nested, "nested() closure variable closure closure() closure variable local"),
        "global": (in_global, "in_global() global LOCK"),
        "inner": (in_inner, "in_inner() global LOCK"),
        "default": (default, "default() defaults[0][0]"),
        "keyword": (keyword, "keyword() defaults[1]['guard']"),
        "recursive": (recursive, "recursive() closure variable local"),
        "mutual": (other, "another() closure variable local"),
        "partial": (functools.partial(print, local), ".args[0]"),
        "method": (holder.use, ".__self__.settings['guards'][1]"),
        "attribute": (holder, ".settings['guards'][1]"),
        "class": (makes, "closure variable Guarded.guard"),
        "instance": (Guarded(), " class.guard"),
    }


@pytest.mark.parametrize("case", _places())
def test_what_cannot_be_pickled_is_named(case):
    value, place = _places()[case]
    where, culprit = blame(value)
    assert where.endswith(place) and type(culprit).__name__ == "lock"
    assert where.count(" recursive()") <= 1
    with pytest.raises(TypeError, match=r"the value cannot be sent: the _thread.lock object at .*; create it inside"):
        dumps(value, "the value")
