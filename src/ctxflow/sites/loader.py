"""Load a site from a file, a name or a model, or say in one line each what is wrong with it.

`read_toml` and `located` are for other files too that people write, such as the simulator's workloads.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic.fields import FieldInfo

from ctxflow.files import text_of
from ctxflow.policies.registry import FAMILIES
from ctxflow.sites.engine_kinds import (
    MOVED,
    OWN,
    SITE_KEYS,
    TIER_KEYS,
    engine_kind,
    given_keys,
    relocated,
    renamed_keys,
)
from ctxflow.sites.provider_keys import SUBMIT_EXAMPLES, takes
from ctxflow.sites.site_model import Region, Site, Tier, site_class
from ctxflow.sites.site_problems import (
    FileError,
    FileProblem,
    KeyPath,
    NotToml,
    SiteError,
    lines_of,
    parse,
    shown,
    suggestion,
)
from ctxflow.sites.site_rules import problems

logger = logging.getLogger("ctxflow")
_told: set[tuple[str, str]] = set()  # Files and tables whose keys stand where earlier versions had them.


def load_site(site: str | Path | Site, **overrides: Any) -> Site:
    """Return a site, from the name of a built-in one ("local"), a TOML file, or a model.

    :param overrides: keys that take the place of the site's own, if they are not None.
    :raises SiteError: a ValueError, for an unknown site or key, or impossible values; the message has a line for each
        problem that names the key and says what to write, with the file and its line.

    >>> load_site("local", workers=3).workers
    3
    """
    text, moved = "", dict[str, list[str]]()
    if isinstance(site, Site):
        values = given_keys(site)
    elif str(site) == "local":
        values = {}
    else:
        text, values = read_toml(Path(site))
        values, moved = relocated(_by_new_names(str(site), values))
        for table, keys in moved.items():
            where = f"under a header [{table}]: each engine has a table of its own keys"
            _warn_once(str(site), table, f"write {', '.join(keys)} {where}")
    given = renamed_keys({key: value for key, value in overrides.items() if value is not None}, SITE_KEYS)
    changed, flat = relocated(given)
    for key, value in changed.items():
        tables = isinstance(value, Mapping) and key in flat
        values[key] = {**given_keys(values.get(key, {})), **value} if tables else value
    try:
        made = site_class(values.get("engine"))(**values)
        found = list(problems(made))
    except pydantic.ValidationError as error:
        found = list(explain(error, values))
    if found:
        above = {(table, key) for table, keys in (*moved.items(), *flat.items()) for key in keys}
        found = [FileProblem(each.path[1:], each.text) if each.path[:2] in above else each for each in found]
        raise SiteError(located(found, str(site) if text else "", text, {(key,) for key in given}))
    return made


def _by_new_names(file: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a site file's values with keys of earlier versions by their new names; warn once of each file."""
    tiers, old = values.get("tiers"), set[str]()
    if isinstance(tiers, list):
        old = {key for tier in tiers if isinstance(tier, dict) for key in tier}
        renamed = [renamed_keys(tier, TIER_KEYS) if isinstance(tier, dict) else tier for tier in tiers]
        values = {**values, "tiers": renamed}
    for names, keys in ((SITE_KEYS, values.keys()), (TIER_KEYS, old)):
        for key in names.keys() & keys:
            _warn_once(file, key, f"{key} is now called {names[key]}")
    return renamed_keys(values, SITE_KEYS)


def _warn_once(file: str, what: str, text: str) -> None:
    if (file, what) not in _told:
        _told.add((file, what))
        logger.warning("%s: %s", file, text)


def read_toml(
    path: Path,
    what: str = "site",
    instead: str = '"local" or the path of a site file',
    error: type[FileError] = SiteError,
) -> tuple[str, dict[str, Any]]:
    """Return the text of a file that a person wrote, and its values.

    :param what: what it is a file of, for messages; `instead`: what to give where there is none.
    :raises FileError: of the kind given, if it cannot be read or is no TOML.
    """
    try:
        text = text_of(path)
        return text, parse(text)
    except FileNotFoundError:
        raise error([f"there is no {what} {str(path)!r}: give {instead}"], missing=True) from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.toml"))
        hint = f"one of the files in it, such as {inside[0]}" if inside else f"the path of a {what} file"
        raise error([f"{path} is a folder: give {hint}"], missing=True) from None
    except OSError as trouble:
        raise error([f"the {what} file {path} cannot be read: {trouble.strerror}"]) from None
    except UnicodeDecodeError as trouble:
        line = trouble.object[: trouble.start].count(b"\n") + 1
        text = f"{path}, line {line}: it is not TOML: a character is not UTF-8: save the file as UTF-8"
        raise error([text]) from None
    except NotToml as trouble:
        raise error([f"{path}, line {trouble.line}: it is not TOML: {trouble}"]) from None


