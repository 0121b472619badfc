"""What results depend on beside their inputs: an app's code, its contexts' recipes, and the contents of their models.

A map with `resume=` and `ctxflow batch` keep it beside their results, and compare it before adding to them. Code is
compared as Python compiled it: comments, blank lines and line numbers do not count, helpers of the user's own do,
wherever they are; installed libraries count by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxflow.app_options import MappedApp, recipes_of
from ctxflow.digest import digest, is_library_module
from ctxflow.files import Tell, digest_files
from ctxflow.recipe import Context, inner_recipes

_LOG = logging.getLogger("ctxflow")
_NAMED = 3  # Files that a message names.
_ABSENT = "not here"


@dataclasses.dataclass(frozen=True)
class Identity:
    """What results depend on; plain data, so that it can be kept as JSON.

    :ivar python: the Python that compiled the code: code of different ones cannot be compared.
    :ivar code: digests of the function and of the contexts' recipes, by what a person calls them.
    :ivar constants: digests of the constants, by name.
    :ivar contents: for each model and each file of a context the digests of its files; none for what is not on this
        machine, which cannot be compared.
    """

    python: str = ""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    contents: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain data, which `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Identity:
        """Return the identity that `as_json` was given of."""
        return cls(**{each.name: kept[each.name] for each in dataclasses.fields(cls) if each.name in kept})

    def knowing(self, earlier: Identity) -> Identity:
        """Return this identity with what was known earlier of models that are not on this machine now."""
        known = {name: files or earlier.contents.get(name, {}) for name, files in self.contents.items()}
        return dataclasses.replace(self, contents=known)


def identity_of(app: MappedApp, constants: Mapping[str, Any], tell: Tell | None = None) -> Identity:
    """Return what an app's results depend on beside the items.

    :param tell: called with the progress of reading large models; see `ctxflow.files.Tell`.
    :raises TypeError: for code or constants that cannot be identified, such as an open file, saying where it is.
    :raises FileNotFoundError: if a context's file is not there.
    """
    code = {_called(app.function): digest(app.function)}
    contents: dict[str, Mapping[str, str]] = {}
    for number, recipe in enumerate(recipes_of(app)):
        name = f"the context {recipe.name}" + (f" (alternative {number})" if number else "")
        code[name] = digest((recipe.function, recipe.args, dict(recipe.kwargs), dict(recipe.env)))
        for path in recipe.files.values():
            contents[path] = digest_files(path, tell)
        for model in _models(recipe):
            contents[model] = contents_of_model(model, tell)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Identity(python, code, {name: digest(value) for name, value in sorted(constants.items())}, contents)


def contents_of_model(model: str, tell: Tell | None = None) -> dict[str, str]:
    """Return what distinguishes a model from others of its name; nothing if it is not on this machine.

    :param model: a folder, whose files count, or a file; `package:NAME`, whose version does too; or a hub id, of which
        this machine's cache has a revision.
    """
    from ctxflow.models.model_folder import carrier_of, locate_model, revision_of
    from ctxflow.models.results import ModelNotFoundError

    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_file():
        return digest_files(folder, tell)
    package = model.removeprefix("package:") if model.startswith("package:") else carrier_of(model)
    if package is not None:
        try:
            found = digest_files(locate_model(f"package:{package}"), tell)
        except ModelNotFoundError:
            return {}
        return {**found, **_version(package.partition("/")[0])}
    revision = revision_of(model)
    return {} if revision is None else {"revision": revision}


def changes(known: Identity, now: Identity) -> list[str]:
    """Return what has changed, in words; nothing if results of both may stand side by side."""
    found = []
    for name, files in now.contents.items():
        had = known.contents.get(name)
        if had and files and had != files:
            differ = [each for each in sorted({*had, *files}) if had.get(each) != files.get(each)]
            more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            found.append(f"the contents of {name} have changed: {', '.join(differ[:_NAMED])}{more}")
    if known.code != now.code and known.python != now.python:
        found.append(f"the code was compiled by Python {known.python}, and this is {now.python}, which tells it anew")
    else:
        for name in now.code:
            if name not in known.code:
                others = ", ".join(each for each in known.code if each not in now.code)
                found.append(f"{name} takes the place of {others}" if others else f"{name} is new")
            elif known.code[name] != now.code[name]:
                found.append(f"{name}, or something of yours that it uses, has changed")
    before, after = known.constants, now.constants
    names = [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]
    if names:
        found.append(f"{'the constant' if len(names) == 1 else 'the constants'} {', '.join(names)} changed")
    return found


def reading(done: int, total: int) -> None:
    """Log how far models are read, for those who have no display of their own."""
    _LOG.warning("%s", reading_text(done, total))


def reading_text(done: int, total: int) -> str:
    """Return how far models are read, in words."""
    return (
        f"reading models, to notice when they change: {done / 1e9:.1f} of {total / 1e9:.1f} GB; "
        "the next time this is known"
    )


def _called(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")
    module = getattr(function, "__module__", None)
    return f"the function {name}" + (f" in {module}" if module and module != "__main__" else "")


def _models(recipe: Context) -> Iterator[str]:
    """Yield what a recipe and those among its inputs load from here: `model` of ctxflow's own, folders of others."""
    for each in (recipe, *inner_recipes(recipe)):
        if is_library_module(getattr(each.function, "__module__", None)):
            with contextlib.suppress(TypeError, ValueError):
                bound = inspect.signature(each.function).bind_partial(*each.args, **each.kwargs)
                model = bound.arguments.get("model")
                if isinstance(model, (str, os.PathLike)):
                    yield os.fspath(model)
        else:
            for value in (*each.args, *each.kwargs.values()):
                if isinstance(value, (str, os.PathLike)) and _is_model(value):
                    yield os.fspath(value)


def _is_model(value: str | os.PathLike[Any]) -> bool:
    try:
        return os.path.isfile(os.path.join(os.path.expanduser(os.fspath(value)), "config.json"))
    except (ValueError, TypeError):  # No path at all.
        return False


def _version(package: str) -> dict[str, str]:
    try:
        return {"version": importlib.metadata.version(package.replace("_", "-"))}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
