"""The `ctxflow` command, one file a verb."""

from ctxflow.cli.app import main

__all__ = ["main"]
