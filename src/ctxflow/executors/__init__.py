"""The Parsl executor; the run behind it (live_run.py, run_loop.py); and the engines that it drives (contract.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxflow.executors.executor import ContextExecutor

__all__ = ["ContextExecutor"]


def __getattr__(name: str) -> Any:
    # Lazily: the TaskVine manager's program lives below this room, and need not wait for Parsl.
    if name != "ContextExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ctxflow.executors.executor import ContextExecutor

    return ContextExecutor
