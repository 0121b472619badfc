"""The parts of a load: they exclude each other and add up, whatever is nested, raised, or done on other threads."""

import _frozen_importlib
import asyncio
import importlib
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host import Driven

import ctxflow
from ctxflow import on_worker
from ctxflow.host.load_parts import BUILD, IMPORTS, PROCESS, LoadParts, parts_of
from waiting import eventually, joined

NAMES = st.sampled_from(["weights", "imports", "compile", "warm-up", "index"])
TIMES = st.floats(-5, 20, allow_nan=False)
MARKS = st.lists(st.tuples(TIMES, st.integers(1, 6), NAMES | st.just("")), max_size=30)


@given(MARKS, st.floats(0, 5), st.floats(0, 10))
def test_parts_add_up_and_are_never_negative_whatever_the_marks(marks, began, seconds):
    parts = parts_of(marks, began, began + seconds)
    assert sum(parts.values()) == pytest.approx(seconds)
    assert min(parts.values()) >= 0
    assert set(parts) <= {name for _, _, name in marks if name} | {BUILD}


@given(st.lists(NAMES, max_size=8))
def test_of_nested_parts_each_has_the_time_in_which_it_is_innermost(names):
    """A second before each is entered, and one before each is left."""
    marks = [(n + 1.0, n, name) for n, name in enumerate(names, 1)]
    marks += [(2.0 * len(names) + 1 - n + 1, n, "") for n in range(len(names), 0, -1)]
    expected = {BUILD: 2.0 + (1.0 if names else 0.0)}
    for depth, name in enumerate(names, 1):
        expected[name] = expected.get(name, 0.0) + (1.0 if depth == len(names) else 2.0)
    ended = 2.0 * len(names) + 2
    found = parts_of(marks, 0.0, ended)
    assert sum(found.values()) == pytest.approx(ended)
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names})


@pytest.fixture
def timed():
    """The parts of a load that goes on; nothing of it is left in Python's import system."""
    before = _frozen_importlib._find_and_load
    parts = LoadParts()
    parts.begin()
    on_worker.time_parts(parts)
    yield parts
    on_worker.time_parts(None)
    parts.end()
    assert _frozen_importlib._find_and_load is before


PROGRAM = st.recursive(
    st.sampled_from(["work", "raise"]), lambda inner: st.tuples(NAMES, st.booleans(), st.lists(inner, max_size=3)),
    max_leaves=12,
)  # fmt: skip


def carry_out(step, threads):
    """Enter parts in parts, on this thread or one of their own; some raise.

    :param threads: is given those that may outlast the step.
    """
    if step == "work":
        time.sleep(0.0005)
    elif step == "raise":
        raise KeyError(step)
    else:
        name, aside, steps = step

        def inside():
            with ctxflow.load_part(name):
                for each in steps:
                    try:
                        carry_out(each, threads)
                    except KeyError:
                        if len(steps) > 1:  # Else it goes on up.
                            continue
                        raise

        if aside:
            thread = threading.Thread(target=inside)  # It may end with an error.
            threads.append(thread)
            thread.start()
            if len(steps) % 2:
                thread.join()
        else:
            inside()


@settings(max_examples=60, deadline=None)
@given(PROGRAM)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_parts_add_up_however_code_nests_them_with_errors_and_threads(program):
    before, parts = time.monotonic(), LoadParts()
    parts.begin()
    on_worker.time_parts(parts)
    began = time.monotonic()
    threads = []
    try:
        carry_out(program, threads)
    except KeyError:
        pass
    finally:
        on_worker.time_parts(None)
        ended = time.monotonic()
        seconds, told = parts.end()
        for thread in threads:  # A thread may start others meanwhile.
            joined(thread)
    assert ended - began - 1e-5 <= seconds <= time.monotonic() - before + 1e-5
    assert sum(told.values()) == pytest.approx(seconds, abs=2e-5)
    assert min(told.values()) >= 0


