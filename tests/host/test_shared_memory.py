"""What library processes leave in /dev/shm, whatever is killed."""

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from test_library_loop import Items

from ctxflow.host import private_shm
from ctxflow.host.shm_leftovers import ShmLeftovers
from waiting import eventually

SHM = Path("/dev/shm")
BYTES = 1 << 20


@pytest.fixture
def driven(tmp_path):
    (tmp_path / "logs").mkdir()
    driven = Items(tmp_path)
    yield driven
    driven.close()


def segments():
    return {path.name for path in SHM.iterdir()}


def make_segments():
    """Start a child that has one too, in a session of its own; returns what keeps them, and the child."""
    own = shared_memory.SharedMemory(create=True, size=BYTES)
    own.buf[:] = bytes(BYTES)
    program = (
        "import time; from multiprocessing import shared_memory, resource_tracker\n"
        f"theirs = shared_memory.SharedMemory(create=True, size={BYTES})\n"
        "print(theirs.name, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    return own, child, child.stdout.readline().decode().strip()


async def build():
    return make_segments()


async def names(context):
    own, child, theirs = context
    return [own.name.lstrip("/"), theirs.lstrip("/"), child.pid, sorted(os.listdir("/dev/shm"))]


def gone(seen, pid):
    eventually(lambda: segments().isdisjoint(seen) and not Path(f"/proc/{pid}/exe").exists())


@pytest.mark.parametrize("killed", ["unload", "library", "child", "stop"])
def test_nothing_is_left_in_shared_memory(driven, killed):
    driven.load(build)
    driven.next("ready")
    own, theirs, child, listed = driven.value(driven.item(names))
    assert {own, theirs} <= set(listed), "they are where they are looked for"
    library = driven.host._libraries["c"].process.pid
    if killed == "unload":
        driven.tell("unload", context="c")
        driven.next("unloaded")
    elif killed == "stop":
        driven.host.stop()
    else:
        os.kill(library if killed == "library" else child, signal.SIGKILL)
        if killed == "library":
            driven.next("died")
        else:
            driven.tell("unload", context="c")
            driven.next("unloaded")
    gone({own, theirs}, library)
    with contextlib.suppress(ProcessLookupError):  # Only a host of its own adopts what has left its session.
        os.kill(child, signal.SIGKILL)


def test_a_pipe_in_the_place_of_the_record_stops_no_host(tmp_path):
    os.mkfifo(ShmLeftovers(str(tmp_path))._record, 0o666)
    leftovers = ShmLeftovers(str(tmp_path))
    own = shared_memory.SharedMemory(create=True, size=BYTES)
    try:
        leftovers.look([os.getpid()])
        assert leftovers.sweep() == []
    finally:
        own.close()
        own.unlink()


def test_a_model_in_shared_memory_is_seen(driven, tmp_path):
    with tempfile.NamedTemporaryFile(dir=SHM) as model:

        async def build(path):
            return os.path.exists(path)

        async def seen(found):
            return found

        driven.load(build, model.name)
        driven.next("ready")
        assert driven.value(driven.item(seen)) is True


AS_NOBODY = """
import ctypes, os
from ctxflow.host import private_shm
os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # Dumpable, as a process is that did not change its user.
before = os.statvfs("/dev/shm").f_blocks
entered = private_shm.enter()
name = f"of-nobody-{os.getpid()}"
open("/dev/shm/" + name, "w").close()
print(entered, os.getuid(), os.statvfs("/dev/shm").f_blocks == before, name)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_who_may_mount_nothing_gets_one_too_where_the_kernel_lets_him(tmp_path):
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=True)
    entered, user, as_large, name = done.stdout.split()
    assert (user, as_large) == ("65534", "True")
    if entered == "False":
        (SHM / name).unlink()
        pytest.skip("the kernel does not let users have namespaces")
    assert name not in segments()


def test_what_is_left_in_the_machines_is_removed_where_a_library_process_has_none_of_its_own(driven):
    """Of made-up names, that its processes had mapped, and nobody has any more."""
    kept = shared_memory.SharedMemory(create=True, size=BYTES)
    named = f"mine-{os.getpid()}"
    driven.load(make_segments)
    driven.next("ready")

    maps = []

    def share(context, items):
        name, mine = items
        # Not by SharedMemory, of which a process of Python's own removes what is left.
        (SHM / mine).write_bytes(bytes(BYTES))
        for each in (name, mine):
            with (SHM / each).open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), BYTES))
        return [context[0].name.lstrip("/"), context[1].pid]

    try:
        driven.call(share, [kept.name.lstrip("/"), named])
        own, child = pickle.loads(driven.next("finished")[1])
        with tempfile.NamedTemporaryFile(dir=SHM):  # The host looks again only where the folder has changed.
            mapped = {own, kept.name.lstrip("/")}
            eventually(lambda: mapped <= driven.host._leftovers._seen.keys() or driven.step(), pause=0.001)
        os.kill(driven.host._libraries["c"].process.pid, signal.SIGKILL)
        driven.next("died")
        eventually(lambda: own not in segments() or driven.step(), pause=0.001)
        assert {kept.name.lstrip("/"), named} <= segments(), "of others, or named by somebody"
        os.kill(child, signal.SIGKILL)
    finally:
        kept.close()
        kept.unlink()
        (SHM / named).unlink(missing_ok=True)


def test_what_killed_hosts_left_is_removed_by_the_next(tmp_path):
    program = (
        "import multiprocessing, os, sys; from multiprocessing import shared_memory\n"
        "from ctxflow.host.shm_leftovers import ShmLeftovers\n"
        "segment = shared_memory.SharedMemory(create=True, size=100)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "ShmLeftovers(sys.argv[1]).look([os.getpid()])\n"
        "print(segment.name.lstrip('/'), f'sem.{lock._semlock.name.lstrip(chr(47))}', flush=True)\n"
        "os.killpg(0, 9)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = set(done.stdout.split())
    assert left <= segments()
    [record] = tmp_path.iterdir()
    record.write_text("nonsense\n1 2 3\n0 0 psm_00000000\n" + record.read_text())
    ShmLeftovers(str(tmp_path))
    assert left.isdisjoint(segments())
    assert not list(tmp_path.iterdir())


def test_a_context_that_needs_what_is_in_the_machines_gets_none(driven):
    driven.load(build, directory="/dev/shm")
    driven.next("ready")
    own, theirs, child, _ = driven.value(driven.item(names))
    assert {own, theirs} <= segments()
    os.kill(child, signal.SIGKILL)
    for name in (own, theirs):
        (SHM / name).unlink(missing_ok=True)


PATHS = """
import os, sys
from ctxflow.host import private_shm

given, taken = sys.argv[1:]
before = private_shm.one_path(given), private_shm.entered()
assert before == (given, False), before
if not private_shm.enter():
    sys.exit(77)
assert private_shm.entered()
named = private_shm.one_path(given)
assert private_shm.one_path(given) == named and private_shm.one_path(named) == named
assert private_shm.one_path(taken) == taken, "what is not in a cache keeps its path"
print(named, open(os.path.join(named, "config.json")).read())
"""


def test_files_of_a_context_have_one_path_on_all_workers_where_they_have_a_shared_memory_of_their_own(tmp_path):
    """Each gets the files of its own worker, by a name that only its own processes see."""
    said = []
    for worker in ("one", "other"):
        folder = tmp_path / worker / "cache" / ("0ab1" * 8) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(worker)
        words = [sys.executable, "-c", PATHS, os.fspath(folder), os.fspath(tmp_path)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode == 77:
            pytest.skip("the kernel lets this user mount nothing")
        assert not done.returncode, done.stderr
        said.append(done.stdout.split())
    (one, first), (other, second) = said
    assert one == other and (first, second) == ("one", "other")
    assert not os.path.lexists(one), "it went with the processes, and was never in the machine's"


def test_a_link_that_leads_elsewhere_is_not_taken_for_a_file(tmp_path):
    """As that of another file of the same digest and name, in the same process."""
    program = (
        PATHS.partition("named =")[0]
        + """
folder, other = given, os.path.join(taken, "other", os.path.basename(os.path.dirname(given)), "model")
os.makedirs(other)
assert private_shm.one_path(given) != given
assert private_shm.one_path(other) == other
"""
    )
    folder = tmp_path / "cache" / ("0ab1" * 8) / "model"
    folder.mkdir(parents=True)
    words = [sys.executable, "-c", program, os.fspath(folder), os.fspath(tmp_path)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("the kernel lets this user mount nothing")
    assert not done.returncode, done.stderr


OF_LINKS = [
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error",
    "ibv_reg_mr failed: Cannot allocate memory",
    "libibverbs: Warning: RLIMIT_MEMLOCK is 32768 bytes.",
    "no InfiniBand device can be opened",
]


@pytest.mark.parametrize("said", [*OF_LINKS, "CUDA out of memory"])
@pytest.mark.parametrize("apart", [True, False])
def test_an_error_of_links_between_gpus_names_the_way_out_where_there_is_a_user_namespace(monkeypatch, said, apart):
    links = {"/proc/self/ns/user": "user:[1]", "/proc/7/ns/user": "user:[2]" if apart else "user:[1]"}
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    assert ("CTXFLOW_PRIVATE_SHM" in private_shm.advice(7, said)) == (apart and said in OF_LINKS)


def test_whoever_is_gone_gets_no_advice():
    assert private_shm.advice(2**22 + 1, OF_LINKS[0]) == ""


def test_a_build_that_fails_at_links_names_the_way_out(driven, monkeypatch):
    def build():
        print("worker 1: NCCL WARN Call to ibv_create_qp failed")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(private_shm, "advice", lambda pid, said: f"; told of {'NCCL WARN' in said}")
    driven.load(build)
    head, _ = driven.next("failed")
    assert head["failure"]["message"].endswith("See root cause above.; told of True")
