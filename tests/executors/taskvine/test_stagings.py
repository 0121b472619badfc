"""Contexts' files on their way to workers: files that go meanwhile, and what is known of workers that are gone."""

import os
import shutil
from types import SimpleNamespace

import pytest

from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.vine_workers import VineWorker
from ctxflow.host.messages import FetchFile, FileCached, FileDone, FileFailed, LinkFile, SeedFile, TakeKept
from ctxflow.host.wire import Trouble
from ctxflow.scheduler import events as ev
from waiting import finished


class Played:
    """The calls to workers, each of which finds what it is to fetch."""

    def __init__(self, directory):
        self.link = SimpleNamespace(send=lambda head: None)
        self.events, self._made, self._directory = [], [], directory
        self.asked, self.kept = [], {}  # Names of the messages; by host, what its cache answers.
        setup = SimpleNamespace(note=lambda line: None, path=lambda name: str(directory / name))
        run = SimpleNamespace(clock=lambda: 0.0)
        self.stagings = Stagings(run, self, setup, self.events.append, lambda: None)

    def make(self, worker, frames, then, inputs=None, outputs=None):
        self._made.append((worker, frames, then))
        return len(self._made)

    def answer(self):
        while self._made:
            worker, [message], then = self._made.pop(0)
            self.asked.append(type(message))
            there = FileCached("", f"{self._directory}/{worker.name}")
            then(worker, [self.kept.get(worker.host, there) if isinstance(message, TakeKept) else there])

    def join(self, name, host="", kept=""):
        host = host or name
        worker = VineWorker(name, host, "127.0.0.1:1", since=0.0, place=host, kept=kept)
        self.stagings.joined(worker)
        return worker

    def happened(self):
        events, self.events[:] = [type(event) for event in self.events], []
        return events


@pytest.fixture
def played(tmp_path):
    played = Played(tmp_path)
    yield played
    played.stagings.close()


@pytest.fixture
def context(tmp_path):
    (tmp_path / "weights").write_text("7")
    (tmp_path / "words").write_text("8")
    files = {name: (str(tmp_path / name), f"digest-{name}") for name in ("weights", "words")}
    return SimpleNamespace(id="c1", name="model", level=ev.PERVASIVE, files=files)


def test_a_file_that_goes_as_it_is_staged_costs_that_build_alone(played, context, monkeypatch):
    worker, size = played.join("w1"), os.path.getsize

    def gone(path):
        if path.endswith("words"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return size(path)

    monkeypatch.setattr(os.path, "getsize", gone)
    played.stagings.stage(worker, context)
    played.answer()
    [event] = played.events
    assert isinstance(event, ev.ContextFailed) and "see that it is there as long as the run lasts" in str(event.failure)
    played.happened()
    monkeypatch.undo()
    played.stagings.stage(worker, context)
    played.answer()
    assert played.happened() == [ev.ContextStaged]


def test_so_does_a_folder(played, context, tmp_path):
    worker, folder = played.join("w1"), tmp_path / "folder"
    context.files["folder"] = (str(folder), "digest-folder")
    played.stagings.stage(worker, context)
    assert played.happened() == [ev.ContextFailed]
    folder.mkdir()
    played.stagings._packing.submit(shutil.rmtree, folder)  # Before it is packed.
    for expected in (ev.ContextFailed, ev.ContextStaged):
        played.stagings.stage(worker, context)
        finished(played.stagings._packing.submit(lambda: None)).result()
        played.stagings.serve()
        played.answer()
        assert played.happened() == [expected]
        folder.mkdir(exist_ok=True)


def test_whose_file_it_was_is_forgotten_with_a_worker(played, context):
    stay = played.join("stays")
    played.stagings.stage(stay, context)
    played.answer()
    there = len(played.stagings._holders)
    for number in range(20):
        worker = played.join(f"w{number}")
        played.stagings.stage(worker, context)
        played.answer()
        assert len(played.stagings._holders) > there
        played.stagings.lost(worker)
    waits = played.join("waits")
    played.stagings.stage(waits, context)
    played.stagings.lost(waits)
    assert played.happened() == [ev.ContextStaged] * 21
    assert set(played.stagings._holders.values()) == {"stays"}
    assert set(played.stagings._wants) == {"stays"}


def test_a_worker_whose_hosts_cache_has_a_file_is_sent_nothing_and_a_folder_is_not_packed(played, context, tmp_path):
    (tmp_path / "folder").mkdir()
    context.files["folder"] = (str(tmp_path / "folder"), "digest-folder")
    played.stagings.stage(played.join("w1", kept="/scratch/ctxflow/1000"), context)
    played.answer()
    assert played.asked == [TakeKept] * 3
    assert played.happened() == [ev.ContextStaged]
    assert not played.stagings._files


def test_what_it_has_not_is_sent_and_is_to_be_kept(played, context):
    played.kept["n1"] = FileDone()
    played.stagings.stage(played.join("w1", "n1", kept="/scratch/ctxflow/1000"), context)
    [(_, [first], _), (_, [second], _)] = played._made
    assert {type(first), type(second)} == {TakeKept}
    played.answer()
    assert played.asked[2:] == [SeedFile, SeedFile, FetchFile, FetchFile]
    assert played.happened() == [ev.ContextStaged]
    played.stagings.stage(played.join("w2", "n1", kept="/scratch/ctxflow/1000"), context)
    played.answer()
    assert played.asked[6:] == [TakeKept, TakeKept, LinkFile, LinkFile]


def test_what_was_spoiled_there_is_told_once_and_sent_anew(played, context, caplog):
    trouble = Trouble("exception", "SpoiledEntry", "the host's cache had it, and not as it was put there")
    played.kept["n1"] = FileFailed("d", trouble)
    for name in ("w1", "w2"):
        played.stagings.stage(played.join(name, "n1", kept="/scratch/ctxflow/1000"), context)
        played.answer()
    assert played.happened() == [ev.ContextStaged] * 2
    assert caplog.messages == ["on n1: the host's cache had it, and not as it was put there"]


def test_at_level_none_files_are_sent_each_time(played, context):
    context.level = ev.NONE
    played.stagings.stage(played.join("w1", kept="/scratch/ctxflow/1000"), context)
    assert [message.keep for _, [message], _ in played._made] == [False, False]
    played.answer()
    assert played.asked == [FetchFile, FetchFile]
