"""Modules of installed packages: which were imported, importing them beforehand, and what the user has in their way."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from types import ModuleType

from ctxflow.host.linux import package_root

_STANDARD = os.path.dirname(os.__file__)
_BUILT_IN = ("built-in", "frozen")


def is_installed(path: str) -> bool:
    """Return whether an entry of `sys.path` is of this Python's standard library, or holds installed packages.

    >>> is_installed("/usr/lib/python3/dist-packages"), is_installed("/home/ann/project")
    (True, False)
    """
    parts = path.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts or path == _STANDARD or _standard(path)


def _standard(place: str) -> bool:
    return place.startswith(_STANDARD + os.sep)


def import_installed(name: str) -> str:
    """Import a module if it is ctxflow's own or of an installed package; return why it is not imported, "" if it is."""
    top = name.partition(".")[0]
    try:
        if top not in sys.modules and top != "ctxflow":
            spec = importlib.util.find_spec(top)
            if spec is None:
                return "it is not installed"
            places = [spec.origin or "", *(spec.submodule_search_locations or [])]
            if spec.origin not in _BUILT_IN and not any(is_installed(os.path.dirname(place)) for place in places):
                return "it is of no installed package"
        importlib.import_module(name)
    except BaseException as error:  # A package may end the process where it does not like it.
        return f"{type(error).__name__}: {error}"
    return ""


def imported_modules(before: Collection[str]) -> list[str]:
    """Return the modules of installed packages, and ctxflow's own, imported since those `before`, in their order.

    >>> before = frozenset(sys.modules) - {"json.tool"}
    >>> import json.tool
    >>> imported_modules(before)
    ['json.tool']
    """
    found = []
    for name, module in list(sys.modules.items()):
        if name not in before and isinstance(module, ModuleType):
            spec = module.__dict__.get("__spec__")
            if getattr(spec, "name", None) != name:  # Not made by importing it.
                continue
            origin = spec.origin or "" if spec is not None else ""
            if name.startswith("ctxflow.") or origin in _BUILT_IN or is_installed(os.path.dirname(origin)):
                found.append(name)
    return found


def shadowing(path: Sequence[str], before: Collection[str]) -> str:
    """Return what is in the way of an imported package for who finds modules by `path`, "" if nothing.

    :param before: the modules that any process of ctxflow's has.
    """
    folders = []
    for entry in path:
        if "site-packages" in entry or "dist-packages" in entry:
            break
        if not is_installed(entry) and entry != package_root() and os.path.isdir(entry):
            folders.append(entry)
    if not folders:
        return ""
    tops = {name for name in list(sys.modules) if "." not in name and name not in before}
    endings = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
    for folder in folders:
        listed: list[str] = []
        with contextlib.suppress(OSError):  # What cannot be listed is not imported from either.
            listed = os.listdir(folder)
        for found in listed:
            if (top := found.partition(".")[0]) in tops:
                place = os.path.join(folder, found)
                own = getattr(sys.modules[top], "__file__", None) or ""
                if (os.path.isdir(place) or place.endswith(endings)) and not own.startswith(place):
                    return place
    return ""
