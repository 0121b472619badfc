"""Zygotes: what is forked from them is as if it had been spawned, and nothing unsafe is ever forked."""

import os
import pickle
import random
import selectors
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_host import Driven

from ctxflow.host.forking import CannotFork, ForkedProcess, Zygote, receive, send
from ctxflow.host.library_start import library_variables
from ctxflow.host.local_files import OF_LIBRARY

PATIENCE = 30.0


@pytest.fixture
def driven(tmp_path):
    (tmp_path / "logs").mkdir()
    driven = Driven(tmp_path)
    yield driven
    driven.close()


def built(driven, function=dict, context="c", **more):
    """Build a context; return what is reported."""
    driven.load(function, context=context, **more)
    return driven.next("ready")[0]


def answer(driven, function, context="c"):
    driven.call(function, [None], context=context)
    return pickle.loads(driven.next("finished")[1])[0]


def zygotes(driven):
    return list(driven.host._zygotes._zygotes.values())


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
                time.sleep(600)
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
    driven.reports_nothing(1.0)
    assert zygote.ready
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
        zygote.process.wait(PATIENCE)
        assert answer(driven, lambda value, items: [7]) == 7, number  # What it has forked lives on.
    assert built(driven)["started"] == "spawned: 3 zygotes have ended"


def test_one_that_dies_while_it_imports_costs_no_load(driven, tmp_path):
    environment = package(tmp_path, "deadly", "import os\nos.kill(os.getpid(), 9)")
    report = built(driven, environment=environment, preload=["deadly"])
    assert report["started"] == "spawned: 3 zygotes have ended"


def test_imports_that_hang_take_no_longer_than_a_load_may(driven, tmp_path):
    environment = package(tmp_path, "hangs", "import time\ntime.sleep(600)")
    report = built(driven, environment=environment, preload=["hangs"], timeout=1.0)
    assert report["started"] == "spawned: what it imports took longer than its load_timeout"


def test_a_load_that_is_not_wanted_any_more_waits_for_no_zygote(driven, tmp_path):
    environment = package(tmp_path, "slow", "import time\ntime.sleep(0.5)")
    driven.load(dict, environment=environment, preload=["slow"])
    driven.tell("unload", context="c")
    driven.next("unloaded")
    assert built(driven, context="d", environment=environment, preload=["slow"])["context"] == "d"


def test_zygotes_end_with_their_host(driven):
    built(driven)
    [pid] = driven.host._zygotes.pids()
    driven.host.stop()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_zygote_ends_when_nobody_can_ask_it(tmp_path):
    zygote = Zygote(library_variables({}), str(tmp_path))
    zygote.line.close()
    assert zygote.process.wait(PATIENCE) == 0


def test_what_is_forked_outlives_its_zygote_and_tells_how_it_ended(driven):
    built(driven)
    library = driven.host._libraries["c"].process
    assert isinstance(library, ForkedProcess) and library.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        library.wait(0.01)
    library.kill()
    assert library.wait(PATIENCE) == -signal.SIGKILL
    library.send_signal(signal.SIGTERM)  # Is no error.
    assert driven.next("died")[0]["context"] == "c"


def test_a_zygote_that_is_gone_forks_nothing(tmp_path):
    zygote = Zygote(library_variables({}), str(tmp_path))
    zygote.process.kill()
    zygote.process.wait(PATIENCE)
    with pytest.raises(CannotFork, match="the zygote is gone"):
        zygote.fork("library", ["x"], {}, str(tmp_path), [], [1])
    assert zygote.ended and not zygote.ready


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=70_000), max_size=4), st.integers(0, 3))
def test_messages_come_as_they_were_sent(message, count):
    import socket

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
    zygotes(driven)[0].process.wait(PATIENCE)
    driven.reports_nothing(0.3)
    assert len(driven.selector.get_map()) == before - 1
