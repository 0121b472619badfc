"""The gate before TaskVine's port: who has not proven the password never comes to TaskVine, and holds nobody up.

A real gate, in its process; TaskVine is played by a listening socket and its side of the handshake.
"""

import contextlib
import hashlib
import mmap
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
from executor_helpers import first_free

from ctxflow.executors.taskvine import gate
from ctxflow.executors.taskvine.gate import Entrance
from ctxflow.executors.taskvine.manager_messages import BYTES, NEWS, Bell
from waiting import FOREVER, eventually, joined, patience

IDENT, PASSWORD = b"auth password sha1", b"open sesame"


def proof(challenge, password=PASSWORD):
    return hashlib.sha1(password + b" " + challenge).hexdigest().encode()


def shake_hands(connection, password=PASSWORD, more=b""):
    """TaskVine's handshake, which is the same on either side; whether the other accepts it.

    :param more: what is said at once after it.
    """
    lines = connection.makefile("rb", buffering=0)

    def line():
        return lines.readline().rstrip(b"\n")

    connection.sendall(IDENT + b"\n")
    if line() != IDENT:
        return False
    connection.sendall(b"my challenge\n")
    connection.sendall(proof(line(), password) + b"\n")
    if line() != proof(b"my challenge"):
        return False
    connection.sendall(b"ok\n" + more)
    return line() == b"ok"


class Played:
    """TaskVine's listening socket, and what stands before it."""

    def __init__(self, tmp_path):
        (tmp_path / "password").write_bytes(PASSWORD)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.asleep = os.memfd_create("asleep")
        os.ftruncate(self.asleep, BYTES)
        self.bell = mmap.mmap(self.asleep, BYTES)
        descriptor = self.listener.fileno()
        self.entrance = Entrance(descriptor, self.asleep, str(tmp_path / "bell"), str(tmp_path / "password"))
        self.strangers = []

    def connect(self):
        return socket.create_connection(self.address, timeout=patience())

    def accept(self):
        """TaskVine takes a connection, which has to do as a worker does."""
        self.listener.settimeout(patience())
        connection, address = self.listener.accept()
        connection.settimeout(patience())
        assert shake_hands(connection)
        return connection, address

    def until(self, condition):
        def holds():
            if condition():
                return True
            if self.bell[NEWS]:  # The manager looks there for nothing else.
                self.bell[NEWS] = 0
                self.strangers += self.entrance.serve()
            self.entrance.check()
            return False

        eventually(holds)


@pytest.fixture
def played(tmp_path):
    played = Played(tmp_path)
    yield played
    played.entrance.close()
    played.listener.close()
    os.close(played.asleep)


def test_a_worker_comes_under_the_descriptor_that_taskvine_knows(played):
    with played.connect() as worker:
        assert shake_hands(worker, more=b"taskvine 10\n"), "what follows at once is not lost"
        inside, address = played.accept()
        descriptor = inside.fileno()
        with inside:
            played.until(lambda: inside.getpeername() == worker.getsockname())
            assert inside.fileno() == descriptor
            assert inside.recv(100) == b"taskvine 10\n"
            inside.sendall(b"hello")
            assert worker.recv(100) == b"hello", "nothing stands between them"
            assert played.entrance.origin(f"{address[0]}:{address[1]}") == "127.0.0.1"
            played.entrance._gate.kill()
            played.entrance._gate.wait()
            worker.sendall(b"still there")
            assert inside.recv(100) == b"still there"
    assert not played.strangers


def test_workers_that_come_together_all_get_in(played):
    """One is put into its place while TaskVine has taken the connection for another, of which nobody knows yet."""
    with played.connect() as one, played.connect() as other:
        assert shake_hands(one) and shake_hands(other)
        ends = {one.getsockname(), other.getsockname()}
        first, _ = played.accept()
        second, _ = played.listener.accept()
        with first, second:
            played.until(lambda: first.getpeername() in ends)
            second.settimeout(patience())
            assert shake_hands(second)
            played.until(lambda: {first.getpeername(), second.getpeername()} == ends)


def test_strangers_hold_up_nobody_and_are_told_once(played):
    said = [b"abc"] * 12 + [b"", IDENT + b"\n", IDENT + b"\nchallenge\n", b"x" * 5000, IDENT + b"\nc\nno proof\n"]
    with contextlib.ExitStack() as connections:
        for words in said:
            connections.enter_context(played.connect()).sendall(words)
        for number in range(3):
            worker = connections.enter_context(played.connect())
            assert shake_hands(worker)
            inside, _ = played.accept()
            connections.enter_context(inside)
            played.until(lambda inside=inside, worker=worker: inside.getpeername() == worker.getsockname())
            worker.sendall(b"%d" % number)
            assert inside.recv(10) == b"%d" % number
        played.listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            played.listener.accept()
        played.until(lambda: played.strangers)
    assert played.strangers == ["127.0.0.1"]


def test_no_challenge_is_answered_before_there_is_proof(played):
    """TaskVine answers any: so its answer to one connection's challenge was good on another."""
    with played.connect() as stranger:
        stranger.sendall(IDENT + b"\nmy challenge\n")
        stranger.settimeout(patience())
        heard = b""
        while heard.count(b"\n") < 2:
            heard += stranger.recv(1000)
        stranger.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:
                heard += stranger.recv(1000)
        ident, challenge = heard.splitlines()
        assert ident == IDENT and proof(b"my challenge") not in heard
        stranger.settimeout(patience())
        stranger.sendall(proof(challenge, b"a guess") + b"\n")
        assert stranger.recv(100) == b"", "it is over"


