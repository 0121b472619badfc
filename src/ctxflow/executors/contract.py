"""The contract between a run and its engine: what each may ask of the other.

One contract test suite (ctxflow.testing.engines) runs against all engines.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ctxflow.causes import ShortfallCause
from ctxflow.errors import CtxflowError
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.events import PERVASIVE, Event, TierSpec
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import Capabilities


@dataclasses.dataclass(frozen=True)
class ContextPayload:
    """What an engine needs to build a context on a worker.

    :ivar recipe: what the library process opens; empty for the plain library process.
    :ivar files: parameter name -> (path on this machine, digest of the content).
    :ivar timeout: seconds that building may take.
    :ivar memory: bytes that the library process may use.
    :ivar level: one of `events.LEVELS`. At "none" `Stage` brings the files anew, sharing none with other contexts
        or workers, and `Unload(files=True)` removes them; at other levels they stay, and the context may be loaded
        again without another `Stage`.
    :ivar concurrency: the most calls that its library process runs at a time; None if nobody said.
    :ivar preload: modules that building it imports, as far as is known beforehand; None if its library process is to be
        spawned, not forked from a zygote.
    :ivar park: whether it may be parked, if it can be.
    :ivar artifacts: what the recipe names of what building it makes (name -> variable or folder); None to keep none.
    """

    id: str
    name: str
    recipe: bytes
    files: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]
    timeout: float | None
    memory: int | None
    level: str = PERVASIVE
    concurrency: int | None = None
    preload: Sequence[str] | None = ()
    park: bool = True
    artifacts: Mapping[str, str] | None = None


class Pickled:
    """A function or constants, pickled: a library process is sent each once.

    :ivar name: no other has it, or ever will, so that it can be forgotten.
    """

    __slots__ = ("__weakref__", "body", "name")

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.body = body


@dataclasses.dataclass(frozen=True)
class Input:
    """A file that a call takes: its path in the call's folder, and its path here or its web address."""

    name: str
    source: str


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """A file that a call makes.

    :ivar name: its path in the call's folder.
    :ivar target: its path here.
    :ivar append: whether it is added to what is there.
    :ivar required: whether the call has to make it; else it is what a call prints, which comes also where it fails.
    """

    name: str
    target: str
    append: bool = False
    required: bool = True


@dataclasses.dataclass
class CallFiles:
    """All files of a call; `settled` once its outputs are here, by the first of several runs of it that ends."""

    inputs: tuple[Input, ...]
    outputs: tuple[OutputFile, ...] = ()
    settled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallPayload:
    """What an engine needs to run a batch.

    :ivar style: "batch" (the function gets lists, one result per item), "item" (an `async` function that gets the
        values of one item, and answers while others are in flight; the body is their tuple, the result a list of the
        one), "apply" (any arguments, one result) or "step" (the function makes chunks of sessions; the body is entries
        of host/call_results.py, and the library process has to be told the folder of the worker's cache where frozen
        states are, which `Carry` moves files between).
    :ivar function: None if it is in the body.
    :ivar insert: whether an "apply" function gets the built context as its first argument.
    :ivar body: the pickled inputs.
    :ivar files: those that are to be in the call's folder, and those that it makes there; only where workers have
        folders for calls.
    :ivar constants: the named arguments that the function gets besides, None if there are none.
    :ivar threads: of a call that overlaps others as an item does, but on a thread of the library process: how many such
        threads the context bears. 0 for items, and for calls that run one after the other.
    """

    style: str
    function: Pickled | None
    insert: bool
    timeout: float | None
    body: bytes
    files: CallFiles | None = None
    constants: Pickled | None = None
    threads: int = 0

    @property
    def overlaps(self) -> bool:
        """Whether the call runs beside others of its library process, which sees to its timeout itself."""
        return self.style == "item" or self.threads > 1

    def new_parts(self, known: Collection[str]) -> Sequence[Pickled]:
        """Return what a library process has to be sent before the call, of which it has `known`, by name."""
        return [part for part in (self.function, self.constants) if part is not None and part.name not in known]


