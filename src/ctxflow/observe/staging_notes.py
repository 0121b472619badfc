"""Read what the TaskVine engine notes of staging, in `taskvine/staging.jsonl`.

It has names for what the manager's debug log (transfers.py) calls by addresses and cache names, and hard links, of
which that log knows nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class ContextFile:
    """A file that contexts need. `digest` is its key; `bytes` is None where unknown; `context` may be ""."""

    digest: str
    name: str
    bytes: int | None = None
    context: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A worker as its site knows it: `address` is "IP:PORT" of its connection to the manager, `listens` where it
    serves its peers; times in seconds."""

    worker: str
    host: str
    address: str = ""
    joined: float | None = None
    lost: float | None = None
    listens: str = ""


@dataclasses.dataclass
class StagingNotes:
    """What a staging file says. Times in seconds on the run's clock.

    :ivar origin: the Unix time of the run's clock 0, None if it is not said.
    :ivar names: cache name -> digest.
    :ivar links: (time, worker, the sibling whose file it linked, digest).
    :ivar fetches: (time, worker, digest, seconds it took).
    """

    origin: float | None = None
    peers: dict[str, Peer] = dataclasses.field(default_factory=dict)
    files: dict[str, ContextFile] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    links: list[tuple[float, str, str, str]] = dataclasses.field(default_factory=list)
    fetches: list[tuple[float, str, str, float]] = dataclasses.field(default_factory=list)


def read_staging(lines: Iterable[str]) -> StagingNotes:
    r"""Return what a staging file says; lines that are torn or of a kind not known here are left out.

    >>> staging = read_staging(['{"is":"origin","unix":1763700000.0}\n', '{"is":"lin'])
    >>> staging.origin, staging.links
    (1763700000.0, [])
    """
    staging = StagingNotes()
    for line in lines:
        try:
            record = json.loads(line)
            _take(staging, record)
        except (ValueError, KeyError, TypeError):
            continue
    return staging


def _take(staging: StagingNotes, record: dict[str, Any]) -> None:
    match record["is"]:
        case "origin":
            staging.origin = float(record["unix"])
        case "worker":
            name = record["worker"]
            staging.peers[name] = Peer(
                name, record["host"], record["address"], float(record["time"]), listens=record.get("listens", "")
            )
        case "lost":
            name = record["worker"]
            known = staging.peers.get(name, Peer(name, ""))
            staging.peers[name] = dataclasses.replace(known, lost=float(record["time"]))
        case "file":
            digest = record["digest"]
            if record.get("cached_name"):
                staging.names[record["cached_name"]] = digest
            staging.files[digest] = ContextFile(digest, record["name"], record["bytes"], record.get("context") or "")
        case "linked":
            staging.links.append((float(record["time"]), record["worker"], record["from"], record["digest"]))
        case "fetched":
            staging.fetches.append(
                (float(record["time"]), record["worker"], record["digest"], float(record["seconds"]))
            )
