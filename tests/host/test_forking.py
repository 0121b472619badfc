"""Zygotes: what is forked from them is as if it had been spawned, and nothing unsafe is ever forked."""

import contextlib
import os
import pickle
import random
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.host import zygote as zygote_module
from ctxflow.host.forking import FIRST_VARIABLE, HOST, CannotFork, ForkedProcess, Zygote, Zygotes, receive, send
from ctxflow.host.installed_modules import shadowing
from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_start import command, library_variables
from ctxflow.host.linux import descendants, process_state, readable
from ctxflow.host.local_files import OF_LIBRARY
from ctxflow.host.zygote import ZygoteServer
from unkillable import traced
from waiting import FOREVER, eventually, exited, nothing_left, patience


def built(driven, function=dict, context="c", **more):
    """Build a context; return what is reported."""
    driven.load(function, context=context, **more)
    return driven.next("ready")[0]


def answer(driven, function, context="c"):
    driven.call(function, [None], context=context)
    return pickle.loads(driven.next("finished")[1])[0]


def zygotes(driven):
    return list(driven.host._zygotes._zygotes.values())


def package(folder, name, text):
    """Make an installed package, in a folder that is for them."""
    place = folder / "site-packages"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(place)}


def test_a_forked_process_is_as_a_spawned_one(driven):
    """Its parent, group, session, directory, variables, descriptors, signals, and what it imports."""

    def state():
        handlers = [
            str(signal.getsignal(n)).partition(" at ")[0] for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ]
        return {
            "parent": os.getppid(),
            "leads its group": os.getpgid(0) == os.getpid(),
            "session": os.getsid(0),
            "in its folder": os.path.basename(os.getcwd()),
            "variables": {name: value for name, value in os.environ.items() if name not in ("PWD", "_")},
            "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in range(3)),
            "handlers": handlers,
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
            "path": [entry for entry in sys.path if "scratch" not in entry],
            "threads": len(os.listdir("/proc/self/task")),
        }

    found = {}
    for name, preload in (("forked", []), ("spawned", None)):
        assert built(driven, context=name, preload=preload, environment={"OF_CONTEXT": "1"})["started"] == name
        found[name] = answer(driven, lambda value, items: [state()], context=name)
    for each in found.values():
        each["variables"].pop(OF_LIBRARY)
        each["in its folder"] = each["in its folder"].rstrip("0123456789")
    assert found["forked"]["variables"].pop(FIRST_VARIABLE) == "1", "all else is as it is in a spawned one"
    assert found["forked"] == found["spawned"]
    assert found["forked"]["parent"] == os.getpid()


def test_what_a_forked_process_started_is_found_and_ended(driven):
    """Also what has left its group and its session, and has no program of its own."""

    def leave():
        told, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(tell, str(os.getpid()).encode())
                time.sleep(FOREVER)
            os._exit(0)
        os.wait()
        return int(os.read(told, 16))

    built(driven)
    stray = answer(driven, lambda value, items: [leave()])
    driven.tell("unload", context="c")
    driven.next("unloaded")

    def gone():
        driven.host.bury_orphans()
        return not os.path.exists(f"/proc/{stray}")

    eventually(gone)


def test_a_second_context_has_what_the_first_imported_for_it(driven, tmp_path):
    environment = package(tmp_path, "heavy", "import os\nbuilt_in = os.getpid()")

    def build():
        import heavy

        return heavy.built_in

    first = built(driven, build, environment=environment)
    assert "heavy" in first["modules"]
    assert answer(driven, lambda value, items: [value == os.getpid()])
    second = built(driven, build, context="d", environment=environment, preload=first["modules"])
    assert second["started"] == "forked" and "heavy" not in second["modules"]
    assert answer(driven, lambda value, items: [value], context="d") == zygotes(driven)[0].process.pid


def test_modules_are_imported_while_files_are_on_their_way(driven, tmp_path):
    environment = package(tmp_path, "heavy", "import os, time\nbuilt_in = os.getpid()\ntime.sleep(0.3)")

    def build():
        import heavy

        return heavy.built_in

    driven.tell("preload", environment=environment, modules=["heavy"])
    [zygote] = zygotes(driven)
    eventually(lambda: zygote.ready or driven.step(), pause=0.001)
    assert "imports" not in built(driven, build, environment=environment, preload=["heavy"])["parts"]
    assert answer(driven, lambda value, items: [value]) == zygote.process.pid