def located(found: Iterable[FileProblem], name: str, text: str, changed: Collection[KeyPath] = ()) -> list[str]:
    """Return problems with the file's name and the line where they stand, in order; `changed` are not the file's."""
    if not name:
        return [problem.text for problem in found]
    lines = {_new_path(path): line for path, line in lines_of(text).items()}
    told = []
    for problem in found:
        path = problem.path
        own = any(path[:n] in changed for n in range(1, len(path) + 1))
        while path and path not in lines:
            path = path[:-1]
        of_file = bool(path) and not own
        line = lines[path] if of_file else 0
        told.append((line, f"{name}, line {line}: {problem.text}" if of_file else f"{name}: {problem.text}"))
    return [each for _, each in sorted(told, key=lambda pair: pair[0])]


def _new_path(path: KeyPath) -> KeyPath:
    """Return where a key of a site file stands by its new name."""
    if path[:1] == ("tiers",):
        return (*path[:2], *(TIER_KEYS.get(str(key), key) for key in path[2:3]), *path[3:])
    return (*(SITE_KEYS.get(str(key), key) for key in path[:1]), *path[1:])


_MEANT = {
    "cpu": "cores", "cpus": "cores", "ncpus": "cores", "request_cpus": "cores", "cores_per_node": "cores",
    "mem": "memory_gb", "memory": "memory_gb", "ram": "memory_gb", "memory_mb": "memory_gb",
    "request_memory": "memory_gb", "mem_per_node": "memory_gb",
    "disk": "disk_gb", "disk_mb": "disk_gb", "request_disk": "disk_gb",
    "gpu": "gpus", "ngpus": "gpus", "request_gpus": "gpus", "gpus_per_node": "gpus", "gpus_per_worker": "gpus",
    "max": "workers", "maximum": "workers", "max_workers": "workers", "count": "workers", "max_blocks": "workers",
    "min": "minimum", "min_workers": "minimum", "min_blocks": "minimum", "init_blocks": "minimum",
    "container": "image", "container_image": "image", "docker_image": "image", "singularity_image": "image",
    "environment": "env", "env_vars": "env",
    "cost": "price", "batch_system": "provider", "type": "provider", "scheduler": "provider",
}  # fmt: skip
_LIST_EXAMPLES = {"tiers": '["a10"]', "hosts": '["gpu*.example.org"]'}
_OF_VALIDATORS = ("value_error", "assertion_error")
_UNITS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


def explain(error: pydantic.ValidationError, values: Mapping[str, Any]) -> Iterator[FileProblem]:
    """Yield the problems that a model found in these values, each once.

    >>> try:
    ...     Site(workers=0)
    ... except pydantic.ValidationError as error:
    ...     print(next(explain(error, {"workers": 0})).text)
    workers cannot be 0: write 1 or more
    """
    told: set[KeyPath] = set()
    for each in error.errors(include_url=False):
        path = _place(each["loc"], values)
        if path not in told and not (each["type"] == "extra_forbidden" and path == (values.get("engine"),)):
            told.add(path)
            yield FileProblem(path, _sentence(path, dict(each), values))


def _place(loc: Sequence[str | int], values: Mapping[str, Any]) -> KeyPath:
    """Return the keys of a place, without the names of alternatives that pydantic adds to it."""
    path = tuple(loc)
    if path[0] == "tiers":
        return path
    return path[:3] if path[0] == "regions" else path[:2] if _is_table(path[0], values) else path[:1]


def _is_table(key: str | int, values: Mapping[str, Any]) -> bool:
    """Return whether a key of the site's is the table of an engine."""
    return key in OWN or key == values.get("engine")


