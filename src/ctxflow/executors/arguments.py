"""What an executor is made with, checked where it is written; what a site says of it is checked in sites/."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from parsl.config import Config
from parsl.data_provider.staging import Staging
from parsl.monitoring.radios.base import RadioConfig

from ctxflow.option_values import closest, flag, number, refuse, text, whole
from ctxflow.scheduler import Limits
from ctxflow.sites import Site


def check_arguments(
    site: Any,
    label: Any,
    workers: Any,
    slowdowns: Any,
    limits: Any,
    log_events: Any,
    working_dir: Any,
    storage_access: Any,
    remote_monitoring_radio: Any,
) -> None:
    """See that the arguments of an executor are what they can be.

    :raises TypeError, ValueError: for one that is not, by its name.
    """
    if not isinstance(site, (str, os.PathLike, Site)):
        raise refuse("site", site, '"local", the path of a site file, or a ctxflow.sites.Site', TypeError)
    text("label", label, 'text: a name for the executor, such as "ctxflow"')
    if workers is not None:
        whole("workers", workers, "how many workers, 1 or more")
    factors = "a list of factors, more than 0, such as [1, 2.5]"
    for factor in _items("slowdowns", slowdowns, factors):
        number("slowdowns", factor, factors, above=True)
    if limits is not None and not isinstance(limits, Limits):
        raise refuse("limits", limits, "a ctxflow.scheduler.Limits(...)", TypeError)
    flag("log_events", log_events)
    if working_dir is not None and not isinstance(working_dir, (str, os.PathLike)):
        raise refuse("working_dir", working_dir, "the path of a folder", TypeError)
    ways = "a list of Parsl's ways of staging, such as [HTTPInTaskStaging()]"
    for way in _items("storage_access", () if storage_access is None else storage_access, ways):
        if not isinstance(way, Staging):
            raise refuse("storage_access", storage_access, ways, TypeError)
    if remote_monitoring_radio is not None and not isinstance(remote_monitoring_radio, RadioConfig):
        wanted = "one of Parsl's, such as UDPRadio(address=...)"
        raise refuse("remote_monitoring_radio", remote_monitoring_radio, wanted, TypeError)


def _items(name: str, value: Any, wanted: str) -> Iterable[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(name, value, wanted, TypeError)
    return value


def divided(executor: type, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of an executor, and those of Parsl's configuration.

    :raises TypeError: for one that neither knows.
    """
    own, parsls = list(inspect.signature(executor).parameters), list(inspect.signature(Config).parameters)
    for name in options:
        if name not in own and name not in parsls:
            meant = closest(name, [*own, *parsls])
            hint = f": did you mean {meant!r}?" if meant else f": the executor takes {', '.join(own)}"
            raise TypeError(f"neither the executor nor parsl.Config has an option {name!r}{hint}")
    first = {name: value for name, value in options.items() if name in own}
    return first, {name: value for name, value in options.items() if name not in own}
