"""No preemption: who waits, waits."""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.policies.protocols import AppView, View


class NoPreemption:
    """Nobody gives way."""

    def victims(self, view: View, app: AppView) -> Sequence[int]:
        """Nobody."""
        return ()
