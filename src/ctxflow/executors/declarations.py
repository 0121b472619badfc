"""The apps and contexts that a run knows before they are used, and when it forgets them.

An app without items and sessions for a minute is retired, sooner if many others were used since; a context a minute
after the last of its apps, once no worker keeps it. What is used again is declared anew by its `Declaration`. Of the
user's modules, those that workers elsewhere lack travel with what is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import itertools
import operator
import os
import site
import sys
import sysconfig
import weakref
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from ctxflow.digest import all_code, is_library_module
from ctxflow.errors import counted
from ctxflow.executors.contract import CallFiles, ContextPayload, Pickled
from ctxflow.pickling import CARRIED, functions_in
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.context_moves import app_is_used, context_is_used, refused
from ctxflow.scheduler.run_state import RunState


class PickledParts:
    """What is pickled for calls and held by somebody, by name; `gone`, what workers are to forget."""

    def __init__(self) -> None:
        self._held: dict[str, weakref.ref[Pickled]] = {}
        self._names = itertools.count(1)
        self.gone: list[str] = []

    def add(self, body: bytes) -> Pickled:
        """Add a part, under a name that no other has."""
        part = Pickled(f"part-{next(self._names)}", body)
        self._held[part.name] = weakref.ref(part, functools.partial(self._drop, part.name))
        return part

    def _drop(self, name: str, _: object) -> None:
        del self._held[name]
        self.gone.append(name)


@dataclasses.dataclass(frozen=True)
class DeclaredApp:
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

    apps: tuple[DeclaredApp, ...]
    contexts: tuple[DeclaredContext, ...]

    @functools.cached_property
    def id(self) -> str:
        """Return what the scheduler knows the app by."""
        return self.apps[0].spec.id

    @property
    def bytes(self) -> int:
        """Of its constants, which nothing else may hold."""
        constants = self.apps[0].constants
        return 0 if constants is None else len(constants.body)


@dataclasses.dataclass(frozen=True)
class ApplyCall:
    """A single call, pickled when it was submitted; its function is in the body unless it was pickled before."""

    function: Pickled | None
    body: bytes
    files: CallFiles | None = None


class Declared:
    """The apps (alternatives too) and contexts that a run knows, by id; the run locks what changes them.

    :ivar labels: of apps with alternatives, and of these, what results call the context that answered them.
    """

    def __init__(self) -> None:
        self.contexts: dict[str, ContextPayload] = {}
        self.apps: dict[str, DeclaredApp] = {}
        self.parts = PickledParts()
        self.labels: dict[str, str] = {}

    def add_app(self, app: DeclaredApp) -> bool:
        """Make it known; False if it is already."""
        spec = app.spec
        if spec.id in self.apps:
            return False
        self.apps[spec.id] = app
        if spec.alternative_of:
            self.labels[spec.id] = app.label
            self.labels[spec.alternative_of] = self.apps[spec.alternative_of].label
        return True

    def keep(self, apps: Collection[str], contexts: Collection[str]) -> None:
        """Forget all but these."""
        self.apps = {name: app for name, app in self.apps.items() if name in apps}
        for name in [name for name in self.contexts if name not in contexts]:
            del self.contexts[name]
        self.labels = {name: label for name, label in self.labels.items() if name in apps}


def check(spec: ev.ContextSpec, tiers: Collection[ev.TierSpec], reserves: bool) -> None:
    """See that workers may have the GPUs that a context needs.

    :param reserves: whether the preemption policy makes room on machines for workers with more GPUs than others have.
    :raises ValueError: if there are too few, or all of them have too little memory.
    """
    refusal = refused(spec, tiers, reserves)
    if refusal is not None:
        raise ValueError(refusal)
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
    """Return what the scheduler knows a context by: apps that have the recipe at different levels do not share it."""
    if context is None:
        return ev.PLAIN
    return context.id if level == ev.PERVASIVE else f"{context.id}-{level}"


def payload_of(context: Context | None, level: str) -> ContextPayload:
    """Return what the engine builds: the pickled recipe, and the digests of its files.

    :raises OSError: if a file cannot be read.
    """
    if context is None:
        return ContextPayload(ev.PLAIN, "", b"", {}, {}, None, None)
    from ctxflow.files import digest_path
    from ctxflow.preloading import preloaded
    from ctxflow.topology.machine import GPU_MEMORY

    files = {name: (path, digest_path(path)) for name, path in context.files.items()}
    declared = {} if context.gpu_memory is None else {GPU_MEMORY: str(context.gpu_memory)}
    return ContextPayload(
        context_id(context, level),
        context.name,
        context.dumps(),
        files,
        {**declared, **context.env},
        context.load_timeout,
        context.memory,
        level,
        context.concurrency,
        preload=preloaded(context),
        park=context.park,
        # Levels that build again and again measure what that costs.
        artifacts=context.artifacts if level == ev.PERVASIVE else None,
    )


def spec_of(context: Context | None, level: str) -> ev.ContextSpec:
    """Return what the scheduler knows of it."""
    if context is None:
        return ev.ContextSpec(ev.PLAIN, "")
    files, memory = bool(context.files), context.memory
    name = context_id(context, level)
    needs = context.gpus, memory, context.gpu_memory, level, context.affinity, context.concurrency
    return ev.ContextSpec(name, context.name, files, *needs)


IDLE_SECONDS = 60.0
MOST_IDLE = 500
"""How many apps, and contexts, are remembered that nobody uses."""
MOST_BYTES = 64 << 20
"""How many bytes of constants are remembered that nobody uses."""


@dataclasses.dataclass(slots=True)
class AppUse:
    """When an app or a context was used last, and the app's declaration."""

    at: float
    declaration: Declaration | None = None

    @property
    def bytes(self) -> int:
        """How much the app's constants hold."""
        return 0 if self.declaration is None else self.declaration.bytes


