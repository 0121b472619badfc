"""What of ctxflow few workers need comes when something imports it."""

import os
import pickle
import subprocess
import sys
import types

import pytest
from message_heads import frame
from vine_player import Player

from ctxflow.files import digest_path
from ctxflow.host import worker_program as rest
from ctxflow.host.worker_program import build_program


class Worker:
    """A host that runs the program which lacks something, and what it lacks."""

    def __init__(self, directory):
        self.file = str(directory / rest.NAME)
        self.program = build_program(str(directory / "ctxflow.pyz"), self.file)
        python = {"CTXFLOW_PYTHON": os.path.realpath(sys.executable)}
        self.player = Player(directory, [sys.executable, self.program, "vine_library"], python)
        self.player.message()
        self.player.ask("hello")
        self.player.answer(self.player.send(self.player.load()))
        self._listening = None

    def start(self, function):
        """Start a call, and give its number."""
        return self.player.send(*self.player.call(lambda _, items, function=function: [function()], [1]))

    def asked(self):
        """Wait until the host asks for what the program lacks."""
        listening, self._listening = self._listening or self.player.send(frame({"do": "listen"})), None
        _, reports = self.player.answer(listening)
        return [head["is"] for head, _ in reports]

    def bring(self):
        """Do what the driver does then."""
        digest = digest_path(self.file)
        head = {"do": "fetch", "digest": digest, "content": digest, "source": self.file, "kind": "file", "input": "in"}
        with open(self.file, "rb") as file:
            _, ((report, _),) = self.player.answer(self.player.send(frame(head), files={"in": file.read()}))
        assert report["is"] == "fetched"

    def result(self, task):
        """What a call gave."""
        _, reports = self.player.answer(task)
        head, body = reports[-1]
        assert head["is"] == "finished", head
        return pickle.loads(body)[0]

    def nothing_asked(self):
        """Whether the host has not asked: a listen is not answered while calls are."""
        self._listening = self._listening or self.player.send(frame({"do": "listen"}))
        self.result(self.start(lambda: 1))
        return not self.player.answered(self._listening)


@pytest.fixture
def worker(tmp_path):
    made = Worker(tmp_path)
    yield made
    made.player.close()


def import_lazily():
    from ctxflow.observe.progress import __file__ as place

    return place


def import_by_name():
    import importlib

    return importlib.import_module("ctxflow.observe.progress").__file__


def import_in_another_process():
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(eval, ("__import__('ctxflow.observe.progress').observe.progress.__file__",))


def import_in_a_fork():
    read, write = os.pipe()
    if not os.fork():
        from ctxflow.observe.progress import __file__ as place

        os.write(write, place.encode())
        os._exit(0)
    os.wait()
    return os.read(read, 4096).decode()


def import_through_a_public_name():
    import ctxflow

    return sys.modules[ctxflow.Alternative.__module__].__file__


def import_through_another_module():
    """As an installed package that ctxflow knows nothing of would."""
    module = types.ModuleType("stranger")
    exec("from ctxflow.observe.progress import __file__ as place", vars(module))
    return module.place


@pytest.mark.parametrize(
    "function",
    [
        import_lazily, import_by_name, import_in_another_process, import_in_a_fork, import_through_a_public_name,
        import_through_another_module,
    ],
)  # fmt: skip
def test_a_call_waits_for_what_it_imports(worker, function):
    call = worker.start(function)
    assert worker.asked() == ["lacks"]
    assert not worker.player.answered(call)
    worker.bring()
    assert f"/{rest.NAME}/ctxflow/" in worker.result(call)


def test_a_reference_in_a_pickle_is_found(worker):
    from ctxflow.observe.progress import Throughput

    call = worker.start(lambda kind=Throughput: kind.__module__)
    assert worker.asked() == ["lacks"]
    worker.bring()
    assert worker.result(call) == "ctxflow.observe.progress"


def test_it_is_asked_for_once(worker):
    call = worker.start(import_lazily)
    assert worker.asked() == ["lacks"]
    worker.bring()
    places = {
        worker.result(call),
        worker.result(worker.start(import_lazily)),
        worker.result(worker.start(import_by_name)),
    }
    assert len(places) == 1
    assert worker.nothing_asked()


def test_nothing_is_asked_for_models_and_what_else_workers_have(worker):
    names = ["ctxflow.models.answering", "ctxflow.models.contexts", "ctxflow.pickling", "ctxflow.on_worker"]

    def look():
        import importlib

        import ctxflow

        found = [importlib.import_module(name).__name__ for name in names]
        return found, ctxflow.load_variable_from_context.__name__

    assert worker.result(worker.start(look)) == (names, "load_variable_from_context")
    assert worker.nothing_asked()


def test_a_module_that_there_is_none_of_is_missing_as_anywhere(worker):
    def look():
        try:
            __import__("ctxflow.typo")
        except ModuleNotFoundError as error:
            return str(error)

    call = worker.start(look)
    worker.asked()
    worker.bring()
    assert worker.result(call) == "No module named 'ctxflow.typo'"


def run_alone(directory, code, **variables):
    """What a Python says that finds ctxflow in a program which lacks something."""
    program = build_program(str(directory / "ctxflow.pyz"), str(directory / rest.NAME))
    environment = {**os.environ, "PYTHONPATH": program, **variables}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_where_the_worker_is_gone_an_import_says_so(tmp_path):
    done = run_alone(tmp_path, "import ctxflow.observe.progress", CTXFLOW_REST=str(tmp_path / "gone"))
    assert done.stderr.endswith(
        "ImportError: ctxflow.observe cannot be had: the worker is ending (No such file or directory)\n"
    )


def test_what_never_comes_is_told_in_a_sentence(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    os.mkfifo(cache / rest._BELL)
    bell = os.open(cache / rest._BELL, os.O_RDWR | os.O_NONBLOCK)
    try:
        code = "from ctxflow.host import worker_program as p; p._LIMIT_SECONDS = 0.3; import ctxflow.observe.progress"
        done = run_alone(tmp_path, code, CTXFLOW_REST=str(cache))
        assert "ctxflow.observe did not come from the driver within 0 s" in done.stderr
        assert os.read(bell, 10) == b".", "asked for once in ten seconds"
    finally:
        os.close(bell)


def test_an_installed_ctxflow_asks_nobody(tmp_path):
    code = "import sys, ctxflow; print([each for each in sys.meta_path if 'rest' in getattr(each, '__module__', '')])"
    environment = {**os.environ, "CTXFLOW_REST": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
