"""Changes to a site and a workload, as `ctxflow simulate --set KEY=VALUE` and `--sweep KEY=A,B,C` give them.

A key is a path with dots. One that begins with `workload.` is of the workload, any other of the site; an entry of a
list (a tier, an app, a context) goes by its name or its number from 0. A value is TOML, or else text; `2x` is twice
what it was; nothing takes the key out, so that its default holds. What does not live here: what the keys mean.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import UsageError
from ctxflow.policies.registry import DEFAULTS
from ctxflow.sites import loader
from ctxflow.sites.site_problems import Path

_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")


@dataclasses.dataclass(frozen=True)
class Factor:
    """So many times what it was."""

    by: float


@dataclasses.dataclass(frozen=True)
class Change:
    """One key with its new value; None for its default.

    :ivar text: as it was given.
    """

    key: tuple[str, ...]
    value: Any
    text: str

    @property
    def of_workload(self) -> bool:
        """Whether it is of the workload, and not of the site."""
        return self.key[0] == "workload"

    @property
    def path(self) -> tuple[str, ...]:
        """The key within its file."""
        return self.key[1:] if self.of_workload else self.key


def parse(text: str) -> Change:
    """A change from `KEY=VALUE`.

    :raises UsageError: if it is none.

    >>> parse("tiers.a10.workers=40").value, parse("workers=2x").value, parse("batching=opportunistic").value
    (40, Factor(by=2.0), 'opportunistic')
    """
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts) or parts == ("workload",):
        raise UsageError(
            f"{text!r} changes nothing: write KEY=VALUE, such as batching=opportunistic, tiers.a10.workers=40 or "
            "workload.evictions.per_hour=6"
        )
    return Change(parts, _value(value.strip()), text)


def _value(text: str) -> Any:
    if not text:
        return None
    if match := _FACTOR.fullmatch(text):
        return Factor(float(match[1]))
    try:
        return loader.parse(f"value = {text}")["value"]
    except (loader.NotToml, KeyError):
        return text


def parse_sweep(text: str) -> list[Change]:
    """The changes of a sweep, from `KEY=A,B,C`.

    :raises UsageError: if it is none.

    >>> [change.text for change in parse_sweep("batching=opportunistic,{policy='fixed', size=10}")]
    ['batching=opportunistic', "batching={policy='fixed', size=10}"]
    """
    key, equals, values = text.partition("=")
    found = [part.strip() for part in _split(values)]
    if not equals or not all(found):
        raise UsageError(f"{text!r} is no sweep: write KEY=A,B,C, such as batching=fixed,opportunistic")
    return [parse(f"{key.strip()}={value}") for value in found]


def _split(text: str) -> Iterator[str]:
    """Split at commas that are in no brackets, braces or quotes."""
    depth, quote, part = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield part
            part = ""
            continue
        part += letter
    yield part


def combinations(sweeps: Iterable[Sequence[Change]]) -> list[tuple[Change, ...]]:
    """Every combination of one change from each sweep; of none, the one without changes."""
    return list(itertools.product(*sweeps))


def applied(values: Mapping[str, Any], now: Any, changes: Iterable[Change]) -> tuple[dict[str, Any], set[Path]]:
    """A file's values with changes, and the places that were changed.

    :param values: as the file has them.
    :param now: the model that they made: what `2x` is twice of.
    :raises UsageError: for an entry that there is not, or a factor of what is no number.

    >>> from ctxflow.sites import Site
    >>> applied({}, Site(workers=2), [parse("workers=2x"), parse("batching.size=10")])[0]
    {'workers': 4, 'batching': {'policy': 'fixed', 'size': 10}}
    """
    out: dict[str, Any] = copy.deepcopy(dict(values))
    places: set[Path] = set()
    for change in (each for given in changes for each in _spread(given, now)):
        value = change.value
        if isinstance(value, Factor):
            value = _times(value.by, change, now)
        place = _put(out, now, change, value)
        places.add(place)
    return out, places


def _spread(change: Change, now: Any) -> Iterator[Change]:
    """`workers=2x` of a site with tiers is of each tier's."""
    tiers = getattr(now, "tiers", ())
    if change.key == ("workers",) and isinstance(change.value, Factor) and tiers:
        for tier in tiers:
            yield Change(("tiers", tier.name, "workers"), change.value, change.text)
    else:
        yield change


def _times(factor: float, change: Change, now: Any) -> Any:
    for key in change.path:
        if isinstance(now, (list, tuple)):
            now = now[_number(now, key, change)]
        else:
            now = now.get(key) if isinstance(now, Mapping) else getattr(now, key, None)
    if isinstance(now, dict) and all(isinstance(each, (int, float)) for each in now.values()):
        return {key: each * factor for key, each in now.items()}
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        raise UsageError(f"{change.text} needs a number to multiply, and there is none: write what it should be")
    return round(now * factor) if isinstance(now, int) else now * factor


def _number(entries: Sequence[Any], key: str, change: Change) -> int:
    """The place of a list's entry that goes by its name or its number."""
    names = [each.get("name") if isinstance(each, Mapping) else getattr(each, "name", None) for each in entries]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(entries):
        return int(key)
    there = ", ".join(str(name) for name in names if name) or "none"
    raise UsageError(f"{change.text}: there is no {key!r} in {change.path[0]}: there are {there}")


def _put(values: dict[str, Any], now: Any, change: Change, value: Any) -> Path:
    """Put a value in its place, which is made if it is not there; gives the place."""
    inside: Any = values
    place: list[str | int] = []
    *way, last = change.path
    for depth, key in enumerate(way):
        at: str | int = key
        if isinstance(inside, list):
            at = _number(getattr(now, str(place[0])), key, change)
        elif not isinstance(inside.get(key), (dict, list)):
            inside[key] = _begun(inside.get(key), now, key, depth)
        place.append(at)
        inside = inside[at]
    if isinstance(inside, list):
        raise UsageError(
            f"{change.text} is of a whole entry: name one of its keys, as in {'.'.join(change.key)}.KEY=..."
        )
    if value is None:
        inside.pop(last, None)
    else:
        inside[last] = value
    return (*place, last)


def _begun(given: Any, now: Any, key: str, depth: int) -> Any:
    """What a key holds whose inner key is about to be set."""
    if depth == 0 and key in DEFAULTS:
        return {"policy": given or getattr(now, key, DEFAULTS[key])}
    entries = getattr(now, key, None) if depth == 0 else None
    if isinstance(entries, tuple):
        return [{} for _ in entries]
    return {}
