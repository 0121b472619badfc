"""The wrapper around a vine_worker, which a program of the tests stands for."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxflow.host.linux import descendants, kill_tree, package_root, process_state, python_path
from ctxflow.host.vine_protocol import key_of
from ctxflow.host.worker_program import build_program
from ctxflow.ownership import lives
from waiting import eventually, output, patience

PLAYED = Path(__file__).parent / "played_worker.py"


def alive(pid):
    return lives(pid, None)


class Job:
    """A wrapper that runs, and what its vine_worker noted."""

    def __init__(self, tmp_path, plan, *words, program=None, **environment):
        self.scratch = tmp_path / "scratch"
        self.scratch.mkdir()
        self.notes_file = tmp_path / "notes"
        played = tmp_path / "vine_worker"
        paths = f"{PLAYED.parent}:{package_root()}"
        played.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} {PLAYED} "$@"\n')
        played.chmod(0o755)
        variables = {**os.environ, **python_path(), **environment, "_CONDOR_SCRATCH_DIR": str(self.scratch)}
        variables["PLAN"] = json.dumps({**plan, "notes": str(self.notes_file)})
        command = [sys.executable, *([program] if program else ["-m", "ctxflow.host.worker"])]
        self.process = subprocess.Popen(
            [*command, *(["worker"] if program else []), "submit:9123", "--vine-worker", str(played), *words],
            env=variables,
            stderr=subprocess.PIPE,
        )

    def notes(self):
        return json.loads(eventually(lambda: self.notes_file.exists() and self.notes_file.read_text()))

    def ended(self):
        """The exit status; nothing may be left."""
        output(self.process)
        notes = self.notes()
        assert not alive(notes["pid"])
        assert not alive(notes["left"])
        assert list(self.scratch.iterdir()) == []
        return self.process.returncode


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(plan, *words, **options):
        jobs.append(Job(tmp_path, plan, *words, **options))
        return jobs[-1]

    yield start
    for each in jobs:
        kill_tree(each.process.pid)
        each.process.communicate()


def test_the_vine_worker_gets_a_name_a_directory_and_what_was_asked(job, tmp_path):
    given = ["--name-prefix", "host_1#12.0", "--cores", "4", "--memory", "2000", "--gpus", "1", "--disk", "9", "--ssl"]
    (tmp_path / "secret").write_text("open sesame")
    given += ["--remove-password", "--password", str(tmp_path / "secret")]
    given += ["--cache", "/scratch/c", "--cache-gb", "9.5"]
    work = job({"do": "exit", "status": 7}, *given, "--idle-timeout", "60", "--debug-file", "d")
    assert work.ended() == 7
    notes = work.notes()
    words, environment = notes["arguments"], notes["environment"]
    name = words[words.index("--feature") + 1]
    assert name.startswith("host-1-12.0.")
    assert words[words.index("--from-factory") + 1] == name == environment["CTXFLOW_WORKER_NAME"]
    assert words[-1] == "submit:9123"
    for expected in ("--single-shot", "--parent-death", "--ssl"):
        assert expected in words
    for option, value in {
        "--cores": "4",
        "--memory": "2000",
        "--gpus": "1",
        "--disk": "9",
    }.items():
        assert words[words.index(option) + 1] == value
    assert words[words.index("--workspace") + 1].startswith(environment["CTXFLOW_WORKER_DIRECTORY"])
    assert environment["CTXFLOW_WORKER_DIRECTORY"].startswith(str(work.scratch))
    assert (environment["CTXFLOW_CACHE"], environment["CTXFLOW_CACHE_GB"]) == ("/scratch/c", "9.5")
    assert not (tmp_path / "secret").exists()
    assert bytes.fromhex(environment["CTXFLOW_KEY"]) == key_of(b"open sesame")


def test_the_password_is_in_no_file_and_soon_forgotten(job, tmp_path):
    (tmp_path / "secret").write_text("open sesame")
    work = job({"do": "sleep"}, "--remove-password", "--password", str(tmp_path / "secret"))
    notes = work.notes()
    assert notes["password"] == "open sesame"
    there = [path for path in work.scratch.rglob("*") if path.is_file()]
    assert there and not [path for path in there if b"open sesame" in path.read_bytes()]
    given = notes["arguments"][notes["arguments"].index("--password") + 1]
    again = Path(given.replace("self", str(notes["pid"])))
    eventually(lambda: again.read_text() == "")


def test_a_python_whose_path_has_a_space(job, tmp_path):
    (tmp_path / "my tools").mkdir()
    python = tmp_path / "my tools" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.executable = {str(python)!r}\n"
        "from ctxflow.host.worker import main; sys.exit(main(sys.argv[2:]))\n"
    )
    work = job({"do": "serve"}, program=str(program))
    eventually((tmp_path / "notes.listens").exists)
    work.process.send_signal(signal.SIGTERM)
    assert work.ended() == 0


@pytest.mark.parametrize("packed", [False, True], ids=["package", "one file"])
def test_a_notice_reaches_the_manager_and_a_release_ends_the_worker(job, tmp_path, packed):
    program = build_program(str(tmp_path / "ctxflow.pyz")) if packed else None
    work = job({"do": "serve"}, program=program, CUDA_VISIBLE_DEVICES="GPU-7")
    eventually((tmp_path / "notes.listens").exists)
    work.process.send_signal(signal.SIGTERM)
    assert work.ended() == 0
    assert pickle.loads((tmp_path / "notes.devices").read_bytes()) == ["GPU-7"]
    assert work.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_host_a_notice_ends_it_at_once(job, number):
    work = job({"do": "sleep"})
    work.notes()
    work.process.send_signal(number)
    assert work.ended() == 128 + number


def test_a_second_notice_ends_it_at_once(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    host = int(next(work.scratch.iterdir()).joinpath("host.pid").read_text())
    os.kill(host, signal.SIGSTOP)
    eventually(lambda: process_state(host) == "T")
    work.process.send_signal(signal.SIGTERM)
    eventually(lambda: "ShdPnd:\t0000000000004000" in Path(f"/proc/{host}/status").read_text())  # SIGTERM waits for it.
    work.process.send_signal(signal.SIGTERM)
    assert work.ended() == 128 + signal.SIGTERM


def test_a_worker_whose_host_was_killed_says_so(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    host = int(next(work.scratch.iterdir()).joinpath("host.pid").read_text())
    for pid in (work.notes()["pid"], work.process.pid):  # So that neither notices by itself.
        os.kill(pid, signal.SIGSTOP)
    os.kill(host, signal.SIGKILL)
    eventually(lambda: not alive(host))
    work.process.send_signal(signal.SIGUSR1)  # As the next one does.
    work.process.send_signal(signal.SIGCONT)
    _, said = output(work.process)
    assert (work.process.returncode, b"context host was killed" in said) == (1, True)


def test_a_worker_that_was_suspended_goes_on(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    work.process.send_signal(signal.SIGSTOP)
    eventually(lambda: process_state(work.process.pid) == "T")
    resumed_at = time.monotonic() + 1.0  # Longer than it waits for a signal at once.
    eventually(lambda: time.monotonic() > resumed_at)
    work.process.send_signal(signal.SIGCONT)
    eventually(lambda: process_state(work.process.pid) == "S")
    work.process.send_signal(signal.SIGTERM)
    assert work.ended() == 0


def test_a_worker_whose_host_has_ended_does_not_stay(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    os.kill(work.notes()["pid"], signal.SIGSTOP)  # It lingers, as one that lost its manager.
    os.kill(int(next(work.scratch.iterdir()).joinpath("host.pid").read_text()), signal.SIGKILL)
    assert work.ended() == 128 + signal.SIGHUP


def test_nothing_is_left_of_a_vine_worker_that_is_killed(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    pids = descendants(work.process.pid)
    os.kill(work.notes()["pid"], signal.SIGKILL)
    assert work.ended() == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_if_it_is_killed_itself_its_worker_and_all_library_processes_end(job, tmp_path):
    work = job({"do": "serve"})
    eventually((tmp_path / "notes.listens").exists)
    pids = [pid for pid in descendants(work.process.pid) if pid != work.notes()["left"]]
    assert len(pids) == 4, "the guard, the vine_worker, its transfer server and its library"
    work.process.kill()
    eventually(lambda: not any(map(alive, pids)))
    assert list(work.scratch.iterdir()) == []
    os.kill(work.notes()["left"], signal.SIGKILL)


def test_it_ends_with_the_process_that_started_it_where_that_is_asked_for(tmp_path):
    """As the doorbell's does, whose vine_worker would wait for five seconds."""
    program = "import os, sys; sys.path[:0] = sys.argv[1:3]; import pathlib; from test_worker import Job\n"
    program += "Job(pathlib.Path(sys.argv[3]), {'do': 'serve'}, '--parent', str(os.getpid())).process.wait()"
    command = [sys.executable, "-c", program, *map(str, Path(__file__).parents[:2]), str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **python_path()}) as parent:
        eventually((tmp_path / "notes.listens").exists)
        pids = descendants(parent.pid)
        notes = json.loads((tmp_path / "notes").read_text())
        parent.kill()
    eventually(lambda: not any(alive(pid) for pid in pids if pid != notes["left"]))
    eventually(lambda: list((tmp_path / "scratch").iterdir()) == [])
    os.kill(notes["left"], signal.SIGKILL)


def test_a_missing_vine_worker_is_named(tmp_path):
    command = [sys.executable, "-m", "ctxflow.host.worker", "submit:9123", "--vine-worker", "no-such-program"]
    done = subprocess.run(
        command, env={**os.environ, **python_path()}, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert done.returncode == 127
    assert done.stderr.startswith("the program no-such-program is not on this machine: install coop-computing-tools")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "why"), [("file/below", "Not a directory"), ("a b", "TaskVine takes no path with spaces")]
)
def test_a_directory_that_cannot_be_used_is_named(job, tmp_path, place, why):
    (tmp_path / "file").write_text("")
    work = job({"do": "exit", "status": 7}, "--workdir", str(tmp_path / place))
    _, said = output(work.process)
    assert work.process.returncode == 1
    assert "the worker gets no directory: " in said.decode() and why in said.decode()
