"""ctxflow: throughput-oriented LLM inference on opportunistic GPUs.

The public names, and nothing else; most are imported when first used, since a worker needs almost none.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from ctxflow.app_options import Alternative
    from ctxflow.apps import BatchApp, ContextApp, ItemApp
    from ctxflow.context import context
    from ctxflow.decorators import batch_app, context_app, item_app
    from ctxflow.errors import (
        BatchContractError,
        CallCrashed,
        CallError,
        CallTimeout,
        ContextError,
        ContextLost,
        CtxflowError,
        DependencyFailed,
        ItemRefused,
        RemoteError,
        RunEnded,
        TurnOver,
        WorkersLost,
    )
    from ctxflow.executors import ContextExecutor
    from ctxflow.installing import __version__
    from ctxflow.map_results import MapResult
    from ctxflow.on_worker import idle, last, load_part, load_variable_from_context, load_variable_in_serverless
    from ctxflow.recipe import Context
    from ctxflow.sessions import Session, SessionApp, session_app

_NAMES = {
    "app_options": ["Alternative"],
    "apps": ["BatchApp", "ContextApp", "ItemApp"],
    "context": ["context"],
    "decorators": ["batch_app", "context_app", "item_app"],
    "errors": [
        "BatchContractError", "CallCrashed", "CallError", "CallTimeout", "ContextError", "ContextLost", "CtxflowError",
        "DependencyFailed", "ItemRefused", "RemoteError", "RunEnded", "TurnOver", "WorkersLost",
    ],
    "executors": ["ContextExecutor"],
    "installing": ["__version__"],
    "map_results": ["MapResult"],
    "on_worker": ["idle", "last", "load_part", "load_variable_from_context", "load_variable_in_serverless"],
    "recipe": ["Context"],
    "sessions": ["Session", "SessionApp", "session_app"],
}  # fmt: skip
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Alternative",
    "BatchApp",
    "BatchContractError",
    "CallCrashed",
    "CallError",
    "CallTimeout",
    "Context",
    "ContextApp",
    "ContextError",
    "ContextExecutor",
    "ContextLost",
    "CtxflowError",
    "DependencyFailed",
    "ItemApp",
    "ItemRefused",
    "MapResult",
    "RemoteError",
    "RunEnded",
    "Session",
    "SessionApp",
    "TurnOver",
    "WorkersLost",
    "__version__",
    "batch_app",
    "context",
    "context_app",
    "idle",
    "item_app",
    "last",
    "load_part",
    "load_variable_from_context",
    "load_variable_in_serverless",
    "session_app",
]


class _Package(ModuleType):
    """The package with `context` as the decorator: Python sets it to the module of that name when that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.context if name == "context" and isinstance(value, ModuleType) else value)

    def __reduce__(self) -> tuple[Any, ...]:  # For cloudpickle, which knows modules by their exact type.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ctxflow' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ctxflow.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, also those not used yet: what an editor or a notebook completes."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


class _OldNames:
    """Finds modules by the names that they had in earlier versions; asked last, for what nothing else has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import one of ctxflow's; see `importlib.abc.MetaPathFinder`."""
        if not name.startswith("ctxflow.") or name == "ctxflow.renamed":
            return None
        return importlib.import_module("ctxflow.renamed").find_spec(name)  # type: ignore[no-any-return]


sys.meta_path.append(_OldNames)

if hasattr(__spec__.loader, "archive"):  # A worker's program, which lacks what few workers need.
    importlib.import_module("ctxflow.host.worker_program").install()
