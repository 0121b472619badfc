"""A fixed number of workers."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.policies.protocols import View


class FixedWorkers:
    """As many workers of every tier, all the time.

    :param workers: workers a tier, within its bounds; None for the most that the site allows.
    :raises ValueError: for a negative number.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 0:
            raise ValueError("workers is how many to hold: give 0 or more")
        self._workers = workers

    def target(self, view: View) -> Mapping[str, int]:
        """The same number whatever the load."""
        wish = self._workers
        return {
            name: tier.maximum if wish is None else max(tier.minimum, min(tier.maximum, wish))
            for name, tier in view.tiers.items()
        }
