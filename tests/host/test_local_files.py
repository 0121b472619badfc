"""The cache, complete or not there at all; and folders that last as long as their owner, however it ends."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ctxflow.host import local_files
from ctxflow.host.linux import python_path
from ctxflow.host.local_files import Scratch, abandoned, cached, stage, sweep
from waiting import eventually


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "weights").write_bytes(os.urandom(1000) * 4200)  # More than is copied.
    (folder / "link").symlink_to("config.json")
    return folder


def test_a_file_and_a_folder_keep_their_names(tmp_path, model):
    cache = tmp_path / "cache"
    place = stage(str(model), "aa", str(cache))
    assert place == cached("aa", str(model), str(cache)) == f"{cache}/aa/model"
    assert tree(cache / "aa" / "model") == tree(model)
    assert stage(f"{model}/config.json", "bb", str(cache)) == f"{cache}/bb/config.json"
    assert stage(f"{model}/", "aa", str(cache)) == place
    assert sorted(os.listdir(cache)) == ["aa", "bb"], "nothing else is left"


def test_files_are_copied_where_a_link_will_not_do(tmp_path, model):
    for source in (model, model / "deep" / "weights"):
        linked = stage(str(source), "aa", str(tmp_path / "linked"))
        copied = stage(str(source), "aa", str(tmp_path / "copied"), link=False)
        weights = ("deep/weights",) if source is model else ()
        assert os.stat(os.path.join(linked, *weights)).st_ino == os.stat(model / "deep" / "weights").st_ino
        assert os.stat(os.path.join(copied, *weights)).st_ino != os.stat(model / "deep" / "weights").st_ino
        with open(os.path.join(copied, *weights), "rb") as file:
            assert file.read() == (model / "deep" / "weights").read_bytes()


def test_the_same_content_under_two_names(tmp_path, model):
    (tmp_path / "other.json").write_text("{}")
    cache = str(tmp_path / "cache")
    for source in (f"{model}/config.json", str(tmp_path / "other.json")):
        with open(stage(source, "same", cache)) as file:
            assert file.read() == "{}"


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_copy_is_made_where_there_are_no_links(tmp_path, model, links, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    monkeypatch.setattr(local_files, "_COPIED_BYTES", 0)
    place = stage(f"{model}/config.json", "cc", str(tmp_path / "cache"))
    assert os.path.samefile(place, model / "config.json") == links


@pytest.mark.parametrize("source", ["missing", "model"])
def test_nothing_half_made_is_left(tmp_path, model, source, monkeypatch):
    copies = iter([None])

    def copy(source, target):
        next(copies, None)
        raise OSError(28, "No space left on device", target)

    monkeypatch.setattr(local_files, "link_or_copy", copy)
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match=r"No space left|missing"):
        stage(str(tmp_path / source), "dd", str(cache))
    assert os.listdir(cache) == []


def test_many_stage_the_same_at_once(tmp_path, model):
    cache = tmp_path / "cache"
    for number in range(30):
        (model / f"part-{number}").write_bytes(b"x" * 1000)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=stage, args=(str(model), "ee", str(cache))) for _ in range(4)]
    for process in processes:
        process.start()
    wanted, seen = tree(model), []

    def look():
        while any(process.is_alive() for process in processes):
            if (cache / "ee" / "model").exists():
                seen.append(tree(cache / "ee" / "model") == wanted)

    looking = threading.Thread(target=look)
    looking.start()
    for process in processes:
        process.join()
    looking.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert all(seen), "whoever saw it saw all of it"
    assert tree(cache / "ee" / "model") == wanted
    assert os.listdir(cache) == ["ee"]


def test_what_is_written_into_a_small_staged_file_stays_there(tmp_path, model):
    (model / "config.json").chmod(0o755)
    place = stage(str(model), "aa", str(tmp_path / "cache"))
    with open(f"{place}/config.json", "r+") as file:
        file.write("[]")
    assert (model / "config.json").read_text() == "{}"
    assert os.access(f"{place}/config.json", os.X_OK), "a program stays one"


def test_a_folder_of_many_small_files_is_not_copied_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files, "_COPIED_IN_ALL", 25)
    (tmp_path / "many").mkdir()
    for number in range(5):
        (tmp_path / "many" / f"{number}").write_text("ten bytes.")
    place = stage(str(tmp_path / "many"), "aa", str(tmp_path / "cache"))
    shared = [os.path.samefile(f"{place}/{number}", tmp_path / "many" / f"{number}") for number in range(5)]
    assert sum(shared) == 3 and tree(tmp_path / "cache" / "aa" / "many") == tree(tmp_path / "many")


def test_files_share_their_blocks_where_the_disk_can(tmp_path, model, monkeypatch):
    def clone(target, request, source):
        assert request == local_files._FICLONE
        os.sendfile(target, source, 0, os.fstat(source).st_size)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "ioctl", clone)
        place = stage(str(model), "aa", str(tmp_path / "cache"))
    assert not os.path.samefile(f"{place}/deep/weights", model / "deep" / "weights")
    assert tree(tmp_path / "cache" / "aa" / "model") == tree(model)


OWNS = """
import sys
from ctxflow.host.local_files import Guard, Scratch
scratch = Scratch(sys.argv[1])
guard = Guard(sys.argv[2:]) if sys.argv[2:] else None
print(scratch.path, flush=True)
sys.stdin.read()
"""


class Owner:
    def __init__(self, base: Path, *guarded: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNS, str(base), *map(str, guarded)],
            env={**os.environ, **python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout
        self.path = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path):
    owners: list[Owner] = []

    def start(*guarded: Path) -> Owner:
        owners.append(Owner(tmp_path, *guarded))
        return owners[-1]

    yield start
    for each in owners:
        each.kill()


def test_what_a_killed_owner_left_is_found_and_removed_and_nothing_of_a_live_one(owner, tmp_path):
    dead, live = owner(), owner()
    (Path(dead.path) / "cache").mkdir()
    (Path(dead.path) / "cache" / "file").write_text("x")
    dead.kill()
    assert abandoned(str(tmp_path)) == [dead.path]
    assert sweep(str(tmp_path)) == [dead.path]
    assert not os.path.exists(dead.path) and os.path.isdir(live.path)
    assert sweep(str(tmp_path)) == []


def test_it_is_no_matter_how_old_it_is_or_who_has_the_owner_s_number_now(owner, tmp_path):
    live = owner()
    os.utime(live.path, (1, 1))
    assert sweep(str(tmp_path)) == []


def test_folders_of_others_are_left_alone(owner, tmp_path):
    dead = owner()
    dead.kill()
    (tmp_path / "ctxflow-mine").mkdir(mode=0o700)  # By its name alone.
    (tmp_path / "ctxflow-link").symlink_to(dead.path)
    os.chmod(dead.path, 0o755)  # It is not as it was made.
    assert sweep(str(tmp_path)) == []
    os.chmod(dead.path, 0o700)
    assert sweep(str(tmp_path)) == [dead.path]
    assert sorted(os.listdir(tmp_path)) == ["ctxflow-link", "ctxflow-mine"]


def test_a_child_that_lives_on_keeps_the_folder(tmp_path):
    scratch = Scratch(str(tmp_path))
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    os.close(scratch._folder)
    scratch._folder = -1
    try:
        assert abandoned(str(tmp_path)) == []
    finally:
        os.close(write)
        os.waitpid(child, 0)
    assert abandoned(str(tmp_path)) == [scratch.path]
    scratch.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_is_guarded_goes_when_its_process_is_killed_and_all_of_its_group(owner, tmp_path, number):
    secret, folder = tmp_path / "password", tmp_path / "folder"
    secret.write_text("secret")
    folder.mkdir()
    (folder / "socket").write_text("")
    killed = owner(secret, folder)
    assert secret.exists()
    os.killpg(killed.process.pid, number)
    eventually(lambda: not secret.exists() and not folder.exists())