def test_who_connects_from_one_place_again_and_again_pushes_out_nobody_else():
    manager, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.create_server(("127.0.0.1", 0)) as public, socket.create_server(("127.0.0.1", 0)) as private, theirs:
        address = public.getsockname()
        bell = Bell(mmap.mmap(-1, BYTES), "nobody")
        served = gate.Gate(public, private, theirs, PASSWORD, bell, proof_seconds=FOREVER, most_open=10)
        thread = threading.Thread(target=served.serve)
        thread.start()
        with contextlib.ExitStack() as connections:
            worker = connections.enter_context(socket.create_connection(address, timeout=patience()))
            assert worker.recv(100).startswith(IDENT)
            flood = []
            for _ in range(20):
                stranger = socket.create_connection(address, timeout=patience(), source_address=("127.0.0.2", 0))
                flood.append(connections.enter_context(stranger))
                assert stranger.recv(100).startswith(IDENT)
            worker.setblocking(False)
            with pytest.raises(BlockingIOError):  # Neither ended, nor spoken to again.
                worker.recv(1)
            assert flood[0].recv(1) == b"", "the oldest of those are"
        manager.close()
        joined(thread)
        for party in served._open:
            party.connection.close()
        served._selector.close()
        bell.close()


def test_a_gate_that_was_killed_is_started_again(played, monkeypatch):
    monkeypatch.setattr("ctxflow.executors.taskvine.gate._PAUSE_SECONDS", 0.0)
    first = played.entrance._gate
    first.kill()
    played.until(lambda: played.entrance._gate is not first)
    with played.connect() as worker:
        assert shake_hands(worker)


def test_the_manager_is_woken_if_it_sleeps(tmp_path):
    asleep = mmap.mmap(-1, 1)
    bell = Bell(asleep, str(tmp_path / "bell"))
    bell.ring()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as doorbell:
        doorbell.bind(str(tmp_path / "bell"))
        bell.ring()
        with pytest.raises(BlockingIOError):
            doorbell.recv(1)
        asleep[0] = 1
        bell.ring()
        assert doorbell.recv(1) == b"."
    bell.close()


def ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def test_a_gate_without_descriptors_lets_workers_wait_and_says_so(played):
    gate = played.entrance._gate.pid
    _, before = resource.prlimit(gate, resource.RLIMIT_NOFILE)
    with played.connect() as early:  # It is up.
        assert early.recv(100).startswith(IDENT)
        limit = first_free(gate)
        resource.prlimit(gate, resource.RLIMIT_NOFILE, (limit, before))
        with played.connect() as worker:
            played.until(lambda: played.entrance.troubles)
            spent = ticks(gate)
            time.sleep(1.0)  # In which it could spin.
            assert ticks(gate) - spent < os.sysconf("SC_CLK_TCK") / 5, "it spins"
            resource.prlimit(gate, resource.RLIMIT_NOFILE, (limit + 1, before))
            proven = []
            shaking = threading.Thread(target=lambda: proven.append(shake_hands(worker)))
            shaking.start()
            shaking.join(2)  # It has one for the worker, and none to take it to TaskVine with.
            resource.prlimit(gate, resource.RLIMIT_NOFILE, (before, before))
            connection, _ = played.accept()
            with connection:
                joined(shaking)
                assert proven == [True]
    [said] = played.entrance.troubles
    assert "connections of workers have to wait" in said and "raise `ulimit -n`" in said
    assert played.entrance._gate.poll() is None


def test_workers_for_whom_the_manager_has_no_descriptors_wait_before_taskvine(played, monkeypatch):
    """Where TaskVine has none for a connection, or for a file, it loses workers that it has."""
    monkeypatch.setattr(gate, "count_left", lambda: gate._RESERVE)
    with played.connect() as stranger:
        assert stranger.recv(100).startswith(IDENT)
        played.until(lambda: played.entrance._may == 0)
    with played.connect() as gone, played.connect() as worker:
        assert shake_hands(gone)
        gone.close()
        assert shake_hands(worker)
        played.until(lambda: played.entrance.troubles)
        assert not select.select([played.listener], [], [], 0.5)[0]
        monkeypatch.setattr(gate, "count_left", lambda: 1000)
        played.until(lambda: select.select([played.listener], [], [], 0)[0])
        inside, _ = played.accept()
        with inside:
            played.until(lambda: inside.getpeername() == worker.getsockname())
    [said] = played.entrance.troubles
    assert "connections of workers have to wait" in said and "raise `ulimit -n`" in said


def test_a_manager_without_descriptors_for_any_worker_does_not_start(played, monkeypatch):
    played.entrance.require_room()
    monkeypatch.setattr(gate, "count_left", lambda: gate._RESERVE + 1)
    with pytest.raises(OSError, match="Too many open files"):
        played.entrance.require_room()


def test_the_processes_before_taskvine_may_have_many_connections():
    program = "import resource as r; from ctxflow.host.linux import take_enough; take_enough(); "
    program += "print(r.getrlimit(r.RLIMIT_NOFILE))"
    for limits, wanted in (((100, 2000), "(2000, 2000)"), ((2000, 2000), "(2000, 2000)")):
        words = ["prlimit", f"--nofile={limits[0]}:{limits[1]}", sys.executable, "-c", program]
        assert subprocess.run(words, capture_output=True, check=True, text=True).stdout.strip() == wanted
