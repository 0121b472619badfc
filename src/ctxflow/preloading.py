"""What building a context imports, as far as its recipe tells: a zygote (host/zygote.py) imports it beforehand."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ctxflow.host.installed_modules import is_installed
from ctxflow.recipe import Context, inner_recipes

_CONDITIONAL = ("JUMP", "FOR_ITER", "SETUP_FINALLY", "SEND")


def preloaded(recipe: Context) -> list[str] | None:
    """Return the modules that building a recipe is sure to import; None if its library process is to be spawned.

    Those that it names (`preload=`), those of installed packages that its functions refer to, and those that they
    import before anything may turn out either way.

    >>> from ctxflow import context
    >>> @context(preload=["numpy"])
    ... def model(fast):
    ...     import json.decoder
    ...     if fast:
    ...         import zlib
    >>> preloaded(model(True))
    ['numpy', 'json.decoder']
    """
    if recipe.preload is None:
        return None
    found = dict.fromkeys(recipe.preload)
    for each in (recipe, *inner_recipes(recipe)):
        found.update(dict.fromkeys(_referred(each.function)))
    return list(found)


def _referred(function: Callable[..., Any]) -> Iterator[str]:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(module, str) and _of_package(module):
            yield module
    yield from _imported(function.__code__)


def _of_package(module: str) -> bool:
    origin = getattr(sys.modules.get(module), "__file__", None)
    return module.startswith("ctxflow.") or (bool(origin) and is_installed(str(origin)))


def _imported(code: CodeType) -> Iterator[str]:
    """Yield what code imports before its first branch."""
    for instruction in dis.get_instructions(code):
        if any(each in instruction.opname for each in _CONDITIONAL):
            return
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)
