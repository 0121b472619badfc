"""A map as a person holds it: its results in order or as they come, and how far it has come.

A bar on a terminal or in a notebook, which leaves what the program prints whole; a line now and then elsewhere. One
thread shows all maps of the program, and is there only while there is something to show: items cost nothing for it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Generic, Protocol, TextIO

from ctxflow.app_options import MappedApp, Result
from ctxflow.identity import identity_of, reading
from ctxflow.map_inputs import MapInputs
from ctxflow.mapping import NOTHING_YET, MapWork
from ctxflow.option_values import choice, flag, refuse, whole
from ctxflow.resume import ResultsByContent, ResultsFile

if TYPE_CHECKING:
    from ctxflow.executors.bare import BareExecutor

_WINDOW = 20_000
_TURNS = 64  # An `async for` over results that are there lets other tasks go on after so many.
_AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.25
_LINE_SECONDS = 10.0


class Watched(Protocol):
    """A map that is watched."""

    called: str

    def answered_items(self) -> int:
        """Return how many of its items have an answer."""

    def is_over(self) -> bool:
        """Return whether it has ended."""


class _View(Protocol):
    def add(self, called: str, total: int | None) -> int: ...
    def update(self, task: int, done: int, total: int | None, seconds: float, over: bool) -> None: ...
    def draw(self) -> None: ...
    def close(self) -> None: ...


class _Bars:
    """A line at the foot of a terminal, which is away whenever the program writes there.

    What the program writes goes to the terminal as it is. The line comes back once the program has ended its own.
    """

    def __init__(self) -> None:
        # What a command guards its terminal with lets no control characters through.
        self._terminal: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self._lock = threading.RLock()  # A signal's handler may print.
        self._owner = os.getpid()
        self._lines: dict[int, str] = {}
        self._names: list[str] = []
        self._shown = False
        self._at_start = True  # Of a line, as far as the program has written.
        self._over: list[str] = []  # Lines of maps that have ended, which stay.
        self._replaced: list[tuple[str, Any, Any]] = []
        self._write("\x1b[?25l")
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced.append((name, stream, _Whole(stream, self)))
                setattr(sys, name, self._replaced[-1][2])

    def add(self, called: str, total: int | None) -> int:
        self._names.append(called)
        return len(self._names) - 1

    def update(self, task: int, done: int, total: int | None, seconds: float, over: bool) -> None:
        with self._lock:
            text = bar_line(self._names[task], done, total, seconds)
            if over:
                self._lines.pop(task, None)
                self._over.append(text)
            else:
                self._lines[task] = text

    def draw(self) -> None:
        with self._lock:
            if not self._at_start:
                return
            self._clear()
            width = _width(self._terminal)
            ended = "".join(f"{text[: width - 1]}\n" for text in self._over)
            self._over.clear()
            self._write(ended + "  ".join(self._lines.values())[: width - 1])
            self._shown = bool(self._lines)

    def close(self) -> None:
        with self._lock:
            self._clear()
            self._write("\x1b[?25h")
            for name, stream, ours in self._replaced:
                if getattr(sys, name) is ours:
                    setattr(sys, name, stream)

    def pass_on(self, write: Callable[[Any], Any], stream: Any, data: Any) -> Any:
        """Write what the program writes, with nothing else on its line."""
        if os.getpid() != self._owner:  # A fork, in which the lock is never released.
            return write(data)
        with self._lock:
            self._clear()
            written = write(data)
            stream.flush()
            if data:
                self._at_start = data[-1:] in ("\n", b"\n")
            return written

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # The terminal may be gone.
            encoding = self._terminal.encoding or "ascii"
            self._terminal.write(text.encode(encoding, "replace").decode(encoding))
            self._terminal.flush()


class _Whole:
    """A stream of the program's to a terminal that has a line of ours."""

    def __init__(self, stream: Any, bars: _Bars) -> None:
        self._stream, self._bars = stream, bars

    def write(self, data: Any) -> Any:
        """Write it as it is."""
        return self._bars.pass_on(self._stream.write, self._stream, data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write them as they are."""
        for each in lines:
            self.write(each)

    @property
    def buffer(self) -> _Whole:
        """Return what takes bytes."""
        return _Whole(self._stream.buffer, self._bars)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _width(terminal: TextIO) -> int:
    with contextlib.suppress(ValueError, OSError):
        return int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(terminal.fileno()).columns or 80
    with contextlib.suppress(ValueError, OSError):
        return os.get_terminal_size(terminal.fileno()).columns or 80
    return 80


_BAR = 30  # Characters.


def bar_line(called: str, done: int, total: int | None, seconds: float) -> str:
    """Return how far a map has come, as a terminal shows it.

    >>> bar_line("verify", 1200, 4800, 10.0)
    'verify.map ━━━━━━━━────────────────────── 1200/4800 120/s 0:00:10, 0:00:30 left'
    """
    full = 0 if not total else round(_BAR * min(1.0, done / total))
    rate = done / max(seconds, 1e-9)
    left = f", {_clock((total - done) / rate)} left" if total and done and done < total else ""
    bar = "━" * full + "─" * (_BAR - full)
    return f"{called}.map {bar} {done}/{'?' if total is None else total} {rate:,.4g}/s {_clock(seconds)}{left}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


class _Cell:
    """A text below a notebook's cell, apart from what the cell prints."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: list[str] = []
        self._handle: Any = None

    def add(self, called: str, total: int | None) -> int:
        self._names.append(called)
        self._lines.append("")
        return len(self._names) - 1

    def update(self, task: int, done: int, total: int | None, seconds: float, over: bool) -> None:
        self._lines[task] = bar_line(self._names[task], done, total, seconds)

    def draw(self) -> None:
        display = importlib.import_module("IPython.display").display
        shown = {"text/plain": "\n".join(self._lines)}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        pass


class _Lines:
    """Lines for a log."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._due: dict[int, float] = {}

    def add(self, called: str, total: int | None) -> int:
        self._names.append(called)
        return len(self._names) - 1

    def update(self, task: int, done: int, total: int | None, seconds: float, over: bool) -> None:
        if over or time.monotonic() >= self._due.setdefault(task, 0.0):
            self._due[task] = time.monotonic() + _LINE_SECONDS
            sys.stderr.write(line(self._names[task], done, total, seconds, over) + "\n")
            sys.stderr.flush()

    def draw(self) -> None:
        pass

    def close(self) -> None:
        pass


def line(called: str, done: int, total: int | None, seconds: float, over: bool = False) -> str:
    """Return how far a map has come, in a line.

    >>> line("verify", 1200, 5000, 10.0), line("verify", 7, None, 2.0, over=True)
    ('verify.map: 1,200 of 5,000, 120/s', 'verify.map: 7 in 2 s, 3.5/s')
    """
    of = f" of {total:,}" if total is not None and not over else ""
    spent = f" in {seconds:,.0f} s" if over else ""
    return f"{called}.map: {done:,}{of}{spent}, {done / max(seconds, 1e-9):,.4g}/s"


class _Board:
    """The maps that are shown, and the thread that does it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._maps: list[tuple[Watched, int | None, float]] = []
        self._thread: threading.Thread | None = None
        self._shows = False
        self._closing = False

    def add(self, watched: Watched, total: int | None) -> None:
        """Show a map from when it has taken a while."""
        with self._changed:
            self._maps.append((watched, total, time.monotonic()))
            if self._thread is None or not self._thread.is_alive():  # After a fork it is not.
                self._thread = threading.Thread(target=self._show, name="ctxflow-progress", daemon=True)
                self._thread.start()

    def ended(self) -> None:
        """Have a map that has ended shown for the last time, before its program goes on."""
        with self._changed:
            thread = self._thread if self._shows else None
            self._changed.notify_all()
        if thread is not None and len(self._maps) < 2:
            thread.join(timeout=1.0)

    def close(self) -> None:
        """Leave the terminal as it was; at the end of the program."""
        self._closing = True
        self.ended()

    def _show(self) -> None:
        view: _View | None = None
        tasks: dict[int, int] = {}
        try:
            going = True
            while going:
                ended = set()
                for watched, total, began in list(self._maps):
                    seconds, over = time.monotonic() - began, watched.is_over()
                    if over:
                        ended.add(id(watched))
                    task = tasks.get(id(watched))
                    if task is None and (over or seconds < _AFTER_SECONDS):
                        continue
                    if view is None:
                        view = _view()
                        self._shows = True
                    if task is None:
                        task = tasks[id(watched)] = view.add(watched.called, total)
                    view.update(task, watched.answered_items(), total, seconds, over)
                if view is not None:
                    view.draw()
                going = self._wait(ended)
        finally:
            if view is not None:
                view.close()

    def _wait(self, ended: Set[int]) -> bool:
        """Wait until it is time to look again; False if there is nothing to show any more.

        :param ended: the maps that were shown as over: one that has ended since is still to be shown so.
        """
        with self._changed:
            self._maps = [each for each in self._maps if id(each[0]) not in ended]
            if not self._maps or self._closing:
                self._thread, self._shows = None, False
                return False
            if not any(watched.is_over() for watched, _, _ in self._maps):
                self._changed.wait(_EVERY_SECONDS)
            return True


def _view() -> _View:
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bars()
    return _Cell() if "ipykernel" in sys.modules else _Lines()


def is_wanted(progress: bool | None) -> bool:
    """Return whether a map is to be shown: where nobody says, on a terminal and in a notebook."""
    return progress if progress is not None else sys.stderr.isatty() or "ipykernel" in sys.modules


board = _Board()
atexit.register(board.close)


class MapResult(Generic[Result]):
    """The results of a map: an iterator; see `BatchApp.map`.

    Inputs are pulled up to a window of items that are on their way or wait for their turn: on the consumer's thread
    what is there, such as lists and files; on a thread of their own what may have to be waited for, such as generators.
    Closing it (or dropping it) cancels what is queued or runs.
    """

    def __init__(
        self,
        app: MappedApp,
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
        raises, window = on_error == "raise", window or _WINDOW
        self._mapping = mapping = MapWork(run, declared, through, raises, window, file, app.__name__)
        weakref.finalize(self, mapping.drop)  # When nobody holds it any more, and at the end of the program.
        self.finished, self._count, self._taken = mapping.finished, through.count, 0
        mapping.forget = executor.add_map(mapping)
        if is_wanted(progress):
            board.add(mapping, through.count)
            mapping.at_end = board.ended
        mapping.begin()
        self._results = mapping.ordered() if order == "input" else mapping.completed()

    def __iter__(self) -> MapResult[Result]:
        return self

    def __next__(self) -> Result:
        try:
            while (result := next(self._results)) is NOTHING_YET:
                self._mapping.wait()
        except KeyboardInterrupt:  # Whether or not a name holds the map on, as in a notebook.
            self.close()
            raise
        return result  # type: ignore[no-any-return]

    def __aiter__(self) -> MapResult[Result]:
        return self

    async def __anext__(self) -> Result:
        """Return the next result, pulling inputs on the event loop's thread; cancelling the caller closes the map."""
        try:
            self._taken += 1
            if self._taken % _TURNS == 0:
                await asyncio.sleep(0)
            while (result := next(self._results)) is NOTHING_YET:
                await self._mapping.arrival()
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
        """Return how many results there will be in all.

        :raises TypeError: if the inputs do not tell.
        """
        if self._count is None:
            raise TypeError("this map has no length, for its inputs do not tell theirs")
        return self._count

    @property
    def answered(self) -> dict[str, int]:
        """Return how many items each context answered so far, by its name, for an app with alternatives."""
        return dict(self._mapping.answered)

    def close(self) -> None:
        """Stop: cancel what is queued, keep what is done."""
        self._results = iter(())
        self._mapping.end()
