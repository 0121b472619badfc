"""Engines by name: what a site can select with `engine = "..."`, what each can do, and the options of its table.

ctxflow's own stand here, so that what they can do is known without importing them. Another package adds one with an
entry point in the group `ctxflow.engines`, named as the engine, for a class of the contract
`ctxflow.executors.contract.SiteEngine`:

    [project.entry-points."ctxflow.engines"]
    my-engine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from ctxflow.renamed import tell
from ctxflow.sites.site_problems import suggestion

GROUP = "ctxflow.engines"


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine can do, and what the rest of ctxflow therefore does for it.

    :ivar remote: workers may be on machines that have none of the user's files: modules travel with what is pickled.
    :ivar stages: files among the arguments of calls are brought to workers, and output files back, since workers do not
        see this machine's disk (see `CallPayload.files`).
    :ivar acquires: workers are jobs of the batch systems that the site's `[[tiers]]` name, so that there must be tiers,
        and limits, `acquire = "factory"` and `ctxflow batch --detach` have a meaning.
    """

    remote: bool = False
    stages: bool = False
    acquires: bool = False


class EngineOptions(pydantic.BaseModel):
    """The keys of an engine's table in a site file, for an engine to subclass; by itself, a table without keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


def key(default: Any, description: str, **bounds: Any) -> Any:
    """Return the field of a key: its default, what it means, and its bounds."""
    return pydantic.Field(default, description=description, **bounds)


class EmbeddedOptions(EngineOptions):
    """The table `[embedded]`."""

    gpus_per_worker: int | None = key(None, "GPUs of each worker; by default all are distributed evenly.", ge=0)
    slowdowns: tuple[Annotated[float, pydantic.Field(gt=0)], ...] = key(
        (), "Factors by which the first, second, ... worker is slower, to try policies on uneven workers."
    )


class TaskVineOptions(EngineOptions):
    """The table `[taskvine]`."""

    address: str | None = key(
        None, "The address at which workers reach this machine; by default that of its outgoing connections."
    )
    port: int | tuple[int, int] = key(
        0, "The port that workers connect to, or the lowest and highest of a range; 0 for any."
    )
    ssl: bool = key(False, "Encrypt the traffic between this machine and the workers (see docs/security.md).")
    worker_transfers: bool = key(
        True, "Whether workers send files to those of other machines; else each machine gets them from this one."
    )
    transfer_port: int | tuple[int, int] = key(
        0,
        "The port at which workers are reached by others, or the lowest and highest of a range, of as many as a "
        "machine has workers; 0 for any.",
    )
    fan_out: int = key(1, "Number of workers to which one worker sends a file at a time.", ge=1)
    keepalive_interval: int = key(5, "Seconds of silence after which a keepalive is sent to a worker.", ge=1)
    keepalive_timeout: int = key(15, "Seconds after which a worker that does not answer counts as lost.", ge=4)

    @property
    def ports(self) -> Sequence[int]:
        """The ports that will do."""
        return (self.port,) if isinstance(self.port, int) else range(self.port[0], self.port[1] + 1)

    @property
    def transfer_ports(self) -> str:
        """The ports at which workers are reached, as vine_worker has them; "" for any."""
        found = self.transfer_port
        return str(found or "") if isinstance(found, int) else f"{found[0]}:{found[1]}"


@dataclasses.dataclass(frozen=True)
class EngineKind:
    """An engine that a site can select: the model of its table `[NAME]`, and where its class is, as `MODULE:CLASS`."""

    name: str
    capabilities: Capabilities
    options: type[pydantic.BaseModel]
    place: str

    def load(self) -> Any:
        """Import the engine's class."""
        module, _, attribute = self.place.partition(":")
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


_CLUSTER = Capabilities(remote=True, stages=True, acquires=True)
OWN = {
    kind.name: kind
    for kind in (
        EngineKind("embedded", Capabilities(), EmbeddedOptions, "ctxflow.executors.embedded:EmbeddedEngine"),
        EngineKind("taskvine", _CLUSTER, TaskVineOptions, "ctxflow.executors.taskvine.engine:TaskVineEngine"),
    )
}
"""ctxflow's own engines, whose tables are fields of `Site`."""

MOVED = {key: kind.name for kind in OWN.values() for key in kind.options.model_fields}
"""The keys that a site file may also have above its first header, as in earlier versions, each with its table."""


def engine_names() -> list[str]:
    """Return the names that `engine` of a site may have.

    >>> engine_names()[:2]
    ['embedded', 'taskvine']
    """
    offered = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    return [*OWN, *sorted(offered - set(OWN))]


def engine_kind(name: str) -> EngineKind:
    """Return what is known of an engine by its name; another package's is imported for it.

    :raises ValueError: if there is none of that name, or it is no engine that a site can select.

    >>> engine_kind("taskvine").capabilities.remote
    True
    """
    return OWN.get(name) or _offered(name)


def relocated(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Put keys that stand above a site file's first header into their engine's table.

    :returns: the values with these keys in their tables, where they win, and for each table the keys that were moved.

    >>> relocated({"fan_out": 3, "taskvine": {"port": 9123}})
    ({'taskvine': {'port': 9123, 'fan_out': 3}}, {'taskvine': ['fan_out']})
    """
    out, moved = dict(values), dict[str, list[str]]()
    for key, table in MOVED.items():
        if key in out:
            inner = given_keys(out.get(table, {}))
            if isinstance(inner, Mapping):
                out[table] = {**inner, key: out.pop(key)}
                moved.setdefault(table, []).append(key)
    return out, moved


SITE_KEYS = {"environment": "python_environment"}
TIER_KEYS = {"variables": "env"}
"""Keys of a site and of its tiers by the names that they had in earlier versions."""


def with_new_keys(values: Any, names: Mapping[str, str], whose: str) -> Any:
    """Return values with old keys by their new names, and warn of each once; what is no mapping stays as it is."""
    if not isinstance(values, Mapping):
        return values
    for old in names.keys() & values.keys():
        tell(f"{whose}: {old}", f"{old} of {whose} is now called {names[old]}")
    return renamed_keys(values, names)


def renamed_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return values with old keys by their new names, in their order; one that is given by both is left as it is.

    >>> renamed_keys({"environment": "/opt", "slots": 2}, SITE_KEYS)
    {'python_environment': '/opt', 'slots': 2}
    """
    return {key if names.get(key, key) in values else names.get(key, key): value for key, value in values.items()}


def given_keys(table: Any) -> Any:
    """Return a model's values as they were given, without defaults; what is no model stays as it is."""
    if isinstance(table, pydantic.BaseModel):
        return {key: getattr(table, key) for key in type(table).model_fields if key in table.model_fields_set}
    return table


def _offered(name: str) -> EngineKind:
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        try:
            engine = point.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"engine {name!r} cannot be imported from {point.value}: {why}") from error
        missing = [each for each in ("from_site", "capabilities", "tiers") if not hasattr(engine, each)]
        if missing:
            wrong = f"engine {name!r} is {point.value}, which has no {missing[0]!r}"
            raise ValueError(f"{wrong}: see SiteEngine of ctxflow.executors.contract")
        return EngineKind(name, engine.capabilities, getattr(engine, "Options", EngineOptions), point.value)
    known = engine_names()
    choice = " or ".join(f'"{each}"' for each in known) if len(known) < 3 else f"one of {', '.join(known)}"
    hint = suggestion(name, known, "")
    raise ValueError(f"write {choice}" + (f"; {hint}" if hint else ""))