class Retirement:
    """Notes what is used; its owner locks.

    All are looked through only when there are many more than after the last look, so that a declaration costs the same
    however many there are.
    """

    def __init__(self) -> None:
        self.apps: dict[str, AppUse] = {}
        self._contexts: dict[str, AppUse] = {}
        self._look_at = MOST_IDLE
        self._new_bytes = 0

    def app(self, declaration: Declaration, now: float) -> None:
        """Note that an app is declared."""
        self.apps[declaration.id] = AppUse(now, declaration)
        self._new_bytes += declaration.bytes

    def context(self, context: str, now: float) -> None:
        """Note that a context is declared."""
        self._contexts[context] = AppUse(now)

    def held(self, app: str) -> Declaration:
        """Return an app as it was declared, so that who may use it again need not hold that."""
        declaration = self.apps[app].declaration
        assert declaration is not None
        return declaration

    @property
    def due(self) -> bool:
        """Whether there are so many that some should go now."""
        return len(self.apps) + len(self._contexts) > self._look_at or self._new_bytes > MOST_BYTES

    def retired(self, state: RunState, now: float) -> ev.Retired | None:
        """Return what is to be forgotten; `forget` follows once the scheduler has."""
        idle = [name for name in self.apps if not app_is_used(state, state.apps[name])]
        apps = _overdue(self.apps, idle, now)
        gone = set(apps)
        for name in gone:  # Its context is used as long as it is.
            context = self._contexts.get(state.apps[name].context)
            if context is not None:
                context.at = max(context.at, self.apps[name].at)
        free = [name for name in self._contexts if not context_is_used(state, name, gone)]
        contexts = _overdue(self._contexts, free, now)
        left = len(self.apps) + len(self._contexts) - len(apps) - len(contexts)
        self._look_at = left + max(MOST_IDLE, left // 4)
        self._new_bytes = 0
        return ev.Retired(now, apps, contexts) if apps or contexts else None

    def forget(self, state: RunState) -> None:
        """Forget what the scheduler does not know any more."""
        self.apps = {name: use for name, use in self.apps.items() if name in state.apps}
        self._contexts = {name: use for name, use in self._contexts.items() if name in state.contexts}


def _overdue(known: dict[str, AppUse], idle: list[str], now: float) -> list[str]:
    """Return those of the idle that are so for long, and of the others all but the last used."""
    idle.sort(key=lambda name: -known[name].at)
    kept = size = 0
    for name in idle:
        size += known[name].bytes
        if known[name].at + IDLE_SECONDS <= now or kept >= MOST_IDLE or (kept and size > MOST_BYTES):
            break
        kept += 1
    return idle[kept:]


_seen = 0


def carry_user_modules() -> None:
    """Have cloudpickle send what a function uses of the user's modules along with it.

    The user's modules are those imported from files that are neither Python's own, nor installed packages, nor
    ctxflow. Cheap where nothing was imported since the last time.
    """
    global _seen  # noqa: PLW0603 - cloudpickle's own register is global too
    if len(sys.modules) == _seen:
        return
    _seen = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name not in ("__main__", "__mp_main__") and is_users_own(module):
            cloudpickle.register_pickle_by_value(module)


class UserModules:
    """The user's modules as a run met them: workers that share the disk import them by name, and keep what they have.

    A module whose code changes in this program travels with functions from then on, and so do those that use it. Code
    are functions, classes and constants. What the user's functions rebind while they run is state, and no code.
    """

    _all: ClassVar[weakref.WeakSet[UserModules]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._met: dict[str, tuple[ModuleType, object, list[_Names]]] = {}
        self._seen: set[str] = set()
        self._state: set[tuple[str, str]] = set()
        self._changed: set[str] = set()
        self._all.add(self)

    def look(self) -> None:
        """Have those travel that have changed since they were met."""
        changed = {name for name in list(self._met) if name not in self._changed and self._has_changed(name)}
        new: list[ModuleType] = []
        if len(sys.modules) != len(self._seen):
            new = [module for name, module in list(sys.modules.items()) if name not in self._seen]
            new = [module for module in new if _may_change(module)]
            self._seen = set(sys.modules)
            for module in new:
                self._state.update(_rebound(module))
            for module in new:
                self._meet(module)
        if changed or (new and self._changed):
            self._carry(changed | self._changed)

    def _meet(self, module: ModuleType) -> None:
        values = list(vars(module).values())
        classes = [each for each in values if isinstance(each, type) and each.__module__ == module.__name__]
        names = [_Names(module, self._state), *(_Names(each, self._state) for each in classes)]
        self._met[module.__name__] = module, module.__spec__, names

    def _has_changed(self, name: str) -> bool:
        module, spec, names = self._met[name]
        if sys.modules.get(name, module) is not module or module.__spec__ is not spec:  # It was loaded again.
            return True
        others = [each for each in names if each.differ()]
        if any(each.mean_other_code(self._state) for each in others):
            return True
        if others:
            self._meet(module)
        return False

    def _carry(self, changed: set[str]) -> None:
        """Have changed modules travel, and those that use one."""
        elsewhere = cloudpickle.list_registry_pickle_by_value() - CARRIED.keys()
        uses = {name: _used(met[0]) for name, met in list(self._met.items()) if name not in changed}
        while users := {name for name, used in uses.items() if name not in changed and used & changed}:
            changed |= users
        self._changed = changed
        for name in changed - elsewhere:
            if (module := sys.modules.get(name)) is not None:
                cloudpickle.register_pickle_by_value(module)
                CARRIED[name] = module

    def close(self) -> None:
        """Have them travel no longer, unless they do for another run."""
        own, self._changed = self._changed, set()
        for name in own.difference(*(each._changed for each in list(self._all))):
            with contextlib.suppress(ValueError, KeyError):  # Somebody else saw to that, or sees to it.
                cloudpickle.unregister_pickle_by_value(CARRIED.pop(name))


def _may_change(module: ModuleType) -> bool:
    name, path = getattr(module, "__name__", None), getattr(module, "__file__", None)
    if name in (None, "__main__", "__mp_main__") or not isinstance(path, str):
        return False
    if "-packages" in path or path.startswith(_NOT_THE_USERS):  # Most are known by that, without a look at the disk.
        return False
    return is_users_own(module) and sys.modules.get(module.__name__) is module and not is_library_module(name)


_SCALARS = (type(None), bool, int, float, str, bytes)
_CONSTANTS = (*_SCALARS, tuple, frozenset, list, dict, set, ModuleType)
_CODE = (FunctionType, type, staticmethod, classmethod, property)


class _Names:
    """The names of a module or of a class that mean code."""

    def __init__(self, owner: ModuleType | type, state: Collection[tuple[str, str]]) -> None:
        self._names = vars(owner)
        self._size = len(self._names)
        self._module = owner.__module__ if isinstance(owner, type) else owner.__name__
        self._dot = "." * isinstance(owner, type)
        self._meant = {name: value for name, value in list(self._names.items()) if self._is_code(name, value, state)}

    def _is_code(self, name: str, value: object, state: Collection[tuple[str, str]]) -> bool:
        is_code = isinstance(value, _CODE) or (isinstance(value, _CONSTANTS) and not name.startswith("__"))
        return is_code and (self._module, self._dot + name) not in state

    def differ(self) -> bool:
        """Return whether a name may mean something else: cheap enough for every call."""
        known = self._meant
        return len(self._names) != self._size or not all(map(operator.is_, map(self._names.get, known), known.values()))

    def mean_other_code(self, state: Collection[tuple[str, str]]) -> bool:
        """Return whether one means other code."""
        items = list(self._names.items())
        return any(self._is_code(name, value, state) and self._is_other(name, value) for name, value in items)

    def _is_other(self, name: str, value: Any) -> bool:
        if name not in self._meant:  # Submodules and what is imported late come so.
            own = getattr(value, "__module__", self._module) in (self._module, "__main__")
            return own and not isinstance(value, ModuleType)
        known = self._meant[name]
        if isinstance(known, FunctionType) and isinstance(value, FunctionType):  # Decorators may make another of it.
            return known.__code__ is not value.__code__
        same = known is value or (isinstance(value, _SCALARS) and type(known) is type(value) and known == value)
        return not same


_GLOBALS = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
_BINDING = {*_GLOBALS, dis.opmap["STORE_ATTR"]}


def _code_in(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of the functions that a module defines."""
    for function in itertools.chain.from_iterable(map(functions_in, list(vars(module).values()))):
        if function.__globals__ is vars(module):
            yield from all_code(function.__code__)


def _rebound(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield what a module's functions bind when they run: names of modules, and with a dot those of attributes."""
    for code in _code_in(module):
        steps = code.co_code
        if _BINDING.isdisjoint(steps[::2]):
            continue
        used = [each for name in code.co_names if isinstance(each := vars(module).get(name), ModuleType)]
        for operation, argument in zip(steps[::2], steps[1::2], strict=True):
            if operation in _GLOBALS:
                yield module.__name__, code.co_names[argument]
            elif operation in _BINDING:
                name = code.co_names[argument]
                yield module.__name__, f".{name}"
                yield from ((each.__name__, name) for each in used)


def _used(module: ModuleType) -> set[str]:
    """Return the names of the modules of which a module's functions and classes use something."""
    names = {name for code in _code_in(module) for name in code.co_names}
    used, within = set[str](), [module]
    for place in within:
        for value in [vars(place)[name] for name in names & vars(place).keys()]:
            used.add(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "")
            if isinstance(value, ModuleType) and value not in within and not is_library_module(value.__name__):
                within.append(value)
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    return used.union(base.__module__ for each in classes for base in each.__mro__)


def is_users_own(module: ModuleType) -> bool:
    """Return whether a module is the user's.

    >>> is_users_own(os), is_users_own(cloudpickle)
    (False, False)
    """
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py") or not isinstance(module, ModuleType):
        return False
    return not os.path.realpath(path).startswith(_NOT_THE_USERS)


def _prefixes() -> tuple[str, ...]:
    paths = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    paths |= {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)} - {"/usr", "/", "/usr/local"}
    paths.add("/usr/lib/python3")  # Debian's packages.
    paths.add(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))  # ctxflow, which every worker has.
    return tuple(os.path.realpath(path) + os.sep for path in paths)


_NOT_THE_USERS = _prefixes()
