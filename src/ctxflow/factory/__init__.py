"""Acquiring and releasing workers: providers, which start and end worker jobs, one job per worker.

What does not live here: how many workers to hold (policies/scaling), and what a worker does (host/).
"""

from ctxflow.factory.condor import CondorProvider
from ctxflow.factory.local import LocalProvider
from ctxflow.factory.provider import JobChange, Provider, ProviderError, WorkerJob

__all__ = ["CondorProvider", "JobChange", "LocalProvider", "Provider", "ProviderError", "WorkerJob"]
