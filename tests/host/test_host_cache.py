"""A host's cache: what it gives is what was put there, whatever was killed, altered, full, or put at the same time."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import forked
from ctxflow.files import digest_path
from ctxflow.host import cache_folder
from ctxflow.host.host_cache import HostCache, SpoiledEntry
from suite.depth import some
from waiting import eventually, joined

CONTENTS = [bytes([number]) * 1000 * (number + 1) for number in range(6)]


def digest_of(data, tmp_path):
    file = tmp_path / "data"
    file.write_bytes(data)
    return digest_path(file, again=True)


def writer(data):
    return lambda path: Path(path).write_bytes(data)


@pytest.fixture
def opened(tmp_path):
    """Open caches in one folder, each like another worker's."""
    caches = []

    def make(limit=None, **options):
        caches.append(HostCache(str(tmp_path / "cache"), limit, **{"strict": False, **options}))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def settled(cache):
    """Wait until what was put has reached the disk."""
    for thread in cache._syncing:
        joined(thread)
    return cache


def test_what_one_worker_put_the_next_finds(opened, tmp_path):
    key = digest_of(b"weights", tmp_path)
    first = opened()
    path = first.put(key, writer(b"weights"), "model.bin")
    first.close()
    second = opened()
    assert second.get(key) == path == str(tmp_path / "cache" / str(os.geteuid()) / "kept" / key / "content")
    assert Path(path).read_bytes() == b"weights"
    assert second.get("other") is None
    [entry] = second.entries()
    assert (entry.key, entry.name, entry.bytes, entry.held) == (key, "model.bin", 7, True)
    assert entry.users == (os.getpid(),)


def test_a_folder_is_kept_with_its_modes_and_read_only(opened, tmp_path):
    def make(path):
        os.makedirs(f"{path}/sub/empty")
        Path(f"{path}/sub/run").write_text("#!/bin/sh")
        os.chmod(f"{path}/sub/run", 0o755)
        Path(f"{path}/words").write_text("8")
        os.chmod(f"{path}/sub", 0o555)

    make(str(tmp_path / "source"))
    path = Path(opened().put(digest_path(tmp_path / "source"), make))
    assert stat.S_IMODE((path / "words").stat().st_mode) == 0o400
    assert stat.S_IMODE((path / "sub" / "run").stat().st_mode) == 0o500
    assert stat.S_IMODE((path / "sub").stat().st_mode) == 0o700
    assert digest_path(path, again=True) == digest_path(tmp_path / "source")


def test_a_user_has_a_folder_of_mode_0700_below_one_for_all(opened, tmp_path):
    cache = opened()
    assert stat.S_IMODE(os.stat(cache.path).st_mode) == 0o700
    os.chmod(cache.path, 0o750)
    with pytest.raises(OSError, match=r"can be entered by others, so that .*: call chmod 700"):
        opened()
    os.chmod(cache.path, 0o700)
    os.chmod(tmp_path, 0o1777)
    shared = HostCache(str(tmp_path / "scratch"))
    shared.close()
    assert stat.S_IMODE(os.stat(tmp_path / "scratch").st_mode) == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user's folder")
def test_another_users_folder_is_refused_and_one_below_anothers_is_not_used_in_place(opened, tmp_path):
    cache = opened()
    assert cache.in_place
    os.chown(cache.path, 12345, 12345)
    with pytest.raises(OSError, match=r"belongs to another user, so that .*: have it removed"):
        opened()
    os.chown(cache.path, 0, 0)
    os.chown(tmp_path / "cache", 12345, 12345)
    path = opened().put("k", writer(b"1"))
    assert path.startswith(f"/proc/{os.getpid()}/fd/") and Path(path).read_bytes() == b"1"


def test_a_link_in_its_place_is_not_followed(opened, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache" / str(os.geteuid())).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link or no folder, so that it is not used"):
        opened()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_least_recently_used_that_nobody_holds_make_room(opened):
    first, second = opened(2500), opened(2500)
    for key in ("a", "b"):
        first.put(key, writer(b"x" * 1000))
    first.release("a")
    first.release("b")
    os.utime(Path(first.path, "kept", "b", "held"), (1, 1))
    assert second.get("a")
    first.put("c", writer(b"x" * 1000))
    assert {entry.key for entry in first.entries()} == {"a", "c"}
    for size in (1000, 0):  # Nothing can be removed for it.
        with pytest.raises(OSError, match="beside 2e-06 GB in use or being kept are more than the host's cache"):
            first.put("d", writer(b"x" * 1000), size=size)
    assert {entry.key for entry in first.entries()} == {"a", "c"} and not os.listdir(Path(first.path, "work"))
    second.close()
    first.put("d", writer(b"x" * 1000))
    assert {entry.key for entry in first.entries()} == {"c", "d"}


