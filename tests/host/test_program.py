"""The one file that a worker runs."""

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
import zipfile
from pathlib import Path

import cloudpickle
import pytest
from vine_player import Player

import ctxflow
from ctxflow.files import digest_path
from ctxflow.host import worker_program as program
from ctxflow.host import worker_program as rest
from ctxflow.host.worker_program import build_program

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
    assert sources < 800_000 and os.path.getsize(apart[0]) < 520_000
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
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
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
    done = subprocess.run([sys.executable, program, "nothing"], capture_output=True, check=False, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"usage: python {program} {{worker|vine_library|doorbell}} ...\n"
