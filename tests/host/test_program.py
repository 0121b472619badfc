"""The one file that a worker runs."""

import os
import pickle
import subprocess
import sys
import zipfile

import cloudpickle
from vine_player import Player

import ctxflow
from ctxflow.host.program import build_program


def test_it_holds_what_a_worker_needs_and_is_the_same_each_time(tmp_path):
    first, second = (build_program(str(tmp_path / name)) for name in ("a.pyz", "b.pyz"))
    with open(first, "rb") as a, open(second, "rb") as b:
        assert a.read() == b.read()
    names = set(zipfile.ZipFile(first).namelist())
    assert {"__main__.py", "ctxflow/host/library.py", "ctxflow/context.py", "cloudpickle/cloudpickle.py"} <= names
    assert not [name for name in names if "examples/" in name or "__pycache__" in name]
    assert sorted(os.listdir(tmp_path)) == ["a.pyz", "b.pyz"], "nothing else is left"


def test_made_of_a_ctxflow_that_is_only_found_on_the_path_it_names_no_distribution(tmp_path):
    """One without a name would make each `entry_points()` in a library process raise, hence many an import."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for package in (ctxflow, cloudpickle):
        (packages / package.__name__).symlink_to(os.path.dirname(package.__file__))
    make = "import sys; from ctxflow.host.program import build_program; build_program(sys.argv[1])"
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