def test_what_is_being_made_has_its_room(opened):
    """Also of another process, and while neither is there yet."""
    first, second = opened(2500), opened(2500)
    refused = []

    def make(path):
        with pytest.raises(OSError, match=r"beside 1\.8e-06 GB in use") as found:
            second.put("b", writer(b"x" * 1000), size=1000)
        refused.append(found)
        second.put("c", writer(b"x" * 500), size=500)
        writer(b"x" * 1800)(path)

    first.put("a", make, size=1800)
    assert refused and {entry.key for entry in first.entries()} == {"a", "c"}


def test_what_is_larger_than_was_told_is_not_kept_beside_what_is_in_use(opened):
    cache = opened(2500)
    cache.put("a", writer(b"x" * 1500), size=1500)
    with pytest.raises(OSError, match="more than the host's cache may hold"):
        cache.put("b", writer(b"x" * 1200), size=10)
    cache.put("c", writer(b"x" * 900), size=10)
    assert {entry.key: entry.bytes for entry in cache.entries()} == {"a": 1500, "c": 900}
    Path(cache.path, "kept", "c", "index").write_text("torn")
    assert {entry.key: entry.bytes for entry in cache.entries()} == {"a": 1500, "c": 900}, "it takes room all the same"


def test_what_is_larger_than_all_it_may_hold_costs_nothing_that_is_there(opened):
    cache = opened(2000)
    cache.put("a", writer(b"x"))
    cache.release("a")
    for size in (3000, 0):
        with pytest.raises(OSError, match="more than the host's cache may hold"):
            cache.put("b", writer(b"x" * 3000), size=size)
    assert [entry.key for entry in cache.entries()] == ["a"]
    assert not os.listdir(Path(cache.path, "work"))


def test_empty_takes_what_nobody_holds(opened):
    cache, other = opened(), opened()
    for key in ("a", "b"):
        cache.put(key, writer(b"x"))
    cache.release("a")
    assert [entry.key for entry in other.empty()] == ["a"]
    assert [entry.key for entry in other.entries()] == ["b"]


def altered(path, how):
    os.chmod(path, 0o600)
    its = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"X")
    if how == "secretly":
        os.utime(path, ns=(its.st_atime_ns, its.st_mtime_ns))


def test_what_was_written_to_is_removed_and_told_and_can_be_put_again(opened, tmp_path):
    key = digest_of(b"weights", tmp_path)
    cache = opened()
    altered(cache.put(key, writer(b"weights")), "openly")
    with pytest.raises(SpoiledEntry, match=r"not as it was put there \(files of it were changed"):
        opened().get(key)
    assert cache.get(key) is None
    assert Path(cache.put(key, writer(b"weights"))).read_bytes() == b"weights"


@pytest.mark.parametrize("why", ["shared account", "killed writer"])
def test_what_was_altered_without_a_trace_is_found_by_its_digest(opened, tmp_path, why):
    good, bad = digest_of(b"good", tmp_path), digest_of(b"weights", tmp_path)
    first = opened()
    first.put(good, writer(b"good"))
    altered(first.put(bad, writer(b"weights")), "secretly")
    settled(first).close()
    assert not os.path.exists(os.path.join(first.path, "writing"))
    if why == "killed writer":
        Path(first.path, "writing").touch()
    cache = opened(strict=why == "shared account")
    assert cache.get(good)
    with pytest.raises(SpoiledEntry, match="it does not have its digest"):
        cache.get(bad)
    assert not os.path.exists(os.path.join(first.path, "writing"))


def test_an_entry_is_verified_once_by_a_worker(opened, tmp_path, monkeypatch):
    key = digest_of(b"weights", tmp_path)
    settled(opened()).put(key, writer(b"weights"))
    read = []
    monkeypatch.setattr("ctxflow.files.digest_path", lambda path, again: read.append(path) or key)
    cache = opened(strict=True)
    for _ in range(3):
        cache.get(key)
    assert len(read) == 1