@pytest.mark.parametrize(
    "text, why",
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads (Thread-"),
        ("import subprocess\nchild = subprocess.Popen(['sleep', '600'])", "has started a process"),
        ("__fork_unsafe__ = 'it counts its processes'", "unsafe must not be imported before a fork: it counts its"),
        ("import socket\nkept = socket.socket()", "has opened socket:"),
        (
            "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(600))",
            "lets no fork come to its end",
        ),
    ],
)
def test_what_cannot_be_forked_is_spawned_and_says_why(driven, tmp_path, text, why):
    environment = package(tmp_path, "unsafe", text)
    there = {}
    for context in ("c", "d"):
        report = built(driven, context=context, environment=environment, preload=["unsafe"])
        assert report["started"].startswith("spawned: ") and why in report["started"]
        assert not zygotes(driven)
        there[context] = answer(driven, lambda value, items: ["unsafe" in sys.modules], context=context)
    assert there == {"c": True, "d": False}, "the first is what was the zygote, and need not import again"
    driven.host._libraries["c"].process.kill()
    died = driven.next("died")[0]
    assert died["context"] == "c" and "SIGKILL" in died["failure"]["message"]
    assert built(driven, context="e")["started"] == "forked"  # Of another environment.


def test_only_installed_packages_are_imported_beforehand(driven, tmp_path):
    """What is the user's own may change, and is imported where it is used."""
    (tmp_path / "mine.py").write_text("import os\nbuilt_in = os.getpid()")

    def build():
        import mine

        return mine.built_in

    report = built(driven, build, preload=["mine", "json.tool"], path=[str(tmp_path)])
    assert report["started"] == "forked" and "mine" not in report["modules"]
    assert answer(driven, lambda value, items: [value == os.getpid()])
    assert zygotes(driven)[0].failed == {"mine": "it is not installed"}


def test_a_module_of_the_users_goes_before_a_package_of_its_name(driven, tmp_path):
    environment = package(tmp_path, "both", "whose = 'installed'")
    own = tmp_path / "project"
    own.mkdir()
    (own / "both.py").write_text("whose = 'mine'")

    def build():
        import both

        return both.whose

    path = [str(own), environment["PYTHONPATH"]]
    report = built(driven, build, environment=environment, preload=["both"], path=path)
    assert report["started"] == f"spawned: {own}/both.py has the name of an installed package"
    assert answer(driven, lambda value, items: [value]) == "mine"


def test_what_cannot_be_imported_fails_in_the_build_that_needs_it(driven, tmp_path):
    environment = package(tmp_path, "broken", "raise SystemExit('not on this machine')")
    assert built(driven, environment=environment, preload=["broken", "no_such_module"])["started"] == "forked"
    [zygote] = zygotes(driven)
    assert zygote.failed == {"broken": "SystemExit: not on this machine", "no_such_module": "it is not installed"}


def test_variables_are_there_before_anything_is_imported(driven, tmp_path):
    text = "import os\nseen = os.environ.get('OF_CONTEXT')"

    def build():
        import reads

        return reads.seen

    for number, context in enumerate("cdc"):
        environment = {**package(tmp_path, "reads", text), "OF_CONTEXT": str(number)}
        report = built(driven, build, context=context, environment=environment, preload=["reads"])
        assert report["started"] == "forked"
        assert answer(driven, lambda value, items: [value], context=context) == str(number)
    assert len(zygotes(driven)) == 2


def test_each_child_has_its_own_random_numbers(driven):
    def build():
        import multiprocessing

        import numpy

        return random.random(), numpy.random.rand(), bytes(multiprocessing.current_process().authkey)

    modules = ["numpy.random", "multiprocessing.process", "random"]
    drawn = []
    for context in "cd":
        built(driven, build, context=context, preload=modules)
        drawn.append(answer(driven, lambda value, items: [value], context=context))
    assert not set(drawn[0]) & set(drawn[1])


def test_a_zygote_that_is_killed_is_replaced_and_then_given_up(driven):
    for number in range(3):
        assert built(driven)["started"] == "forked"
        [zygote] = zygotes(driven)
        zygote.process.kill()
        exited(zygote.process)
        assert answer(driven, lambda value, items: [7]) == 7, number  # What it has forked lives on.
    assert built(driven)["started"] == "spawned: 3 zygotes have ended"


