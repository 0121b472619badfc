"""The one file that a worker runs, and how what it lacks comes when something imports it."""

import array
import ast
import fcntl
import marshal
import os
import pickle
import re
import signal
import subprocess
import sys
import termios
import types
import zipfile
from pathlib import Path

import cloudpickle
import pytest
from message_heads import frame
from vine_player import Player

import ctxflow
from ctxflow.files import digest_path
from ctxflow.host import worker_program as program
from ctxflow.host import worker_program as rest
from ctxflow.host.worker_program import build_program
from waiting import patience

_TELL_COMPILED = """\
import sys

def heard(event, arguments):
    if event == "compile" and ".pyz/" in str(arguments[1]):
        with open({log!r}, "a") as log:
            log.write(arguments[1] + "\\n")

sys.addaudithook(heard)
"""


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """What gives the files in zips that processes started from now on have compiled."""
    site, log = tmp_path / "site", tmp_path / "compiled"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_TELL_COMPILED.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    return lambda: log.read_text().split()


def test_it_holds_what_a_worker_needs(tmp_path):
    names = zipfile.ZipFile(build_program(str(tmp_path / "ctxflow.pyz"))).namelist()
    needed = {"__main__.py", "ctxflow/host/library.py", "ctxflow/context.py", "cloudpickle/cloudpickle.py"}
    assert needed <= set(names) and len(names) == len(set(names))
    assert not [name for name in names if "examples/" in name]
    assert os.listdir(tmp_path) == ["ctxflow.pyz"], "nothing else is left"


@pytest.fixture
def apart(tmp_path):
    """The program, and what it lacks."""
    rest_file = str(tmp_path / "rest.zip")
    return build_program(str(tmp_path / "ctxflow.pyz"), rest_file), rest_file


def test_the_two_files_hold_together_what_one_holds(apart, tmp_path):
    lacks, others = (set(zipfile.ZipFile(path).namelist()) for path in apart)
    whole = set(zipfile.ZipFile(build_program(str(tmp_path / "whole.pyz"))).namelist())
    assert lacks & others == set() and lacks | others == {*whole, rest.MEMBER}
    assert zipfile.ZipFile(apart[0]).read(rest.MEMBER).decode() == digest_path(apart[1])


def test_a_job_is_sent_what_workers_need_and_not_three_times_that(apart):
    program, others = (zipfile.ZipFile(path) for path in apart)
    sources = sum(len(program.read(name)) for name in program.namelist() if name.endswith(".py"))
    assert sources < 1_150_000 and os.path.getsize(apart[0]) < 900_000
    assert not [name for name in program.namelist() if re.match(r"ctxflow/(policies|simulator|executors|cli)/", name)]
    assert {"ctxflow/simulator/__init__.py", "ctxflow/apps.py"} <= set(others.namelist())


def test_no_program_of_a_host_imports_what_it_lacks(apart):
    """A host that waited for modules would wait for itself; and what is there begins with what is there."""
    program = zipfile.ZipFile(apart[0])
    held = set(program.namelist())
    for name in held:
        if not re.match(r"ctxflow/.*\.py$", name):
            continue
        tree = ast.parse(program.read(name))
        hidden = {each for node in ast.walk(tree) if _is_for_types(node) for each in ast.walk(node)}
        everywhere = name.startswith("ctxflow/host/") and name != "ctxflow/host/library.py"
        for node in ast.walk(tree) if everywhere else tree.body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ctxflow") and node not in hidden:
                place = node.module.replace(".", "/")
                assert {f"{place}.py", f"{place}/__init__.py"} & held, f"{name} imports {node.module}"