def test_a_full_disk_makes_room_of_what_nobody_holds(opened):
    cache = opened()
    for key in ("a", "b"):
        cache.put(key, writer(b"x"))
    cache.release("a")
    tried = []

    def make(path):
        writer(b"x" * 10)(path)
        tried.append({entry.key for entry in cache.entries()})
        if len(tried) == 1:
            raise OSError(28, "No space left on device")

    cache.put("c", make, "weights.bin", size=1 << 60)
    assert tried == [{"a", "b"}, {"b"}]
    assert {entry.key: entry.name for entry in cache.entries()} == {"b": "b", "c": "weights.bin"}


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="needs root, for a small disk")
def test_a_disk_that_is_full_in_truth_keeps_what_fits(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        cache = HostCache(str(disk / "cache"), strict=False)
        for number in range(5):
            data = bytes([number]) * 1_000_000
            cache.put(f"k{number}", writer(data), size=len(data))
            cache.release(f"k{number}")
        there = {entry.key for entry in cache.entries()}
        assert "k4" in there and 1 <= len(there) <= 3
        with pytest.raises(OSError, match="No space left"):
            cache.put("large", writer(b"x" * 4_000_000), size=4_000_000)
        assert not os.listdir(Path(cache.path, "work"))
        cache.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_who_cannot_have_the_lock_does_without(opened):
    cache, other = opened(), opened(lock_seconds=0.05)
    with cache._folder.locked(cache_folder.fcntl.LOCK_EX), pytest.raises(OSError, match="another worker has had"):
        other.get("a")


def test_keys_lead_nowhere_else(opened):
    for key in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="is no key"):
            opened().get(key)


