"""What the manager is told of calls' files, and what becomes of them when a call or its worker ends."""

import os

import pytest

from ctxflow.executors.contract import CallFiles, Input, OutputFile
from ctxflow.executors.taskvine import vine_hosts
from ctxflow.executors.taskvine.manager_messages import DeclareFile, Undeclare
from ctxflow.executors.taskvine.vine_hosts import Attachments
from ctxflow.host.library_messages import CallFinished, CallRaised


class Said(list):
    def known(self, kind):
        """The keys of a kind that the manager was told of and not to forget."""
        keys = [message.key for message in self if isinstance(message, DeclareFile)]
        gone = {message.key for message in self if isinstance(message, Undeclare)}
        return [key for key in keys if key.startswith(kind) and key not in gone]

    def path(self, key):
        return next(message.path for message in self if isinstance(message, DeclareFile) and message.key == key)


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def attached(said, tmp_path):
    return Attachments(said.append, str(tmp_path / "outputs"), lambda: False)


def finished(**made):
    return [CallFinished(1, 1.0, made=made, body=b"result")]


def brought(said, files, content):
    """What TaskVine does: outputs come to where the manager was told."""
    for key in files.outputs.values():
        with open(said.path(key), "w") as file:
            file.write(content)


@pytest.mark.parametrize("proven", [True, False])
def test_workers_send_one_another_inputs_only_where_they_are_known_to_reach_each_other(said, tmp_path, proven):
    source = tmp_path / "in.txt"
    source.write_text("words")
    Attachments(said.append, str(tmp_path / "outputs"), lambda: proven).attach(
        "a", CallFiles((Input("in.txt", str(source)),), ())
    )
    assert [(message.cache, message.peers) for message in said] == [(True, proven)]


def test_an_input_is_declared_anew_once_not_all_workers_reach_one_another(said, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("words")
    answers = [True, True, False, False]
    attachments = Attachments(said.append, str(tmp_path / "outputs"), lambda: answers.pop(0))
    call = CallFiles((Input("in.txt", str(source)),), ())
    keys = [attachments.attach("a", call).inputs["input-0"] for _ in range(4)]
    assert [(message.key, message.peers) for message in said] == [(keys[0], True), (keys[2], False)]
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_of_two_runs_of_a_call_the_first_that_ends_counts(attached, said, tmp_path):
    target = tmp_path / "out.txt"
    call = CallFiles((), (OutputFile("out.txt", str(target)),))
    runs = {worker: attached.attach(worker, call) for worker in ("a", "b")}
    for worker, files in runs.items():
        brought(said, files, worker)
    assert attached.answered("b", runs["b"], finished(**{"output-0": 1})) == finished(**{"output-0": 1})
    attached.answered("a", runs["a"], finished(**{"output-0": 1}))
    assert target.read_text() == "b"
    assert os.listdir(tmp_path / "outputs") == [] == said.known("output")


def test_an_output_that_came_in_part_is_an_error(attached, said, tmp_path):
    files = attached.attach("a", CallFiles((), (OutputFile("out.txt", str(tmp_path / "out.txt")),)))
    brought(said, files, "half")
    (raised,) = attached.answered("a", files, finished(**{"output-0": 8}))
    assert isinstance(raised, CallRaised) and raised.trouble.kind == "exception"
    assert "4 of its 8 bytes have come; is there room on this disk?" in raised.trouble.message
    assert not (tmp_path / "out.txt").exists()


def test_links_and_pipes_stay_what_they_are(attached, said, tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        files = attached.attach("a", CallFiles((), (OutputFile(name, str(tmp_path / name)),)))
        brought(said, files, name)
        assert attached.answered("a", files, finished(**{"output-0": 4})) == finished(**{"output-0": 4})
    assert (tmp_path / "real").read_text() == "link"
    assert (tmp_path / "link").is_symlink()
    assert os.read(reader, 10) == b"pipe"
    os.close(reader)


def test_nothing_is_kept_for_a_worker_that_is_lost(attached, said, tmp_path):
    (tmp_path / "in").touch()
    call = CallFiles((Input("in", str(tmp_path / "in")),), (OutputFile("out", str(tmp_path / "out")),))
    files = [attached.attach("a", call) for _ in range(2)]
    brought(said, files[0], "x")
    attached.lost("a")
    attached.lost("never there")
    assert os.listdir(tmp_path / "outputs") == [] == said.known("output")
    assert len(said.known("input")) == 1, "it was declared once, and stays for other calls"


def test_inputs_that_no_call_takes_are_forgotten_but_for_the_latest(attached, said, tmp_path):
    kept, calls = vine_hosts._KEPT, []
    for number in range(kept + 10):
        path = tmp_path / str(number)
        path.touch()
        calls.append(attached.attach("a", CallFiles((Input("in", str(path)),))))
    assert len(said.known("input")) == kept + 10, "all are under way"
    for call in calls[1:]:
        attached.answered("a", call, finished())
    first, *others = said.known("input")
    assert said.path(first) == str(tmp_path / "0")
    assert len(others) == kept
    assert said.path(others[-1]) == str(tmp_path / str(kept + 9))
