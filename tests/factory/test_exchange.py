"""What a run and its factory tell each other, through real files."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from ctxflow.causes import ShortfallCause
from ctxflow.errors import CtxflowError
from ctxflow.executors.taskvine.manager_process import acquirer_of
from ctxflow.factory import JobChange, exchange
from ctxflow.factory.exchange import FactoryClient, RunFiles, Wishes, news_file, wanted_file
from ctxflow.factory.run_files import factory_file, factory_mark, factory_pid, only_factory
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from waiting import eventually, happened


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def told():
    return threading.Event()


@pytest.fixture
def client(told, request):
    client = FactoryClient("abc", "lab", told.set, **getattr(request, "param", {}))
    client.start()
    yield client
    client.stop()


def until(files, condition):
    """The first wishes that meet a condition."""

    def found():
        wishes = files.read()
        return wishes if wishes is not None and condition(wishes) else None

    return eventually(found)


def test_a_factory_reads_what_a_run_wants(client):
    files = RunFiles("abc")
    assert files.read().site == "lab"
    assert files.read() is None  # Nothing new.
    client.hold("a10", 8)
    client.joined("a10", "1.0")
    client.joined("a10", "1.1")
    client.remove("a10", "1.1")
    client.remove("a10", "1.1")
    client.refused("a10", "1.2", "no libcuda")
    client.exclude("a10", ["n2", "n1"])
    client.look()
    wishes = until(files, lambda wishes: wishes.looks)
    assert wishes.looks == 1
    assert wishes.excluded == {"a10": ["n1", "n2"]}
    assert wishes.wanted == {"a10": 8}
    assert list(wishes.joined["a10"]) == ["1.0"]
    assert wishes.removed == {"a10": ["1.1"]}
    assert wishes.refused == {"a10": {"1.2": "no libcuda"}}
    client.hold_none()
    assert until(files, lambda wishes: True).wanted == {"a10": 0}
    assert client.counts() == {"a10": {"wanted": 0, "joined": 1}}


def test_a_run_hears_of_its_jobs(client, told):
    client.joined("a10", "1.0")
    client.remove("a10", "1.1")
    files = RunFiles("abc")
    changes = [
        JobChange("1.1", "ended", "it was removed"),
        JobChange("1.0", "evicted", "Vacated\n"),
        JobChange("1.2", "running", "", "n1"),
    ]
    for change in changes:
        files.tell("a10", change)
    news = []
    eventually(lambda: news.extend(client.take()) or len(news) == 3)
    happened(told)
    assert news == [("a10", change) for change in changes]
    client.disconnected("a10", "1.0")
    # What is over need not be told any more.
    wishes = until(RunFiles("abc"), lambda wishes: not wishes.joined["a10"] and not wishes.removed["a10"])
    client.joined("a10", "1.0")
    again = until(RunFiles("abc"), lambda wishes: wishes.joined["a10"])
    assert again.joined["a10"]["1.0"] == 2 and wishes.removed == {"a10": []}
    assert client.failure is None
    files.fail("no worker can be used")
    eventually(lambda: client.failure == "no worker can be used")


def test_no_news_of_a_job_parts_a_run_from_a_worker_that_it_hears(client, told):
    client.hold("a10", 2)
    client.connected("a10", "1.0")
    client.joined("a10", "1.1")
    files = RunFiles("abc")
    for state in ("evicted", "running", "held", "queued", "ended"):
        for job in ("1.0", "1.1"):
            files.tell("a10", JobChange(job, state))
    news = []
    eventually(lambda: news.extend(client.take()) or len(news) == 10)
    assert until(RunFiles("abc"), lambda wishes: True).joined == {"a10": {"1.0": 0, "1.1": 1}}
    assert client.counts()["a10"]["joined"] == 1, "one is connected, and has not joined yet"
    client.disconnected("a10", "1.1")
    assert until(RunFiles("abc"), lambda wishes: "1.1" not in wishes.joined["a10"]).joined == {"a10": {"1.0": 0}}
    assert client.counts()["a10"]["joined"] == 0


def test_half_a_line_is_not_news(client):
    with open(news_file("abc"), "a") as file:
        file.write('{"tier": "a10", "job": "1.0", "sta')
        file.flush()
        RunFiles("abc").read()
        time.sleep(2 * exchange._LOOK_SECONDS)  # In which it looks.
        assert client.take() == []
        file.write('te": "running", "something": "of a later version"}\n')
    assert eventually(client.take) == [("a10", JobChange("1.0", "running"))]


@pytest.mark.parametrize(
    "line",
    [
        '{"is": "of another version"}',
        '{"tier": "a10", "job": "1.0"}',
        '{"tier": ["a10"], "job": "1.0", "state": "running"}',
        '{"tier": "a10", "job": {}, "state": "running"}',
        '{"tier": "a10", "reason_to_wait": "x", "causes": [{"kind": "queue", "text": 3}]}',
        "[1, 2]",
        "null",
        "no JSON \udcff",
    ],
)
def test_news_that_cannot_be_read_is_told_and_left_out(client, caplog, line):
    with caplog.at_level(logging.WARNING, "ctxflow"):
        with open(news_file("abc"), "a", errors="surrogateescape") as file:
            file.write(line + '\n{"tier": "a10", "job": "1.0", "state": "running"}\n')
        assert eventually(client.take) == [("a10", JobChange("1.0", "running"))]
    assert "cannot be read and is left out" in caplog.text
    client.hold("a10", 3)
    until(RunFiles("abc"), lambda wishes: wishes.wanted == {"a10": 3})


def test_what_others_may_have_written_is_neither_wishes_nor_news(client, runtime, caplog):
    wanted, news = runtime / "ctxflow" / "abc.wanted", runtime / "ctxflow" / "abc.news"
    wanted.chmod(0o620)
    news.chmod(0o620)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        assert RunFiles("abc").read() is None
        RunFiles("abc").tell("a10", JobChange("1.0", "running"))
        assert news.read_text() == ""
        news.write_text('{"tier": "a10", "job": "1.0", "state": "running"}\n')
        eventually(lambda: f"others may write to {news}" in caplog.text)
    assert f"others may write to {wanted}" in caplog.text and client.take() == []
    wanted.chmod(0o600)
    (runtime / "ctxflow").chmod(0o777)
    assert RunFiles("abc").read() is None


def test_no_factory_is_where_others_may_write(runtime):
    (runtime / "ctxflow").mkdir()
    (runtime / "ctxflow").chmod(0o770)
    with pytest.raises(CtxflowError, match="call chmod go-w"), only_factory("lab"):
        pass
    with pytest.raises(CtxflowError, match="others may write to"):
        FactoryClient("abc", "lab", print).start()


def test_files_are_their_users_alone_and_gone_afterwards(client, runtime):
    client.hold("a10", 1)
    until(RunFiles("abc"), lambda wishes: wishes.wanted)
    assert {name: os.stat(runtime / "ctxflow" / name).st_mode & 0o777 for name in os.listdir(runtime / "ctxflow")} == {
        "abc.wanted": 0o600,
        "abc.news": 0o600,
    }
    assert os.stat(runtime / "ctxflow").st_mode & 0o777 == 0o700
    client.stop()
    assert os.listdir(runtime / "ctxflow") == []
    files = RunFiles("abc")
    files.tell("a10", JobChange("1.0", "ended"))  # Nobody hears it, and nothing is left of it.
    assert RunFiles("abc").read() is None
    assert os.listdir(runtime / "ctxflow") == []
    (runtime / "ctxflow" / "abc.news").touch(0o600)
    files.retry()
    assert (runtime / "ctxflow" / "abc.news").read_text() == ""


def test_torn_wishes_are_none(runtime):
    (runtime / "ctxflow").mkdir()
    bad = ('{"site": "la', '{"colour": "blue"}', "[]", '{"site": "lab", "wanted": 5}', '{"site": "lab", "joined": []}')
    for text in (*bad, '{"site": "lab", "wanted": {"a10": "x"}}'):
        (runtime / "ctxflow" / "abc.wanted").write_text(text)
        assert RunFiles("abc").read() is None, "one run's file ends no factory"


def test_a_place_that_cannot_be_written_is_said_so(runtime):
    (runtime / "ctxflow").write_text("a file")
    with pytest.raises(CtxflowError, match='or set acquire = "run"'):
        FactoryClient("abc", "lab", print).start()


@pytest.mark.parametrize("client", [{"alone_seconds": 0.0}], indirect=True)
def test_a_run_without_a_factory_says_so_once(client, caplog):
    with caplog.at_level(logging.WARNING, "ctxflow"):
        eventually(lambda: "none serves the site" in caplog.text)
        client.look()
        until(RunFiles("abc"), lambda wishes: wishes.looks)
    assert caplog.text.count("none serves") == 1


def test_the_factory_of_a_site_is_known_by_its_process(runtime):
    (runtime / "ctxflow").mkdir()
    assert factory_pid("my/lab") is None
    mine, another = factory_mark(), f"{os.getpid()} 1@an-earlier-boot"
    for text, pid in (
        (mine, os.getpid()),
        (str(os.getpid()), os.getpid()),
        ("", None),
        ("4194305", None),
        (another, None),
    ):
        with open(factory_file("my/lab"), "w") as file:
            file.write(text)
        os.utime(factory_file("my/lab"), times=(1, 1))  # No clock has a say.
        assert factory_pid("my/lab") == pid
    with only_factory("my/lab"):
        assert factory_pid("my/lab") == os.getpid()
    assert factory_pid("my/lab") is None
    # One in a container, whose number means nothing here, is there while it has its lock.
    Path(factory_file("my/lab")).write_text(f"4194305 {mine.partition(' ')[2].rpartition('@')[0]}@1")
    assert factory_pid("my/lab") is None
    with open(factory_file("my/lab")) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert factory_pid("my/lab") == 4194305


def test_the_site_chooses(tmp_path):
    class Setup:
        class run:
            id = "abc"

        def lead(self, port):
            return None

    site = Site(name="lab", acquire="factory", tiers=(Tier(provider="local"),))
    chosen = acquirer_of(site, Setup(), 9123, print)
    assert isinstance(chosen, FactoryClient)
    chosen.start()
    assert RunFiles("abc").read().site == "lab"
    with pytest.raises(CtxflowError, match="factory of lab"):
        chosen.provider("gpu")
    chosen.stop()
    assert not os.path.exists(wanted_file("abc"))


def test_news_wait_while_the_disk_is_full(client, monkeypatch):
    files, real = RunFiles("abc"), os.write

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: real(file, data[:7]))  # A little room is left.
        files.tell("a10", JobChange("1.0", "running"))
        patched.setattr(os, "write", full)
        files.tell("a10", JobChange("1.0", "evicted"))
    files.retry()
    news = []
    eventually(lambda: news.extend(client.take()) or len(news) == 2)
    assert [change.state for _, change in news] == ["running", "evicted"]


def test_a_factory_reads_what_a_run_of_another_version_wants():
    assert Wishes.read('{"site": "lab", "wanted": {"a10": 8}, "weather": "fine"}') == Wishes("lab", {"a10": 8})
    for text in ('{"wanted": {}}', "[]", '"lab"', "{"):
        with pytest.raises(ValueError):
            Wishes.read(text)


def test_a_run_hears_why_it_has_fewer_workers_than_it_wants(client):
    client.hold("a10", 2)
    client.hold("v100", 0)
    files = RunFiles("abc")
    told = [
        ShortfallCause("lost", "workers end before they join on n3", tier="a10"),
        ShortfallCause("back-off", "nothing more is asked for", tier="a10", until=1e9),
    ]
    files.explain("a10", told)
    files.explain("v100", [ShortfallCause("queue", "1 job waits for a machine", tier="v100")])
    eventually(lambda: client.causes() == told)
    for job in ("1.0", "1.1"):
        client.joined("a10", job)
    assert client.causes() == []


def test_a_run_and_a_factory_of_other_versions_understand_why_workers_are_lacking(client):
    client.hold("a10", 2)
    RunFiles("abc")._add({"tier": "a10", "reason_to_wait": "1 job waits for a machine"})
    eventually(lambda: [each.sentence() for each in client.causes()] == ["1 job waits for a machine"])
    RunFiles("abc")._add({"tier": "a10", "reason_to_wait": "", "causes": [{"kind": "new", "text": "so", "more": 1}]})
    eventually(lambda: client.causes() == [ShortfallCause("new", "so", tier="a10")])
    RunFiles("abc").explain("a10", [ShortfallCause("hold", "1 job is put on hold", "ask ops", "a10")])
    assert '"reason_to_wait": "1 job is put on hold: ask ops"' in Path(news_file("abc")).read_text()


@pytest.mark.parametrize("client", [{"alone_seconds": 0.0}], indirect=True)
def test_a_run_that_nobody_serves_says_so_as_its_reason(client):
    client.hold("a10", 2)
    alone = 'no factory serves the site "lab" here, as far as is known'
    eventually(lambda: client.causes() == [ShortfallCause("factory", alone, tier="a10")])
    waits = ShortfallCause("queue", "1 job waits for a machine", tier="a10")
    RunFiles("abc").explain("a10", [waits])
    eventually(lambda: client.causes() == [waits])