@pytest.mark.parametrize(("name", "shared"), [("ann", False), ("nobody", True), ("slot1_2", True), ("slot12", True)])
def test_accounts_of_slots_are_shared(name, shared, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", lambda number: type("Account", (), {"pw_name": name}))
    assert cache_folder.is_shared_account() is shared


def test_an_account_that_is_not_the_jobs_owners_is_shared(tmp_path, monkeypatch):
    (tmp_path / "ad").write_text('MyType = "Job"\nOwner = "ann"\n')
    monkeypatch.setenv("_CONDOR_JOB_AD", str(tmp_path / "ad"))
    for name, shared in (("ann", False), ("osg01", True)):
        monkeypatch.setattr("pwd.getpwuid", lambda number, name=name: type("Account", (), {"pw_name": name}))
        assert cache_folder.is_shared_account() is shared


class Caches(RuleBasedStateMachine):
    """Several workers' caches of one folder, with what happens to them and to their files in any order."""

    @initialize(folder=st.just(None))
    def begin(self, folder):
        import tempfile

        self.folder = tempfile.mkdtemp()
        self.keys = [digest_of(data, Path(self.folder)) for data in CONTENTS]
        self.limit = 9000
        self.caches = [self._open() for _ in range(2)]

    def _open(self):
        return HostCache(os.path.join(self.folder, "cache"), self.limit, strict=False)

    @rule(which=st.integers(0, 1), number=st.integers(0, 5), is_told=st.booleans())
    def put(self, which, number, is_told):
        size = len(CONTENTS[number])
        try:
            path = self.caches[which].put(self.keys[number], writer(CONTENTS[number]), size=size if is_told else 0)
        except OSError:
            assert sum(e.bytes for e in self.caches[which].entries() if e.held) + size > self.limit
            return
        assert Path(path).read_bytes() == CONTENTS[number]

    @rule(which=st.integers(0, 1), number=st.integers(0, 5))
    def get(self, which, number):
        try:
            path = self.caches[which].get(self.keys[number])
        except SpoiledEntry:
            path = None
        if path is not None:
            assert Path(path).read_bytes() == CONTENTS[number]

    @rule(which=st.integers(0, 1), number=st.integers(0, 5))
    def release(self, which, number):
        self.caches[which].release(self.keys[number])

    @rule(which=st.integers(0, 1))
    def come_anew(self, which):
        self.caches[which].close()
        self.caches[which] = self._open()

    @rule(number=st.integers(0, 5), what=st.sampled_from(["content", "index", "held"]))
    def alter(self, number, what):
        place = Path(self.caches[0].path, "kept", self.keys[number])
        if place.exists():
            if what == "held":
                (place / "held").unlink(missing_ok=True)
            else:
                altered(place / what, "openly")

    @rule(which=st.integers(0, 1))
    def trim(self, which):
        assert not self.caches[which].trim()

    @invariant()
    def nothing_half_made_stays_and_the_limit_is_kept(self):
        if hasattr(self, "caches"):
            assert sum(entry.bytes for entry in self.caches[0].entries()) <= self.limit
            assert not [name for name in os.listdir(Path(self.caches[0].path, "work")) if name.startswith("new-")]

    def teardown(self):
        if hasattr(self, "caches"):
            for cache in self.caches:
                cache.close()
            shutil.rmtree(self.folder)


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

# A worker that puts, uses and releases at random until it is killed; what it reads must be what the key says.
WORKER = """
import os, random, sys, time
from pathlib import Path
from ctxflow.files import digest_path
from ctxflow.host.host_cache import HostCache, SpoiledEntry
folder, limit, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
keys = sys.argv[4:]
chance = random.Random(seed)
cache = HostCache(folder, limit, strict=False)
def make(number):
    def fill(path):
        if number % 2:
            os.mkdir(path)
            path = os.path.join(path, "part")
        with open(path, "wb") as file:
            for _ in range(20):
                file.write(bytes([number]) * 2000)
                file.flush()
    return fill
def say(line):
    os.write(1, f"{line}\\n".encode())  # At once: the others write to the same file, and print may write in pieces.
say(f"up {os.getpid()}")
while True:
    number = chance.randrange(len(keys))
    try:
        path = cache.get(keys[number]) or cache.put(keys[number], make(number))
    except SpoiledEntry:
        say("spoiled")
        continue
    except OSError as error:
        say("full" if "in use or being kept are more than" in str(error) else f"error {error}")
        continue
    if digest_path(path, again=True) != keys[number]:
        say("WRONG")
    if chance.random() < 0.7:
        cache.release(keys[number])
"""


def test_workers_that_are_killed_at_any_moment_leave_nothing_wrong_or_half_made(tmp_path):
    keys, chance = [], random.Random(7)
    for number in range(6):
        place = tmp_path / f"source{number}"
        data = bytes([number]) * 40_000
        if number % 2:
            place.mkdir()
            (place / "part").write_bytes(data)
        else:
            place.write_bytes(data)
        keys.append(digest_path(place))
    folder, limit = str(tmp_path / "cache"), 150_000
    said = (tmp_path / "said").open("w+")

    def start():
        words = [sys.executable, "-c", WORKER, folder, str(limit), str(chance.random())[2:10], *keys]
        return forked.Popen(words, stdout=said, stderr=said)

    running = [start() for _ in range(2)]
    try:
        for _ in range(some(8, deeply=24)):
            victim = running.pop(0)
            eventually(lambda victim=victim: f"up {victim.pid}\n" in (tmp_path / "said").read_text())
            time.sleep(chance.uniform(0.02, 0.4))
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            running.append(start())
    finally:
        for process in running:
            process.kill()
            process.wait()
    said.seek(0)
    text = said.read()
    said.close()
    assert "up" in text and "WRONG" not in text and "error" not in text and "spoiled" not in text, text
    cache = HostCache(folder, limit, strict=False)
    cache.trim()
    entries = cache.entries()
    assert sum(entry.bytes for entry in entries) <= limit and not any(entry.held for entry in entries)
    assert not os.listdir(Path(cache.path, "work"))
    for key in keys:
        if (path := cache.get(key)) is not None:
            assert digest_path(path, again=True) == key
    assert all(json.loads(Path(cache.path, "kept", entry.key, "index").read_text()) for entry in entries)
    cache.close()


# A worker that puts what its contexts need, and uses it for a while, whether it is kept or not.
BUSY = """
import collections, random, sys
from pathlib import Path
from ctxflow.host.host_cache import HostCache
folder, limit, size, told, seed = sys.argv[1], *map(int, sys.argv[2:])
chance, said = random.Random(seed), collections.Counter()
cache = HostCache(folder, limit, strict=False)
def make(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(10):
            file.write(bytes(size // 10))
for _ in range(60):
    key = f"model-{chance.randrange(6)}"
    try:
        found = Path(cache.put(key, make, size=size if told else 0)).stat().st_size
    except OSError as error:
        said["refused"] += "may hold" in str(error)
    else:
        said["kept"] += found == size
    if chance.random() < 0.6:
        cache.release(f"model-{chance.randrange(6)}")
print(said["kept"], said["refused"], flush=True)
"""


def size_of(path):
    """The bytes of a file, 0 of one that somebody removes: of two that made the same one is not needed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("told", [True, False], ids=["sizes are told", "sizes are not told"])
def test_no_number_of_workers_makes_it_hold_more_than_it_may(tmp_path, told):
    folder, limit, size = str(tmp_path / "cache"), 250_000, 60_000
    words = [sys.executable, "-c", BUSY, folder, *map(str, (limit, size, int(told)))]
    workers = [forked.Popen([*words, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(4)]
    watching, most = HostCache(folder, strict=False), 0
    places = "kept", *(["work"] if told else [])
    while any(worker.poll() is None for worker in workers):
        with watching._folder.locked(fcntl.LOCK_SH):  # Nothing comes or goes meanwhile.
            files = [path for place in places for path in Path(watching.path, place).glob("[!g]*/content")]
            most = max(most, sum(map(size_of, files)))
    said = [tuple(map(int, worker.communicate()[0].split())) for worker in workers]
    assert all(worker.returncode == 0 and sum(each) == 60 for worker, each in zip(workers, said, strict=True)), said
    assert all(kept and refused for kept, refused in said), said
    assert 0 < most <= limit
    watching.close()


FOREIGN = {
    "a file": ["notes.txt"],
    "a folder named as one of ours": ["work/thesis/data.txt"],
    "the like for entries": ["kept/photos/one.txt"],
    "all of our names": ["lock", "kept/photos/one.txt", "work/new-1/data.txt"],
    "beside a cache": ["lock", "kept/ab/content", "kept/ab/index", "kept/ab/held", "work/new-1/held", "notes.txt"],
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_that_holds_anything_else_is_not_used(opened, tmp_path, names):
    own = tmp_path / "cache" / str(os.geteuid())
    for name in ["kept/", "work/", *names]:
        place = own / name
        (place if name.endswith("/") else place.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not name.endswith("/"):
            place.write_text("precious")
    own.chmod(0o700)
    before = sorted(map(str, own.rglob("*")))
    for make in (True, False):
        with pytest.raises(OSError, match=r"holds what is no cache of ctxflow, so that .*: name another folder"):
            opened(make=make)
    assert sorted(map(str, own.rglob("*"))) == before


def test_what_is_put_beside_the_cache_s_own_later_stays(opened):
    cache = opened(2000)
    places = [Path(cache.path, name, "thesis", "data.txt") for name in ("work", "kept")]
    for place in places:
        place.parent.mkdir()
        place.write_text("precious")
    for key in ("a", "b"):
        cache.put(key, writer(b"x" * 1500))
        cache.release(key)
    assert [entry.key for entry in cache.empty()] == ["b"]
    assert all(place.read_text() == "precious" for place in places)


def test_the_cache_of_an_earlier_version_is_taken_over(opened):
    first = opened()
    first.put("a", writer(b"x"))
    settled(first).close()
    mark = Path(first.path, ".ctxflow-cache")
    assert "keep nothing of your own here" in mark.read_text()
    mark.unlink()
    Path(first.path, "work", "new-abc").mkdir()  # Of a killed worker.
    assert opened().get("a", None) and mark.exists()


def test_a_cache_that_has_lost_old_files_to_others_is_still_one(opened):
    """Scratch disks are purged by files' ages, the mark's too."""
    first = opened()
    first.put("a", writer(b"x"))
    first.put("b", writer(b"y"))
    settled(first).close()
    mark = Path(first.path, ".ctxflow-cache")
    os.utime(mark, (0, 0))
    opened().close()
    assert mark.stat().st_mtime > 0
    mark.unlink()
    Path(first.path, "kept", "a", "content").unlink()
    again = opened()
    with pytest.raises(SpoiledEntry):
        again.get("a")
    assert again.get("b") is not None


def test_the_page_runs_as_it_is_printed():
    page = Path(__file__).parents[2] / "docs" / "host-cache.md"
    [program] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    forked.run([sys.executable, "-c", program], check=True)
