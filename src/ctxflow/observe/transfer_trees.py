"""Arrange a file's transfers as a tree: each hangs under the one that brought the file to its sender."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ctxflow.observe.transfers import MANAGER, Transfer, Transfers


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


def file_trees(transfers: Sequence[Transfer]) -> list[FileTree]:
    """Return a tree for each file, in the order in which they were first asked for.

    Every transfer is in exactly one tree, once. A sender that nobody is known to have sent the file to is a root.

    >>> a = Transfer("f", "manager", "w1", "sent", 0.0, 0.0, 1.0, 100)
    >>> b = Transfer("f", "w1", "w2", "sent", 1.0, 1.0, 2.0, 100)
    >>> [tree] = file_trees([a, b])
    >>> tree.copies, tree.from_manager, tree.depth, tree.seconds
    (2, 1, 2, 2.0)
    """
    by_file: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        by_file.setdefault(transfer.file, []).append(transfer)
    return [_tree(file, of_file) for file, of_file in by_file.items()]


def _tree(file: str, transfers: list[Transfer]) -> FileTree:
    nodes = [TreeNode(transfer) for transfer in transfers]
    arrivals: dict[str, list[TreeNode]] = {}
    for node in sorted(nodes, key=lambda node: _or_zero(node.transfer.end)):
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
    before = [a for a in arrivals if a is not node and _or_zero(a.transfer.end) < end]
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


def _or_zero(time: float | None) -> float:
    return 0.0 if time is None else time


# --- as text


def tree_lines(tree: FileTree, found: Transfers, most: int | None = None) -> list[str]:
    """Return a file's tree as lines of text.

    :param most: leave out transfers beyond so many, saying how many; None for all.
    """
    lines = [title(tree, found)]
    drawn = 0
    total = sum(1 for _ in tree.walk())
    senders: dict[str, list[TreeNode]] = {}
    for node in tree.roots:
        senders.setdefault("" if node.transfer.kind == "made" else node.transfer.sender, []).append(node)
    for sender, roots in senders.items():
        lines.append(root_name(sender, roots, found))
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


def file_name(file: str, found: Transfers) -> str:
    """Return a file's name, with its digest's beginning where another has that name too."""
    known = found.files.get(file)
    if known is None:
        return file
    same = sum(other.name == known.name for other in found.files.values())
    return known.name if same == 1 else f"{known.name} [{file[:8]}]"


def root_name(sender: str, roots: list[TreeNode], found: Transfers) -> str:
    """Return the sender that a tree begins with."""
    if sender == MANAGER:
        return MANAGER
    if sender:
        return f"{worker_name(sender, found)}, which held it before"
    return "written by a call" if roots[0].transfer.kind == "made" else "(sender unknown)"


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
        when = f"{start}-{end} s" if start and end else f"asked at {_or_zero(transfer.asked):.2f} s"
        return f"{who}  FAILED, {when}: {transfer.error}"
    if transfer.kind == "linked":
        return f"{who}  hard link at {end} s"
    size = "" if transfer.bytes is None else f", {megabytes(transfer.bytes)}"
    rate = transfer.bytes_per_second
    waited = _waited(transfer)
    return f"{who}  {start}-{end} s{size}{'' if rate is None else f' at {rate / 1e6:.1f} MB/s'}{waited}"


def _waited(transfer: Transfer) -> str:
    if transfer.asked is None or transfer.start is None or transfer.start - transfer.asked < 0.5:
        return ""
    return f", {transfer.start - transfer.asked:.1f} s after it was asked for"


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