def test_one_that_dies_while_it_imports_costs_no_load(driven, tmp_path):
    environment = package(tmp_path, "deadly", "import os\nos.kill(os.getpid(), 9)")
    report = built(driven, environment=environment, preload=["deadly"])
    assert report["started"] == "spawned: 3 zygotes have ended"


def test_imports_that_hang_take_no_longer_than_a_load_may(driven, tmp_path):
    environment = package(tmp_path, "hangs", "import time\ntime.sleep(600)")
    report = built(driven, environment=environment, preload=["hangs"], timeout=4.0)
    assert report["started"] == "spawned: what it imports took longer than 4 s"


def test_a_load_that_is_not_wanted_any_more_waits_for_no_zygote(driven, tmp_path):
    environment = package(tmp_path, "slow", "import time\ntime.sleep(0.5)")
    driven.load(dict, environment=environment, preload=["slow"])
    driven.tell("unload", context="c")
    driven.next("unloaded")
    assert built(driven, context="d", environment=environment, preload=["slow"])["context"] == "d"


def test_zygotes_end_with_their_host(driven):
    built(driven)
    [pid] = [zygote.process.pid for zygote in zygotes(driven)]
    driven.host.stop()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_zygote_ends_when_nobody_can_ask_it(tmp_path):
    zygote = Zygote(library_variables({}), str(tmp_path))
    zygote.line.close()
    assert exited(zygote.process) == 0


def test_what_is_forked_outlives_its_zygote_and_tells_how_it_ended(driven):
    built(driven)
    library = driven.host._libraries["c"].process
    assert isinstance(library, ForkedProcess) and library.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        library.wait(0.01)
    library.kill()
    assert exited(library) == -signal.SIGKILL
    library.send_signal(signal.SIGTERM)  # Is no error.
    assert driven.next("died")[0]["context"] == "c"


def test_a_process_that_its_tracer_does_not_let_go_of_is_not_waited_for():
    pid = os.fork()
    if not pid:
        signal.pause()
    process = ForkedProcess(pid)
    with traced(pid):
        process.kill()
        eventually(lambda: process_state(pid) == "Z")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
    assert exited(process) == -signal.SIGKILL


def test_a_zygote_that_is_gone_forks_nothing(tmp_path):
    zygote = Zygote(library_variables({}), str(tmp_path))
    zygote.process.kill()
    exited(zygote.process)
    with pytest.raises(CannotFork, match="the zygote is gone"):
        zygote.fork("library", ["x"], {}, str(tmp_path), [], [1])
    assert zygote.ended and not zygote.ready
    zygote.end()


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=70_000), max_size=4), st.integers(0, 3))
def test_messages_come_as_they_were_sent(message, count):
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    with near, far:
        send(near, message, [0] * count)
        got, descriptors = receive(far)
    for descriptor in descriptors:
        os.close(descriptor)
    assert got == message and len(descriptors) == count


def test_the_selector_knows_of_no_zygote_that_has_ended(driven):
    built(driven)
    assert isinstance(driven.selector, selectors.DefaultSelector)
    before = len(driven.selector.get_map())
    zygotes(driven)[0].process.kill()
    exited(zygotes(driven)[0].process)
    driven.reports_nothing(0.3)
    assert len(driven.selector.get_map()) == before - 1


# --- where processes are killed, stopped, or refused


@pytest.fixture
def zygote(tmp_path):
    zygote = Zygote(library_variables({}), str(tmp_path))
    zygote.preload([])
    zygote.heard()
    yield zygote
    zygote.end()


def descriptors(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))


def in_background():
    """The threads in which hosts, also of earlier tests, remove files."""
    return [thread for thread in threading.enumerate() if thread.name == "ctxflow-background"]


def forked_host(zygote, folder, name="w1"):
    """Have a zygote fork a host; return the process and the connection to it."""
    near, far = socket.socketpair()
    words = [0, str(folder / name), str(folder), str(os.getpid())]
    with far, open(folder / "host.log", "ab") as output:
        given = [far.fileno(), output.fileno()]
        return zygote.fork(HOST, words, library_variables({}), str(folder), [], given), near


