"""What an executor is made with, checked where it is written; what a site says of it is checked in sites/."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ctxflow.option_values import flag, number, refuse, text, whole
from ctxflow.scheduler import Limits
from ctxflow.sites import Site


def check_arguments(
    site: Any,
    label: Any,
    workers: Any,
    slowdowns: Any,
    limits: Any,
    log_events: Any,
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
    for factor in items_of("slowdowns", slowdowns, factors):
        number("slowdowns", factor, factors, above=True)
    if limits is not None and not isinstance(limits, Limits):
        raise refuse("limits", limits, "a ctxflow.scheduler.Limits(...)", TypeError)
    flag("log_events", log_events)


def items_of(name: str, value: Any, wanted: str) -> Iterable[Any]:
    """Return what an argument has in it; text is refused."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(name, value, wanted, TypeError)
    return value
