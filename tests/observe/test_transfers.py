"""Transfers, read from the log of a real manager and from logs written to a plan, and their trees."""

import calendar
import collections
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_data import DEBUG, STAGING

from ctxflow.observe.manager_log import read_transfers
from ctxflow.observe.transfers import (
    MANAGER,
    ContextFile,
    Peer,
    StagingNotes,
    Transfer,
    Transfers,
    file_trees,
    read_staging,
    tree_lines,
    with_notes,
)

LINES = DEBUG.read_bytes().splitlines(keepends=True)
NOTES = read_staging(STAGING.read_text().splitlines())


def test_a_real_tree():
    found = read_transfers(LINES, NOTES)
    model = [t for t in found.transfers if found.files[t.file].name == "model.bin"]
    assert [(t.sender, t.receiver, t.kind) for t in model] == [
        (MANAGER, "11.0.w1a", "sent"),
        ("11.0.w1a", "13.0.w3a", "sent"),
        ("11.0.w1a", "14.0.w4a", "sent"),
        ("13.0.w3a", "12.0.w2a", "sent"),
        ("13.0.w3a", "12.0.w5a", "sent"),
    ]
    assert all(t.bytes == 100_000_000 and not t.error for t in model)
    # The links carry 1000 Mbit/s, which is 125 MB/s.
    assert all(100e6 < t.bytes_per_second < 126e6 for t in model)
    assert all(0 < t.asked <= t.start + 0.02 < t.end for t in model)
    assert found.peers["12.0.w5a"].host == "host2.testbed"


def test_a_sender_that_was_lost():
    found = read_transfers(LINES, NOTES)
    to_late = [t for t in found.transfers if t.receiver == "13.0.w6a"]
    assert [(t.sender, t.error) for t in to_late] == [
        ("11.0.w1a", "Resource temporarily unavailable"),
        ("14.0.w4a", ""),
    ]
    assert to_late[0].bytes_per_second is None
    assert found.peers["11.0.w1a"].lost == pytest.approx(14.4, abs=0.1)


def test_hard_links_and_notes():
    found = read_transfers(LINES, NOTES).transfers
    fetched = dataclasses.replace(NOTES, fetches=[(5.0, "12.0.w2a", "d1a4", 0.5), (6.0, "20.0.x", "d1a4", 2.0)])
    both = with_notes(found, fetched)
    links = [t for t in both if t.kind == "linked"]
    assert len(links) == 8
    assert all(t.bytes_per_second is None for t in links)
    extra = [t for t in both if t not in found and t.kind != "linked"]
    # The manager's log tells of the first of the two already.
    assert extra == [Transfer("d1a4", "", "20.0.x", "sent", None, 4.0, 6.0, 100_000_000)]


def test_without_notes_addresses_stand_for_workers():
    found = read_transfers(LINES)
    [made] = [t for t in found.transfers if t.kind == "made" and t.bytes == 100_000_000]
    assert made.receiver.startswith("10.77.0.11:")
    assert found.peers[made.receiver].host == "host1.testbed"
    assert sum(t.sender == MANAGER for t in found.transfers) == 3
    assert 0 < min(t.start for t in found.transfers) < 5


def test_a_run_without_context_files_has_no_transfers():
    """What TaskVine sends for the library process itself is no context file."""
    assert read_transfers(LINES, dataclasses.replace(NOTES, names={}, files={})).transfers == []


@pytest.mark.parametrize("hours", [-9.5, -3, 5.75, 13])
def test_any_time_zone(hours):
    """The log has local times, of a machine that may be elsewhere."""

    def shifted(line):
        try:
            seconds = calendar.timegm(time.strptime(line[:19].decode(), "%Y/%m/%d %H:%M:%S")) + hours * 3600
        except ValueError:
            return line
        return time.strftime("%Y/%m/%d %H:%M:%S", time.gmtime(seconds)).encode() + line[19:]

    here, there = read_transfers(LINES, NOTES).transfers, read_transfers(map(shifted, LINES), NOTES).transfers
    for one, other in zip(here, there, strict=True):
        assert (one.sender, one.receiver, one.error) == (other.sender, other.receiver, other.error)
        assert other.start == pytest.approx(one.start, abs=0.001)


