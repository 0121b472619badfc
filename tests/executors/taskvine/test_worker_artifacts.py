"""What builds made goes from the worker that built to the driver, and on to those on machines that are alike."""

import os
from types import SimpleNamespace

import pytest

from ctxflow.executors.taskvine import worker_artifacts
from ctxflow.executors.taskvine.manager_messages import DeclareFile
from ctxflow.executors.taskvine.vine_workers import VineWorker
from ctxflow.executors.taskvine.worker_artifacts import ArtifactTransfers
from ctxflow.files import digest_now
from ctxflow.host.host_cache import HostCache
from ctxflow.host.messages import ArtifactsFailed, ArtifactsMade, FileFailed, FileSent, SendArtifacts
from ctxflow.host.wire import Trouble

KEYS = [f"artifacts-{number:032x}" for number in range(4)]
CONTEXT = SimpleNamespace(id="context-1", name="model", artifacts={})


class Played:
    """Workers that send what they are asked for, and to which files come when `arrive` says so."""

    def __init__(self, directory):
        self.directory, self.sent, self.lines = directory, {}, []
        self.asked, self.coming, self._files = [], [], {}
        self.link = SimpleNamespace(send=self._told)
        self.start()

    def start(self):
        setup = SimpleNamespace(note=self.lines.append, path=lambda name: str(self.directory / name))
        run = SimpleNamespace(clock=lambda: 0.0)
        self.artifacts = ArtifactTransfers(run, self, setup, self, lambda: None)

    def _told(self, message):
        if isinstance(message, DeclareFile):
            self._files[message.key] = message.path

    def number(self):
        return len(self._files)

    def make(self, worker, messages, then, inputs=None, outputs=None):
        [message] = messages
        assert isinstance(message, SendArtifacts) and message.output in outputs
        self.asked.append((worker, message.kept, then, self._files[outputs[message.output]]))

    def bring(self, worker, path, digest, context, done):
        assert digest_now(path) == digest and context == "model"
        self.coming.append((worker, digest, done))

    def made(self, worker, text="x" * 100, key=KEYS[0], context="context-1"):
        self.artifacts.heard(worker, ArtifactsMade(context, key, len(text)))

    def send(self, text="x" * 100, altered=b""):
        """The worker that is asked sends what it keeps."""
        worker, _, then, path = self.asked.pop(0)
        with open(path, "w") as file:
            file.write(text)
        digest, size = digest_now(path), os.path.getsize(path)
        if altered:
            with open(path, "ab") as file:
                file.write(altered)
        then(worker, [FileSent(digest, size)])
        self.settle()
        return digest

    def settle(self):
        self.artifacts._thread.submit(lambda: None).result()
        self.artifacts.serve()
        self.artifacts._thread.submit(lambda: None).result()
        self.artifacts.serve()

    def arrive(self, failure=None):
        coming, self.coming = self.coming, []
        for _, _, done in coming:
            done(failure)

    def found(self, worker):
        return {key: digest for key, (digest, _) in self.artifacts.sent(worker, CONTEXT).items()}


def worker(name, alike="machine-a"):
    return VineWorker(name, name, "127.0.0.1:1", since=0.0, alike=alike)


@pytest.fixture
def played(tmp_path, monkeypatch):
    monkeypatch.setenv("CTXFLOW_ARTIFACTS", str(tmp_path / "user"))
    played = Played(tmp_path)
    played.settle()
    yield played
    played.artifacts.close()


def test_the_first_that_built_is_asked_once_and_the_next_gets_it(played):
    first, second = worker("w1"), worker("w2")
    assert not played.artifacts.bring(first, CONTEXT)
    played.made(first)
    played.made(second)
    assert [(each[0].name, each[1]) for each in played.asked] == [("w1", KEYS[0])]
    digest = played.send()
    assert not played.asked, "one is enough"
    then = []
    assert played.artifacts.bring(second, CONTEXT)
    assert played.artifacts.bring(second, CONTEXT, lambda: then.append(played.found(second)))
    assert len(played.coming) == 1 and not then, "it is on its way once"
    played.arrive()
    assert then == [{KEYS[0]: digest}]
    assert not played.artifacts.bring(second, CONTEXT) and not played.coming
    assert [line["is"] for line in played.lines] == ["artifacts"]


def test_machines_that_differ_and_contexts_that_keep_none_get_nothing(played):
    played.made(worker("w1"))
    played.send()
    assert not played.artifacts.bring(worker("w2", alike="machine-b"), CONTEXT)
    assert not played.artifacts.bring(worker("w3", alike=""), CONTEXT)
    none = SimpleNamespace(id="context-1", name="model", artifacts=None)
    assert not played.artifacts.bring(worker("w4"), none) and not played.artifacts.sent(worker("w4"), none)
    other = SimpleNamespace(id="context-2", name="model", artifacts={})
    assert not played.artifacts.bring(worker("w5"), other) and not played.coming


def test_what_a_first_call_adds_takes_the_place_of_what_was_there(played):
    first = worker("w1")
    played.made(first)
    played.made(first, "y" * 200)  # While the first file is being sent.
    old = played.send()
    new = played.send("y" * 200)
    played.made(worker("w2"), "z" * 205)
    assert not played.asked, "which is hardly more"
    second = worker("w3")
    assert played.artifacts.bring(second, CONTEXT)
    played.arrive()
    assert played.found(second) == {KEYS[0]: new} and new != old