def threads_for(context: ContextPayload, files: CallFiles | None = None) -> int:
    """Return the `CallPayload.threads` of a batch, or single call, of a context.

    What takes or makes files runs by itself: it has the folder of its library process to itself.
    """
    bears = context.concurrency or 1
    return bears if bears > 1 and files is None else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Payloads:
    """What goes with the commands of one `Engine.execute`: `Run` and `Step`, by attempt; others, by context."""

    calls: Mapping[int, CallPayload] = dataclasses.field(default_factory=dict)
    contexts: Mapping[str, ContextPayload] = dataclasses.field(default_factory=dict)


NO_PAYLOADS = Payloads()


class RunServices(Protocol):
    """What a run offers its engine."""

    @property
    def id(self) -> str:
        """The run's id."""

    @property
    def directory(self) -> str:
        """Where the run keeps its files."""

    def clock(self) -> float:
        """Return the seconds since the run began."""


class EngineFailed(CtxflowError):
    """Raised by `poll` when no work will get done, saying why, and what to do: all calls fail, also later ones."""


class LimitReached(EngineFailed):
    """A limit of GPU-hours or cost is reached, all workers were given back, and something is not answered."""

    exit_status = 4


class Engine(Protocol):
    """Carries out commands and reports events.

    `execute` may be called from any thread, also while another is in `poll`; the run never calls `execute`
    twice at a time.
    """

    capabilities: Capabilities
    """What it can do, and what the run therefore does for it."""

    def start(self, run: RunServices) -> None:
        """Get ready; workers come with `Acquire`."""

    def execute(self, commands: Sequence[Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands, in order, without waiting for them to take effect.

        :param payloads: what those of them need that build contexts and run calls.
        """

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened; wait up to `timeout` seconds for something to.

        :raises EngineFailed: if no work will ever get done.
        """

    def forget(self, functions: Collection[str]) -> None:
        """Have workers keep these functions and constants no more, by name: no call will need them.

        Called as `execute` is. A call that was given before may still run, and be answered for nobody.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called from a finalizer, on a thread that is inside the engine."""

    def stop(self) -> None:
        """End all workers; nothing is left behind. What is called after it does nothing."""


class SiteEngine(Engine, Protocol):
    """An engine that a site can select by name: what an entry point in the group `ctxflow.engines` leads to.

    Its own keys, in the site file's table `[NAME]`, are checked by the class attribute `Options`, a model of pydantic's
    (see `ctxflow.sites.engine_kinds.EngineOptions`); without one it has none.
    """

    @classmethod
    def from_site(cls, site: Site) -> SiteEngine:
        """Make the engine of a site: of `site.options`, its own keys, and of those that are for all engines.

        :raises ValueError: if it cannot be made so, saying what to write.
        """

    def tiers(self) -> Sequence[TierSpec]:
        """Return the kinds of workers that it can have, one at least: what `Acquire` may name."""


@runtime_checkable
class Explains(Protocol):
    """An engine that knows why a tier has fewer workers than were asked for."""

    def causes(self) -> Sequence[ShortfallCause]:
        """Return why tiers have fewer workers; none of those that have them."""


@runtime_checkable
class KnowsJobs(Protocol):
    """An engine that knows which jobs its workers are, and where what they say is kept."""

    def job_of(self, worker: str) -> tuple[str | None, str]:
        """Return the job of a worker in its batch system, if any, and the path of its log, "" if there is none here."""


@runtime_checkable
class Bounded(Protocol):
    """An engine whose workers are bounded by more than what its tiers say."""

    def maxima(self) -> Mapping[str, int]:
        """Return for each tier how many workers there may be now, where that is less than the site says."""

    def limits(self) -> list[dict[str, Any]]:
        """Return what is used of each limit (see `ctxflow.factory.limits.standing`)."""


def current_directory() -> str:
    """Return the directory where calls on this machine are to run.

    :raises CtxflowError: if it was removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise CtxflowError(
            f"calls run in the directory where the executor is started, which is not there any more ({error}): "
            "change to one that is"
        ) from error
