"""A map over many items, as people hold it: an iterator over its results, also for `async for`.

What does not live here: the work (mapping.py), and the file that keeps results (resume.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic

from ctxflow.apps import Result
from ctxflow.identity import identity_of, reading
from ctxflow.map_inputs import MapInputs
from ctxflow.map_progress import board, is_wanted
from ctxflow.mapping import LEAST_WINDOW, NOTHING_YET, MapWork
from ctxflow.option_values import choice, flag, refuse, whole
from ctxflow.resume import ResultsFile
from ctxflow.resume_content import ResultsByContent

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp
    from ctxflow.executors.bare import BareExecutor

_TURNS = 64  # An `async for` over results that are there lets other tasks go on after so many.


class Mapped(Generic[Result]):
    """The results of a map: an iterator; see `BatchApp.map`.

    Inputs are pulled up to a window of items that are on their way or wait for their turn: on the consumer's thread
    what is there, such as lists and files; on a thread of their own what may have to be waited for, such as generators.
    Closing it (or dropping it) cancels what is queued or runs.
    """

    def __init__(
        self,
        app: BatchApp,
        through: MapInputs,
        constants: Mapping[str, Any],
        executor: BareExecutor,
        resume: str | os.PathLike[str] | None,
        on_error: str,
        order: str,
        window: int | None,
        progress: bool | None = None,
        resume_by: str = "index",
    ) -> None:
        self._mapping: MapWork | None = None
        self._taken = 0
        self._count = through.count
        self._results: Iterator[Any] = iter(())
        choice("on_error", on_error, ("raise", "return"))
        choice("order", order, ("input", "completed"))
        if window is not None:
            window = whole("window", window, "how many items may be on their way, 1 or more", 1)
        if resume is not None and not isinstance(resume, (str, os.PathLike)):
            raise refuse("resume", resume, "the path of a file that keeps the results", TypeError)
        choice("resume_by", resume_by, ("index", "content"))
        if resume is None and resume_by != "index":
            raise ValueError(f"resume_by={resume_by!r} says how results are found again: name their file with resume=")
        if progress is not None:
            flag("progress", progress)
        run = executor.calls.run
        declared = app.declare(run, constants, look_inside=True)
        # Last of what may raise: a file that is open is locked.
        file = None
        if resume is not None:
            kind = ResultsFile if resume_by == "index" else ResultsByContent
            file = kind(resume, app, constants, identity_of(app, constants, reading))
        raises, window = on_error == "raise", window or LEAST_WINDOW
        mapping = MapWork(run, declared, through.items, through.may_wait, raises, window, file, app.__name__)
        self._mapping = mapping
        self.finished = mapping.finished
        mapping.forget = executor.add_map(mapping)
        if is_wanted(progress):
            board.add(mapping, through.count)
            mapping.at_end = board.ended
        mapping.begin()
        self._results = mapping.ordered() if order == "input" else mapping.completed()

    def __iter__(self) -> Mapped[Result]:
        return self

    def __next__(self) -> Result:
        try:
            while (result := next(self._results)) is NOTHING_YET:
                self._mapping.wait()  # type: ignore[union-attr]
        except KeyboardInterrupt:  # Whether or not a name holds the map on, as in a notebook.
            self.close()
            raise
        return result  # type: ignore[no-any-return]

    def __aiter__(self) -> Mapped[Result]:
        return self

    async def __anext__(self) -> Result:
        """The next result. Inputs are pulled on the event loop's thread; cancelling who waits here closes the map."""
        mapping = self._mapping
        try:
            self._taken += 1
            if self._taken % _TURNS == 0:
                await asyncio.sleep(0)
            while (result := next(self._results)) is NOTHING_YET and mapping is not None:
                await mapping.arrival()
        except StopIteration:
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            self.close()
            raise
        return result  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Close it, for `contextlib.aclosing`."""
        self.close()

    def __len__(self) -> int:
        """How many results there will be in all.

        :raises TypeError: if the inputs do not tell.
        """
        if self._count is None:
            raise TypeError("this map has no length, for its inputs do not tell theirs")
        return self._count

    @property
    def answered(self) -> dict[str, int]:
        """How many items each context answered so far, by its name, for an app with alternatives."""
        return dict(self._mapping.answered) if self._mapping is not None else {}

    def close(self) -> None:
        """Stop: cancel what is queued, keep what is done."""
        self._results = iter(())
        if self._mapping is not None:
            self._mapping.end()

    def __del__(self) -> None:
        if self._mapping is not None:
            self._mapping.drop()
