"""ContextExecutor: the Parsl executor, which is also a context manager of its own for use without Parsl.

What does not live here: the run (run.py), engines, and how a call is pickled (submission.py).
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from parsl.config import Config
from parsl.data_provider.data_manager import default_staging
from parsl.data_provider.file_noop import NoOpFileStaging
from parsl.data_provider.staging import Staging
from parsl.dataflow.dflow import DataFlowKernelLoader
from parsl.executors.base import ParslExecutor
from parsl.monitoring.radios.base import RadioConfig
from parsl.monitoring.radios.udp import UDPRadio
from parsl.utils import RepresentationMixin

from ctxflow.errors import CtxflowError
from ctxflow.executors.arguments import check_arguments, divided
from ctxflow.executors.call_files import WorkerStaging
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.ending import (
    OpenMap,
    ParslWait,
    await_answers,
    cancelled_text,
    cause_of,
    tell,
    waiting_text,
)
from ctxflow.executors.files import SharedDiskStaging, current_directory
from ctxflow.executors.pool import Pool
from ctxflow.executors.run import Run
from ctxflow.executors.status import Status
from ctxflow.executors.submission import Calls
from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.forks import belongs_here, foreign_text
from ctxflow.policies.registry import FAMILIES
from ctxflow.scheduler import Limits, Policies
from ctxflow.sites import Site, load_site
from ctxflow.sites.region import region_specs

_active: list[ContextExecutor] = []


class ContextExecutor(ParslExecutor, RepresentationMixin):  # type: ignore[misc]
    """Runs apps on workers that build each model context once, keep it, and reuse it for every batch.

    With Parsl it is an executor like any other; on its own it is a context manager.

    :param site: "local", the path of a site file, or a `ctxflow.sites.Site`.
    :param label: Parsl's name for it.
    :param workers: how many workers, if not as many as the site says.
    :param routing: a policy by name, as a table, or as an object; likewise the next five.
    :param level: how much of a context workers keep from call to call, if not as the site says: "pervasive", or for
        measuring "partial" or "none" (see `ctxflow.app_options.Options`).
    :param slowdowns: factors by which the first, second, ... worker is slower, for tests.
    :param limits: how much is borne before an item or a context is given up.
    :param log_events: whether to keep the event log in the run's directory.
    :param storage_access: Parsl's staging providers, if not ctxflow's own; `[SharedDiskStaging()]` of
        `ctxflow.executors.files` where TaskVine's workers see this machine's disk under the same paths.
    :param working_dir: where Parsl's staging brings files from the web, as with Parsl's other executors; calls do not
        run there (docs/where-your-code-runs.md).
    :raises ValueError: for a site or policy that makes no sense, saying what to write.

    >>> with ContextExecutor(workers=1) as executor:
    ...     executor.submit(pow, {}, 2, 5).result()
    32
    """

    def __init__(
        self,
        site: str | Site = "local",
        label: str = "ctxflow",
        workers: int | None = None,
        routing: Any = None,
        batching: Any = None,
        placement: Any = None,
        preemption: Any = None,
        scaling: Any = None,
        sessions: Any = None,
        level: str | None = None,
        slowdowns: Sequence[float] = (),
        limits: Limits | None = None,
        log_events: bool = True,
        working_dir: str | None = None,
        storage_access: Sequence[Any] | None = None,
        remote_monitoring_radio: RadioConfig | None = None,
    ) -> None:
        current_directory()  # Parsl's executors, too, cannot do without one.
        ParslExecutor.__init__(self)
        check_arguments(
            site, label, workers, slowdowns, limits, log_events, working_dir, storage_access, remote_monitoring_radio
        )
        self.site, self.label, self.workers = site, label, workers
        self.routing, self.batching, self.placement = routing, batching, placement
        self.preemption, self.scaling, self.sessions, self.slowdowns = preemption, scaling, sessions, slowdowns
        self.level, self.limits, self.log_events, self.working_dir = level, limits, log_events, working_dir
        self.remote_monitoring_radio = remote_monitoring_radio or UDPRadio(address="127.0.0.1")
        self.resolved_site = load_site(
            site,
            workers=workers,
            routing=routing,
            batching=batching,
            placement=placement,
            preemption=preemption,
            scaling=scaling,
            sessions=sessions,
            level=level,
        )
        self.storage_access = _staging(self.resolved_site) if storage_access is None else storage_access
        self._policies = Policies.chosen({family: getattr(self.resolved_site, family) for family in FAMILIES})
        self.engine = self._make_engine()
        self.run: Run | None = None
        self._calls: Calls | None = None
        self._maps: dict[object, weakref.ref[OpenMap]] = {}
        self._lock = threading.Lock()
        self._parsl_wait = ParslWait()
        belongs_here(self)

    def _make_engine(self) -> EmbeddedEngine | TaskVineEngine:
        site = self.resolved_site
        if site.engine == "taskvine":
            return TaskVineEngine(site)
        return EmbeddedEngine(site.workers, site.gpus_per_worker, site.slots, site.scratch, slowdowns=self.slowdowns)

    @classmethod
    def config(cls, site: str | Site = "local", **options: Any) -> Config:
        """A Parsl configuration with one such executor.

        Parsl's own log of every state of every task, which costs more than a short call, is off; give
        `initialize_logging=True` to have it. The end of `with parsl.load(...)` waits for all calls, as that of a
        `concurrent.futures` executor does; `exit_mode="cleanup"` cancels them instead. Options of the executor go to
        it, others to `parsl.Config`.

        :raises TypeError: for an option that neither knows.

        >>> ContextExecutor.config(site="local", workers=2, retries=1).retries
        1
        """
        own, rest = divided(cls, options)
        defaults = {"initialize_logging": False, "strategy": "none", "usage_tracking": 0, "exit_mode": "wait"}
        return Config(executors=[cls(site, **own)], **{**defaults, **rest})

    # --- Parsl's side

    def start(self) -> None:
        """Start the run: its workers come up while the program goes on."""
        directory = self.run_dir
        if directory == current_directory():
            directory = os.path.abspath(os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"))
        self.run = Run(
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
        self.run.each_second = functools.partial(self._while_parsl_waits, self.run)
        brought = any(isinstance(provider, WorkerStaging) for provider in self.storage_access)
        self.run.files_travel = brought and self.engine.remote
        self._calls = Calls(self.run)
        self.run.start()
        _active.append(self)
        atexit.register(self._at_exit)

    def submit(
        self, func: Callable[..., Any], resource_specification: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """One call of any function.

        :param resource_specification: may hold "context" (a recipe, or the paper's `[function, args, kwargs]`),
            "priority", "timeout" and "level".
        :raises TypeError: if the function or an argument cannot be pickled, naming it.
        """
        return self.calls.submit(func, resource_specification, args, kwargs)

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
                    tell(cancelled_text(cancelled, cause_of(sys.exc_info()[1])))
        for each in self._open_maps():
            each.release()
        self._maps.clear()
        super().shutdown()

    def _at_exit(self) -> None:
        """The program ends without having left its executor: say what that costs."""
        if self.run is not None and not self._is_copy and (calls := len(self.run.open_calls())):
            tell(cancelled_text(calls, "the program ended; take their results, or leave the executor, before that"))

    @property
    def _is_copy(self) -> bool:
        return self.run is not None and self.run.is_copy

    def forked(self) -> None:
        """Be of no use, in a child, where Parsl's kernel is none either: leaving its block does nothing there."""
        self._lock = threading.Lock()
        self._calls = None
        kernel = DataFlowKernelLoader._dfk
        if kernel is not None and self in kernel.executors.values():
            kernel.config.exit_mode = "skip"
            DataFlowKernelLoader._dfk = None

    def monitor_resources(self) -> bool:
        """A call shares its library process with others: Parsl cannot tell what is whose."""
        return False

    # --- ctxflow's side

    def __enter__(self) -> ContextExecutor:
        """Start, if Parsl has not."""
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

    def _finish(self, run: Run) -> None:
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

    def _while_parsl_waits(self, run: Run) -> None:
        """Have Parsl, where it waits for all tasks, not wait for maps that nobody reads, and say for what it waits."""
        wait = self._parsl_wait
        wait.look()
        if wait.thread is None:
            if kernel := wait.was_interrupted():
                threading.Thread(target=kernel.cleanup, name="ctxflow-cleanup", daemon=False).start()
            return
        for each in self._open_maps():
            if not each.read_elsewhere(wait.thread):
                if wait.leaving:
                    each.cut()
                each.release()
        if not wait.teller.seconds and (calls := len(run.open_calls())):
            wait.teller.say(waiting_text(calls, 0, run.status()))

    @property
    def calls(self) -> Calls:
        """Where calls go in.

        :raises CtxflowError: if the executor is not running.
        """
        if self._is_copy:
            raise CtxflowError(foreign_text(f"the executor {self.label!r}"))
        if self._calls is None:
            raise CtxflowError("the executor is not running: load it with parsl.load, or use it in a with statement")
        return self._calls

    def pool(self) -> Pool:
        """A `concurrent.futures.Executor` over this run, for code that wants one; ending it leaves the run as it is.

        >>> with ContextExecutor(workers=1) as executor, executor.pool() as pool:
        ...     list(pool.map(pow, [1, 2, 3], [2, 2, 2]))
        [1, 4, 9]
        """
        return Pool(self.calls)

    def status(self) -> Status:
        """What is going on, at this moment."""
        return self.calls.run.status()

    def history(self) -> list[tuple[float, int, int]]:
        """Once a second: seconds since the start, workers connected, items done."""
        return list(self.calls.run.samples)

    def add_map(self, open_map: OpenMap) -> Callable[[], None]:
        """Have a map end with the run at the latest; gives what takes that back, waiting for no lock."""
        token = object()
        with self._lock:
            self._maps[token] = weakref.ref(open_map)

        def take_back() -> None:
            self._maps.pop(token, None)

        return take_back

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


def _staging(site: Site) -> list[Staging]:
    """Parsl's staging providers: workers on other machines get copies, those on this one see its disk."""
    if site.engine == "taskvine":
        return [WorkerStaging()]
    others = [provider for provider in default_staging if not isinstance(provider, NoOpFileStaging)]
    return [SharedDiskStaging(), *others]


def active_executor(label: str | None = None) -> tuple[ContextExecutor, Any]:
    """The executor that calls go to now, and Parsl's kernel if it is loaded there.

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
    kernel = DataFlowKernelLoader._dfk
    loaded = kernel is not None and executor in kernel.executors.values()
    return executor, kernel if loaded else None
