"""Nobody is put in quarantine, the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.policies.protocols import Trial, Verdict, View
from ctxflow.policies.views import AppView, WorkerView


class NoQuarantine:
    """Every host is trusted, whatever happens there."""

    probation = 0.0

    def observe(self, view: View, trial: Trial) -> None:
        """Nothing is kept."""

    def doubts(self, view: View, worker: WorkerView, app: AppView) -> bool:
        """Never."""
        return False

    def judge(self, view: View) -> Sequence[Verdict]:
        """Nobody."""
        return ()
