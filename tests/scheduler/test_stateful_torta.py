"""The routing policy `torta` through random joins, losses and failures: only valid assignments, and every run ends.

The machine is test_stateful.py's; that no worker idles while work waits is not true of `torta`, which may wait for a
context or a region, and so is not asked.
"""

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_stateful import CONTEXTS, Pool

from ctxflow.policies.torta.routing import Torta
from ctxflow.scheduler import events as ev


def nonsense(demand, capacity, costs, previous):
    """What a form of one's own may say."""
    return np.full((len(capacity), len(capacity)), np.nan)


MACROS = {
    "context-affinity": "transport",
    "least-loaded": "lookahead",
    "round-robin": nonsense,
    "skylb": lambda demand, capacity, costs, previous: np.zeros((1, 7)),
    "sdib": lambda demand, capacity, costs, previous: np.eye(len(capacity))[::-1],
}


class Checked(Torta):
    """Sees that what it gives can be done."""

    def assign(self, view, ready):
        given = list(super().assign(view, ready))
        taken = Counter(assignment.worker for assignment in given)
        assert all(count <= view.free[worker].free_slots for worker, count in taken.items()), "more calls than slots"
        for assignment in given:
            worker, app = view.workers[assignment.worker], view.apps[assignment.app]
            assert app in ready and app.backlog > 0
            assert view.can_run(app, worker), "it cannot run there"
        return given

    def warm(self, view):
        for assignment in super().warm(view):
            assert not view.workers[assignment.worker].running
            yield assignment


class TortaPool(Pool):
    def routing(self, name):
        return Checked(MACROS[name], slot_seconds=3.0, patience=2.0, longest_wait=5.0)

    def check_nothing_idles(self):
        """It may."""

    @rule(
        rate=st.sampled_from([float("nan"), float("inf"), -1.0, 0.5, 1.0, 1e300]),
        contexts=st.sets(st.sampled_from(CONTEXTS), min_size=1, max_size=3),
    )
    def foretell(self, rate, contexts):
        """A predictor that says anything."""
        self.now += 2
        self.scheduler.state.arrivals._forecast = {f"{context}/0": rate for context in contexts}
        self.tell(ev.Tick)

    @rule()
    def settle(self):
        """All that is under way ends: then there is time to look ahead."""
        for _ in range(40):
            name, worker = next(((n, w) for n, w in self.workers.items() if w.loads or w.runs), ("", None))
            if worker is None:
                return
            if worker.loads:
                self.finish_load(name, next(iter(worker.loads)))
            else:
                self.finish_run(name, next(iter(worker.runs)))


TortaPool.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTortaPool = TortaPool.TestCase
