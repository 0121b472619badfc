"""Opening what the answers of library processes bring: pickles of results and of exceptions."""

from __future__ import annotations

import dataclasses
import pickle

from ctxflow.executors.run.futures import unpickled_error
from ctxflow.scheduler import events as ev


def opened(event: ev.Event) -> ev.Event:
    """Unpickle a batch's results or exception; results that cannot be unpickled here are a failure.

    >>> import pickle
    >>> opened(ev.BatchFinished(2.0, "w", 7, 1.5, pickle.dumps([4, 9]))).results
    [4, 9]
    """
    if isinstance(event, ev.BatchFailed) and isinstance(event.exception, bytes):
        return dataclasses.replace(event, exception=unpickled_error(event.exception))
    if not isinstance(event, (ev.BatchFinished, ev.ItemsFinished)):
        return event
    try:
        results = pickle.loads(event.results)
        if isinstance(event, ev.ItemsFinished):
            return ev.ItemsFinished(event.time, event.worker, event.attempt, event.first, event.count, results)
        return ev.BatchFinished(event.time, event.worker, event.attempt, event.seconds, results)
    except BaseException as error:  # Unpickling runs code of the user's, which must not end this thread.
        failure = ev.Failure(
            "exception",
            type(error).__name__,
            f"the app's result cannot be opened here ({error}): return plain data, or install its package here too",
            worker=event.worker,
        )
        return ev.BatchFailed(event.time, event.worker, event.attempt, failure)
