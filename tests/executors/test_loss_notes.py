"""Notes on contexts that are lost while a run goes on."""

import contextlib
import itertools
import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
from executor_helpers import started

from ctxflow import batch_app, context, item_app
from ctxflow.executors.loss_notes import LossNotes
from ctxflow.scheduler import events as ev
from waiting import eventually

CRASH = ev.Failure("crash", "LibraryDied", "the library process was killed by SIGKILL:\n see the log")


def a_state(held=("c",), parked=()):
    """Attempt 7 runs on worker w, which holds contexts."""
    names = {"c": "model", "": ""}
    contexts = {key: SimpleNamespace(spec=SimpleNamespace(name=name)) for key, name in names.items()}
    worker = SimpleNamespace(id="w", contexts=dict.fromkeys(held), parked=dict.fromkeys(parked))
    attempts = {7: SimpleNamespace(context=held[0])} if held else {}
    return SimpleNamespace(attempts=attempts, contexts=contexts, workers={"w": worker})


def failed(time=0.0, attempt=7, failure=CRASH, lost_context=True):
    return ev.BatchFailed(time, "w", attempt, failure, lost_context)


@pytest.mark.parametrize(
    ("event", "state", "begins"),
    [
        (failed(), a_state(), "the context model was lost on worker w"),
        (failed(failure=ev.Failure("timeout", "Timeout", "too long")), a_state(), "the context model was lost"),
        (failed(), a_state([""]), "a library process without a context was lost on worker w"),
        (ev.ContextUnloaded(0.0, "w", "c", CRASH), a_state(), "the context model was lost"),
        (ev.ContextUnloaded(0.0, "w", "c", CRASH), a_state([], ["c"]), "the context model was lost"),
        (ev.ContextUnloaded(0.0, "w", "c"), a_state(), ""),  # Which was asked for.
        (ev.ContextUnloaded(0.0, "w", "c", CRASH), a_state([]), ""),
        (ev.ContextUnloaded(0.0, "gone", "c", CRASH), a_state(), ""),
        (failed(attempt=8), a_state(), ""),  # Which the first of those that were lost together has ended.
        (failed(lost_context=False), a_state(), ""),
        (failed(failure=ev.Failure("cancelled", "CallInterrupted", "nobody waits")), a_state(), ""),
    ],
)
def test_one_line_of_a_loss_says_where_and_why(event, state, begins):
    told = LossNotes().of(event, state)
    assert told.startswith(begins) and bool(told) == bool(begins)
    assert not begins or told.endswith(event.failure.message.split()[-1])
    assert "\n" not in told


def test_what_is_lost_again_and_again_is_told_once_a_minute():
    notes = LossNotes()
    told = [notes.of(failed(at), a_state()) for at in (0.0, 10.0, 20.0, 59.0, 61.0, 62.0, 400.0)]
    assert [bool(text) for text in told] == [True, False, False, False, True, False, True]
    assert "after 3 losses that were not reported" in told[4] and "after 1 loss that were" in told[6]
    assert notes.of(failed(400.0), a_state([""])), "another context's is told"


@context
def plain():
    return os.getpid()


@context
async def looping():
    return os.getpid()


@batch_app(plain(), batch_size=1)
def pids(process, numbers):
    time.sleep(0.05)
    return [process for _ in numbers]


@item_app(looping())
async def pid(process, number):
    return process


@pytest.mark.parametrize("app", [pids, pid], ids=["batch", "item"])
@pytest.mark.parametrize("busy", [True, False])
def test_a_run_tells_why_its_context_is_built_again(tmp_path, caplog, app, busy):
    caplog.set_level(logging.WARNING, "ctxflow")
    name = "plain" if app is pids else "looping"

    def told():
        return [text for text in caplog.messages if "was lost" in text]

    with started(tmp_path):
        with contextlib.closing(app.map(itertools.count() if busy else [1])) as calls:
            first = next(calls)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: told() or (busy and next(calls) is None))
        [line] = told()
        assert f"the context {name} was lost on worker " in line and "killed by SIGKILL" in line