def _sentence(path: KeyPath, error: dict[str, Any], values: Mapping[str, Any]) -> str:
    if path[0] == "regions":
        return _of_region(path, error)
    if _is_table(path[0], values) and (len(path) > 1 or error["type"] != "extra_forbidden"):
        return _of_engine(path, error, values)
    in_tier = len(path) >= 3 and path[0] == "tiers"
    key = str(path[2] if in_tier else path[0])
    whose = f" of {tier_called(path[1], values)}" if in_tier else ""
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, error["input"], _tier_values(path, values) if in_tier else None, whose)
    if path[0] == "tiers" and not in_tier:
        return _tiers_header(error["input"])
    if len(path) > 3:
        return f'{path[3]} in {key}{whose} cannot be {shown(error["input"])}: write {path[3]} = "{error["input"]}"'
    given = error["input"] if in_tier else values.get(key, error["input"])
    return f"{key}{whose} cannot be {shown(given)}: {advice(key, error, (Tier if in_tier else Site).model_fields[key])}"


def _of_engine(path: KeyPath, error: dict[str, Any], values: Mapping[str, Any]) -> str:
    """Return what is wrong with an engine's table, or with a key in it."""
    table = str(path[0])
    model, given = engine_kind(table).options, values.get(table)
    if len(path) < 2:
        if error["type"] in _OF_VALIDATORS:
            return f"[{table}] cannot be so: {error['ctx']['error']}"
        return f"{table} cannot be {shown(given)}: write [{table}] on a line of its own, and the engine's keys under it"
    key = str(path[1])
    if error["type"] == "extra_forbidden":
        keys = _all_keys(f"[{table}]", model) if model.model_fields else f"[{table}] takes none"
        return f"[{table}] has no key {key!r}: {suggestion(key, model.model_fields, keys)}"
    if error["type"] == "missing":
        return f"[{table}] needs {key}: {model.model_fields[key].description or 'write it'}"
    inner = given.get(key, error["input"]) if isinstance(given, Mapping) else error["input"]
    return f"{key} cannot be {shown(inner)}: {advice(key, error, model.model_fields[key])}"


def _of_region(path: KeyPath, error: dict[str, Any]) -> str:
    """Return what is wrong with the regions, or with a key of one."""
    if len(path) < 3:
        given = shown(error["input"])
        return f"regions cannot have {given}: write [[regions]] on a line of its own, and the region's keys under it"
    key = str(path[2])
    if error["type"] == "extra_forbidden":
        return f"a region has no key {key!r}: {suggestion(key, Region.model_fields, _all_keys('a region', Region))}"
    whose, given = f"of region {int(path[1]) + 1}", shown(error["input"])
    if key in ("tiers", "hosts"):
        return f"{key} {whose} cannot be {given}: write a list of texts, such as {key} = {_LIST_EXAMPLES[key]}"
    if key in ("latency_ms", "bandwidth_mbit"):
        return f"{key} {whose} cannot have {given}: write a number for each region, such as {key} = {{campus = 40}}"
    return f"{key} {whose} cannot be {given}: {advice(key, error, Region.model_fields[key])}"


def _tier_values(path: KeyPath, values: Mapping[str, Any]) -> Mapping[str, Any]:
    with contextlib.suppress(KeyError, IndexError, TypeError):
        return dict(values["tiers"][path[1]])
    return {}


def tier_called(number: str | int, values: Mapping[str, Any]) -> str:
    """Return a tier in words: by its name if it has one, else by its place.

    >>> tier_called(0, {"tiers": [{"name": "a10"}]}), tier_called(1, {"tiers": [{}, {}]})
    ('tier a10', 'tier 2')
    """
    name = _tier_values(("tiers", number), values).get("name")
    return f"tier {name}" if isinstance(name, str) and name else f"tier {int(number) + 1}"


def _tiers_header(given: Any) -> str:
    if isinstance(given, Mapping):
        inner = [key for key, value in given.items() if isinstance(value, Mapping) and key not in Tier.model_fields]
        if inner:
            return f'tiers is a list: write [[tiers]] and under it name = "{inner[0]}", in place of [tiers.{inner[0]}]'
        return "tiers is a list, and each tier has a header with two brackets: write [[tiers]] in place of [tiers]"
    return f"tiers cannot have {shown(given)}: write [[tiers]] on a line of its own, and the tier's keys under it"


