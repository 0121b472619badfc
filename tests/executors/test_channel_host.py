"""What the contract suite cannot bring about between an engine and a context host (tests/examples/test_engine.py)."""

import selectors
import socket

import pytest

from ctxflow.executors.channel_host import ChannelHost, SharedDisk
from ctxflow.executors.contract import CallPayload, ContextPayload, Payloads, Pickled
from ctxflow.host import library_messages
from ctxflow.host import messages as msg
from ctxflow.host.wire import Channel, pack
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

CONTEXT = ContextPayload("c", "model", b"recipe", {}, {}, None, None)


@pytest.fixture
def ends():
    """A worker, and the other end of its channel."""
    near, far = map(Channel, socket.socketpair())
    with selectors.DefaultSelector() as selector:
        worker = ChannelHost(ev.WorkerSpec("w"), "/scratch/w", near, selector, SharedDisk("/scratch/cache", "/"))
        yield worker, far
        worker.close()
    far.close()


def test_what_is_said_of_an_earlier_build_counts_no_more(ends):
    worker, far = ends

    def told_to_build():
        worker.tell(cmd.Load("w", "c"), Payloads(contexts={"c": CONTEXT}))
        [message] = far.receive()
        return msg.TO_HOST.open(*message).key

    def heard_of(key):
        far.send_frame(pack(library_messages.ContextBuilt("c", key, 2.0)))
        return [type(event) for event in worker.hear(5.0)]

    earlier, latest = told_to_build(), told_to_build()
    assert heard_of(earlier) == []
    assert heard_of(latest) == [ev.ContextReady]


def test_a_host_that_cannot_go_on_is_gone_and_says_why(ends):
    worker, far = ends
    assert not worker.gone
    far.send_frame(pack(msg.WorkerStuck("process 7 does not end")))
    assert worker.hear(1.0) == []
    assert worker.gone
    assert worker.stuck == "process 7 does not end"


def test_what_does_not_fit_into_the_socket_follows(ends):
    worker, far = ends
    body = bytes(range(256)) * (1 << 14)
    payload = CallPayload("batch", Pickled("f", body), False, None, b"inputs")
    worker.tell(cmd.Run("w", 3, "app", "c", (1,)), Payloads(calls={3: payload}))
    assert worker.channel.pending
    received = []
    while len(received) < 2:
        worker.hear(1.0)
        received += far.receive()
    part, call = (msg.TO_HOST.open(*each) for each in received)
    assert (part.name, part.body, call.call, call.body) == ("f", body, 3, b"inputs")
    assert not worker.channel.pending


@pytest.fixture
def noticed(ends):
    """The same, where the worker runs a call and has notice."""
    worker, far = ends
    payload = CallPayload("batch", None, False, None, b"inputs")
    worker.tell(cmd.Run("w", 3, "app", "c", (1,)), Payloads(calls={3: payload}))
    far.send_frame(pack(msg.NoticeGiven()))
    assert worker.hear(1.0) == [ev.EvictionNotice(1.0, "w")]
    worker.release_idle()
    assert len(far.receive()) == 1, "it was told to leave amid its call"
    return ends


@pytest.mark.parametrize("command", [cmd.Unload("w", "c"), cmd.Load("w", "c")])
def test_one_with_notice_does_not_wait_for_calls_whose_process_it_ended(noticed, command):
    worker, far = noticed
    worker.tell(command, Payloads(contexts={"c": CONTEXT}))
    worker.release_idle()
    assert [head[0] for head, _ in far.receive()][1:] == ["LeaveWorker"]


def test_one_with_notice_leaves_when_it_runs_nothing(noticed):
    worker, far = noticed
    far.send_frame(pack(library_messages.CallFinished(3, 0.5)))
    worker.hear(2.0)
    worker.release_idle()
    worker.release_idle()
    assert [head for head, _ in far.receive()] == [["LeaveWorker"]]
