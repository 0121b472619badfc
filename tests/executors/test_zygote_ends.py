"""Zygotes of the engine and its hosts are killed or stopped, or their driver is: the run goes on, or leaves nothing."""

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from executor_helpers import marked, runs, started

from ctxflow import batch_app, context
from ctxflow.host.linux import descendants, python_path
from waiting import eventually, exited, finished, nothing_left

IMPORTS = """
import os, sys, time
zygote = os.path.basename(open("/proc/self/comm").read().strip()) == "ctxflow-zygote"
if zygote:
    open(os.environ["IMPORTING"], "w").close()
    time.sleep(float(os.environ["SECONDS"]))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module, with the variables that its code reads."""

    def install(module, source, **variables):
        place = tmp_path / "site-packages"
        place.mkdir()
        (place / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(place)
        path = {"PYTHONPATH": str(place)}
        for name, value in {**path, **python_path(path), **variables}.items():
            monkeypatch.setenv(name, str(value))

    return install


@pytest.fixture
def package(tmp_path, install):
    """An installed package, whose import takes long in a zygote."""
    install("takes_long", IMPORTS, IMPORTING=tmp_path / "importing", SECONDS=600)
    return tmp_path / "importing"


@context()
def importing():
    import importlib

    return importlib.import_module("takes_long").__name__  # Which is seen when it is built, not before.


@batch_app(importing(), batch_size=1)
def imported(name, items):
    return [(os.getpid(), os.getppid()) for _ in items]


@context()
def plain():
    import decimal

    return decimal.Decimal


@batch_app(plain(), batch_size=1)
def where(decimal, items):
    """The library's process, its host's, and the host's parent's."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    return [(os.getpid(), os.getppid(), parent) for _ in items]


@context()
def another():
    import fractions

    return fractions.Fraction


@batch_app(another(), batch_size=1)
def fraction(fraction, items):
    return [os.getppid() for _ in items]


@batch_app(plain(), batch_size=1)
def first_variable(decimal, items):
    """Where this process's first variable is, and where those begin that its program was started with."""
    import ctypes

    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    with open("/proc/self/stat") as file:
        begin = int(file.read().rpartition(")")[2].split()[47])
    return [(variables[0], begin) for _ in items]


def evicted(executor):
    """Take the only worker away, and wait until that is known."""
    before = executor.status().evictions
    eventually(executor.engine.evict)
    eventually(lambda: executor.status().evictions > before)


@pytest.fixture
def executor(tmp_path):
    with started(tmp_path / "run", workers=1) as executor:
        yield executor


def forked(executor):
    """Have a call answered by a worker that was forked from the engine's zygote; return that and the worker's."""
    evicted(executor)
    _, host, parent = where(1).result()
    zygote = executor.engine._local._zygote.process
    assert parent == zygote.pid
    return zygote, host


def test_a_zygote_that_is_killed_is_replaced_and_its_hosts_are_watched_all_the_same(executor):
    where(1).result()
    zygote, host = forked(executor)
    zygote.send_signal(signal.SIGKILL)
    exited(zygote)
    assert where(1).result()[1] == host, "it lives on"
    second, other = forked(executor)
    assert second.pid != zygote.pid and not runs(host) and runs(other)
    os.kill(other, signal.SIGKILL)
    eventually(lambda: executor.status().workers_lost)
    where(1).result()
    eventually(lambda: not runs(other))


def test_a_process_that_is_forked_after_an_eviction_can_set_its_title(executor):
    """setproctitle looks for the command line before the first variable, which has to stay where it was."""
    where(1).result()
    _, host = forked(executor)
    library, of_library, _ = where(1).result()
    assert of_library == host
    assert b"ctxflow.host.zygote" in Path(f"/proc/{library}/cmdline").read_bytes(), "forked, not spawned"
    first, begin = first_variable(1).result()
    assert first == begin


def test_a_zygote_that_is_stopped_costs_one_start(executor):
    where(1).result()
    zygote, host = forked(executor)
    zygote.send_signal(signal.SIGSTOP)
    evicted(executor)
    assert where(1).result()[2] == os.getpid(), "spawned"
    eventually(lambda: not runs(zygote.pid))
    assert not runs(host)
    forked(executor)


def test_a_hosts_zygote_that_is_stopped_costs_one_load(executor):
    where(1).result()
    _, host = forked(executor)
    [own] = [pid for pid in descendants(host) if name_of(pid) == "ctxflow-zygote"]
    os.kill(own, signal.SIGSTOP)
    assert fraction(1).result() == host, "the worker was not lost"
    assert not runs(own)


def name_of(pid):
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip()


def test_hosts_that_are_buried_leave_no_zombies(executor):
    where(1).result()
    for _ in range(4):
        zygote, host = forked(executor)
    evicted(executor)
    where(1).result()
    assert len(descendants(zygote.pid, deep=False)) == 1
    assert not runs(host)


def test_a_run_that_ends_while_its_zygote_imports_leaves_nothing(tmp_path, package, monkeypatch):
    monkeypatch.setenv("MARK", mark := f"ends-{os.getpid()}")
    with started(tmp_path / "run", workers=1) as executor:
        imported(1).result()
        evicted(executor)
        eventually(package.exists)
        assert marked(mark)
    assert not marked(mark)


PROGRAM = """
import time
from test_zygote_ends import evicted, imported
from executor_helpers import started

with started("run", workers=1) as executor:
    imported(1).result()
    evicted(executor)
    time.sleep(600)
"""


def test_a_driver_that_is_killed_takes_the_zygote_along_that_imports(tmp_path, package, monkeypatch):
    """It reads nothing meanwhile, so that the end of its socket is no news to it."""
    mark = f"killed-{os.getpid()}"
    path = os.pathsep.join([str(tmp_path / "site-packages"), *(str(Path(__file__).parents[up]) for up in (0, 1))])
    variables = {**os.environ, **python_path({"PYTHONPATH": path}), "MARK": mark}
    driver = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=variables)
    try:
        eventually(package.exists)
    finally:
        driver.kill()
        exited(driver)
    nothing_left(lambda: marked(mark))