# --- to a plan


@dataclasses.dataclass
class Planned:
    file: int
    sender: int | None  # None: the manager.
    receiver: int
    seconds: float
    fails: bool


PLANS = st.lists(
    st.builds(
        Planned,
        st.integers(0, 3),
        st.none() | st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 900).map(lambda hundredths: hundredths / 100),
        st.booleans(),
    ),
    max_size=20,
)
ZERO = 1_795_239_000.0


def written(plan):
    """The log of a plan that is carried out one after another, a second between two."""
    at = ZERO

    def line(text):
        # Rounded to the hundredth first: the manager's clock and its log must not be on two sides of a second.
        hundredths = round(at * 100)
        stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.gmtime(hundredths // 100))
        return f"{stamp}.{hundredths % 100:02d} vine_manager[7]vine: {text}\n".encode()

    yield line("manager start")
    for n in range(6):
        yield line(f"rx from h{n} (10.0.0.{n}:5000): transfer-port {1024 + n}")
    for number, one in enumerate(plan):
        at += 1
        to, name = f"h{one.receiver} (10.0.0.{one.receiver}:5000)", f"temp-{one.file}"
        if one.sender is None:
            yield line(f"tx to {to}: put {name} 2 {1000 * (one.file + 1)}")
            at += one.seconds
            failed = f"failed to send x ({17} bytes sent)."
            yield line(f"{to} {failed if one.fails else f'received 0.01 MB in {one.seconds:.2f}s (1 MB/s)'}")
            continue
        url = f"workerip://10.0.0.{one.sender}:{1024 + one.sender}/{name}"
        yield line(f"tx to {to}: puturl {url} {name} 0 {1000 * (one.file + 1)} 0755 ID-{number}")
        began = at
        at += one.seconds
        if one.fails:
            yield line(f"rx from {to}: cache-invalid {name} 5 ID-{number}")
            yield line(f"{to} invalidated {name} with error: oh no")
        else:
            size = 1000 * (one.file + 1)
            yield line(
                f"rx from {to}: cache-update {name} 2 0 {size} 33188 {round(one.seconds * 1e6)} "
                f"{round(began * 1e6)} ID-{number}"
            )


@given(PLANS)
def test_what_was_planned_is_read(plan):
    notes = StagingNotes(
        origin=ZERO,
        names={f"temp-{n}": f"digest-{n}" for n in range(4)},
        files={f"digest-{n}": ContextFile(f"digest-{n}", f"file {n}", 1000 * (n + 1)) for n in range(4)},
        peers={f"w{n}": Peer(f"w{n}", f"h{n}", f"10.0.0.{n}:5000", 0.0) for n in range(6)},
    )
    found = read_transfers(written(plan), notes).transfers
    at = 0.0
    for one, transfer in zip(plan, found, strict=True):
        at += 1
        assert transfer.file == f"digest-{one.file}"
        assert transfer.sender == (MANAGER if one.sender is None else f"w{one.sender}")
        assert transfer.receiver == f"w{one.receiver}"
        assert bool(transfer.error) is one.fails
        assert transfer.asked == pytest.approx(at, abs=0.011)
        at += one.seconds
        assert transfer.end == pytest.approx(at, abs=0.011)
        if not one.fails:
            assert transfer.bytes == 1000 * (one.file + 1)
            assert transfer.seconds == pytest.approx(one.seconds, abs=0.011)


@given(st.data())
def test_damaged_logs_tell_nothing_that_was_not_there(data):
    """Lines torn, lost, or overwritten in places."""
    whole = read_transfers(LINES, NOTES).transfers
    lost = data.draw(st.sets(st.integers(0, len(LINES) - 1), max_size=20), label="lost")
    kept = [line for number, line in enumerate(LINES) if number not in lost]
    cut = data.draw(st.integers(0, len(kept) - 1))
    kept[cut] = kept[cut][: data.draw(st.integers(0, len(kept[cut])))]
    hit = data.draw(st.integers(0, len(kept) - 1))
    place = data.draw(st.integers(0, max(len(kept[hit]) - 1, 0)))
    kept[hit] = kept[hit][:place] + data.draw(st.binary(max_size=8)) + kept[hit][place + 2 :]
    told = {(t.file, t.sender, t.receiver) for t in whole}
    strange = 0
    for transfer in read_transfers(kept, NOTES).transfers:
        assert transfer.file in {"d1a4", "77e0", "c09e"}
        if transfer.kind == "sent":
            strange += (transfer.file, transfer.sender, transfer.receiver) not in told and ":" not in transfer.sender
    assert strange <= 1  # Of the line that was overwritten; a lost one leaves a sender's bare address.


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_anything_is_a_log(lines):
    assert read_transfers(lines).transfers == []


def test_a_transfer_that_the_log_does_not_end():
    end = next(n for n, line in enumerate(LINES) if b"puturl" in line)
    [*_, last] = read_transfers(LINES[: end + 1], NOTES).transfers
    assert (last.end, last.error) == (None, "it was not over when the log ended")


def test_an_address_that_two_workers_had():
    notes = StagingNotes(
        origin=ZERO,
        names={"temp-0": "d"},
        peers={
            "first": Peer("first", "h1", "10.0.0.1:5000", 0.0, lost=3.0),
            "second": Peer("second", "h1", "10.0.0.1:5000", 3.5),
        },
    )
    plan = [Planned(0, None, 1, 0.5, False), Planned(0, None, 1, 3.0, False), Planned(0, None, 1, 0.5, False)]
    assert [t.receiver for t in read_transfers(written(plan), notes).transfers] == ["first", "first", "second"]


@pytest.mark.parametrize(("unlinked", "times"), [(True, 2), (False, 1)])
def test_a_file_that_was_taken_away_is_made_anew(unlinked, times):
    stamp, worker = "2026/11/21 05:00:00.00 vine_manager[7]vine:", "h1 (10.0.0.1:5000)"
    made = f"{stamp} rx from {worker}: cache-update temp-0 1 0 10 33188 5000 1795239000000000 X".encode()
    gone = f"{stamp} tx to {worker}: unlink temp-0".encode()
    found = read_transfers([made, gone, made] if unlinked else [made, made]).transfers
    assert [t.kind for t in found] == ["made"] * times


def test_names_in_the_log_itself():
    """The engine's calls name their files by digests, so that it is known what was sent and made for them."""
    stamp, worker = "2026/11/21 05:00:0{}.00 vine_manager[7]vine:", "h1 (10.0.0.1:5000)"
    lines = [
        f"{stamp.format(0)} tx to {worker}: put file-meta-1 0 30",
        f"{stamp.format(1)} {worker} received 0.00 MB in 1.00s (1 MB/s)",
        f"{stamp.format(1)} tx to {worker}: put buffer-1 0 30",
        f"{stamp.format(2)} {worker} received 0.00 MB in 1.00s (1 MB/s)",
        f"{stamp.format(2)} tx to {worker}: infile file-meta-1 ctxflow-in-d1 0",
        f"{stamp.format(2)} tx to {worker}: infile buffer-1 call 0",
        f"{stamp.format(2)} tx to {worker}: outfile temp-1 ctxflow-out-d1 0",
        f"{stamp.format(2)} rx from {worker}: cache-update temp-1 1 0 30 33188 5000 1795239000000000 X",
        f"{stamp.format(3)} tx to h2 (10.0.0.2:5000): puturl workerip://10.0.0.1:1025/temp-1 temp-1 0 30 0755 ID",
        f"{stamp.format(4)} rx from h2 (10.0.0.2:5000): cache-update temp-1 2 0 30 33188 800000 1795237203200000 ID",
    ]
    notes = read_staging(
        ['{"is": "origin", "unix": 1795237200.0}', '{"is": "file", "digest": "d1", "name": "model", "bytes": 30}']
    )
    found = read_transfers([line.encode() for line in lines], notes)
    assert [(t.file, t.sender, t.receiver, t.kind, pytest.approx(t.seconds)) for t in found.transfers] == [
        ("d1", MANAGER, "10.0.0.1:5000", "sent", 1.0),
        ("d1", "10.0.0.1:1025", "10.0.0.2:5000", "sent", 0.8),
    ]
    assert found.files["d1"].name == "model"


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
