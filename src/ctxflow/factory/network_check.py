"""Whether workers can reach a run that is started here, for `ctxflow site check`: its address, port and directory.

What does not live here: trying it with a worker (probe.py), and what batch systems say (site_check.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from ctxflow.sites import Site

_NO_OTHER_MACHINE = ("tmpfs", "ramfs", "overlay")
_SHARED = ("condor", "local")  # Providers whose jobs need no directory that machines share.


def network_problems(site: Site) -> Iterator[str]:
    """Why no worker would reach a run of this site that is started here, a sentence each.

    >>> list(network_problems(Site(engine="taskvine", address="no-such-host.invalid")))[0][:46]
    'address no-such-host.invalid cannot be resolve'
    """
    if site.address:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(site.address, None)}
        except OSError as error:
            yield (
                f"address {site.address} cannot be resolved ({error.strerror or error}): write an IP address of this "
                "machine, or a name that the workers' machines know"
            )
            found = set()
        elsewhere = [tier.name for tier in site.tiers if tier.provider != "local"]
        if elsewhere and found and all(address.startswith("127.") or address == "::1" for address in found):
            yield (
                f"address {site.address} is this machine to itself alone, and tier {elsewhere[0]} is on others: write "
                "the address by which they reach it"
            )
    ports = [site.port] if isinstance(site.port, int) else list(range(site.port[0], site.port[1] + 1))
    refused = [_refusal(port) for port in ports]
    if ports != [0] and all(refused):
        yield refused[0]


def _refusal(port: int) -> str:
    """Why nobody can listen at a port here, "" if it can be done."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except PermissionError:
            return f"port = {port} is for root alone on this machine: write one from 1024 on, or 0 for any"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port = {port} is taken on this machine: write another, or 0 for any, or end who listens there"
            return f"port = {port} cannot be listened at ({error.strerror}): write another, or 0 for any"
    return ""


def network_advice(site: Site) -> Iterator[str]:
    """What may keep workers from a run of this site that is started here, a sentence each."""
    if site.address and not _is_ours(site.address):
        yield (
            f"address {site.address} is none of this machine's: workers reach a run only if what goes there comes here"
        )
    for tier in site.tiers:
        if tier.provider in _SHARED:
            continue
        here = os.getcwd()
        kind = file_system(here)
        if kind in _NO_OTHER_MACHINE or here.startswith(("/tmp/", "/var/tmp/", "/dev/shm/")):
            yield (
                f"{here} is seldom seen by other machines, and jobs of tier {tier.name} find their files where the run "
                "is started: start it in a directory that all nodes share"
            )
        if tier.disk_gb is not None:
            yield (
                f"disk_gb = {tier.disk_gb:g} of tier {tier.name} is asked of nobody: a worker that finds less in "
                "TMPDIR or /tmp does not start; leave it out where nodes may have less"
            )


def _is_ours(address: str) -> bool:
    for family, kind, number, _, place in _resolved(address):
        with socket.socket(family, kind, number) as trial:
            try:
                trial.bind((place[0], 0))
            except OSError:
                continue
            return True
    return not _resolved(address)  # What cannot be resolved is told already.


def _resolved(address: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []


def file_system(path: str) -> str:
    """The kind of file system that a directory is on, such as "nfs4"; "" if that cannot be told.

    >>> file_system("/proc")
    'proc'
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    path = os.path.realpath(path)
    around = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(around, key=lambda each: len(each[0]))[1] if around else ""


def own_address() -> str:
    """The address that this machine uses outwards; nothing is sent to find it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