def test_a_zygote_that_was_just_killed_costs_no_load(driven):
    """Its host has not heard of it; what takes the number of its descriptor is watched all the same."""
    built(driven)
    for context in "de":
        [zygote] = zygotes(driven)
        zygote.process.send_signal(signal.SIGKILL)
        exited(zygote.process)
        assert built(driven, context=context)["started"].startswith("spawned: the zygote is gone")
        assert answer(driven, lambda value, items: [7], context=context) == 7
        assert built(driven, context="again")["started"] == "forked"


def test_a_zygote_that_is_stopped_is_not_waited_for(driven):
    built(driven)
    [zygote] = zygotes(driven)
    zygote.process.send_signal(signal.SIGSTOP)
    eventually(lambda: zygote.stopped)
    driven.load(dict, context="d")
    assert driven.next("ready")[0]["started"] == "forked", "from another"
    eventually(lambda: zygote.process.poll() == -signal.SIGKILL)


def test_a_zygote_whose_fork_hangs_is_given_up_with_what_it_was_forking(driven, tmp_path, monkeypatch):
    """The fork that was tried came back; nothing moves in the next one."""
    monkeypatch.setattr("ctxflow.host.forking.readable_soon", lambda descriptor: readable(descriptor, 0.1))
    text = f"""
        import os, time
        forks = []
        os.register_at_fork(
            before=lambda: forks.append(1),
            after_in_child=lambda: len(forks) > 1 and time.sleep({FOREVER}),
        )
    """
    environment = package(tmp_path, "hangs", textwrap.dedent(text))
    others = set(descendants(os.getpid()))
    started = built(driven, environment=environment, preload=["hangs"])["started"]
    assert started == "spawned: the zygote is gone (it does not answer)"
    library = driven.host._libraries["c"].process.pid
    eventually(lambda: driven.host.bury_orphans() or set(descendants(os.getpid())) - others == {library})


def test_a_zygote_that_is_stopped_forks_nothing(zygote, tmp_path):
    zygote.process.send_signal(signal.SIGSTOP)
    eventually(lambda: zygote.stopped)
    with pytest.raises(CannotFork, match="it is stopped"):
        zygote.fork(HOST, [], {}, str(tmp_path), [], [])


def test_a_zygote_is_asked_to_fork_once_it_is_there(tmp_path):
    """Its host answers others while it starts, also where it has nothing to import."""
    load = BuildContext("c", preload=[])
    with selectors.DefaultSelector() as selector, contextlib.closing(Zygotes(selector, str(tmp_path))) as them:
        assert them.offer(load) is None
        for key, _ in selector.select(patience()):
            key.data()
        assert them.offer(load).ready


def test_the_import_that_may_take_least_is_looked_at_first(zygote, tmp_path):
    def load(timeout, **environment):
        return BuildContext("c", environment=environment, preload=["json.tool"], timeout=timeout)

    with selectors.DefaultSelector() as selector, contextlib.closing(Zygotes(selector, str(tmp_path), zygote)) as them:
        assert them.offer(load(200.0)) is None
        due = them.due()
        assert them.offer(load(100.0, COLOUR="blue")) is None
        assert them.due() < due < float("inf")


def test_one_that_was_taken_along_is_not_waited_for_either(tmp_path, zygote):
    near, far = socket.socketpair()
    with far:
        copied = Zygote(zygote.variables, str(tmp_path), process=(zygote.process, near))
        assert 0 < copied.line.gettimeout() < 15.0, "less than what a host may take to answer"
        near.close()


def test_what_is_forked_by_a_zygote_that_then_dies_answers_nobody(driven):
    """It has the descriptors of a load that is spawned instead, which it must not listen to."""
    built(driven)
    [zygote] = zygotes(driven)
    near, far = socket.socketpair()
    orphans = []

    def play():
        asked, given = receive(far)
        words = [str(given[word]) if isinstance(word, int) else word for word in asked["words"]]
        orphans.append(
            subprocess.Popen(
                [*command("library"), *words], pass_fds=given[:-1], env=asked["variables"], cwd=asked["directory"]
            )
        )
        for descriptor in given:
            os.close(descriptor)
        far.close()

    zygote.line.close()
    watched = driven.selector.unregister(zygote.line)
    zygote.line = near
    driven.selector.register(near, selectors.EVENT_READ, watched.data)
    threading.Thread(target=play).start()
    report = built(driven, context="d")
    assert report["started"].startswith("spawned: the zygote is gone")
    for number in range(5):
        assert answer(driven, lambda value, items, number=number: [number], context="d") == number
    assert exited(orphans[0]) == 0


