"""Files: digests of their contents, none that others may have written, and all of one or nothing."""

import contextlib
import json
import logging
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from ctxflow import files
from ctxflow.files import (
    NotOwnError,
    check_own_folder,
    make_own_folder,
    open_new,
    open_own,
    own_folder,
    part_of,
    read_own,
    write_private,
    written_out,
    written_whole,
)
from waiting import happened

LARGE = 5 << 20


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Where digests are remembered, with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_REMEMBERED", files._Remembered())
    return tmp_path / "cache" / "ctxflow" / "digests.jsonl"


@pytest.fixture
def weights(tmp_path):
    """A large file that nobody has touched lately."""
    path = tmp_path / "weights"
    path.write_bytes(b"w" * LARGE)
    os.utime(path, ns=(10**18, 10**18))
    return path


def in_another_process(monkeypatch):
    monkeypatch.setattr(files, "_REMEMBERED", files._Remembered())


def test_a_large_file_is_read_once_also_by_other_processes(store, weights, monkeypatch):
    before = files.digest_path(weights)
    assert json.loads(store.read_text())[0] == str(weights)
    assert store.stat().st_mode & 0o777 == 0o600
    in_another_process(monkeypatch)
    weights.chmod(0)  # For those who are not root: it cannot even be read.
    store.write_text(store.read_text().replace(before, "as remembered"))
    assert files.digest_path(weights) == "as remembered"


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_is_not_as_it_was_is_read_again(store, weights, monkeypatch, change):
    before = files.digest_path(weights)
    store.write_text(store.read_text().replace(before, "as remembered"))
    in_another_process(monkeypatch)
    if change == "size":
        with open(weights, "ab") as file:
            file.write(b"w")
        os.utime(weights, ns=(10**18, 10**18))
    elif change == "time":
        os.utime(weights, ns=(10**18, 2 * 10**18 - 1))
    else:
        (weights.parent / "other").write_bytes(b"w" * LARGE)
        os.replace(weights.parent / "other", weights)
        os.utime(weights, ns=(10**18, 10**18))
    assert (files.digest_path(weights) == before) == (change != "size")


def test_a_file_that_may_still_change_is_not_remembered(store, weights):
    os.utime(weights)
    files.digest_path(weights)
    assert not store.exists()
    os.utime(weights, ns=(time.time_ns() - 10**10,) * 2)
    files.digest_path(weights)
    assert store.exists()


