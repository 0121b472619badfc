"""A run's transfers: who sent which file to whom, the engine's notes of them, and each file's tree.

The notes, in `taskvine/staging.jsonl`, have names for what the manager's debug log (manager_log.py) calls by addresses
and cache names, and hard links, of which that log knows nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MANAGER = "manager"
"""What the manager is called as a sender."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One file brought to one worker. Times in seconds on the run's clock, None where unknown.

    :ivar file: the file's digest, or its cache name where nobody noted a digest.
    :ivar sender: a worker, "manager", the start of a URL, or "" where unknown.
    :ivar kind: "sent" over the network, "linked" (hard-linked from a sibling on the same host) or "made" (written
        by a call on the worker itself).
    :ivar asked: when the manager asked for it; `start` and `end`: when it began and was there, or had failed.
    :ivar bytes: its size, None where unknown.
    :ivar error: why it failed, "" if it did not.
    """

    file: str
    sender: str
    receiver: str
    kind: str
    asked: float | None
    start: float | None
    end: float | None
    bytes: int | None = None
    error: str = ""

    @property
    def seconds(self) -> float | None:
        """How long it took, in seconds."""
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def span(self) -> tuple[float | None, float | None]:
        """Return from when until when it is drawn, as far as that is known."""
        begin = self.start if self.start is not None else self.asked
        return begin, self.end if self.end is not None else begin

    @property
    def bytes_per_second(self) -> float | None:
        """Its speed; None for hard links and where unknown."""
        seconds = self.seconds
        return self.bytes / seconds if self.kind == "sent" and not self.error and self.bytes and seconds else None


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
class Transfers:
    """All transfers of a run, by the time they were asked for, with the files and workers that they name."""

    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    files: dict[str, ContextFile] = dataclasses.field(default_factory=dict)
    peers: dict[str, Peer] = dataclasses.field(default_factory=dict)


# --- the engine's notes


@dataclasses.dataclass
class StagingNotes:
    """What a staging file says. Times in seconds on the run's clock.

    :ivar origin: the Unix time of the run's clock 0, None if it is not said; `names`: cache name -> digest.
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
    """Return what a staging file says; lines that are torn or of a kind not known here are left out."""
    staging = StagingNotes()
    for line in lines:
        try:
            _take_note(staging, json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue
    return staging


def _take_note(staging: StagingNotes, record: dict[str, Any]) -> None:
    match record["is"]:
        case "origin":
            staging.origin = float(record["unix"])
        case "worker":
            name = record["worker"]
            joined, listens = float(record["time"]), record.get("listens", "")
            staging.peers[name] = Peer(name, record["host"], record["address"], joined, listens=listens)
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
            time, took = float(record["time"]), float(record["seconds"])
            staging.fetches.append((time, record["worker"], record["digest"], took))


def with_notes(found: list[Transfer], staging: StagingNotes) -> list[Transfer]:
    """Return the transfers with those that only the engine knows of: hard links, and what the log does not say."""
    known = {(transfer.receiver, transfer.file) for transfer in found if not transfer.error}
    sizes = {digest: file.bytes for digest, file in staging.files.items()}
    extra = [
        Transfer(digest, sibling, worker, "linked", time, time, time, sizes.get(digest))
        for time, worker, sibling, digest in staging.links
    ]
    extra += [
        Transfer(digest, "", worker, "sent", None, time - seconds, time, sizes.get(digest))
        for time, worker, digest, seconds in staging.fetches
        if (worker, digest) not in known
    ]
    return sorted([*found, *extra], key=began)


def began(transfer: Transfer) -> float:
    """Return the first time that is known of a transfer, 0 if there is none."""
    times = (transfer.asked, transfer.start, transfer.end)
    return next((time for time in times if time is not None), 0.0)


def rows_by_host(found: Transfers) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """Return the row of everybody, those of a host side by side, and (host, first row, last row) of each."""
    order: dict[str, list[str]] = {}
    for transfer in found.transfers:
        for name in (transfer.sender, transfer.receiver):
            peer = found.peers.get(name)
            group = order.setdefault("" if peer is None else peer.host, [])
            if name not in group:
                group.append(name)
    rows: dict[str, int] = {}
    hosts = []
    for host in sorted(order, key=lambda host: host != ""):  # Who is on no host comes first: the manager.
        first = len(rows)
        for name in order[host]:
            rows[name] = len(rows)
        if host:
            hosts.append((host, first, len(rows) - 1))
    return rows, hosts


# --- as trees


@dataclasses.dataclass
class TreeNode:
    """A transfer and those that its receiver made possible, by time."""

    transfer: Transfer
    children: list[TreeNode] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class FileTree:
    """How one file spread: under each root's sender ("manager", a URL, a worker that wrote it, "") hang its transfers.

    :ivar copies: arrivals over the network; `links`: hard links; `failed`: transfers that failed.
    :ivar depth: how many times the file was sent on the longest way from a root; hard links do not count.
    :ivar seconds: from the first transfer's start to the last arrival, None if nothing arrived.
    """

    file: str
    roots: list[TreeNode]
    from_manager: int = 0
    copies: int = 0
    links: int = 0
    failed: int = 0
    depth: int = 0
    seconds: float | None = None

    def walk(self) -> Iterator[tuple[TreeNode, int]]:
        """Yield every node, in the order of the text, with how many hops over the network led there."""
        stack = [(node, 0) for node in reversed(self.roots)]
        while stack:
            node, before = stack.pop()
            hops = before + (node.transfer.kind == "sent")
            yield node, hops
            stack += [(child, hops) for child in reversed(node.children)]

    def by_sender(self, found: Transfers) -> list[tuple[str, list[TreeNode]]]:
        """Return the roots by the sender that they begin with, in words."""
        senders: dict[str, list[TreeNode]] = {}
        for node in self.roots:
            senders.setdefault("" if node.transfer.kind == "made" else node.transfer.sender, []).append(node)
        return [(_root_name(sender, roots[0].transfer, found), roots) for sender, roots in senders.items()]


def file_trees(transfers: Sequence[Transfer]) -> list[FileTree]:
    """Return a tree for each file, in the order in which they were first asked for.

    Every transfer is in exactly one tree, once. A sender that nobody is known to have sent the file to is a root.
    """
    by_file: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        by_file.setdefault(transfer.file, []).append(transfer)
    return [_tree(file, of_file) for file, of_file in by_file.items()]


def _tree(file: str, transfers: list[Transfer]) -> FileTree:
    nodes = [TreeNode(transfer) for transfer in transfers]
    arrivals: dict[str, list[TreeNode]] = {}
    for node in sorted(nodes, key=lambda node: node.transfer.end or 0.0):
        if not node.transfer.error:
            arrivals.setdefault(node.transfer.receiver, []).append(node)
    tree = FileTree(file, [])
    for node in nodes:
        source = _source(node, arrivals.get(node.transfer.sender, []))
        (tree.roots if source is None else source.children).append(node)
    _count(tree, transfers)
    return tree


def _source(node: TreeNode, arrivals: list[TreeNode]) -> TreeNode | None:
    """Return the last arrival at the sender before this transfer ended; not itself, nor one that came later."""
    end = node.transfer.end if node.transfer.end is not None else node.transfer.asked
    if node.transfer.kind == "made" or end is None:
        return None
    # Strictly before its own end: so that no transfer is, over others, its own source.
    before = [a for a in arrivals if a is not node and (a.transfer.end or 0.0) < end]
    return before[-1] if before else None


def _count(tree: FileTree, transfers: list[Transfer]) -> None:
    arrived = [t for t in transfers if not t.error]
    sent = [t for t in arrived if t.kind == "sent"]
    tree.copies = len(sent)
    tree.from_manager = sum(t.sender == MANAGER for t in sent)
    tree.links = sum(t.kind == "linked" for t in arrived)
    tree.failed = len(transfers) - len(arrived)
    tree.depth = max((hops for node, hops in tree.walk() if not node.transfer.error), default=0)
    starts = [t.start for t in transfers if t.start is not None]
    ends = [t.end for t in arrived if t.end is not None]
    tree.seconds = max(ends) - min(starts) if starts and ends else None


# --- as text


def tree_lines(tree: FileTree, found: Transfers, most: int | None = None) -> list[str]:
    """Return a file's tree as lines of text, with at most so many transfers, saying how many are left out."""
    lines = [title(tree, found)]
    drawn = 0
    total = sum(1 for _ in tree.walk())
    for sender, roots in tree.by_sender(found):
        lines.append(sender)
        stack = [(node, "", n == len(roots) - 1) for n, node in enumerate(roots)][::-1]
        while stack:
            node, indent, last = stack.pop()
            if most is not None and drawn >= most:
                lines.append(f"{indent}... and {total - drawn} more transfers (--all shows them)")
                return lines
            drawn += 1
            lines.append(indent + ("└─ " if last else "├─ ") + describe(node.transfer, found))
            below = indent + ("   " if last else "│  ")
            stack += [(child, below, n == len(node.children) - 1) for n, child in enumerate(node.children)][::-1]
    return lines


def title(tree: FileTree, found: Transfers) -> str:
    """Return one line on a file and how it spread.

    >>> title(FileTree("f", [], from_manager=1, copies=3, links=4, failed=1, depth=2, seconds=2.5), Transfers())
    'f: 3 copies sent (1 by the manager), 4 hard links, 1 failed, 2 hops deep, 2.50 s'
    """
    file = found.files.get(tree.file)
    name = tree.file if file is None else file_name(tree.file, found)
    size = "" if file is None or file.bytes is None else f", {megabytes(file.bytes)}"
    of = f" of {file.context}" if file is not None and file.context else ""
    parts = [f"{_plural(tree.copies, 'copy', 'copies')} sent ({tree.from_manager} by the manager)"]
    parts += [_plural(tree.links, "hard link")] if tree.links else []
    parts += [f"{tree.failed} failed"] if tree.failed else []
    parts += [f"{_plural(tree.depth, 'hop')} deep"]
    parts += [f"{tree.seconds:.2f} s"] if tree.seconds is not None else []
    return f"{name}{of}{size}: {', '.join(parts)}"


def _root_name(sender: str, first: Transfer, found: Transfers) -> str:
    if sender and sender != MANAGER:
        return f"{worker_name(sender, found)}, which held it before"
    return sender or ("written by a call" if first.kind == "made" else "(sender unknown)")


def file_name(file: str, found: Transfers) -> str:
    """Return a file's name, with its digest's beginning where another has that name too."""
    known = found.files.get(file)
    if known is None:
        return file
    same = sum(other.name == known.name for other in found.files.values())
    return known.name if same == 1 else f"{known.name} [{file[:8]}]"


def worker_name(worker: str, found: Transfers) -> str:
    """Return a worker with its host."""
    peer = found.peers.get(worker)
    return f"{worker} ({peer.host.partition('.')[0]})" if peer is not None and peer.host else worker


def describe(transfer: Transfer, found: Transfers) -> str:
    """Return a transfer in words, but for its sender.

    >>> describe(Transfer("f", "m", "w1", "sent", 2.4, 2.5, 4.5, 10_000_000), Transfers())
    'w1  2.50-4.50 s, 10.0 MB at 5.0 MB/s'
    """
    who = worker_name(transfer.receiver, found)
    start, end = (None if at is None else f"{at:.2f}" for at in (transfer.start, transfer.end))
    if transfer.error:
        when = f"{start}-{end} s" if start and end else f"asked at {transfer.asked or 0.0:.2f} s"
        return f"{who}  FAILED, {when}: {transfer.error}"
    if transfer.kind == "linked":
        return f"{who}  hard link at {end} s"
    size = "" if transfer.bytes is None else f", {megabytes(transfer.bytes)}"
    rate = transfer.bytes_per_second
    waited = 0.0 if transfer.asked is None or transfer.start is None else transfer.start - transfer.asked
    late = f", {waited:.1f} s after it was asked for" if waited >= 0.5 else ""
    return f"{who}  {start}-{end} s{size}{'' if rate is None else f' at {rate / 1e6:.1f} MB/s'}{late}"


def megabytes(count: int) -> str:
    """Return bytes in megabytes, or gigabytes where there are many.

    >>> megabytes(100_000_000), megabytes(1_234), megabytes(3_700_000_000)
    ('100.0 MB', '0.001 MB', '3.70 GB')
    """
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 50_000 else f"{count / 1e6:.3f} MB"


def _plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
