"""Request workers from batch systems and give them back: providers, which start and end one job per worker.

The names are imported when first used: the process of HTCondor's bindings needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxflow.factory.condor_provider import CondorProvider
    from ctxflow.factory.local import LocalProvider
    from ctxflow.factory.provider import JobChange, Provider, ProviderError, WorkerJob

_PLACES = {
    "CondorProvider": "condor_provider",
    "JobChange": "provider",
    "LocalProvider": "local",
    "Provider": "provider",
    "ProviderError": "provider",
    "WorkerJob": "provider",
}

__all__ = ["CondorProvider", "JobChange", "LocalProvider", "Provider", "ProviderError", "WorkerJob"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ctxflow.factory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ctxflow.factory.{_PLACES[name]}"), name)