COUNTED = """
import os, time
with open(os.environ["COUNT"], "a") as file:
    print(os.getpid(), file=file)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
"""


@pytest.fixture
def counted(tmp_path, install):
    """An installed package, whose imports are counted in a file, and wait for another."""
    install("is_counted", COUNTED, COUNT=tmp_path / "count", GO=tmp_path / "go")
    return tmp_path


@context(preload=["is_counted"])
def heavy():
    return importlib.import_module("is_counted").__name__


@batch_app(heavy(), batch_size=1)
def heavily(name, items):
    time.sleep(0.02)
    return [(os.getpid(), os.getppid(), name in sys.modules) for _ in items]


def answered_by(app, count):
    """The answers by as many library processes as are to give one."""
    found = {}
    with contextlib.closing(app.map(itertools.count(), order="completed")) as answers:
        for _, (library, *more) in answers:
            found[library] = more
            if len(found) == count:
                return found
    raise AssertionError("endless")


def imports(folder):
    """The processes that have imported the package."""
    return (folder / "count").read_text().split() if (folder / "count").exists() else []


def test_packages_are_imported_once_for_the_workers_of_a_machine(tmp_path, counted):
    (counted / "go").touch()
    with started(tmp_path / "run", workers=3) as executor:
        found = answered_by(heavily, 3)
        assert len({host for host, _ in found.values()}) == 3 and all(there for _, there in found.values())
        assert sorted(host for host, _ in found.values()) == sorted(executor.engine.worker_pids().values())
        assert imports(counted) == [str(executor.engine._local._zygote.process.pid)]
        assert executor.status().workers_lost == 0
    assert not any(map(runs, found))


