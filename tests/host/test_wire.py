"""Framing: whatever way the bytes are split, the same messages come out."""

import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.host.wire import BlockingChannel, Channel, connect, frame, listen, unframe

keys = st.text(max_size=5)
heads = st.dictionaries(
    keys,
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(keys, max_size=3),
    max_size=4,
)
messages = st.lists(st.tuples(heads, st.binary(max_size=300)), max_size=8)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


@settings(deadline=None, max_examples=200)
@given(messages, st.lists(st.integers(1, 64), max_size=30))
def test_any_split_of_the_bytes_gives_the_messages(sent, sizes):
    left, right = socket.socketpair()
    with left, right:
        channel, received = Channel(right), []
        data = b"".join(frame(head, body) for head, body in sent)
        for size in sizes:
            left.sendall(data[:size])
            data = data[size:]
            received += channel.receive()
        left.sendall(data)
        left.close()
        while not channel.closed:
            received += channel.receive()
        assert received == sent


@settings(deadline=None, max_examples=100)
@given(messages)
def test_both_kinds_of_channel_understand_each_other(sent):
    left, right = socket.socketpair()
    with left, right:
        theirs = BlockingChannel(right)
        ours = Channel(left)
        for head, body in sent:
            ours.send(head, body)
        assert [theirs.receive() for _ in sent] == sent
        for head, body in sent:
            theirs.send(head, body)
        right.shutdown(socket.SHUT_WR)
        received = []
        while not ours.closed:
            received += ours.receive()
        assert received == sent


def test_what_does_not_fit_waits_and_arrives_in_order(pair):
    ours, theirs = Channel(pair[0]), Channel(pair[1])
    bodies = [os.urandom(size) for size in (3_000_000, 10, 2_000_000, 0)]
    for number, body in enumerate(bodies):
        ours.send({"n": number}, body)
    assert ours.pending
    received = []
    while len(received) < len(bodies):
        ours.flush()
        received += theirs.receive()
    assert not ours.pending
    assert received == [({"n": number}, body) for number, body in enumerate(bodies)]


def test_the_other_end_is_gone(pair):
    ours = Channel(pair[0])
    pair[1].close()
    ours.send({"n": 1})
    ours.send({"n": 2})
    ours.flush()
    assert ours.receive() == []
    assert ours.closed


def test_a_blocking_channel_says_when_the_other_end_is_gone_even_within_a_message(pair):
    theirs = BlockingChannel(pair[1])
    pair[0].sendall(frame({"n": 1}, b"whole") + frame({"n": 2}, b"torn")[:-1])
    pair[0].shutdown(socket.SHUT_WR)
    assert theirs.receive() == ({"n": 1}, b"whole")
    with pytest.raises(EOFError):
        theirs.receive()


def test_what_is_no_message_closes_the_channel_and_what_came_before_counts(pair):
    channel = Channel(pair[1])
    pair[0].sendall(frame({"n": 1}) + struct.pack("<IQ", 5, 0) + b"junk!")
    assert channel.receive() == [({"n": 1}, b"")]
    assert channel.closed


def test_a_head_holds_what_json_can_and_text_of_the_rest():
    assert json.loads(frame({"path": os.curdir, "text": "\ud800"})[12:]) == {"path": ".", "text": "\ud800"}


@pytest.mark.parametrize("length", [10, 200])
def test_sockets_have_paths_of_any_length(tmp_path, length):
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    with listen(str(folder / "driver.sock")) as listener, connect(str(folder / "driver.sock")) as near:
        far, _ = listener.accept()
        with far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
    with pytest.raises(OSError, match="refused"):
        connect(str(folder / "driver.sock"))
    with pytest.raises(FileNotFoundError):
        listen(str(tmp_path / ("y" * length) / "driver.sock"))


@given(messages, st.data())
def test_bytes_hold_the_messages_that_were_put_together_and_no_part_of_one(sent, data):
    together = b"".join(frame(head, body) for head, body in sent)
    assert unframe(together) == sent
    ends = {sum(len(frame(*message)) for message in sent[:count]) for count in range(len(sent) + 1)}
    cut = data.draw(st.integers(0, len(together)))
    if cut not in ends:
        with pytest.raises(ValueError, match="cut off"):
            unframe(together[:cut])


def test_waiting_with_any_number_of_open_files():
    """select(2) takes no descriptor above 1023; a channel's is above it in a driver with many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    left, right = socket.socketpair()
    try:
        high = fcntl.fcntl(right, fcntl.F_DUPFD_CLOEXEC, 1500)
        with left, right, contextlib.closing(Channel(socket.socket(fileno=high))) as channel:
            assert channel.fileno() >= 1500
            assert not channel.wait(0.0)
            assert channel.wait(events=select.POLLOUT)
            left.sendall(frame({"a": 1}))
            assert channel.wait() and channel.receive() == [({"a": 1}, b"")]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
