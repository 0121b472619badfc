"""The doorbell, whose calls end when a byte arrives; and seals: what was altered, or has another key, is not opened."""

import contextlib
import json
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vine_player import Player

from ctxflow.host.vine_protocol import SEAL_BYTES, Once, key_of, open_answer, open_call, seal_answer, seal_call
from ctxflow.host.wire import short_path
from waiting import DeadlinePassed

SERVE = "import sys; from ctxflow.host.vine_protocol import answer_rings; sys.exit(answer_rings(sys.argv[1:]))"


@pytest.fixture
def bell(tmp_path):
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    path = str(folder / "bell")
    player = Player(tmp_path, [sys.executable, "-c", SERVE, "--socket", path])
    assert json.loads(player.message())["name"] == "doorbell"

    def ring():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end, short_path(path) as address:
            end.sendto(b".", address)

    yield player, ring
    player.close()
    assert player.process.returncode == 0


def test_a_call_ends_when_it_rings(bell):
    player, ring = bell
    for _ in range(3):
        tasks = [player.send(name="wait") for _ in range(2)]
        ring()
        for task in tasks:
            assert player.answer(task) == (0, [])


def test_a_ring_before_the_call_counts_once(bell):
    player, ring = bell
    ring()
    ring()
    assert player.answer(player.send(name="wait")) == (0, [])
    task = player.send(name="wait")
    with pytest.raises(DeadlinePassed):
        player.answer(task, within=0.3)
    ring()
    assert player.answer(task) == (0, [])


KEY = key_of(b"password")


@given(st.text(max_size=20), st.integers(0, 2**64 - 1), st.binary(max_size=100))
def test_what_is_sealed_opens(worker, number, data):
    call = seal_call(KEY, worker, number, data)
    assert open_call(KEY, worker, call) == (number, data)
    assert open_answer(KEY, call, seal_answer(KEY, call, data)) == data


@given(st.binary(max_size=60), st.data())
def test_one_bit_is_noticed(data, draw):
    call = seal_call(KEY, "w", 1, data)
    answer = seal_answer(KEY, call, data)
    for sealed, opened in ((call, lambda c: open_call(KEY, "w", c)), (answer, lambda a: open_answer(KEY, call, a))):
        bit = draw.draw(st.integers(0, 8 * len(sealed) - 1))
        bent = bytearray(sealed)
        bent[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):
            assert opened(bytes(bent)) is None


@given(st.lists(st.integers(1, 40), max_size=60))
def test_each_number_counts_once_in_any_order(numbers):
    once = Once()
    assert [once.take(number) for number in numbers] == [
        number not in numbers[:place] for place, number in enumerate(numbers)
    ]


def test_an_answer_is_no_call():
    """Even where what they are about is the same: the tag names the direction."""
    about = b"w" * SEAL_BYTES
    answer = seal_answer(KEY, about, (1).to_bytes(8, "big") + b"x")
    with pytest.raises(ValueError, match="seal"):
        open_call(KEY, about.decode(), answer)


def test_of_another_worker_call_or_key():
    call, other = seal_call(KEY, "w", 1, b"x"), seal_call(KEY, "w", 2, b"x")
    with pytest.raises(ValueError, match="seal"):
        open_call(KEY, "v", call)
    with pytest.raises(ValueError, match="seal"):
        open_call(key_of(b""), "w", call)
    assert open_answer(KEY, other, seal_answer(KEY, call, b"y")) is None
    assert open_answer(KEY, call, call) is None, "a call is no answer"
    for short in (b"", b"x" * 15):
        assert open_answer(KEY, call, short) is None
        with pytest.raises(ValueError, match="seal"):
            open_call(KEY, "w", short)
