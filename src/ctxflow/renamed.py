"""Public names of earlier versions: they go on working, and each warns once of what it is called now.

A module that is gone is found by a finder at the end of `sys.meta_path` (installed by `ctxflow/__init__`), which is
asked only for what nothing else finds. A name that has left a module which is still there needs two lines at that
module's end, since no finder is asked for it:

    if not TYPE_CHECKING:
        __getattr__ = names_of(__name__)

Needs the standard library alone: it is part of what workers get.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

_Called = TypeVar("_Called", bound=Callable[..., Any])

RENAMED: dict[str, str] = {
    "ctxflow.alternatives": "ctxflow.app_options",
    "ctxflow.batch.status_file": "ctxflow.batch.job_status",
    "ctxflow.executors.files": "ctxflow.executors.executor",
    "ctxflow.executors.run": "ctxflow.executors",
    "ctxflow.executors.simulated:Machine": "ctxflow.executors.simulated.market:SimulatedMachine",
    "ctxflow.host.file_cache": "ctxflow.host.local_files",
    "ctxflow.host.machine_errors": "ctxflow.host.linux",
    "ctxflow.host.processes": "ctxflow.host.linux",
    "ctxflow.host.session_states": "ctxflow.host.call_results",
    "ctxflow.host.session_states:state_path": "ctxflow.host.call_surroundings:state_path",
    "ctxflow.host.vine_messages": "ctxflow.host.messages",
    "ctxflow.mapped": "ctxflow.map_results",
    "ctxflow.mapped:Mapped": "ctxflow.map_results:MapResult",
    "ctxflow.models.parallel": "ctxflow.models.vllm",
    "ctxflow.models.sampling": "ctxflow.models.results",
    "ctxflow.models.shape": "ctxflow.models.model_folder",
    "ctxflow.models.token_batches": "ctxflow.models.transformers",
    "ctxflow.policies.agh.rolling": "ctxflow.policies.agh.solution",
    "ctxflow.policies.batching.fixed": "ctxflow.policies.simple",
    "ctxflow.policies.batching:Coalescing": "ctxflow.policies.simple:Coalescing",
    "ctxflow.policies.batching:Fixed": "ctxflow.policies.simple:Fixed",
    "ctxflow.policies.batching:Opportunistic": "ctxflow.policies.opportunistic:Opportunistic",
    "ctxflow.policies.health:NoQuarantine": "ctxflow.policies.simple:NoQuarantine",
    "ctxflow.policies.placement.live": "ctxflow.policies.agh.placement",
    "ctxflow.policies.placement.rolling": "ctxflow.policies.agh.solution",
    "ctxflow.policies.placement:Everywhere": "ctxflow.policies.simple:Everywhere",
    "ctxflow.policies.placement:Problem": "ctxflow.policies.agh.problem:Problem",
    "ctxflow.policies.placement:solve": "ctxflow.policies.agh.solution:solve",
    "ctxflow.policies.preemption.selection": "ctxflow.policies.flextopo.preemption",
    "ctxflow.policies.preemption:ExactPreemption": "ctxflow.policies.flextopo.preemption:ExactPreemption",
    "ctxflow.policies.preemption:IncrementalMinimalPreemption": (
        "ctxflow.policies.flextopo.preemption:IncrementalMinimalPreemption"
    ),
    "ctxflow.policies.preemption:NoPreemption": "ctxflow.policies.simple:NoPreemption",
    "ctxflow.policies.preemption:StandardPreemption": "ctxflow.policies.flextopo.preemption:StandardPreemption",
    "ctxflow.policies.routing.forecast": "ctxflow.policies.torta.quantities",
    "ctxflow.policies.routing.lookahead": "ctxflow.policies.torta.transport",
    "ctxflow.policies.routing.reactive": "ctxflow.policies.baselines",
    "ctxflow.policies.routing.simple": "ctxflow.policies.simple",
    "ctxflow.policies.routing.torta": "ctxflow.policies.torta.routing",
    "ctxflow.policies.routing.transport": "ctxflow.policies.torta.transport",
    "ctxflow.policies.routing:ContextAffinity": "ctxflow.policies.simple:ContextAffinity",
    "ctxflow.policies.routing:LeastLoaded": "ctxflow.policies.simple:LeastLoaded",
    "ctxflow.policies.routing:RoundRobin": "ctxflow.policies.simple:RoundRobin",
    "ctxflow.policies.scaling.activation": "ctxflow.policies.torta.scaling",
    "ctxflow.policies.scaling.latency": "ctxflow.policies.turboserve.rebalancing",
    "ctxflow.policies.scaling.rebalancing": "ctxflow.policies.turboserve.rebalancing",
    "ctxflow.policies.scaling:ClosedLoop": "ctxflow.policies.turboserve.scaling:ClosedLoop",
    "ctxflow.policies.scaling:FixedWorkers": "ctxflow.policies.simple:FixedWorkers",
    "ctxflow.policies.scaling:QueueProportional": "ctxflow.policies.simple:QueueProportional",
    "ctxflow.policies.sessions:LeastLoadedSessions": "ctxflow.policies.simple:LeastLoadedSessions",
    "ctxflow.policies.sessions:TurboServe": "ctxflow.policies.turboserve.session_placement:TurboServe",
    "ctxflow.policies.torta.forecast": "ctxflow.policies.torta.quantities",
    "ctxflow.policies.torta.scores": "ctxflow.policies.torta.micro",
    "ctxflow.policies.turboserve.assignment": "ctxflow.policies.turboserve.rebalancing",
    "ctxflow.policies.turboserve.profiling": "ctxflow.policies.turboserve.autoscaling",
    "ctxflow.policies.turboserve.profiling:tuned": "ctxflow_papers.turboserve.bounds:tuned",
    "ctxflow.simulator.flextopo": "ctxflow_papers.flextopo",
    "ctxflow.simulator.gh_agh": "ctxflow_papers.gh_agh",
    "ctxflow.simulator.pervasive_context": "ctxflow_papers.pervasive_context",
    "ctxflow.simulator.times": "ctxflow.simulator.pools",
    "ctxflow.simulator.torta": "ctxflow_papers.torta",
    "ctxflow.simulator.turboserve": "ctxflow_papers.turboserve",
    "ctxflow.testing.models": "ctxflow.testing.small_models",
    "ctxflow.testing.sessions": "ctxflow.testing.session_contract",
    "ctxflow.turns": "ctxflow.on_worker",
    "ctxflow.version": "ctxflow.installing",
}
"""Old names -> new ones: of modules and packages (`a.b`), with all below them, and of what is in them (`a.b:Name`).