def test_a_library_process_whose_host_has_ended_before_it_was_adopted_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    begun = []
    monkeypatch.setattr(zygote_module.library, "main", begun.append)
    acts = []

    def fork(act):
        acts.append(act)
        if len(acts) == 1:
            with contextlib.suppress(OSError):
                act()
        return os.getpid()

    monkeypatch.setattr(zygote_module, "_fork", fork)
    near, far = socket.socketpair()
    with near, far, contextlib.suppress(ChildProcessError, OSError):
        server = object.__new__(ZygoteServer)
        server._fork_library({}, [])
    monkeypatch.setattr(os, "getppid", lambda: 2)
    acts[1]()
    assert not begun


def test_one_that_may_not_fork_leaks_nothing(tmp_path, monkeypatch):
    def refused(act):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(zygote_module, "_fork", refused)
    server = object.__new__(ZygoteServer)
    near, far = socket.socketpair()
    nothing_left(in_background)
    with near, far:
        before = descriptors()
        with pytest.raises(BlockingIOError):
            server._fork_library({}, [])
        with pytest.raises(BlockingIOError):
            server.copy(far.fileno(), [])
        assert descriptors() == before


def test_many_forks_leak_no_descriptor_and_leave_no_zombie(driven):
    built(driven)
    [zygote] = zygotes(driven)
    count = answer(driven, lambda value, items: [len(os.listdir("/proc/self/fd"))])
    nothing_left(in_background)
    before = descriptors(), descriptors(zygote.process.pid)
    for _ in range(40):
        assert built(driven)["started"] == "forked"
        assert answer(driven, lambda value, items: [len(os.listdir("/proc/self/fd"))]) == count
    eventually(lambda: (descriptors(), descriptors(zygote.process.pid)) == before)
    nothing_left(Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children").read_text)


def test_a_folder_that_cannot_be_listed_is_in_nobodys_way(tmp_path, monkeypatch):
    def refused(folder):
        raise PermissionError(folder)

    monkeypatch.setattr(os, "listdir", refused)
    assert shadowing([str(tmp_path)], set()) == ""


def test_its_hosts_are_no_reason_against_forking_more(zygote, tmp_path):
    hosts = [forked_host(zygote, tmp_path, name) for name in ("w1", "w2")]
    zygote.preload(["json.tool"])
    zygote.heard()
    assert zygote.unsafe == "" and zygote.ready
    for process, near in hosts:
        near.close()
        assert exited(process) == 255
        zygote.bury(process.pid)
        eventually(lambda pid=process.pid: not os.path.exists(f"/proc/{pid}"))


def test_a_host_that_is_given_up_removes_its_own_files_alone(zygote, tmp_path):
    """Its driver lives: so does the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "driver.sock").touch()
    process, near = forked_host(zygote, tmp_path / "run")
    eventually((tmp_path / "run" / "w1").exists)
    near.close()
    exited(process)
    assert not (tmp_path / "run" / "w1").exists() and (tmp_path / "run" / "driver.sock").exists()


def test_a_zygote_whose_process_is_killed_while_it_imports_is_no_error_of_what_comes_later(zygote):
    zygote.preload(["json.tool"])
    zygote.process.send_signal(signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        for _ in range(2):  # It may have answered before.
            zygote.heard()


def test_a_process_that_cannot_be_watched_is_none(monkeypatch, zygote, tmp_path):
    def full(pid):
        raise OSError(24, "Too many open files")

    near, far = socket.socketpair()
    words = [0, str(tmp_path / "w1"), str(tmp_path), str(os.getpid())]
    with near, far, open(os.devnull, "wb") as output:
        monkeypatch.setattr(os, "pidfd_open", full)
        with pytest.raises(CannotFork, match="cannot be watched"):
            zygote.fork(HOST, words, {}, str(tmp_path), [], [far.fileno(), output.fileno()])

    def childless():
        zygote.preload([])
        zygote.heard()
        with open(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children") as file:
            return not file.read()

    eventually(childless)