def module(tmp_path, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that take as long as their names say; the outer imports the inner."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module(tmp_path, "parts_inner", "import time; time.sleep(0.2)")
    module(tmp_path, "parts_outer", "import importlib, time; time.sleep(0.1); import parts_inner")
    module(tmp_path, "parts_wrong", "import time; time.sleep(0.1); raise ValueError('parts')")
    importlib.invalidate_caches()


@pytest.mark.usefixtures("modules")
def test_imports_count_as_imports_wherever_they_are_and_once(timed):
    with ctxflow.load_part("weights"):
        import parts_outer

        time.sleep(0.05)
    importlib.import_module("parts_inner")
    with pytest.raises(ValueError, match="parts"):
        importlib.import_module("parts_wrong")
    marks = len(timed._marks)
    import parts_outer  # noqa: F401

    importlib.import_module("parts_outer")
    assert len(timed._marks) == marks, "nothing is done for what is there"
    assert marks == 2 + 2 + 2 + 2, "the process, the part, one import with what it imports, and one that failed"
    _, parts = timed.end()
    assert parts[IMPORTS] >= 0.4
    assert parts["weights"] >= 0.05


@pytest.mark.usefixtures("modules")
def test_imports_on_a_thread_that_outlasts_the_build_leave_nothing_behind(timed):
    before = timed._import
    thread = threading.Thread(target=lambda: importlib.import_module("parts_outer"))
    thread.start()
    eventually(lambda: any(mark[2] == IMPORTS for mark in timed._marks))
    seconds, parts = timed.end()
    thread.join()
    assert _frozen_importlib._find_and_load == before
    assert 0 < parts[IMPORTS] <= seconds
    importlib.import_module("parts_inner")


@pytest.mark.usefixtures("modules")
def test_imports_on_many_threads_at_once_break_nothing(timed, tmp_path):
    names = [f"parts_many_{number}" for number in range(24)]
    for name in names:
        module(tmp_path, name, "import time; time.sleep(0.005); import parts_inner; value = parts_inner.__name__")
    importlib.invalidate_caches()
    found = []
    threads = [threading.Thread(target=lambda n=name: found.append(importlib.import_module(n).value)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, parts = timed.end()
    assert found == ["parts_inner"] * len(names)
    assert sum(parts.values()) == pytest.approx(seconds, abs=2e-5)
    assert parts[IMPORTS] >= 0.2


def test_outside_of_a_load_a_part_is_nothing_but_has_a_name():
    with ctxflow.load_part("weights"):
        pass
    for wrong in ("", "x" * 41, None):
        with pytest.raises(ValueError, match="1 to 40 characters"), ctxflow.load_part(wrong):
            pass


def test_code_that_names_a_part_in_a_loop_costs_a_bounded_list_and_names_beyond_some_are_the_rest(timed):
    for number in range(30_000):
        with ctxflow.load_part(f"part {number}"):
            pass
    seconds, parts = timed.end()
    assert len(parts) == 17
    assert len(timed._marks) <= 40_000
    assert sum(parts.values()) == pytest.approx(seconds, abs=5e-5)


@pytest.mark.parametrize("preload, started", [(None, "spawned"), ([], "forked"), (["wave", "colorsys"], "forked")])
def test_a_load_tells_the_parts_of_its_process_and_build(driven, preload, started):
    def build():
        import time

        import ctxflow

        with ctxflow.load_part("weights"):
            time.sleep(0.2)
        with ctxflow.load_part("index"):
            time.sleep(0.1)
        return 10

    driven.load(build, preload=preload)
    head, _ = driven.next("ready")
    parts = head["parts"]
    assert sum(parts.values()) == pytest.approx(head["seconds"], abs=2e-5)
    assert parts["weights"] >= 0.2
    assert parts["index"] >= 0.1
    assert parts[PROCESS] > (0.01 if started == "spawned" else 0.0)
    assert head["started"] == started
    driven.call(lambda value, items: [value for _ in items], [1])
    driven.next("finished")


def test_an_async_context_tells_the_parts_that_its_threads_and_tasks_enter(driven):
    async def build():
        import asyncio
        import time

        import ctxflow

        def read():
            with ctxflow.load_part("weights"):
                time.sleep(0.2)

        with ctxflow.load_part("warm-up"):
            await asyncio.sleep(0.1)
        await asyncio.to_thread(read)
        return 10

    driven.load(build)
    head, _ = next(found for found in iter(lambda: driven.next_of("ready"), None))
    assert head["parts"]["weights"] >= 0.2
    assert 0.1 <= head["parts"]["warm-up"] < head["seconds"] - 0.2
    assert sum(head["parts"].values()) == pytest.approx(head["seconds"], abs=2e-5)


class Reporting(Driven):
    def next_of(self, kind):
        """The next report of a kind; others before it are passed over."""
        while True:
            for head, body in self.reports():
                if head["is"] == kind:
                    return head, body


@pytest.fixture
def driven(tmp_path):
    (tmp_path / "logs").mkdir()
    driven = Reporting(tmp_path)
    yield driven
    driven.close()


def test_tasks_that_interleave_have_the_part_that_was_entered_last(timed):
    async def within(name, before, seconds):
        await asyncio.sleep(before)
        with ctxflow.load_part(name):
            await asyncio.sleep(seconds)

    async def both():
        await asyncio.gather(within("weights", 0.0, 0.3), within("compile", 0.1, 0.4))

    asyncio.run(both())
    seconds, parts = timed.end()
    assert parts["weights"] > 0
    assert parts["compile"] >= 0.4
    assert sum(parts.values()) == pytest.approx(seconds, abs=2e-5)
