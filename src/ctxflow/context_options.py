"""What may be said of a context where it is defined, checked there. Pure, but for the paths of files made absolute.

What does not live here: the recipe (context.py), and checks of kinds of values (option_values.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.option_values import choice, number, refuse, whole

NO_OPTIONS: Mapping[str, Any] = {}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(size: int | str | None) -> int | None:
    """Bytes from a number or from text such as "10 GB" or "512MiB".

    :raises ValueError: for text that is no size, or a negative one.

    >>> parse_size("10 GB"), parse_size("2KiB"), parse_size(7), parse_size(None)
    (10000000000, 2048, 7, None)
    """
    if size is None or (isinstance(size, int) and size >= 0):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(size), re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is no size: write a number of bytes, or text such as '10 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


AFFINITIES = ("guaranteed", "best-effort")
"""How close together a context's GPUs have to be: as close as a machine allows, or the closer the better."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a recipe keeps them.

    :raises TypeError, ValueError: for one that cannot be what it is, saying what to write.
    """
    return {name: _OPTIONS[name](value) for name, value in options.items()}


def _size(name: str) -> Callable[[Any], int | None]:
    def check(value: Any) -> int | None:
        if value is not None and not isinstance(value, str):
            wanted = "a number of bytes, or text such as '10 GB'"
            return whole(name, value, wanted, 0)
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return check


def _files(value: Any) -> dict[str, str]:
    wanted = 'a dict of paths by parameter name, such as files={"weights": "model/"}'
    if not isinstance(value, Mapping) or not all(isinstance(path, (str, os.PathLike)) for path in value.values()):
        raise refuse("files", value, wanted, TypeError)
    if not all(isinstance(name, str) for name in value):
        raise refuse("files", value, wanted, TypeError)
    return {name: os.path.abspath(os.path.expanduser(path)) for name, path in value.items()}


def _environment(value: Any) -> dict[str, str]:
    wanted = 'a dict of text by name, such as environment={"OMP_NUM_THREADS": "4"}'
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise refuse("environment", value, wanted, TypeError)
    if not all(isinstance(each, (str, int, float, os.PathLike)) for each in value.values()):
        raise refuse("environment", value, wanted, TypeError)
    return {name: str(each) for name, each in value.items()}


def _load_timeout(value: Any) -> Any:
    wanted = "seconds that building may take, more than 0, or None for no limit"
    return None if value is None else number("load_timeout", value, wanted, above=True)


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "files": _files,
    "environment": _environment,
    "gpus": lambda value: whole("gpus", value, "the number of GPUs that a context occupies, 0 or more", 0),
    "memory": _size("memory"),
    "gpu_memory": _size("gpu_memory"),
    "load_timeout": _load_timeout,
    "affinity": lambda value: None if value is None else choice("affinity", value, AFFINITIES),
    "priority": lambda value: whole("priority", value, "a whole number, such as 10: higher goes first"),
}
