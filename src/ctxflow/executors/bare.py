"""An executor by itself, as a context manager; what makes it one of Parsl's is in executor.py.

Parsl takes a second and 40 MB to import: commands that have no use for it, such as `ctxflow batch`, run on this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from ctxflow.errors import CtxflowError, counted, one_line
from ctxflow.executors.contract import SiteEngine, current_directory
from ctxflow.executors.figures import Status
from ctxflow.executors.live_run import LiveRun
from ctxflow.executors.submission import Calls, Pool
from ctxflow.option_values import flag, refuse, text, whole
from ctxflow.ownership import belongs_here, foreign_text
from ctxflow.policies.registry import FAMILIES
from ctxflow.scheduler import Limits, Policies
from ctxflow.sites import Site, load_site
from ctxflow.sites.site_model import region_specs
from ctxflow.terminal import timed

Self = TypeVar("Self", bound="BareExecutor")

_active: list[BareExecutor] = []


class BareExecutor:
    """Runs apps on workers, without Parsl: its parameters are those of `ContextExecutor` that have no part in Parsl.

    :param policies: by family.
    :ivar run_dir: where the run's folder is made; in a folder `runs` where this is the current one.

    >>> with BareExecutor(workers=1) as executor:
    ...     executor.submit(pow, {}, 2, 5).result()
    32
    """

    def __init__(
        self,
        site: str | Site = "local",
        label: str = "ctxflow",
        workers: int | None = None,
        level: str | None = None,
        limits: Limits | None = None,
        log_events: bool = True,
        **policies: Any,
    ) -> None:
        self.run_dir = current_directory()
        check_arguments(site, label, workers, limits, log_events)
        self.site, self.label, self.workers = site, label, workers
        self.level, self.limits, self.log_events = level, limits, log_events
        vars(self).update(policies)
        self.resolved_site = load_site(site, workers=workers, level=level, **policies)
        self._policies = Policies.chosen({family: getattr(self.resolved_site, family) for family in FAMILIES})
        self.engine = self._make_engine()
        self.run: LiveRun | None = None
        self._calls: Calls | None = None
        self._maps: dict[int, weakref.ref[OpenMap]] = {}
        self._in_block = False
        belongs_here(self)

    def _make_engine(self) -> SiteEngine:
        engine: SiteEngine = self.resolved_site.kind.load().from_site(self.resolved_site)
        return engine

    def start(self) -> None:
        """Start the run: its workers come up while the program goes on.

        In a notebook, or at the prompt, where a cell that starts one may be run twice, it takes the place of one of its
        label that a cell has started before, and that no `with` statement ends.
        """
        if is_interactive() and not self._in_block:
            for earlier in [each for each in _active if each.label == self.label and not each._in_block]:
                tell(f"the executor {self.label!r} is started again: the earlier one is ended")
                earlier.shutdown()
        directory = self.run_dir
        if directory == current_directory():
            directory = os.path.abspath(os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"))
        self.run = LiveRun(
            self.engine,
            self._policies,
            self.engine.tiers(),
            os.path.join(directory, self.label),
            self.limits,
            self.log_events,
            self.resolved_site.level,
            self.resolved_site.start_when,
            region_specs(self.resolved_site.regions, self.resolved_site.home),
        )
        self._prepare(self.run)
        self._calls = Calls(self.run)
        self.run.start()
        _active.append(self)
        atexit.register(self._at_exit)

    def _prepare(self, run: LiveRun) -> None:
        """Set up a run before it starts."""

    def submit(
        self, func: Callable[..., Any], resource_specification: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Submit one call of any function.

        :param resource_specification: may hold "context" (a recipe, or the paper's `[function, args, kwargs]`),
            "priority", "timeout" and "level".
        :raises TypeError: if the function or an argument cannot be pickled, naming it.
        """
        return self.calls.submit(func, resource_specification, args, kwargs)

    @property
    def map(self) -> NoReturn:
        """Say where the maps are."""
        raise AttributeError(f"{type(self).__name__} has no map: call executor.pool().map(...), or the map of an app")

    def shutdown(self) -> None:
        """End the run: workers are ended, unanswered calls fail, which is told on stderr."""
        if self._is_copy:
            return
        if self.run is not None:
            cancelled = len(self.run.open_calls())
            self.run.stop()
            if self in _active:
                _active.remove(self)
                atexit.unregister(self._at_exit)
                if cancelled:
                    error = sys.exc_info()[0]
                    cause = f"the block ended with {error.__name__}" if error else "the executor was shut down"
                    tell(cancelled_text(cancelled, cause))
        for each in self._open_maps():
            each.release()
        self._maps.clear()

    def _at_exit(self) -> None:
        """Say what it costs that the program ends without having left its executor."""
        if self.run is not None and not self._is_copy and (calls := len(self.run.open_calls())):
            tell(cancelled_text(calls, "the program ended; take their results, or leave the executor, before that"))

    @property
    def _is_copy(self) -> bool:
        return self.run is not None and self.run.is_copy

    def forked(self) -> None:
        """Become unusable in a forked child."""
        self._calls = None

    def __enter__(self: Self) -> Self:
        """Start, where that is not done yet."""
        self._in_block = True
        if self.run is None:
            self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Literal[False]:
        """Wait for all calls, and end the workers; where an exception or Ctrl-C ends the wait, calls are cancelled.

        A map that another thread reads is waited for; one that nobody reads on is closed, and so are sessions. After
        two seconds it is said on stderr what is waited for.
        """
        try:
            if error is None and self.run is not None and not self._is_copy:
                self._finish(self.run)
        finally:
            self.shutdown()
        return False

    def _finish(self, run: LiveRun) -> None:
        here = threading.get_ident()
        for each in self._open_maps():
            if not each.read_elsewhere(here):
                each.cut()

        def read_maps() -> list[Future[int]]:
            return [each.finished for each in self._open_maps() if each.read_elsewhere(here)]

        while True:
            await_answers(run.open_calls, read_maps, run.status)
            run.callbacks.flush()  # They may make other calls.
            if not run.open_calls():
                return

    @property
    def calls(self) -> Calls:
        """Return where calls go in; CtxflowError if the executor is not running."""
        if self._is_copy:
            raise CtxflowError(foreign_text(f"the executor {self.label!r}"))
        if self._calls is None:
            raise CtxflowError("the executor is not running: load it with parsl.load, or use it in a with statement")
        return self._calls

    def pool(self) -> Pool:
        """Return a `concurrent.futures.Executor` over this run, for code that wants one; it may end before the run.

        >>> with BareExecutor(workers=1) as executor, executor.pool() as pool:
        ...     list(pool.map(pow, [1, 2, 3], [2, 2, 2]))
        [1, 4, 9]
        """
        return Pool(self.calls)

    def status(self) -> Status:
        """Return the run's figures of this moment."""
        return self.calls.run.status()

    def history(self) -> list[tuple[float, int, int]]:
        """Return a sample a second: seconds since the start, workers connected, items done."""
        return list(self.calls.run.samples)

    def add_map(self, open_map: OpenMap) -> Callable[[], object]:
        """Have a map end with the run at the latest; gives what takes that back. Neither waits for a lock."""
        self._maps[id(open_map)] = weakref.ref(open_map)
        return functools.partial(self._maps.pop, id(open_map), None)

    def _open_maps(self) -> list[OpenMap]:
        held = [reference() for reference in list(self._maps.values())]
        return [each for each in held if each is not None]

    @property
    def outstanding(self) -> int:
        """Items that are queued or running."""
        status = self.status()
        return status.items_queued + status.items_running

    @property
    def connected_workers(self) -> int:
        """Workers that take calls."""
        return self.status().workers


