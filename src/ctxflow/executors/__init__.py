"""The Parsl executor, and the engines that it drives. Extend it with an engine (engine.py is the contract)."""

from ctxflow.executors.executor import ContextExecutor

__all__ = ["ContextExecutor"]
