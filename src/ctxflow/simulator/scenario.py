"""What is simulated: a site and a workload, from files or from a recorded run, with changes.

What does not live here: what files say (workload_file.py), parameters fitted to a recorded run (fitting.py), and making
simulations of it (building.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from ctxflow.errors import UsageError
from ctxflow.executors.embedded import TIER, default_workers
from ctxflow.observe.run_report import EVENTS, find_run, read_report
from ctxflow.scheduler import Limits
from ctxflow.scheduler import events as ev
from ctxflow.simulator import pools
from ctxflow.simulator.changes import Change, applied
from ctxflow.simulator.fitting import fit
from ctxflow.simulator.recorded import Place, Recorded
from ctxflow.simulator.workload_file import Evictions, WorkloadFile
from ctxflow.simulator.workload_problems import WorkloadError, explain, problems
from ctxflow.sites import Site, load_site
from ctxflow.sites.loader import located, read_toml
from ctxflow.sites.site_problems import FileError

_DEVICE_NAME = re.compile(r'DeviceName\s*==\s*"([^"]+)"')

Trace = Sequence[Place] | Sequence[tuple[float, int]]
"""When workers could be had: places of a recorded run, or how many from when on."""


@dataclasses.dataclass(frozen=True)
class Tier:
    """A tier as the simulator sees it."""

    spec: ev.TierSpec
    gpu_model: str
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is simulated.

    :ivar traces: the files that the workload's evictions name, read.
    """

    site: Site
    workload: WorkloadFile
    traces: Mapping[str, Trace] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None

    def places(self, tier: str) -> list[Place]:
        """The places of a tier, where a recorded run says when it had workers."""
        return [each for each in self._trace(tier) if isinstance(each, Place) and each.tier == tier]

    def steps(self, tier: str) -> list[tuple[float, int]]:
        """(time, how many workers of a tier there are from then on), where a spot trace says it."""
        return [each for each in self._trace(tier) if not isinstance(each, Place)]

    def _trace(self, tier: str) -> Trace:
        trace = self.workload.evictions.trace
        name = trace.get(tier) if isinstance(trace, dict) else trace
        return () if name is None else self.traces[name]


# --- from files


def load_scenario(site: str, workload: Path, changes: Iterable[Change] = ()) -> Scenario:
    """What two files say, with changes.

    :raises SiteError, WorkloadError: ValueErrors with a line for each thing that is wrong in the files.
    :raises UsageError: for what is wrong with the changes.
    """
    changes = list(changes)
    text, values = read_toml(workload, "workload", "the path of a workload file", WorkloadError)
    return _scenario(load_site(site), site, changes, values, text, str(workload), workload.parent, {})


def recorded_scenario(recorded: Recorded, changes: Iterable[Change] = ()) -> Scenario:
    """A recorded run as it was, with the parameters that it showed, and with changes."""
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
        made = load_site(site, **{key: changed.get(key, _default(key)) for key in keys}) if keys else base
    tiers = {tier.spec.name: tier.gpu_model for tier in tiers_of_site(made)}
    workload = _validated(values, name, text, tiers, ())
    ours = [change for change in changes if change.of_workload]
    if ours:
        values, places = applied(values, workload, ours)
        with _told_of(ours):
            workload = _validated(values, name, text, tiers, places)
    traces = {file: traces[file] if file in traces else _trace(file, folder) for file in _traces(workload.evictions)}
    return Scenario(made, workload, traces)


@contextlib.contextmanager
def _told_of(changes: Iterable[Change]) -> Iterator[None]:
    """Say of what is wrong within that it was asked for, and stands in no file.

    :raises UsageError: in place of a FileError.
    """
    try:
        yield
    except FileError as error:
        raise UsageError(f"as changed by {', '.join(change.text for change in changes)}: {error}") from None


def _default(key: str) -> Any:
    field = Site.model_fields.get(key)
    return None if field is None else field.default


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


def _traces(evictions: Evictions) -> list[str]:
    trace = evictions.trace
    return list(trace.values()) if isinstance(trace, dict) else [trace] if trace is not None else []


def _trace(name: str, folder: Path) -> Trace:
    """Read a trace: beside the workload file, or else from here."""
    path = folder / name if (folder / name).exists() else Path(name)
    if not path.exists():
        raise WorkloadError([f"the trace {name} is not there: give a spot trace's file, or a run's directory"])
    if path.is_dir() or path.name.endswith(".jsonl"):
        return read_recorded(path).places
    return pools.spot_steps(path)


def tiers_of_site(site: Site) -> list[Tier]:
    """The tiers that a site offers; of a site without any, this machine's workers as one.

    A tier's GPU model is the one that `require_gpus` asks for, else the tier's name stands for it.
    """
    if not site.tiers:
        count = default_workers(0) if site.workers is None else site.workers
        return [Tier(ev.TierSpec(TIER, 0, count, gpus=site.embedded.gpus_per_worker or 0), TIER)]
    found = []
    for number, tier in enumerate(site.tiers):
        most = site.workers if number == 0 and site.workers is not None else tier.workers
        spec = ev.TierSpec(
            tier.name, min(tier.minimum, most), most, tier.gpus, tier.price, tier.boot_seconds, tier.gpu_memory,
            tier.machines or "",
        )  # fmt: skip
        model = _DEVICE_NAME.search(tier.require_gpus or "")
        found.append(Tier(spec, model[1] if model else tier.name, tier.memory))
    return found


def read_recorded(path: Path) -> Recorded:
    """A recorded run.

    :param path: its directory, one above it, or its event log.
    :raises CtxflowError: if there is none.
    :raises ValueError: if it has no event log, or nothing was done in it.
    """
    run = find_run(path)
    if not (run / EVENTS).is_file():
        raise ValueError(f"{run} has no {EVENTS}: only a run with an event log can be simulated")
    transfers = read_report(run).transfers
    with open(run / EVENTS, encoding="utf-8", errors="replace") as lines:
        return fit(lines, str(run), transfers)