def _is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_it_is_the_same_whoever_makes_it(tmp_path):
    make = (
        "import sys; from ctxflow.host.worker_program import build_program; "
        "build_program(sys.argv[1], sys.argv[1] + '.rest')"
    )
    built = [build_program(str(tmp_path / "here.pyz"), str(tmp_path / "here.pyz.rest"))]
    for seed in ("1", "2"):
        built.append(str(tmp_path / f"{seed}.pyz"))
        subprocess.run([sys.executable, "-c", make, built[-1]], env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert len({Path(program).read_bytes() for program in built}) == 1
    assert len({Path(program + ".rest").read_bytes() for program in built}) == 1


def test_nothing_of_it_is_compiled_when_its_programs_start(tmp_path, compilations):
    program = build_program(str(tmp_path / "ctxflow.pyz"))
    for name in ("worker", "doorbell"):
        subprocess.run([sys.executable, program, name, "--help"], stdout=subprocess.DEVNULL, check=True)
    _serve_a_call(tmp_path, program)
    assert set(compilations()) == {f"{program}/__main__.py"}


def test_its_bytecode_is_whole_where_output_is_unbuffered(monkeypatch):
    """A write to a full pipe ends early when its process is stopped, and goes on."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program._COMPILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as compiler:
        compiler.stdin.write(marshal.dumps({"long.py": f"x = {'x' * 500_000!r}".encode()}))
        compiler.stdin.close()
        filled = array.array("i", [0])
        while filled[0] < 65536:  # As much as a pipe holds.
            fcntl.ioctl(compiler.stdout, termios.FIONREAD, filled)
        os.kill(compiler.pid, signal.SIGSTOP)
        os.kill(compiler.pid, signal.SIGCONT)
        [code] = marshal.loads(compiler.stdout.read()).values()
    assert "x" * 500_000 in marshal.loads(code).co_consts


@pytest.mark.parametrize("bent", ["the number of its format", "the name of its Python"])
def test_the_bytecode_of_another_python_is_left_alone(tmp_path, compilations, bent):
    program, whole = str(tmp_path / "ctxflow.pyz"), build_program(str(tmp_path / "whole.pyz"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(program, "w") as new:
        for name in old.namelist():
            data, place = old.read(name), name
            if name.endswith(".pyc") and bent == "the number of its format":
                data = b"\0\0\r\n" + data[4:]
            elif name.endswith(".pyc"):
                place = name.replace(sys.implementation.cache_tag, "cpython-99")
            new.writestr(place, data)
    _serve_a_call(tmp_path, program)
    assert {f"{program}/ctxflow/host/{name}.py" for name in ("vine_library", "library")} < set(compilations())


def _serve_a_call(directory, program):
    player = Player(directory, [sys.executable, program, "vine_library"])
    try:
        player.message()
        player.ask("hello")
        _, reports = player.answer(player.send(player.load(), *player.call(lambda _, items: items, [1])))
        assert pickle.loads(reports[-1][1]) == [1]
    finally:
        player.close()


def test_a_traceback_shows_where_in_it(tmp_path):
    program = build_program(str(tmp_path / "ctxflow.pyz"))
    shown = []
    for start, path in (([program, "library"], program), (["-m", "ctxflow.host.library"], "")):
        command, environment = [sys.executable, *start, "no", "number"], {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        shown.append(re.findall(r'File "(.*)/(ctxflow/host/library.py)", (line \d+), in main', run.stderr))
    ((place, *packed),), ((_, *unpacked),) = shown
    assert place == program and packed == unpacked


def test_made_of_a_ctxflow_that_is_only_found_on_the_path_it_names_no_distribution(tmp_path):
    """One without a name would make each `entry_points()` in a library process raise, hence many an import."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for package in (ctxflow, cloudpickle):
        (packages / package.__name__).symlink_to(os.path.dirname(package.__file__))
    make = "import sys; from ctxflow.host.worker_program import build_program; build_program(sys.argv[1])"
    look = "from importlib.metadata import entry_points; print(len(entry_points()))"
    program = str(tmp_path / "ctxflow.pyz")
    for path, code in ((str(packages), make), (program, look)):
        command, environment = [sys.executable, "-S", "-c", code, program], {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience())
        assert run.returncode == 0, run.stderr
    assert run.stdout == "0\n"


def test_a_library_process_runs_from_it_and_users_find_their_own_path(tmp_path):
    program = build_program(str(tmp_path / "ctxflow.pyz"))
    command = [sys.executable, program, "vine_library"]
    environment = {"PYTHONPATH": "/of/the/user", "CTXFLOW_PYTHON": os.path.realpath(sys.executable)}
    player = Player(tmp_path, ["env", "-u", "CTXFLOW_ORIGINAL_PYTHONPATH", *command], environment)
    try:
        player.message()
        hello, _ = player.ask("hello")
        assert hello["python"] == sys.version.split()[0]

        def look(_, items):
            import ctxflow

            return [(ctxflow.__file__, os.environ["PYTHONPATH"])]

        _, reports = player.answer(player.send(player.load(), *player.call(look, [1])))
        assert pickle.loads(reports[-1][1]) == [(f"{program}/ctxflow/__init__.py", "/of/the/user")]

        def fail(_, items):
            raise ValueError("no")

        _, ((raised, _),) = player.answer(player.send(*player.call(fail, [1])))
        assert "library.py" not in raised["failure"]["traceback"], "own frames are left out in a zip too"
    finally:
        player.close()


def test_a_python_that_does_not_start_is_told(tmp_path):
    player = Player(tmp_path, environment={"CTXFLOW_PYTHON": "/no/such/python"})
    try:
        player.message()
        hello, _ = player.ask("hello")
        assert hello["python"] is None
        assert "the Python that CTXFLOW_PYTHON names does not start" in hello["problem"]
        status, ((failed, _),) = player.answer(player.send(player.load()))
        assert (status, failed["is"], failed["key"]) == (0, "failed", "k")
    finally:
        player.close()


def test_it_says_how_it_is_used(tmp_path):
    program = build_program(str(tmp_path / "ctxflow.pyz"))
    done = subprocess.run(
        [sys.executable, program, "nothing"], capture_output=True, check=False, text=True, timeout=patience()
    )
    assert done.returncode == 1
    assert done.stderr == f"usage: python {program} {{worker|vine_library|doorbell}} ...\n"


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
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience())


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
