"""What is simulated: a site and a workload, from files or from a recorded run, with changes.

Changes come as `ctxflow simulate --set KEY=VALUE` and `--sweep KEY=A,B,C` give them. A key is a path with dots. One
that begins with `workload.` is of the workload, any other of the site; an entry of a list (a tier, an app, a context)
goes by its name or its number from 0. A value is TOML, or else text; `2x` is twice what it was; an empty value takes
the key out, so that its default holds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from ctxflow.errors import UsageError
from ctxflow.executors.embedded import TIER, default_workers
from ctxflow.observe.run_report import EVENTS, find_run, read_report
from ctxflow.policies.registry import DEFAULTS
from ctxflow.scheduler import Limits
from ctxflow.scheduler import events as ev
from ctxflow.simulator import pools
from ctxflow.simulator.recorded_log import RecordedPlace
from ctxflow.simulator.recorded_run import Recorded, fit
from ctxflow.simulator.workload_file import WorkloadError, WorkloadFile, explain, problems
from ctxflow.sites import Site, load_site
from ctxflow.sites.loader import located, read_toml
from ctxflow.sites.site_problems import FileError, KeyPath, NotToml, parse

_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")
_DEVICE_NAME = re.compile(r'DeviceName\s*==\s*"([^"]+)"')

Trace = Sequence[RecordedPlace] | Sequence[tuple[float, int]]
"""When workers could be had: places of a recorded run, or how many from when on."""


@dataclasses.dataclass(frozen=True)
class ScenarioTier:
    """A tier as the simulator sees it."""

    spec: ev.TierSpec
    gpu_model: str
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is simulated; `traces`: the files that the workload's evictions name, read."""

    site: Site
    workload: WorkloadFile
    traces: Mapping[str, Trace] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None

    def places(self, tier: str) -> list[RecordedPlace]:
        """Return the places of a tier, where a recorded run says when it had workers."""
        return [each for each in self._trace(tier) if isinstance(each, RecordedPlace) and each.tier == tier]

    def steps(self, tier: str) -> list[tuple[float, int]]:
        """Return (time, workers of a tier from then on), where a spot trace says it."""
        return [each for each in self._trace(tier) if not isinstance(each, RecordedPlace)]

    def _trace(self, tier: str) -> Trace:
        trace = self.workload.evictions.trace
        name = trace.get(tier) if isinstance(trace, dict) else trace
        return () if name is None else self.traces[name]


@dataclasses.dataclass(frozen=True)
class Factor:
    """A value given as a multiple of the present one."""

    by: float


@dataclasses.dataclass(frozen=True)
class Change:
    """One key with its new value, None for its default; `text`: as it was given."""

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


def load_scenario(site: str, workload: Path, changes: Iterable[Change] = ()) -> Scenario:
    """Return what a site file and a workload file say, with changes.

    :raises SiteError, WorkloadError: ValueErrors with a line for each thing that is wrong in the files.
    :raises UsageError: for what is wrong with the changes.
    """
    changes = list(changes)
    text, values = read_toml(workload, "workload", "the path of a workload file", WorkloadError)
    return _scenario(load_site(site), site, changes, values, text, str(workload), workload.parent, {})


def recorded_scenario(recorded: Recorded, changes: Iterable[Change] = ()) -> Scenario:
    """Return a recorded run as a scenario, with the parameters that were fitted to it, and with changes."""
    site = load_site(Site(**recorded.site_values()))
    traces: dict[str, Trace] = {recorded.name: recorded.places}
    made = _scenario(site, site, list(changes), recorded.workload_values(), "", "", Path(), traces)
    return dataclasses.replace(made, limits=recorded.limits)


def _scenario(
    base: Site,
    site: str | Site,
    changes: Sequence[Change],
    values: dict[str, Any],
    text: str,
    name: str,
    folder: Path,
    traces: dict[str, Trace],
) -> Scenario:
    given = {key: getattr(base, key) for key in base.model_fields_set}
    if "tiers" in given:
        given["tiers"] = [tier.model_dump(exclude_unset=True) for tier in base.tiers]
    sites = [change for change in changes if not change.of_workload]
    changed, places = applied(given, base, sites)
    keys = {str(place[0]) for place in places}
    with _told_of(sites):
        defaults = {key: field.default for key, field in Site.model_fields.items()}
        made = load_site(site, **{key: changed.get(key, defaults.get(key)) for key in keys}) if keys else base
    tiers = {tier.spec.name: tier.gpu_model for tier in tiers_of_site(made)}
    workload = _validated(values, name, text, tiers, ())
    ours = [change for change in changes if change.of_workload]
    if ours:
        values, places = applied(values, workload, ours)
        with _told_of(ours):
            workload = _validated(values, name, text, tiers, places)
    trace = workload.evictions.trace
    files = list(trace.values()) if isinstance(trace, dict) else [trace] if trace is not None else []
    traces = {file: traces[file] if file in traces else _trace(file, folder) for file in files}
    return Scenario(made, workload, traces)


@contextlib.contextmanager
def _told_of(changes: Iterable[Change]) -> Iterator[None]:
    """Raise a UsageError that names the changes in place of a FileError, since what is wrong is in no file."""
    try:
        yield
    except FileError as error:
        raise UsageError(f"as changed by {', '.join(change.text for change in changes)}: {error}") from None


def _validated(
    values: Mapping[str, Any], name: str, text: str, tiers: Mapping[str, str], changed: Iterable[Any]
) -> WorkloadFile:
    try:
        made = WorkloadFile(**values)
        found = list(problems(made, tiers))
    except pydantic.ValidationError as error:
        found = list(explain(error, values))
    if found:
        raise WorkloadError(located(found, name, text, set(changed)))
    return made


