"""What a run is told of apps and contexts before they are used, and what the scheduler and the engine hear of it.

What does not live here: the recipes (context.py), and what fits which worker (scheduler/refusal.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from ctxflow.context import Context
from ctxflow.executors.call_files import CallFiles
from ctxflow.executors.engine import ContextPayload
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.refusal import refused
from ctxflow.wording import counted


@dataclasses.dataclass(frozen=True)
class App:
    """How an app's calls are made; its place in the queue is its `AppSpec`.

    :ivar function: the pickled function of a batch app; an "apply" app's functions come with its calls.
    :ivar label: what results call its context, where items have several that may answer them.
    """

    spec: ev.AppSpec
    style: str
    function: bytes = b""
    insert: bool = False
    timeout: float | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class ApplyCall:
    """A single call, pickled when it was submitted. `function` names one that was pickled before, or is ""."""

    function: str
    body: bytes
    files: CallFiles | None = None


class Declared:
    """The apps, contexts and functions that a run was told of; the run locks what adds to them.

    :ivar contexts: by the id that the scheduler knows each by.
    :ivar apps: by id.
    :ivar functions: pickled, by name.
    """

    def __init__(self) -> None:
        self.contexts: dict[str, ContextPayload] = {}
        self.apps: dict[str, App] = {}
        self.functions: dict[str, bytes] = {}
        self._divided: set[str] = set()  # Apps that name alternatives, and these.

    def add_app(self, app: App) -> bool:
        """Make it known, with its function; False if it is already."""
        spec = app.spec
        if spec.id in self.apps:
            return False
        self.apps[spec.id] = app
        if spec.alternative_of:
            self._divided |= {spec.id, spec.alternative_of}
        if app.function:
            self.functions[spec.id] = app.function
        return True

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
        context.environment,
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
