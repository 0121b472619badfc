"""The simple placement: no limits."""

from __future__ import annotations

from ctxflow.policies.protocols import Plan, View


class Everywhere:
    """Every context may be loaded on every tier, within the site's bounds."""

    def plan(self, view: View) -> Plan:
        """The plan without limits."""
        return Plan()
