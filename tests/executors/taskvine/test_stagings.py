"""Contexts' files on their way to workers: files that go meanwhile, networks that let nobody through, lost workers."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.taskvine.manager_messages import DeclareFile, DeclareTemp, Undeclare
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.vine_workers import VineWorker
from ctxflow.executors.taskvine.worker_transfers import StateTransfers
from ctxflow.host.messages import FetchFile, FileCached, FileDone, FileFailed, LinkFile, ReachPeer, SeedFile, TakeKept
from ctxflow.host.wire import Trouble
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from waiting import finished


class Played:
    """The calls to workers, each of which finds what it is to fetch.

    :ivar reaches: whether one host reaches another.
    """

    def __init__(self, directory, peers=True):
        self.link = SimpleNamespace(send=lambda head: None)
        self.events, self._made, self._directory = [], [], directory
        self.asked, self.kept = [], {}  # Names of the messages; by host, what its cache answers.
        self.reaches = lambda host, other: True
        self.tried, self.copies = [], {}  # Pairs of hosts; temp file -> the hosts that have it.
        setup = SimpleNamespace(note=lambda line: None, path=lambda name: str(directory / name))
        run = SimpleNamespace(clock=lambda: 0.0)
        self.stagings = Stagings(run, self, setup, self.events.append, lambda: None, peers)

    def make(self, worker, frames, then, inputs=None, outputs=None):
        if worker.answers:  # Of a worker that is lost nothing is heard.
            self._made.append((worker, frames, then, inputs or {}, outputs or {}))
        return len(self._made)

    def answer(self, most=10_000):
        while self._made and most:
            most -= 1
            worker, [message], then, inputs, outputs = self._made.pop(0)
            self.asked.append(type(message))
            then(worker, [self._answer(worker, message, [*inputs.values(), *outputs.values()])])

    def _answer(self, worker, message, files):
        there = FileCached("", f"{self._directory}/{worker.name}")
        if isinstance(message, ReachPeer):
            self.tried.append((worker.host, message.address))
            text = f"the worker cannot reach {message.source}: timed out"
            good = self.reaches(worker.host, message.address)
            return FileDone() if good else FileFailed(None, Trouble("exception", "TimeoutError", text))
        if isinstance(message, SeedFile | FetchFile):
            for copy in [each for each in files if each.startswith("temp ")]:
                self.copies.setdefault(copy, set()).add(worker.host)
        return self.kept.get(worker.host, there) if isinstance(message, TakeKept) else there

    def join(self, name, host="", kept="", listens=False):
        host = host or name
        where = {"ip": host, "transfer_port": 1024} if listens else {}
        worker = VineWorker(name, host, "127.0.0.1:1", since=0.0, place=host, kept=kept, **where)
        worker.answers = True
        self.stagings.joined(worker)
        return worker

    def lose(self, worker):
        worker.answers = False
        self._made = [made for made in self._made if made[0] is not worker]
        self.stagings.lost(worker)

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
    [(_, [first], *_), (_, [second], *_)] = played._made
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
    assert [message.keep for _, [message], *_ in played._made] == [False, False]
    played.answer()
    assert played.asked == [FetchFile, FetchFile]


def staged_on(played, context, hosts):
    """Have a worker of each host join and get a context's files; return them, and how often each message was sent."""
    workers = []
    for host in hosts:
        workers.append(played.join(f"w-{host}", host, listens=True))
        played.stagings.stage(workers[-1], context)
        played.answer()
    assert played.happened() == [ev.ContextStaged] * len(hosts)
    return workers, {kind: played.asked.count(kind) for kind in (ReachPeer, SeedFile, FetchFile)}


def test_hosts_that_reach_one_another_are_sent_a_file_once(played, context, caplog):
    _, sent = staged_on(played, context, ["n1", "n2", "n3", "n4"])
    assert sent == {ReachPeer: 2 * 3, SeedFile: 2, FetchFile: 2 * 4}
    assert played.stagings.proven() and not caplog.messages


@pytest.mark.parametrize("one_way", [False, True], ids=["no connections", "in one direction"])
def test_hosts_that_do_not_are_sent_it_each_and_each_pair_is_told_once(played, context, caplog, one_way):
    played.reaches = lambda host, other: one_way and host > other
    workers, sent = staged_on(played, context, ["n1", "n2", "n3"])
    assert sent == {ReachPeer: 2 * 3, SeedFile: 2 * 3, FetchFile: 2 * 3}
    assert all(len(hosts) == 1 for hosts in played.copies.values()) and not played.stagings.proven()
    told = [message.partition(" cannot send")[0] for message in caplog.messages]
    assert told == ["workers on n2 and n1", "workers on n3 and n1", "workers on n3 and n2"]
    assert "the worker cannot reach n2:1024: timed out" in caplog.messages[0]
    played.lose(workers[1])
    staged_on(played, context, ["n2"])
    assert played.asked.count(ReachPeer) == sent[ReachPeer] and len(caplog.messages) == 3, "it is remembered"


def test_where_a_site_says_so_hosts_are_not_even_tried(tmp_path, context):
    played = Played(tmp_path, peers=False)
    _, sent = staged_on(played, context, ["n1", "n2"])
    assert sent == {ReachPeer: 0, SeedFile: 2 * 2, FetchFile: 2 * 2} and not played.stagings.proven()
    played.stagings.stage(played.join("w3", "n2", listens=True), context)
    played.answer()
    assert played.asked[-2:] == [LinkFile, LinkFile], "one machine is no network"
    played.stagings.close()