def _trace(name: str, folder: Path) -> Trace:
    """Read a trace: beside the workload file, or else from here."""
    path = folder / name if (folder / name).exists() else Path(name)
    if not path.exists():
        raise WorkloadError([f"the trace {name} is not there: give a spot trace's file, or a run's directory"])
    if path.is_dir() or path.name.endswith(".jsonl"):
        return read_recorded(path).places
    return pools.spot_steps(path)


def tiers_of_site(site: Site) -> list[ScenarioTier]:
    """Return the tiers that a site offers, with the GPU model of `require_gpus` or else the tier's name for it."""
    if not site.tiers:  # This machine's workers are one.
        count = default_workers(0) if site.workers is None else site.workers
        return [ScenarioTier(ev.TierSpec(TIER, 0, count, gpus=site.embedded.gpus_per_worker or 0), TIER)]
    found = []
    for number, tier in enumerate(site.tiers):
        most = site.workers if number == 0 and site.workers is not None else tier.workers
        spec = ev.TierSpec(
            tier.name, min(tier.minimum, most), most, tier.gpus, tier.price, tier.boot_seconds, tier.gpu_memory,
            tier.machines or "",
        )  # fmt: skip
        model = _DEVICE_NAME.search(tier.require_gpus or "")
        found.append(ScenarioTier(spec, model[1] if model else tier.name, tier.memory))
    return found


def read_recorded(path: Path) -> Recorded:
    """Read a recorded run, whose directory, one above it, or event log is at a path.

    :raises CtxflowError: if there is none.
    :raises ValueError: if it has no event log, or nothing was done in it.
    """
    run = find_run(path)
    if not (run / EVENTS).is_file():
        raise ValueError(f"{run} has no {EVENTS}: only a run with an event log can be simulated")
    transfers = read_report(run).transfers
    with open(run / EVENTS, encoding="utf-8", errors="replace") as lines:
        return fit(lines, str(run), transfers)


def parse_change(text: str) -> Change:
    """Return the change that `KEY=VALUE` asks for.

    :raises UsageError: if it is none.

    >>> [parse_change(text).value for text in ("tiers.a10.workers=40", "workers=2x", "batching=opportunistic")]
    [40, Factor(by=2.0), 'opportunistic']
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
        return parse(f"value = {text}")["value"]
    except (NotToml, KeyError):
        return text


def parse_sweep(text: str) -> list[Change]:
    """Return the changes of a sweep `KEY=A,B,C`, one for each value.

    :raises UsageError: if it is none.

    >>> [change.text for change in parse_sweep("batching=opportunistic,{policy='fixed', size=10}")]
    ['batching=opportunistic', "batching={policy='fixed', size=10}"]
    """
    key, equals, values = text.partition("=")
    found = [part.strip() for part in _split(values)]
    if not equals or not all(found):
        raise UsageError(f"{text!r} is no sweep: write KEY=A,B,C, such as batching=fixed,opportunistic")
    return [parse_change(f"{key.strip()}={value}") for value in found]


def _split(text: str) -> Iterator[str]:
    """Split at commas outside brackets, braces and quotes."""
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
    """Return every combination of one change from each sweep; of no sweep, the one combination without changes."""
    return list(itertools.product(*sweeps))


def applied(values: Mapping[str, Any], now: Any, changes: Iterable[Change]) -> tuple[dict[str, Any], set[KeyPath]]:
    """Return a file's values with changes, and the places that were changed.

    :param values: as the file has them.
    :param now: the model that they made: what `2x` is twice of.
    :raises UsageError: for an entry that there is not, or a factor of what is no number.

    >>> from ctxflow.sites import Site
    >>> applied({}, Site(workers=2), [parse_change("workers=2x"), parse_change("batching.size=10")])[0]
    {'workers': 4, 'batching': {'policy': 'fixed', 'size': 10}}
    """
    out: dict[str, Any] = copy.deepcopy(dict(values))
    places: set[KeyPath] = set()
    for change in (each for given in changes for each in _spread(given, now)):
        value = change.value
        if isinstance(value, Factor):
            value = _times(value.by, change, now)
        places.add(_put(out, now, change, value))
    return out, places


def _spread(change: Change, now: Any) -> Iterator[Change]:
    """Apply `workers=2x` on a site with tiers to each tier."""
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
    """Return the index of a list's entry that is given by its name or its number."""
    names = [each.get("name") if isinstance(each, Mapping) else getattr(each, "name", None) for each in entries]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(entries):
        return int(key)
    there = ", ".join(str(name) for name in names if name) or "none"
    raise UsageError(f"{change.text}: there is no {key!r} in {change.path[0]}: there are {there}")


def _put(values: dict[str, Any], now: Any, change: Change, value: Any) -> KeyPath:
    """Set a value, in tables that are made if they are not there, and return its place."""
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
        keys = ".".join(change.key)
        raise UsageError(f"{change.text} is of a whole entry: name one of its keys, as in {keys}.KEY=...")
    if value is None:
        inside.pop(last, None)
    else:
        inside[last] = value
    return (*place, last)


def _begun(given: Any, now: Any, key: str, depth: int) -> Any:
    """Return what a key holds whose inner key is about to be set."""
    if depth == 0 and key in DEFAULTS:
        return {"policy": given or getattr(now, key, DEFAULTS[key])}
    entries = getattr(now, key, None) if depth == 0 else None
    if isinstance(entries, tuple):
        return [{} for _ in entries]
    return {}
