"""A host's cache on a small disk, shared by two users whose workers are killed, and whose files have bytes flipped."""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest

from ctxflow.files import digest_path
from ctxflow.host.host_cache import HostCache, SpoiledEntry
from suite.depth import some
from waiting import eventually

NOBODY = 65534
ROUNDS = some(4, deeply=12)
DATA = [bytes([number]) * 60_000 for number in range(1, 9)]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have a second user and a small disk")


@pytest.fixture
def disk():
    """A disk that is too small for what two users keep, open to all."""
    place = tempfile.mkdtemp(prefix="cache-chaos-")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k,mode=1777", "tmpfs", place], check=False).returncode:
        os.rmdir(place)
        pytest.skip("mounting is not allowed here")
    os.chmod(place, 0o1777)
    yield place
    subprocess.run(["umount", "-l", place], check=True)
    shutil.rmtree(place, ignore_errors=True)


def child(user, act):
    """Do something in a forked process of a user; return its number."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        act()
        status = 0
    finally:
        os._exit(status)


def working(base, keys, seed, said):
    """Use the cache as a worker does, until this process is killed."""

    def act():
        chance = random.Random(seed)
        cache = HostCache(base, 400_000, strict=True)
        while True:
            number = chance.randrange(len(keys))
            word = b"."
            try:
                path = cache.get(keys[number])
                path = path or cache.put(
                    keys[number], lambda at, data=DATA[number]: Path(at).write_bytes(data), size=60_000
                )
                if Path(path).read_bytes() != DATA[number]:
                    word = b"W"
            except SpoiledEntry:
                word = b"s"
            except OSError:  # The disk is full of what others use: a worker goes on without.
                word = b"f"
            os.write(said, word)
            if chance.random() < 0.8:
                cache.release(keys[number])

    return act


def said_so_far(pipe):
    """How many bytes can be read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def flip(path):
    """Turn a bit, and leave no trace of that."""
    its = os.stat(path)
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.write(data)
    os.chmod(path, its.st_mode)
    os.utime(path, ns=(its.st_atime_ns, its.st_mtime_ns))


def test_two_users_on_a_full_disk_never_get_what_was_not_put_there(disk, tmp_path):
    keys, chance = [], random.Random(11)
    for number, data in enumerate(DATA):
        (tmp_path / str(number)).write_bytes(data)
        keys.append(digest_path(tmp_path / str(number)))
    base = os.path.join(disk, "cache")
    heard, said = os.pipe()
    words, flipped = b"", 0
    for number in range(10 * ROUNDS):
        if number >= ROUNDS and b"s" in words:
            break
        workers = [child(user, working(base, keys, chance.random(), said)) for user in (0, NOBODY, 0, NOBODY)]
        for pid in workers:
            before = said_so_far(heard)
            eventually(lambda before=before: said_so_far(heard) > before)
            time.sleep(chance.uniform(0.05, 0.15))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        words += os.read(heard, said_so_far(heard))
        for path in Path(base).glob("*/kept/*/content"):
            if chance.random() < 0.3:
                with contextlib.suppress(OSError):  # There is no room to write.
                    flip(path)
                    flipped += 1
    os.close(said)
    os.close(heard)
    assert b"W" not in words and flipped
    assert words.count(b".") > ROUNDS and b"s" in words, "what was spoiled is told, and put there again"
    for user in ("0", str(NOBODY)):
        found = os.stat(os.path.join(base, user))
        assert (found.st_uid, found.st_mode & 0o777) == (int(user), 0o700)


def test_a_disk_that_another_has_filled_stops_nothing_that_is_there(disk, tmp_path):
    """After an unclean end, on a disk without room for a byte: what is there serves, nothing is left over."""
    (tmp_path / "1").write_bytes(DATA[1])
    base, key = os.path.join(disk, "cache"), digest_path(tmp_path / "1")
    cache = HostCache(base)
    cache.put(key, lambda at: Path(at).write_bytes(DATA[1]))
    cache.put("other", lambda at: Path(at).write_bytes(DATA[2]))
    cache.close()
    assert os.waitpid(child(0, lambda: HostCache(base).put("cut", lambda at: os.kill(os.getpid(), 9))), 0)[1] == 9
    with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(b"0" * 4096):
            pass
    cache = HostCache(base)
    names = set(os.listdir(cache.path))
    for _ in range(3):
        assert Path(cache.get(key)).read_bytes() == DATA[1]
    assert set(os.listdir(cache.path)) | {"writing"} == names | {"writing"}
    made = cache.put("new", lambda at: Path(at).write_bytes(DATA[3]))
    assert Path(made).read_bytes() == DATA[3] and cache.get("other", None) is None, "it made room"
    assert Path(cache.get(key)).read_bytes() == DATA[1]
    cache.close()


def test_what_another_user_plants_is_never_used(disk, tmp_path):
    """Neither where this user's folder is to be, nor in it."""
    base, key = os.path.join(disk, "cache"), "k"

    def plant_folder():
        os.makedirs(os.path.join(base, "0", "kept", key))
        os.chmod(base, 0o1777)
        Path(base, "0", "kept", key, "content").write_bytes(b"planted")

    assert os.waitpid(child(NOBODY, plant_folder), 0)[1] == 0
    with pytest.raises(OSError, match="another user"):
        HostCache(base)
    shutil.rmtree(base)
    cache = HostCache(base)
    own = cache.put(key, lambda at: Path(at).write_bytes(b"own"))

    def plant_entry():
        for place in (own, os.path.join(base, "0", "kept", "other"), os.path.join(base, "0", "work", "new-x")):
            with contextlib.suppress(OSError):
                Path(place).write_bytes(b"planted")
        with contextlib.suppress(OSError):
            os.rename(os.path.join(base, "0"), os.path.join(base, "away"))

    assert os.waitpid(child(NOBODY, plant_entry), 0)[1] == 0
    assert Path(cache.get(key)).read_bytes() == b"own" and cache.get("other") is None
    assert [entry.key for entry in cache.entries()] == [key]
    cache.close()
