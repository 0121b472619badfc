"""The doorbell: a call ends when a byte arrives, whichever comes first."""

import json
import socket
import sys

import pytest
from vine_player import Player

from ctxflow.host.wire import short_path

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
    with pytest.raises(AssertionError, match="does not answer"):
        player.answer(task, limit=0.3)
    ring()
    assert player.answer(task) == (0, [])