def test_imports_outlive_the_thread_that_asked_for_the_first_call(tmp_path, counted):
    with started(tmp_path / "run", workers=2) as executor:
        futures = []
        user = threading.Thread(target=lambda: futures.append(heavily(0)))
        user.start()
        user.join()
        [zygote] = eventually(lambda: imports(counted))
        (counted / "go").touch()
        assert finished(futures[0]).result()[2]
        assert imports(counted) == [zygote] == [str(executor.engine._local._zygote.process.pid)]


def test_an_answer_that_another_thread_took_is_not_waited_for(executor):
    """The loop has seen the line readable for it, and would wait for another with all others locked out."""
    where(1).result()
    forked(executor)
    engine = executor.engine
    zygote = engine._local._zygote
    with engine._lock:
        assert zygote.ready
        engine._selector.get_key(zygote.line).data()
        assert engine._local._zygote is zygote and zygote.ready


@pytest.mark.parametrize("how", ["killed", "stopped", "evicted", "unsafe"])
def test_what_happens_while_all_wait_for_imports_costs_no_more_than_these(tmp_path, counted, how):
    if how == "unsafe":
        with open(counted / "site-packages" / "is_counted.py", "a") as file:
            file.write("__fork_unsafe__ = 'it says so'\n")
    with started(tmp_path / "run", workers=3) as executor:
        waiting = heavily(0)
        [zygote] = eventually(lambda: imports(counted))
        assert int(zygote) == executor.engine._local._zygote.process.pid
        if how == "evicted":
            eventually(executor.engine.evict)
        elif how != "unsafe":
            os.kill(int(zygote), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        (counted / "go").touch()
        assert finished(waiting).result()[2]
        found = answered_by(heavily, 3)
        assert len({host for host, _ in found.values()}) == 3
        assert len(imports(counted)) <= {"evicted": 1}.get(how, 1 + 3), "else each worker imports for itself"
        assert executor.status().evictions == (how == "evicted")


def test_imports_that_take_longer_than_a_build_may_are_waited_for_no_longer(tmp_path, counted):
    @context(preload=["is_counted"], load_timeout=8.0)
    def hasty():
        return 7

    @batch_app(hasty(), batch_size=1)
    def hastily(seven, items):
        return [seven for _ in items]

    with started(tmp_path / "run", workers=2) as executor:
        assert finished(hastily(0)).result() == 7, "in a process that was spawned"
        zygote = imports(counted)[0]
        nothing_left(lambda: runs(int(zygote)))
        before = len(imports(counted))
        evicted(executor)
        assert finished(hastily(1)).result() == 7
        assert executor.engine._local._zygote is None and len(imports(counted)) <= before + 2, "but workers' own"
        (counted / "go").touch()


def test_who_needs_none_of_what_is_imported_does_not_wait_for_it(tmp_path, counted):
    @context(preload=["fractions"])
    def light():
        return 7

    @context(preload=["is_counted"], env={"OTHER": "1"})
    def apart():
        return 8

    @batch_app(light(), batch_size=1)
    def lightly(seven, items):
        return [seven for _ in items]

    @batch_app(apart(), batch_size=1)
    def differently(eight, items):
        return [eight for _ in items]

    with started(tmp_path / "run", workers=3) as executor:
        other = differently(0)
        others = eventually(lambda: imports(counted))
        assert executor.engine._local._zygote is None, "it would import with other variables"
        waiting = heavily(0)
        eventually(lambda: len(imports(counted)) > len(others))
        assert finished(lightly(0)).result() == 7
        assert executor.engine._local.imports_since is not None and not waiting.done()
        (counted / "go").touch()
        assert finished(other).result() == 8 and finished(waiting).result()[2]


def test_a_worker_that_was_told_something_keeps_its_host(tmp_path, counted):
    (counted / "go").touch()
    with started(tmp_path / "run", workers=2) as executor:
        before = {host for host, _ in answered_by(lone, 2).values()}
        after = {host for host, _ in answered_by(heavily, 2).values()}
        assert before == after == set(executor.engine.worker_pids().values())


@batch_app(batch_size=1)
def lone(items):
    time.sleep(0.02)
    return [(os.getpid(), os.getppid(), True) for _ in items]
