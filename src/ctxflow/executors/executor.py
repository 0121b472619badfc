"""ContextExecutor: the Parsl executor, which is also a context manager of its own for use without Parsl.

With it, how Parsl's staging leaves `File` inputs and outputs to ctxflow, and when Parsl waits for all of its tasks.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from parsl.config import Config
from parsl.data_provider.data_manager import DataManager, default_staging
from parsl.data_provider.file_noop import NoOpFileStaging
from parsl.data_provider.files import File
from parsl.data_provider.staging import Staging
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.dataflow.memoization import id_for_memo
from parsl.executors.base import ParslExecutor
from parsl.monitoring.radios.base import RadioConfig
from parsl.monitoring.radios.udp import UDPRadio
from parsl.utils import RepresentationMixin

from ctxflow.errors import closest
from ctxflow.executors.bare import BareExecutor, Teller, parsl_kernel, waiting_text
from ctxflow.executors.call_files import TAKEN, locate
from ctxflow.executors.contract import current_directory
from ctxflow.executors.live_run import LiveRun
from ctxflow.executors.submission import Memoized
from ctxflow.option_values import refuse
from ctxflow.recipe import Context
from ctxflow.renamed import tell
from ctxflow.scheduler import Limits
from ctxflow.sites import Site, load_site

if TYPE_CHECKING:
    from ctxflow.policies.protocols import (
        BatchingPolicy,
        HealthPolicy,
        PlacementPolicy,
        PreemptionPolicy,
        RoutingPolicy,
        ScalingPolicy,
        SessionPolicy,
    )

_Init = TypeVar("_Init", bound=Callable[..., None])


def _taking_slowdowns(init: _Init) -> _Init:
    """Have the constructor take `slowdowns=` as earlier versions did, with a warning."""

    @functools.wraps(init)
    def call(self: Any, site: str | Site = "local", *args: Any, slowdowns: Any = None, **options: Any) -> None:
        if slowdowns is not None:
            now = 'ContextExecutor(load_site("local", slowdowns=[...]))'
            tell("ContextExecutor(slowdowns=)", f"slowdowns= is an option of the embedded engine now: write {now}")
            site = load_site(site, slowdowns=slowdowns)
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"ContextExecutor got an unexpected keyword argument {unknown[0]!r}: how many workers there are is "
                "workers=, and where they come from is said by a site file, as in ContextExecutor('campus.toml')"
            )
        init(self, site, *args, **options)

    known = inspect.signature(init).parameters
    return cast(_Init, call)


class ContextExecutor(BareExecutor, ParslExecutor, RepresentationMixin):  # type: ignore[misc]
    """Runs apps on workers that build each model context once, keep it, and reuse it for every batch.

    With Parsl it is an executor like any other; on its own it is a context manager.

    :param site: "local", the path of a site file, or a `ctxflow.sites.Site`.
    :param label: Parsl's name for it.
    :param workers: how many workers, if not as many as the site says.
    :param routing: a policy by name, as a table, or as an object; likewise the next five.
    :param level: how much of a context workers keep from call to call, if not as the site says: "pervasive", or for
        measuring "partial" or "none" (see `ctxflow.app_options.Options`).
    :param limits: the failure thresholds of items and contexts.
    :param log_events: whether to keep the event log in the run's directory.
    :param storage_access: Parsl's staging providers, if not ctxflow's own; `[SharedDiskStaging()]` of
        `ctxflow.executors.executor` where TaskVine's workers see this machine's disk under the same paths.
    :param working_dir: where Parsl's staging brings files from the web, as with Parsl's other executors; calls do not
        run there (docs/where-your-code-runs.md).
    :raises ValueError: for a site or policy that makes no sense, saying what to write.

    >>> with ContextExecutor(workers=1) as executor:
    ...     executor.submit(pow, {}, 2, 5).result()
    32
    """

    @_taking_slowdowns
    def __init__(
        self,
        site: str | Site = "local",
        label: str = "ctxflow",
        workers: int | None = None,
        routing: str | dict[str, Any] | RoutingPolicy | None = None,
        batching: str | dict[str, Any] | BatchingPolicy | None = None,
        placement: str | dict[str, Any] | PlacementPolicy | None = None,
        preemption: str | dict[str, Any] | PreemptionPolicy | None = None,
        scaling: str | dict[str, Any] | ScalingPolicy | None = None,
        health: str | dict[str, Any] | HealthPolicy | None = None,
        sessions: str | dict[str, Any] | SessionPolicy | None = None,
        level: Literal["pervasive", "partial", "none"] | None = None,
        limits: Limits | None = None,
        log_events: bool = True,
        working_dir: str | None = None,
        storage_access: Sequence[Any] | None = None,
        remote_monitoring_radio: RadioConfig | None = None,
    ) -> None:
        current_directory()  # Parsl's executors, too, cannot do without one.
        ParslExecutor.__init__(self)
        BareExecutor.__init__(
            self,
            site,
            label,
            workers,
            level,
            limits,
            log_events,
            routing=routing,
            batching=batching,
            placement=placement,
            preemption=preemption,
            scaling=scaling,
            health=health,
            sessions=sessions,
        )
        _check(working_dir, storage_access, remote_monitoring_radio)
        self.working_dir = working_dir
        self.remote_monitoring_radio = remote_monitoring_radio or UDPRadio(address="127.0.0.1")
        self.storage_access = _staging(self.resolved_site) if storage_access is None else storage_access
        self._parsl_wait = ParslWait()

    @classmethod
    def config(cls, site: str | Site = "local", **options: Any) -> Config:
        """Return a Parsl configuration with one such executor.

        Parsl's own log of every state of every task, which costs more than a short call, is off; give
        `initialize_logging=True` to have it. The end of `with parsl.load(...)` waits for all calls, as that of a
        `concurrent.futures` executor does; `exit_mode="cleanup"` cancels them instead. Options of the executor go to
        it, others to `parsl.Config`.

        :raises TypeError: for an option that neither knows.

        >>> ContextExecutor.config(site="local", workers=2, retries=1).retries
        1
        """
        own, rest = _divided(cls, options)
        defaults = {"initialize_logging": False, "strategy": "none", "usage_tracking": 0, "exit_mode": "wait"}
        return Config(executors=[cls(site, **own)], **{**defaults, **rest})

    def _prepare(self, run: LiveRun) -> None:
        run.each_second = functools.partial(self._while_parsl_waits, run)
        brought = any(isinstance(provider, WorkerStaging) for provider in self.storage_access)
        run.files_travel = brought and self.engine.capabilities.stages

    def shutdown(self) -> None:
        """End the run: workers are ended, unanswered calls fail, which is told on stderr."""
        BareExecutor.shutdown(self)
        if not self._is_copy:
            ParslExecutor.shutdown(self)

    def forked(self) -> None:
        """Become unusable in a forked child, as Parsl's kernel is there: leaving its block does nothing."""
        super().forked()
        kernel = parsl_kernel()
        if kernel is not None and self in kernel.executors.values():
            kernel.config.exit_mode = "skip"
            DataFlowKernelLoader._dfk = None

    def monitor_resources(self) -> bool:
        """Return False: a call shares its library process with others, and Parsl cannot tell what is whose."""
        return False

    def _while_parsl_waits(self, run: LiveRun) -> None:
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


