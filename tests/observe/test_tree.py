"""Trees of transfers: every transfer in its place, once."""

import collections

from hypothesis import given
from hypothesis import strategies as st
from observe_data import DEBUG, STAGING

from ctxflow.observe.manager_log import read_transfers
from ctxflow.observe.transfers import MANAGER, Transfer, Transfers, file_trees, read_staging, tree_lines, with_notes

people = st.sampled_from([MANAGER, "", "a", "b", "c", "d"])


@st.composite
def transfers(draw):
    start = draw(st.none() | st.integers(0, 20))
    end = None if start is None else start + draw(st.integers(0, 5))
    return Transfer(
        draw(st.sampled_from("fg")),
        draw(people),
        draw(st.sampled_from("abcd")),
        draw(st.sampled_from(["sent", "linked", "made"])),
        start if draw(st.booleans()) else draw(st.integers(0, 20)),
        start,
        end,
        draw(st.none() | st.integers(0, 10**9)),
        "" if end is not None and draw(st.booleans()) else "why",
    )


@given(st.lists(transfers(), max_size=30))
def test_every_transfer_is_there_once_below_its_source(some):
    trees = file_trees(some)
    walked = [node for tree in trees for node, _ in tree.walk()]
    assert collections.Counter(id(node.transfer) for node in walked) == collections.Counter(map(id, some))
    for node in walked:
        for child in node.children:
            assert child.transfer.sender == node.transfer.receiver
            assert child.transfer.file == node.transfer.file
            assert not node.transfer.error
    assert sum(tree.copies + tree.links + tree.failed for tree in trees) <= len(some)
    found = Transfers(some)
    for tree in trees:
        lines = tree_lines(tree, found)
        assert sum("─ " in line for line in lines) == sum(1 for _ in tree.walk())
        assert len(tree_lines(tree, found, most=3)) <= 3 + 1 + 1 + len(tree.roots)


def test_the_text_of_a_real_tree():
    notes = read_staging(STAGING.read_text().splitlines())
    found = read_transfers(DEBUG.read_bytes().splitlines(), notes)
    found.transfers = with_notes(found.transfers, notes)
    model, _, checkpoint = file_trees(found.transfers)
    assert (model.copies, model.from_manager, model.links, model.depth) == (5, 1, 4, 3)
    assert tree_lines(model, found)[:6] == [
        "model.bin of encoder, 100.0 MB: 5 copies sent (1 by the manager), 4 hard links, 3 hops deep, 3.81 s",
        "manager",
        "└─ 11.0.w1a (host1)  1.62-2.42 s, 100.0 MB at 125.0 MB/s",
        "   ├─ 13.0.w3a (host3)  2.65-3.52 s, 100.0 MB at 114.5 MB/s",
        "   │  ├─ 12.0.w2a (host2)  3.52-4.36 s, 100.0 MB at 118.2 MB/s",
        "   │  │  └─ 12.0.w2b (host2)  hard link at 4.39 s",
    ]
    assert tree_lines(checkpoint, found)[-1] == (
        "   └─ 13.0.w6a (host3)  FAILED, 13.96-14.38 s: Resource temporarily unavailable"
    )


def test_a_large_tree_is_cut():
    some = [Transfer("f", MANAGER, f"w{n}", "sent", n, n, n + 1, 10) for n in range(100)]
    [tree] = file_trees(some)
    lines = tree_lines(tree, Transfers(some), most=40)
    assert len(lines) == 2 + 40 + 1
    assert lines[-1] == "... and 60 more transfers (--all shows them)"
