"""When a run forgets what nobody uses: apps, contexts, functions and constants.

An app without items and sessions for a minute is retired, sooner if many others were used since; a context a minute
after the last of its apps, once no worker keeps it. What is used again is declared anew by its `Declaration`. What does
not live here: whether something is in use (scheduler/retiring.py).
"""

from __future__ import annotations

import dataclasses

from ctxflow.executors.declarations import Declaration
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.context_moves import app_is_used, context_is_used
from ctxflow.scheduler.run_state import RunState

IDLE_SECONDS = 60.0
MOST_IDLE = 500
"""How many apps, and contexts, are remembered that nobody uses."""
MOST_BYTES = 64 << 20
"""How many bytes of constants are remembered that nobody uses."""


@dataclasses.dataclass(slots=True)
class _Use:
    """When an app or a context was used last, and the app's declaration."""

    at: float
    declaration: Declaration | None = None

    @property
    def bytes(self) -> int:
        return 0 if self.declaration is None else self.declaration.bytes


class Retirement:
    """Notes what is used; its owner locks.

    Looking through all of them is put off until there are many more than after the last look, so that a declaration
    costs the same however many there are.
    """

    def __init__(self) -> None:
        self._apps: dict[str, _Use] = {}
        self._contexts: dict[str, _Use] = {}
        self._look_at = MOST_IDLE
        self._new_bytes = 0

    def app(self, declaration: Declaration, now: float) -> None:
        """An app is declared."""
        self._apps[declaration.id] = _Use(now, declaration)
        self._new_bytes += declaration.bytes

    def context(self, context: str, now: float) -> None:
        """A context is declared."""
        self._contexts[context] = _Use(now)

    def used(self, app: str, now: float) -> bool:
        """An app is used; False if it is not known."""
        use = self._apps.get(app)
        if use is None:
            return False
        use.at = now
        return True

    def held(self, app: str) -> Declaration:
        """An app as it was declared, which who may use it again need not hold."""
        declaration = self._apps[app].declaration
        assert declaration is not None
        return declaration

    @property
    def due(self) -> bool:
        """Whether there are so many that some should go now."""
        return len(self._apps) + len(self._contexts) > self._look_at or self._new_bytes > MOST_BYTES

    def retired(self, state: RunState, now: float) -> ev.Retired | None:
        """What is to be forgotten; `forget` follows once the scheduler has."""
        idle = [name for name in self._apps if not app_is_used(state, state.apps[name])]
        apps = _overdue(self._apps, idle, now)
        gone = set(apps)
        for name in gone:  # Its context is used as long as it is.
            context = self._contexts.get(state.apps[name].context)
            if context is not None:
                context.at = max(context.at, self._apps[name].at)
        free = [name for name in self._contexts if not context_is_used(state, name, gone)]
        contexts = _overdue(self._contexts, free, now)
        left = len(self._apps) + len(self._contexts) - len(apps) - len(contexts)
        self._look_at = left + max(MOST_IDLE, left // 4)
        self._new_bytes = 0
        return ev.Retired(now, apps, contexts) if apps or contexts else None

    def forget(self, state: RunState) -> None:
        """What the scheduler does not know any more is forgotten here too."""
        self._apps = {name: use for name, use in self._apps.items() if name in state.apps}
        self._contexts = {name: use for name, use in self._contexts.items() if name in state.contexts}


def _overdue(known: dict[str, _Use], idle: list[str], now: float) -> list[str]:
    """Of those that are idle, the ones that are so for long, and of the others all but the last used."""
    idle.sort(key=lambda name: -known[name].at)
    kept = size = 0
    for name in idle:
        size += known[name].bytes
        if known[name].at + IDLE_SECONDS <= now or kept >= MOST_IDLE or (kept and size > MOST_BYTES):
            break
        kept += 1
    return idle[kept:]
