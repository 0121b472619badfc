"""The Parsl executor, and the engines that it drives. Extend it with an engine (engine.py is the contract)."""

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
