"""The `ctxflow` command: its frame (app.py), and its verbs in modules that are imported when one of them is called."""

from ctxflow.cli.app import main

__all__ = ["main"]
