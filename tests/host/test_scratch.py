"""Folders that last as long as their owner, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxflow.host.linux import python_path
from ctxflow.host.local_files import Scratch, abandoned, sweep

OWNS = """
import sys
from ctxflow.host.local_files import Guard, Scratch
scratch = Scratch(sys.argv[1])
guard = Guard(sys.argv[2:]) if sys.argv[2:] else None
print(scratch.path, flush=True)
sys.stdin.read()
"""


def eventually(condition):
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


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
