"""What a run is told of apps and contexts before they are used, and what the scheduler and the engine hear of it.

What does not live here: the recipes (context.py), what fits which worker (scheduler/refusal.py), and when it is
forgotten (retirement.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Collection, Iterable

from ctxflow.executors.call_files import CallFiles
from ctxflow.executors.engine import ContextPayload, Pickled
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.context_moves import refused
from ctxflow.wording import counted


class PickledParts:
    """What is pickled for calls and held by somebody, by name.

    :ivar gone: the names of those that nobody holds any more, until they are told.
    """

    def __init__(self) -> None:
        self._held: dict[str, weakref.ref[Pickled]] = {}
        self._names = itertools.count(1)
        self.gone: list[str] = []

    def add(self, body: bytes) -> Pickled:
        """Another one."""
        part = Pickled(f"part-{next(self._names)}", body)
        self._held[part.name] = weakref.ref(part, functools.partial(self._drop, part.name))
        return part

    def _drop(self, name: str, _: object) -> None:
        del self._held[name]
        self.gone.append(name)


@dataclasses.dataclass(frozen=True)
class App:
    """How an app's calls are made; its place in the queue is its `AppSpec`.

    :ivar function: of a batch app, or one of sessions; an "apply" app's functions come with its calls.
    :ivar constants: the named arguments that all its calls have.
    :ivar label: what results call its context, where items have several that may answer them.
    """

    spec: ev.AppSpec
    style: str
    function: Pickled | None = None
    insert: bool = False
    timeout: float | None = None
    label: str = ""
    constants: Pickled | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class DeclaredContext:
    """A context as the scheduler and as the engine know it."""

    spec: ev.ContextSpec
    payload: ContextPayload


@dataclasses.dataclass(frozen=True, eq=False)
class Declaration:
    """An app with its alternatives and their contexts: all that it takes to declare it again, if it was forgotten."""

    apps: tuple[App, ...]
    contexts: tuple[DeclaredContext, ...]

    @functools.cached_property
    def id(self) -> str:
        """What the scheduler knows the app by."""
        return self.apps[0].spec.id

    @property
    def bytes(self) -> int:
        """Of its constants, which nothing else may hold."""
        constants = self.apps[0].constants
        return 0 if constants is None else len(constants.body)


@dataclasses.dataclass(frozen=True)
class ApplyCall:
    """A single call, pickled when it was submitted.

    :ivar function: if it was pickled before; else it is in the body.
    """

    function: Pickled | None
    body: bytes
    files: CallFiles | None = None


class Declared:
    """The apps and contexts that a run was told of and did not forget; the run locks what changes them.

    :ivar contexts: by the id that the scheduler knows each by.
    :ivar apps: by id; also alternatives.
    :ivar parts: functions and constants.
    """

    def __init__(self) -> None:
        self.contexts: dict[str, ContextPayload] = {}
        self.apps: dict[str, App] = {}
        self.parts = PickledParts()
        self._divided: set[str] = set()  # Apps that name alternatives, and these.

    def add_app(self, app: App) -> bool:
        """Make it known; False if it is already."""
        spec = app.spec
        if spec.id in self.apps:
            return False
        self.apps[spec.id] = app
        if spec.alternative_of:
            self._divided |= {spec.id, spec.alternative_of}
        return True

    def keep(self, apps: Collection[str], contexts: Collection[str]) -> None:
        """Forget all but these."""
        self.apps = {name: app for name, app in self.apps.items() if name in apps}
        for name in [name for name in self.contexts if name not in contexts]:
            del self.contexts[name]
        self._divided.intersection_update(apps)

    def answering(self, app: str) -> str | None:
        """The name of the context that answers an app's items, if these have several that may answer them."""
        return self.apps[app].label if app in self._divided else None


def check(spec: ev.ContextSpec, tiers: Collection[ev.TierSpec], reserves: bool) -> None:
    """See that workers may have the GPUs that a context needs.

    :param reserves: whether the preemption policy makes room on machines for workers with more GPUs than others have.
    :raises ValueError: if there are too few, or all of them have too little memory.
    """
    refusal = refused(spec, tiers, reserves)
    if refusal is not None:
        raise ValueError(refusal)
    _check_gpu_memory(spec, tiers)


def _check_gpu_memory(spec: ev.ContextSpec, tiers: Iterable[ev.TierSpec]) -> None:
    """See that some tier may have the memory on each GPU that a context declares.

    :raises ValueError: if the site says of all of them that they have not.
    """
    if not spec.gpus or spec.gpu_memory is None:
        return
    found = [tier.gpu_memory for tier in tiers if max(tier.gpus, tier.machine_gpus) >= spec.gpus]
    known = [each for each in found if each is not None]
    if len(known) == len(found) and max(known, default=0) < spec.gpu_memory:
        raise ValueError(
            f"the context {spec.name} needs gpu_memory={spec.gpu_memory / 1e9:g} GB on each of its "
            f"{counted(spec.gpus, 'GPU')}, and the most here is {max(known, default=0) / 1e9:g} GB "
            "(gpu_memory_gb of the site's tiers): give a smaller model or precision, more GPUs to share it, or a tier "
            "with larger ones"
        )


def context_id(context: Context | None, level: str) -> str:
    """What the scheduler knows a context by: apps that have the recipe at different levels do not share it."""
    if context is None:
        return ev.PLAIN
    return context.id if level == ev.PERVASIVE else f"{context.id}-{level}"


def payload_of(context: Context | None, level: str) -> ContextPayload:
    """What the engine builds: the pickled recipe, and the digests of its files.

    :raises OSError: if a file cannot be read.
    """
    if context is None:
        return ContextPayload(ev.PLAIN, "", b"", {}, {}, None, None)
    from ctxflow.contents import digest_path

    files = {name: (path, digest_path(path)) for name, path in context.files.items()}
    return ContextPayload(
        context_id(context, level),
        context.name,
        context.dumps(),
        files,
        context.env,
        context.load_timeout,
        context.memory,
        level,
    )


def spec_of(context: Context | None, level: str) -> ev.ContextSpec:
    """What the scheduler knows of it."""
    if context is None:
        return ev.ContextSpec(ev.PLAIN, "")
    files, memory = bool(context.files), context.memory
    name = context_id(context, level)
    return ev.ContextSpec(name, context.name, files, context.gpus, memory, context.gpu_memory, level, context.affinity)