def _check(working_dir: Any, storage_access: Any, remote_monitoring_radio: Any) -> None:
    """See that what is Parsl's is what it can be."""
    if working_dir is not None and not isinstance(working_dir, (str, os.PathLike)):
        raise refuse("working_dir", working_dir, "the path of a folder", TypeError)
    ways = "a list of Parsl's ways of staging, such as [HTTPInTaskStaging()]"
    given = () if storage_access is None else storage_access
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise refuse("storage_access", given, ways, TypeError)
    for way in given:
        if not isinstance(way, Staging):
            raise refuse("storage_access", storage_access, ways, TypeError)
    if remote_monitoring_radio is not None and not isinstance(remote_monitoring_radio, RadioConfig):
        wanted = "one of Parsl's, such as UDPRadio(address=...)"
        raise refuse("remote_monitoring_radio", remote_monitoring_radio, wanted, TypeError)


def _divided(executor: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide options into those of an executor and those of Parsl's configuration; TypeError if neither knows one."""
    own, parsls = list(inspect.signature(executor).parameters), list(inspect.signature(Config).parameters)
    for name in options:
        if name not in own and name not in parsls:
            meant = closest(name, [*own, *parsls])
            hint = f": did you mean {meant!r}?" if meant else f": the executor takes {', '.join(own)}"
            raise TypeError(f"neither the executor nor parsl.Config has an option {name!r}{hint}")
    first = {name: value for name, value in options.items() if name in own}
    return first, {name: value for name, value in options.items() if name not in own}


def _staging(site: Site) -> list[Staging]:
    """Return Parsl's staging providers: workers on other machines get copies, those on this one see its disk."""
    if site.capabilities.stages:
        return [WorkerStaging()]
    others = [provider for provider in default_staging if not isinstance(provider, NoOpFileStaging)]
    return [SharedDiskStaging(), *others]


@id_for_memo.register(Context)  # type: ignore[untyped-decorator]
def _context_id(context: Context, output_ref: bool = False) -> bytes:
    """Return what Parsl's memoization takes for a recipe in a resource specification."""
    return context.id.encode()


@id_for_memo.register(Memoized)  # type: ignore[untyped-decorator]
def _submission_id(submission: Memoized, output_ref: bool = False) -> bytes:
    """Return what it takes for a call of one of ctxflow's apps."""
    return submission.memo_id()


class SharedDiskStaging(Staging):  # type: ignore[misc]
    """Leaves `file:` inputs and outputs where they are, under absolute paths."""

    def can_stage_in(self, file: File) -> bool:
        """Return whether it is a local path."""
        return bool(file.scheme == "file")

    def can_stage_out(self, file: File) -> bool:
        """Return whether it is a local path."""
        return bool(file.scheme == "file")

    def stage_in(self, dm: DataManager, executor: str, file: File, parent_fut: Any) -> None:
        """Make the path absolute."""
        file.local_path = os.path.abspath(file.path)

    def stage_out(self, dm: DataManager, executor: str, file: File, app_fu: Any) -> None:
        """Do the same as with inputs."""
        self.stage_in(dm, executor, file, app_fu)


class WorkerStaging(SharedDiskStaging):
    """Has `file:` inputs and outputs travel with the calls, and inputs of the web fetched by the workers.

    It only notes in the file where it will be in the call's folder, and where it is here: calls find it there.
    """

    def can_stage_in(self, file: File) -> bool:
        """Return whether it is a local path or a web address."""
        return file.scheme in TAKEN

    def stage_in(self, dm: DataManager, executor: str, file: File, parent_fut: Any) -> None:
        """Note in the file where it is, here and there."""
        locate(file)


class ParslWait:
    """A wait for all of Parsl's tasks, of which Parsl tells nobody: it is seen from the threads' stacks.

    :ivar thread: who waits, None if nobody does.
    :ivar leaving: whether that is the end of `with parsl.load()`.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.leaving = False
        self.teller = Teller()
        self._kernel: DataFlowKernel | None = None
        self._left = 0

    def look(self) -> None:
        """See who waits now; called once a second."""
        before, self.thread = self.thread, None
        own = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            at: FrameType | None = None if ident == own else frame
            for _ in range(8):
                if at is not None and at.f_code is _WAITS:
                    self.thread, self._left = ident, 0
                    self.leaving = at.f_back is not None and at.f_back.f_code is _LEAVES
                    self._kernel = at.f_locals["self"]
                at = at.f_back if at is not None else None
        if self.thread is not None and before is None:
            self.teller = Teller()

    def was_interrupted(self) -> DataFlowKernel | None:
        """Return the kernel whose end was waited for, if Ctrl-C ended that: Parsl leaves it running then.

        It takes two looks to be sure, since a wait that was over is followed by the end of the kernel.
        """
        kernel = self._kernel
        if self.thread is not None or not self.leaving or kernel is None or kernel.cleanup_called:
            return None
        self._left += 1
        if self._left < 3:
            return None
        self._kernel = None
        return kernel


_WAITS = DataFlowKernel.wait_for_current_tasks.__code__
_LEAVES = DataFlowKernel.__exit__.__code__
