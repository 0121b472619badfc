"""No preemption: who waits, waits."""

from __future__ import annotations

from ctxflow.policies.protocols import PlaceRequest, View


class NoPreemption:
    """Nobody gives way."""

    reserves = False
    patience = grace = idle = 0.0

    def victims(self, view: View, request: PlaceRequest) -> None:
        """Nobody."""
        return