def _unknown_key(key: str, value: Any, tier: Mapping[str, Any] | None, whose: str) -> str:
    """Return what to write for an unknown key; `tier` is the one that it stands in, None at the site's level."""
    if tier is None:
        if key in Tier.model_fields or key == "tier":
            what = "is a tier's key" if key != "tier" else "is not a key"
            return f"a site has no key {key!r}, which {what}: put it under a header [[tiers]]"
        if key in ("policy", "policies"):
            return f"a site has no key {key!r}: each family has its own, {', '.join(FAMILIES)}"
        hint = suggestion(key, [*Site.model_fields, *MOVED], _all_keys("a site", Site))
        return f"a site has no key {key!r}: {hint}"
    begin = f"a tier has no key {key!r} ({whose.removeprefix(' of ')})"
    if key in _MEANT:
        return f"{begin}: did you mean {_MEANT[key]!r}?"
    if key in Site.model_fields:
        return f"{begin}; it is the site's: put it above the first [[tiers]]"
    if key in MOVED:
        return f"{begin}; it is the engine's: put it under a header [{MOVED[key]}]"
    provider = str(tier.get("provider", "condor"))
    if key.startswith("+") or (provider == "condor" and key.lower() in SUBMIT_EXAMPLES):
        quoted = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
        return f"{begin}: it goes to HTCondor in submit, so write submit = {{{quoted} = {shown(value)}}}"
    if key in (takes(provider) or ()):
        return f"{begin}: it is an option of {provider}, so write options = {{{key} = {shown(value)}}}"
    return f"{begin}: {suggestion(key, Tier.model_fields, _all_keys('a tier', Tier))}"


def _all_keys(what: str, model: type[pydantic.BaseModel]) -> str:
    return f"{what}'s keys are {', '.join(model.model_fields)}"


def advice(key: str, error: Mapping[str, Any], field: FieldInfo) -> str:
    """Return what to write in place of a value that a model refuses.

    :param error: as pydantic gives it; `field`: of the model, under that key.
    """
    given, context = error["input"], error.get("ctx", {})
    if error["type"] in _OF_VALIDATORS:
        return str(context["error"])
    if key == "start_when" and isinstance(given, (int, float, str)):
        number = _number(given)
        share = number / 100 if number is not None and 1 < number <= 100 else 0.95
        return f"write a share from 0 to 1, such as start_when = {share:g}"
    if error["type"] in ("greater_than_equal", "greater_than"):
        return f"write {context['ge']:g} or more" if "ge" in context else f"write more than {context['gt']:g}"
    if error["type"] == "literal_error":
        words = [str(word) for word in get_args(field.annotation)]
        choice = " or ".join(f'"{word}"' for word in words)
        hint = suggestion(str(given), words, "")
        return f"write {choice}" + (f"; {hint}" if hint else "")
    if error["type"] == "string_pattern_mismatch":
        plain = re.sub(r"[^A-Za-z0-9]+", "-", str(given)).strip("-") or "gpu"
        return f'write letters, digits and hyphens, such as {key} = "{plain}"'
    return _type_advice(key, given, str(field.annotation), field.default)


def _type_advice(key: str, given: Any, annotation: str, default: Any) -> str:
    """Return what to write where the type is wrong."""
    if key == "port":
        return "write a port, such as port = 9123, or the lowest and the highest, such as port = [9000, 9100]"
    if "tuple" in annotation or "list" in annotation:
        parts = '["first", "second"]' if "str" in annotation else "[1, 2.5]"
        return f"write a list, such as {key} = {parts}"
    if "dict" in annotation:
        return f"write a table, {key} = {{KEY = VALUE}}"
    if "bool" in annotation:
        return "write true or false, without quotes"
    if "int" in annotation or "float" in annotation:
        kind = "a number" if "float" in annotation else "a whole number"
        number = _number(given, to_gb=key.endswith("_gb"))
        if number is None or isinstance(given, (list, dict)):
            number = default if isinstance(default, (int, float)) else 1
        example = number if "float" in annotation else round(number)
        return f"write {kind} without quotes or a unit, such as {key} = {example}"
    if isinstance(given, (list, tuple)) and all(isinstance(part, str) for part in given):
        return f"write one text, such as {key} = {shown(' && '.join(f'({part})' for part in given))}"
    return f"write text in quotes, such as {key} = {shown(str(given))}"


def _number(given: Any, to_gb: bool = False) -> float | None:
    """Return the number that something begins with, in GB where it has a unit of memory.

    >>> _number("10000 MB", to_gb=True), _number("4 GPUs"), _number("many")
    (10, 4, None)
    """
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)", str(given).lower())
    if not match:
        return None
    number = float(match[1]) * (_UNITS.get(match[2], 1.0) if to_gb else 1.0)
    return int(number) if number == int(number) else number