def test_what_was_altered_on_the_way_is_not_used_and_another_is_asked(played):
    played.made(worker("w1"))
    played.made(worker("w2"))
    played.send(altered=b"!")
    assert [each[0].name for each in played.asked] == ["w2"]
    assert not played.artifacts.bring(worker("w3"), CONTEXT)
    played.send()
    assert played.artifacts.bring(worker("w3"), CONTEXT)


def test_who_cannot_send_is_not_asked_for_ever(played):
    for number in range(9):
        played.made(worker(f"w{number}"))
    asked = 0
    while played.asked:
        whom, _, then, _ = played.asked.pop(0)
        then(whom, [FileFailed(None, Trouble("exception", "FileNotFoundError", "it keeps none"))])
        asked += 1
    assert asked == worker_artifacts._MOST_TRIES


def test_a_worker_that_is_lost_while_it_sends_or_gets(played):
    first, second = worker("w1"), worker("w2")
    played.made(first)
    played.made(second)
    played.artifacts.lost(first)
    assert [each[0].name for each in played.asked] == ["w1", "w2"], "the other is asked in its place"
    played.asked.pop(0)
    played.send()
    third, then = worker("w3"), []
    assert played.artifacts.bring(third, CONTEXT, lambda: then.append(1))
    played.artifacts.lost(third)
    played.arrive()
    assert not then


def test_what_cannot_be_sent_costs_nothing_but_time(played, caplog):
    played.made(worker("w1"))
    played.send()
    then = []
    assert played.artifacts.bring(worker("w2"), CONTEXT, lambda: then.append(1))
    played.arrive(SimpleNamespace(message="the disk is full"))
    assert then == [1] and played.found(worker("w2")) == {}
    assert "what building model made elsewhere cannot be sent: the disk is full" in caplog.text


def test_what_did_harm_goes_to_nobody_any_more_also_in_later_runs(played):
    played.made(worker("w1"))
    digest = played.send()
    played.artifacts.heard(worker("w2"), ArtifactsFailed("context-1", KEYS[0], "another"))
    assert played.artifacts.bring(worker("w3"), CONTEXT)
    played.arrive()
    played.artifacts.heard(worker("w2"), ArtifactsFailed("context-1", KEYS[0], digest))
    assert not played.artifacts.bring(worker("w4"), CONTEXT)
    played.settle()
    played.artifacts.close()
    played.start()
    played.settle()
    assert not played.artifacts.bring(worker("w5"), CONTEXT)


def test_a_later_run_has_it_from_its_beginning(played):
    played.artifacts.bring(worker("w1"), CONTEXT)
    played.made(worker("w1"))
    played.made(worker("w2"), "other", KEYS[1])
    digests = {KEYS[0]: played.send(), KEYS[1]: played.send("other")}
    played.artifacts.close()
    for path in played.directory.glob("made-*/*"):
        path.unlink()
    played.start()
    played.settle()
    next_, then = worker("w9"), []
    assert played.artifacts.bring(next_, CONTEXT, lambda: then.append(played.found(next_)))
    played.settle()
    assert len(played.coming) == 2
    played.arrive()
    assert then == [digests]
    assert not played.artifacts.bring(worker("w8", "machine-b"), CONTEXT)


def test_a_later_run_has_the_latest(played):
    played.made(worker("w1"))
    played.send()
    played.made(worker("w1"), "y" * 200)
    latest = played.send("y" * 200)
    played.settle()
    played.artifacts.close()
    played.start()
    played.settle()
    assert played.artifacts.bring(worker("w2"), CONTEXT)
    played.settle()
    assert [digest for _, digest, _ in played.coming] == [latest]
    cache = HostCache(os.environ["CTXFLOW_ARTIFACTS"])
    assert len(cache.entries()) == 1, "what was replaced is not kept"
    cache.close()


def test_without_room_for_its_files_a_run_goes_on(played, monkeypatch):
    """Neither what comes from a worker nor what an earlier run has left can be put in its directory."""
    played.made(worker("w1"))
    played.send()
    played.artifacts.close()
    played.start()
    played.settle()

    def full(*given, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker_artifacts.os, "makedirs", full)
    then = []
    assert played.artifacts.bring(worker("w2"), CONTEXT, lambda: then.append(1))
    played.settle()
    assert then == [1] and not played.coming
    played.made(worker("w2"))
    played.send()
    assert not played.artifacts.bring(worker("w3"), CONTEXT)


def test_one_that_is_gone_from_the_users_cache_meanwhile_is_built_again(played):
    played.made(worker("w1"))
    played.send()
    played.artifacts.close()
    played.start()
    played.settle()
    cache = HostCache(os.environ["CTXFLOW_ARTIFACTS"])
    cache.empty()
    cache.close()
    then = []
    assert played.artifacts.bring(worker("w2"), CONTEXT, lambda: then.append(1))
    played.settle()
    assert then == [1] and not played.coming
    played.made(worker("w2"))
    assert played.asked


def test_without_a_users_folder_this_run_alone_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CTXFLOW_ARTIFACTS", "")
    played = Played(tmp_path)
    played.settle()
    played.made(worker("w1"))
    played.send()
    assert played.artifacts.bring(worker("w2"), CONTEXT)
    played.artifacts.close()


def test_what_is_too_large_stays_where_it_is_which_is_told_once(played, caplog):
    for name in ("w1", "w2"):
        played.artifacts.heard(worker(name), ArtifactsMade("context-1", KEYS[0], 600_000_000))
    assert not played.asked
    assert caplog.text.count("0.6 GB, is too large to be sent to other hosts") == 1