def active_executor(label: str | None = None) -> tuple[BareExecutor, Any]:
    """Return the executor that calls go to now, and Parsl's kernel if it is loaded there.

    :param label: which, where several are running; by default the one that was started last.
    :raises CtxflowError: if none is running.
    """
    running = [executor for executor in _active if label is None or executor.label == label]
    if not running:
        which = f"no executor labelled {label!r} is running" if label else "no ContextExecutor is running"
        raise CtxflowError(f"{which}: load one with parsl.load(ContextExecutor.config()), or `with ContextExecutor():`")
    executor = running[-1]
    if executor._is_copy:
        raise CtxflowError(foreign_text(f"the executor {executor.label!r}"))
    kernel = parsl_kernel()
    loaded = kernel is not None and executor in kernel.executors.values()
    return executor, kernel if loaded else None


def is_interactive() -> bool:
    """Return whether a person types the program: in a notebook, or at Python's prompt."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def parsl_kernel() -> Any:
    """Return Parsl's kernel, if Parsl is imported and one is loaded."""
    module = sys.modules.get("parsl.dataflow.dflow")
    return None if module is None else module.DataFlowKernelLoader._dfk


def check_arguments(site: Any, label: Any, workers: Any, limits: Any, log_events: Any) -> None:
    """Raise TypeError or ValueError for an argument of an executor that is not what it can be, by its name."""
    if not isinstance(site, (str, os.PathLike, Site)):
        raise refuse("site", site, '"local", the path of a site file, or a ctxflow.sites.Site', TypeError)
    text("label", label, 'text: a name for the executor, such as "ctxflow"')
    if workers is not None:
        whole("workers", workers, "how many workers, 1 or more")
    if limits is not None and not isinstance(limits, Limits):
        raise refuse("limits", limits, "a ctxflow.scheduler.Limits(...)", TypeError)
    flag("log_events", log_events)