@pytest.mark.parametrize("text", [b"", b"no json\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"a": 1}\n'])
def test_a_store_that_is_broken_costs_a_reading(store, weights, text):
    store.parent.mkdir(parents=True)
    store.write_bytes(text)
    assert files.digest_path(weights) == files.digest_path(weights)


def test_a_store_that_cannot_be_written_is_no_reason_to_fail(store, weights):
    store.parent.parent.write_text("a file where a folder should be")
    assert len(files.digest_path(weights)) == 32


def test_files_of_a_folder_by_their_names(store, tmp_path):
    for name in ("config.json", "deep/part", ".git/HEAD", "deep/.hidden", "__pycache__/x.pyc"):
        (tmp_path / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lm" / name).write_text(name)
    found = files.digest_files(tmp_path / "lm")
    assert sorted(found) == ["config.json", "deep/part"]
    assert found["deep/part"] == files.digest_path(tmp_path / "lm" / "deep" / "part")
    assert files.digest_files(tmp_path / "lm" / "config.json") == {"config.json": found["config.json"]}
    with pytest.raises(FileNotFoundError, match="does not exist"):
        files.digest_files(tmp_path / "gone")


def test_how_far_it_is_read_is_told(store, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", 0.0)
    monkeypatch.setattr(files, "_EVERY", 0.001)
    with open(tmp_path / "weights", "wb") as file:
        file.truncate(100 << 20)
    told, heard = [], threading.Event()

    def tell(done, total):
        told.append((done, total))
        heard.set()

    class Awaited(files._Progress):
        """Nothing is read after the first block before something was told."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "read" and value:
                happened(heard)

    monkeypatch.setattr(files, "_Progress", Awaited)
    files.digest_files(tmp_path / "weights", tell)
    assert {total for _, total in told} == {100 << 20} and told[0][0] < 100 << 20
    assert told == sorted(told) and told[-1][0] <= 100 << 20
    told.clear()
    heard.clear()
    files.digest_files(tmp_path / "weights", tell)
    assert not told, "the second time it is known"


def test_ones_own_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"some text")
    (tmp_path / "file").chmod(0o644)
    assert read_own(str(tmp_path / "file"), 5) == b"text"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(mode)
    with pytest.raises(NotOwnError, match="call chmod go-w"):
        read_own(str(tmp_path / "file"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(mode | 0o100)
    for look in (check_own_folder, make_own_folder):
        with pytest.raises(NotOwnError, match="call chmod go-w"):
            look(str(tmp_path / "folder"))


def test_another_users_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotOwnError, match="belongs to another user"):
        read_own(str(tmp_path / "file"))
    with pytest.raises(NotOwnError, match="belongs to another user"):
        check_own_folder(str(tmp_path))


def test_links_and_pipes_are_no_files(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            open_own(str(tmp_path / name))
        assert not [path for path in open_files() if path.startswith(str(tmp_path))]


def open_files():
    """What this process has open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def test_a_folder_of_ones_own_may_be_elsewhere(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    assert own_folder(str(tmp_path / "home")) and not own_folder(str(tmp_path / "none"))


def test_a_folder_that_is_not_used_is_told_once(tmp_path, caplog):
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        assert not own_folder(str(tmp_path)) and not own_folder(str(tmp_path))
    assert len(caplog.records) == 1


def test_nothing_is_seen_of_it_before_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), written_whole(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_a_link_beside_it_leads_nowhere(tmp_path):
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_bytes(b"mine")
    part_of(path).symlink_to(precious)
    with written_whole(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), path.is_symlink(), precious.read_bytes()) == (b"new", False, b"mine")


def test_a_name_that_comes_back_is_given_up(tmp_path, monkeypatch):
    remove, path = os.unlink, tmp_path / "part"

    def and_again(name):
        remove(name)
        Path(name).symlink_to("precious")

    path.write_bytes(b"")
    monkeypatch.setattr(os, "unlink", and_again)
    with pytest.raises(FileExistsError, match="again and again"):
        open_new(path)
    assert not (tmp_path / "precious").exists()


def test_the_umask_says_who_reads_it(tmp_path):
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_file_and_name_are_on_the_disk_in_order(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def renamed(source, target):
        done.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with written_whole(tmp_path / "file", alone=True) as file:
        file.write(b"text")
    assert done == [("sync", "file.part"), ("rename", "file"), ("sync", tmp_path.name)]
    done.clear()
    with written_whole(tmp_path / "file", sync=False):
        pass
    assert done == [("rename", "file")]


@pytest.mark.parametrize("name", ["page.html", "a" * 255, "\u00fc" * 127 + "b"], ids=["short", "long", "wide"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_that_write_a_file_both_end_well_and_it_is_never_half_of_one(tmp_path, name, order):
    path, texts = tmp_path / name, [b"one" * 50_000, b"two" * 70_000]
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        stacks = first, second
        opened = [stack.enter_context(written_whole(path)) for stack in stacks]
        for file, text in zip(opened, texts, strict=True):
            file.write(text[:100_000])
            assert not path.exists()
        for n in order:
            opened[n].write(texts[n][100_000:])
            stacks[n].close()
            assert path.read_bytes() == texts[n]
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_private_files_of_many_writers_are_whole(tmp_path):
    path, texts, ended = tmp_path / "private", [letter * 20_000 for letter in "abcd"], threading.Event()
    write_private(str(path), texts[0])
    seen = set()

    def look():
        while not ended.is_set():
            seen.add(path.read_text())

    def write(text):
        for _ in range(30):
            write_private(str(path), text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    reader = threading.Thread(target=look)
    for each in [reader, *threads]:
        each.start()
    for each in threads:
        each.join()
    ended.set()
    reader.join()
    assert seen <= set(texts) and os.listdir(tmp_path) == ["private"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_alone_it_writes_over_what_a_kill_left(tmp_path):
    path = tmp_path / "out.parquet"
    part_of(path).write_bytes(b"half")
    with written_whole(path, alone=True) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole" and os.listdir(tmp_path) == ["out.parquet"]


def test_what_a_person_names_may_be_a_link_or_no_file(tmp_path):
    real, link, pipe = (tmp_path / name for name in ("real", "link", "pipe"))
    link.symlink_to(real)
    for content in (b"one", b"two"):
        with written_out(link) as file:
            file.write(content)
        assert link.is_symlink() and real.read_bytes() == content
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with written_out(pipe) as file:
        file.write(b"three")
    assert os.read(reader, 10) == b"three" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe", "real"]