An entry `a.b:Name` alone, without one for `a.b`, is for what a module that is gone or still there has lost.
"""

_BETWEEN = ("ctxflow", "importlib", "pydantic")  # Packages between a user's line and a warning.
_told: set[str] = set()


class RenamedWarning(DeprecationWarning):
    """Something is used by the name that it had in an earlier version: shown once, unless a filter hides it."""


def tell(old: str, sentence: str) -> None:
    """Warn of an old name, once, at the line outside of ctxflow that uses it; the sentence names the new one."""
    if old in _told:
        return
    _show_by_default()
    warnings.warn(sentence, RenamedWarning, stacklevel=_level_of_user())
    _told.add(old)  # Where warnings are errors, the next use is one too.


def options_renamed(**names: str) -> Callable[[_Called], _Called]:
    """Have a function take options by old names too (old name -> new name), with a warning for each.

    >>> @options_renamed(colour="color")
    ... def lamp(*, color="white"):
    ...     return color
    >>> lamp(color="red")
    'red'
    """

    def decorate(function: _Called) -> _Called:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old, new in names.items():
                if old in options:
                    if new in options:
                        raise TypeError(f"{old}= is the old name of {new}=: give {new}= alone")
                    tell(f"{function.__qualname__}({old}=)", f"{old}= is now called {new}=")
                    options[new] = options.pop(old)
            return function(*args, **options)

        return cast(_Called, call)

    return decorate


def names_of(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that has lost names which `RENAMED` knows."""

    def find(name: str) -> Any:
        new = RENAMED.get(f"{module}:{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        tell(f"{module}:{name}", f"{module}.{name} is now {new.replace(':', '.')}")
        return resolve(new)

    return find


def resolve(new: str) -> Any:
    """Return the module, or what is in one, that a name of `RENAMED` stands for."""
    module, _, name = new.partition(":")
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), found) if name else found


def find_spec(name: str) -> ModuleSpec | None:
    """Return how an old module is imported; None for what `RENAMED` does not know."""
    if _new_module(name) is None and not any(old.startswith((f"{name}.", f"{name}:")) for old in RENAMED):
        return None
    loader: Any = _Loader()  # It has what a loader needs; `importlib.abc` would be imported for its base class alone.
    return ModuleSpec(name, loader, is_package=True)


def _new_module(name: str) -> str | None:
    """Return what a module, or a package that it was in, is called now."""
    package, rest = name, ""
    while package:
        if package in RENAMED:
            new = RENAMED[package] + rest
            try:
                return new if importlib.util.find_spec(new) is not None else None
            except ModuleNotFoundError:  # Of what is now one module.
                return None
        package, dot, last = package.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return None


class _OldModule(ModuleType):
    """Stands for a module that is gone, and has what has taken its place."""

    _new: str | None = None

    def __getattr__(self, name: str) -> Any:
        new = RENAMED.get(f"{self.__name__}:{name}")
        if new is not None:
            if self._new is None:
                tell(f"{self.__name__}:{name}", f"{self.__name__}.{name} is now {new.replace(':', '.')}")
            return resolve(new)
        if self._new is None or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self._new), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._new)) if self._new else []


class _Loader:
    """Makes an old module."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that stands for it."""
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import what has taken its place, and warn with its name, and the new names of what is in it."""
        name = module.__name__
        new = _new_module(name)
        if new is None:
            return
        importlib.import_module(new)
        vars(module)["_new"] = new
        inside = {old.partition(":")[2]: now for old, now in RENAMED.items() if old.startswith(f"{name}:")}
        renamed = [f"{old} is {now.replace(':', '.')}" for old, now in inside.items()]
        more = f" ({', '.join(renamed)})" if renamed else ""
        tell(name, f"the module {name} is now {new}{more}")


def _show_by_default() -> None:
    """Have these warnings shown where nobody has said anything of them: Python hides others of their kind."""
    if sys.warnoptions:  # By -W or PYTHONWARNINGS.
        return
    for action, message, category, module, _ in warnings.filters:
        if issubclass(RenamedWarning, category) and message is None and module is None:
            if action == "ignore" and category is DeprecationWarning:
                warnings.simplefilter("default", RenamedWarning)
            return


def _level_of_user() -> int:
    """Return how far the line of a person's lies below the caller of this function, as `warnings` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # Which `warnings` passes over.
    return level