_FIRST_SECONDS = 2.0  # A wait that is over by then needs no explanation.
_LONGEST_SECONDS = 60.0


class OpenMap(Protocol):
    """A map that goes on, as its executor sees it; `finished` is done when it is over."""

    finished: Future[int]

    def read_elsewhere(self, here: int) -> bool:
        """Return whether a thread other than this one, by its identifier, reads it."""

    def release(self) -> None:
        """Tell who waits for the map as a whole, as Parsl does, not to wait any longer."""

    def cut(self) -> None:
        """Cancel what nobody has read; to read further raises `RunEnded`."""


def tell(text: str) -> None:
    """Write a line for the person at the terminal, wherever logging goes."""
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        print(timed(one_line(f"ctxflow: {text}")), file=sys.stderr, flush=True)  # noqa: T201 - it is what this is for


def waiting_text(calls: int, maps: int, status: Status) -> str:
    """Return the line that says for what a program waits before it ends its workers."""
    what = [counted(calls, "call")] if calls else []
    what += [f"{counted(maps, 'map')} that another thread reads"] if maps else []
    workers = counted(status.workers, "worker") if status.workers else "no worker yet"
    return f"waiting for {' and '.join(what)} ({workers}); Ctrl-C cancels what is left"


def cancelled_text(calls: int, cause: str) -> str:
    """Return the line that says how many calls were cancelled, and why."""
    return f"{counted(calls, 'call')} cancelled before an answer came: {cause}"


class Teller:
    """Reports what is waited for: after two seconds, and then ever more seldom, if it has changed."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _FIRST_SECONDS
        self._pause = 4 * _FIRST_SECONDS
        self._said = ""

    @property
    def seconds(self) -> float:
        """Return how long there is nothing to say."""
        return max(0.0, self._due - time.monotonic())

    def say(self, text: str) -> None:
        """Say it, if it is time and if it is new."""
        if self.seconds:
            return
        self._due = time.monotonic() + self._pause
        self._pause = min(_LONGEST_SECONDS, 2 * self._pause)
        if text != self._said:
            self._said = text
            tell(text)


def await_answers(
    calls: Callable[[], Sequence[Future[Any]]], maps: Callable[[], Sequence[Future[Any]]], status: Callable[[], Status]
) -> None:
    """Wait until no call is open and no map is read by another thread; callbacks may make new calls meanwhile."""
    teller = Teller()
    while awaited := calls() or maps():
        for future in awaited:  # One after the other: to wait for all would cost a visit to each every time.
            if not future.done():
                wait([future], timeout=max(0.05, min(teller.seconds, 1.0)))
            if not teller.seconds:
                teller.say(waiting_text(len(calls()), len(maps()), status()))
            if not future.done():
                break
