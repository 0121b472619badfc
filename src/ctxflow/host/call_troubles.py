"""What is reported of an error that a call or a build has raised: in words, with the user's part of the traceback."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

import cloudpickle

from ctxflow.host.linux import looks_like_the_machine
from ctxflow.host.wire import Trouble
from ctxflow.recipe import Context

_LONGEST = 20_000  # Characters of a message or traceback that are kept.
_OWN_FILES = (os.path.dirname(__file__), str(sys.modules[Context.__module__].__file__))


def trouble_of(kind: str, error: BaseException, hint: str) -> tuple[Trouble, bytes]:
    """Return the report of an error, and the error pickled, if it can be.

    :param hint: what to add to its message.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, (StopIteration, StopAsyncIteration)):
        error = error.__cause__  # Python raises RuntimeError for one that leaves a generator.
    try:
        body = cloudpickle.dumps(error)
        pickle.loads(body)  # Some exceptions pickle but do not unpickle.
    except BaseException:
        body = b""
    text = "; ".join(filter(None, (_message(error)[:_LONGEST], hint)))
    shown = user_traceback(error) + hint
    machine = kind == "exception" and looks_like_the_machine(error)
    return Trouble(kind, type(error).__name__, text, shown, machine=machine), body


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install it where the workers run, or name it in the site's environment"
    if isinstance(error, SystemExit):
        return f"exit({error.code!r}) was called: raise an exception instead"
    try:
        return str(error)
    except BaseException:
        return "its message cannot be had: its __str__ raises"


def user_traceback(error: BaseException) -> str:
    """Return the end of the traceback, without ctxflow's own frames."""
    summary = traceback.TracebackException.from_exception(error)
    kept = [f for f in summary.stack if not f.filename.startswith(_OWN_FILES)]
    summary.stack = traceback.StackSummary.from_list(kept)
    return "".join(summary.format())[-_LONGEST:]
