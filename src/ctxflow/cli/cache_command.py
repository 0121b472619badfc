"""`ctxflow cache`: what the hosts' cache of a site holds on this machine, and emptying it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxflow.cli.clean_command import size_text
from ctxflow.cli.screen import AsJson
from ctxflow.errors import UsageError, counted

if TYPE_CHECKING:
    from ctxflow.host.host_cache import CacheEntry, HostCache


def cache(
    where: Annotated[
        Path, typer.Argument(metavar="SITE|FOLDER", help="A site file, or the folder that it names.", exists=True)
    ],
    empty: Annotated[bool, typer.Option("--empty", help="Remove all that no worker uses now.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the hosts' cache of a site holds on this machine for you, and who uses it.

    \b
    ctxflow cache my-site.toml            those of its tiers: contents and users
    ctxflow cache /scratch/ctxflow        the one in a folder
    ctxflow cache my-site.toml --empty    remove what no worker uses

    Call it on a machine where workers run: `ctxflow site check my-site.toml --live` says what is on theirs. Workers
    keep the caches below the site's `cache_gb` by themselves; what they use stays.
    """
    from ctxflow.host.host_cache import HostCache

    told: list[dict[str, Any]] = []
    for folder, limit in _folders(where):
        try:
            found = HostCache(folder, limit, make=False, strict=False)
        except FileNotFoundError:
            told.append({"folder": folder, "bytes": 0, "entries": [], "removed": []})
            if not as_json:
                print(f"{folder}: nothing of yours is on this machine")
            continue
        try:
            removed = found.empty() if empty else []
            entries = found.entries()
        finally:
            found.close()
        total = sum(entry.bytes for entry in entries)
        both = {"entries": list(map(dataclasses.asdict, entries)), "removed": list(map(dataclasses.asdict, removed))}
        told.append({"folder": found.path, "bytes": total, **both})
        if not as_json:
            _show(found, entries)
            if empty:
                size = size_text(sum(entry.bytes for entry in removed))
                print(f"removed {counted(len(removed), 'entry', 'entries')}, {size}")
    if as_json:
        print(json.dumps({"caches": told}, indent=1))


def _folders(where: Path) -> Iterator[tuple[str, int | None]]:
    """Yield the folders that are meant, each with its limit in bytes, None if that is unknown."""
    if where.is_dir():
        yield str(where), None
        return
    from ctxflow.sites import load_site

    tiers = [tier for tier in load_site(where).tiers if tier.cache is not None]
    if not tiers:
        raise UsageError(f'no tier of {where} has a cache: write cache = "/scratch/ctxflow" there, or name a folder')
    yield from {str(tier.cache): int(tier.cache_gb * 1e9) for tier in tiers}.items()


def _show(found: HostCache, entries: Sequence[CacheEntry]) -> None:
    from ctxflow.causes import duration

    for entry in entries:
        ago = duration(max(0.0, time.time() - entry.used))
        users = f"  in use by {', '.join(map(str, entry.users)) or 'a worker'}" if entry.held else ""
        print(f"{size_text(entry.bytes):>9}  used {ago:>12} ago  {entry.key[:12]}  {entry.name}{users}")
    most = f" of {size_text(found.limit)} at most" if found.limit is not None else ""
    total = f"{counted(len(entries), 'entry', 'entries')}, {size_text(sum(entry.bytes for entry in entries))}{most}"
    print(f"{found.path}: {total}; {size_text(shutil.disk_usage(found.path).free)} free on its disk")