@pytest.mark.parametrize("lost", ["the one that tries", "the one that is tried"])
def test_a_worker_that_goes_while_it_is_tried_holds_nobody_up(played, context, lost):
    first = played.join("w1", "n1", listens=True)
    second, third = (played.join(name, "n2", listens=True) for name in ("w2", "w3"))
    for worker in (second, third):
        played.stagings.stage(worker, context)
    played.answer(1)
    played.lose(second if lost == "the one that tries" else first)
    played.answer()
    staged = 1 if lost == "the one that tries" else 2
    assert played.happened() == [ev.ContextStaged] * staged


def test_what_is_still_to_be_brought_to_a_worker_that_is_gone_holds_nobody_up(played, context, tmp_path):
    played.join("w0", "n0", listens=True)
    worker = played.join("w1", "n1", listens=True)
    played.lose(worker)
    played.stagings.bring(worker, str(tmp_path / "weights"), "digest-weights", "model", lambda failure: None)
    played.stagings.stage(played.join("w2", "n1", listens=True), context)
    played.answer()
    assert played.happened() == [ev.ContextStaged]


def test_workers_whose_connections_come_through_tunnels_are_alone(played, context):
    for name in ("n1", "n2"):
        worker = VineWorker(name, name, "127.0.0.1:1", since=0.0, place=name, ip="127.0.0.1", transfer_port=1024)
        worker.answers = True
        played.stagings.joined(worker)
        played.stagings.stage(worker, context)
        played.answer()
    assert ReachPeer not in played.asked and played.asked.count(SeedFile) == 2 * 2


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12), st.booleans())
def test_no_file_goes_between_hosts_that_do_not_reach_each_other(tmp_path_factory, hosts, peers):
    """Racks between which nothing passes, and hosts to which nothing does."""
    rack_of = {f"n{number}": rack if open_ else -number - 1 for number, (rack, open_) in enumerate(hosts)}
    folder = tmp_path_factory.mktemp("files")
    (folder / "weights").write_text("7")
    files = {"weights": (str(folder / "weights"), "digest-weights")}
    context = SimpleNamespace(id="c1", name="model", level=ev.PERVASIVE, files=files)
    played = Played(folder, peers)
    played.reaches = lambda host, other: rack_of[host] == rack_of[other]
    _, sent = staged_on(played, context, list(rack_of))
    assert all(len({rack_of[host] for host in hosts}) == 1 for hosts in played.copies.values())
    assert len(set(played.tried)) == len(played.tried), "a pair was tried twice"
    racks = len(set(rack_of.values()))
    assert racks <= sent[SeedFile] <= len(rack_of)
    if racks <= 2 and peers:
        assert sent[SeedFile] == racks
    played.stagings.close()


class Carried:
    """The calls and the manager's files of sessions' states."""

    def __init__(self, directory):
        self.sent, self.events, self._made = [], [], []
        self.link = SimpleNamespace(send=self.sent.append)
        self.run = SimpleNamespace(clock=lambda: 0.0, directory=str(directory))
        (directory / "taskvine").mkdir()

    def number(self):
        return 7

    def make(self, worker, messages, then, inputs=None, outputs=None):
        self._made.append((worker, then, inputs or {}, outputs or {}))
        return 1


def sent_on_its_way(directory, reach):
    """A state that one worker is to send to another."""
    carried = Carried(directory)
    states = StateTransfers(carried.run, carried, carried.events.append, lambda one, other: reach)
    source, target = (VineWorker(name, name, "127.0.0.1:1", since=0.0, place=name) for name in ("w1", "w2"))
    states.carry(source, target, cmd.Carry("w2", "w1", 3, 5, "", 6))
    return carried, states, source, target


@pytest.mark.parametrize("reach", [True, False])
def test_a_state_goes_by_way_of_the_driver_between_workers_that_do_not_reach_each_other(tmp_path, reach):
    carried, _, source, target = sent_on_its_way(tmp_path, reach)
    [(worker, then, _, outputs)] = carried._made
    [declared] = carried.sent
    assert worker is source and list(outputs.values()) == [declared.key]
    assert isinstance(declared, DeclareTemp if reach else DeclareFile)
    if not reach:
        Path(declared.path).write_text("frozen")  # As TaskVine brings it.
    then(source, [FileDone()])
    worker, then, inputs, _ = carried._made[-1]
    assert worker is target and list(inputs.values()) == [declared.key]
    then(target, [FileDone()])
    assert [type(event) for event in carried.events] == [ev.StateArrived]
    assert type(carried.sent[-1]) is Undeclare and not any((tmp_path / "taskvine").iterdir())


@pytest.mark.parametrize("reach", [True, False])
def test_a_state_whose_worker_is_lost_before_it_comes_leaves_no_file_and_is_asked_for_by_nobody(tmp_path, reach):
    carried, states, source, _ = sent_on_its_way(tmp_path, reach)
    [(_, then, _, _)] = carried._made
    states.lost("w2")
    if not reach:
        Path(carried.sent[0].path).write_text("frozen")
    then(source, [FileDone()])
    assert len(carried._made) == 1 and not carried.events
    assert not any((tmp_path / "taskvine").iterdir())
