"""Transfer trees as nested lists of a page, which fold.

What does not live here: the trees (tree.py), and the page around them (page.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ctxflow.observe.report import Report
from ctxflow.observe.transfers import Transfers
from ctxflow.observe.tree import FileTree, Node, describe, root_name, title

_MOST = 400  # Lines of a file, if not all are wanted.
_MOST_FILES = 30
_OPEN = 60  # Trees of more lines than this are folded below their second level.


@dataclasses.dataclass(frozen=True)
class Section:
    """A file's tree: its title and its lists, as HTML that is escaped."""

    title: str
    html: Any


def tree_sections(report: Report, every: bool) -> list[Section]:
    """A section for each file, the one that was sent most often first; beyond the first few, a line says how many more.

    :param every: all of them, and all of their transfers.
    """
    trees = sorted(report.trees, key=lambda tree: -(tree.copies + tree.links))
    shown = trees if every else trees[:_MOST_FILES]
    sections = [Section(title(tree, report.transfers), _html(tree, report.transfers, every)) for tree in shown]
    if len(shown) < len(trees):
        sections.append(Section(f"... and {len(trees) - len(shown):,} more files (--all shows them)", ""))
    return sections


def _html(tree: FileTree, found: Transfers, every: bool) -> Any:
    """Nested lists: each transfer below the one that brought the file to its sender; hard links of one host on a line.

    Goes through the tree with a stack of its own, so that no depth of a tree is too much.
    """
    from markupsafe import Markup, escape

    total = sum(1 for _ in tree.walk())
    most = total if every else _MOST
    senders: dict[str, list[Node]] = {}
    for node in tree.roots:
        senders.setdefault("" if node.transfer.kind == "made" else node.transfer.sender, []).append(node)
    out: list[str] = []
    stack: list[str | tuple[Node, int]] = []
    for sender, roots in reversed(senders.items()):
        top = f"<ul><li><span class=sender>{escape(root_name(sender, roots, found))}</span>"
        stack += ["</li></ul>", *_below(roots, 1, found)[::-1], top]
    drawn = 0
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            out.append(part)
            continue
        node, depth = part
        drawn += 1
        if drawn > most:
            continue
        line = f"<span{' class=failed' if node.transfer.error else ''}>{escape(describe(node.transfer, found))}</span>"
        if node.children:
            folded = "" if total > _OPEN and depth >= 2 else " open"
            out.append(f"<li><details{folded}><summary>{line}</summary>")
            stack += ["</details></li>", *_below(node.children, depth + 1, found)[::-1]]
        else:
            out.append(f"<li>{line}</li>")
    if drawn > most:
        out.append(f"<p class=remark>These are the first {most:,} of {total:,} transfers; --all shows them all.</p>")
    return Markup("".join(out))


def _below(nodes: list[Node], depth: int, found: Transfers) -> list[str | tuple[Node, int]]:
    """The list of what is below one place, in parts: nodes, and HTML around them."""
    from markupsafe import escape

    linked: dict[str, list[str]] = {}
    parts: list[str | tuple[Node, int]] = ["<ul>"]
    for node in nodes:
        transfer = node.transfer
        peer = found.peers.get(transfer.receiver)
        if transfer.kind == "linked" and not transfer.error and not node.children and peer is not None and peer.host:
            linked.setdefault(peer.host.partition(".")[0], []).append(transfer.receiver)
        else:
            parts.append((node, depth))
    for host, workers in linked.items():
        names = ", ".join(workers[:8]) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        count = "hard link" if len(workers) == 1 else f"{len(workers)} hard links"
        parts.append(f"<li class=link>{escape(f'{count} on {host}: {names}')}</li>")
    return [*parts, "</ul>"]
