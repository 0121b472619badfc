"""A forked program does, and finds around it, what an executed one does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked

FOUND = """
import atexit, os, signal, sys, tempfile, threading
import beside
print(__name__, __package__, globals().get("__file__"), sys.argv, sys.path, vars(sys.modules["__main__"]) is globals())
print(os.getcwd(), tempfile.gettempdir(), os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd")))
print(sorted(os.environ.items()), open("/proc/self/environ", "rb").read().strip(b"\\0"))
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print([(stream.encoding, stream.errors, stream.line_buffering) for stream in (sys.stdin, sys.stdout, sys.stderr)])
print(sys.stdin.read(), len(threading.enumerate()), "forked" in sys.modules)
atexit.register(print, "at its end")
{end}
"""
ENDS = {
    "": 0,
    "print(end='no newline')": 0,
    "sys.exit('no')": 1,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "print(flush=True); os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


@pytest.mark.parametrize(
    ("words", "end"),
    [*((["program.py", "a", "b"], end) for end in ENDS), (["-c", "PROGRAM", "a"], ""), (["-m", "program", "a"], "")],
)
def test_it_is_as_if_it_were_executed(tmp_path, words, end):
    program = FOUND.format(end=end)
    words = [program if word == "PROGRAM" else word for word in words]
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(program)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"TMPDIR": str(tmp_path), "PYTHONPATH": "/nowhere", "MARK": "ä"}
    more = {"cwd": tmp_path, "env": variables, "input": "said", "text": True, "capture_output": True, "timeout": 60}
    executed, fork = (how.run([sys.executable, *words], start_new_session=True, **more) for how in (subprocess, forked))
    assert fork.stdout.splitlines() == executed.stdout.splitlines() and fork.stdout
    assert fork.returncode == executed.returncode == ENDS[end]
    # Above its own lines, a fork's traceback has one of the server's.
    assert fork.stderr.splitlines()[-1:] == executed.stderr.splitlines()[-1:]


def test_the_server_has_no_variable_of_the_test_that_starts_it(tmp_path, monkeypatch):
    python = tmp_path / "python"  # Another name, another server.
    python.symlink_to(sys.executable)
    monkeypatch.setenv("MARK", "of one test")
    before = forked.servers()
    ran = forked.run([str(python), "-c", "import os; print(os.environ['MARK'])"], capture_output=True, text=True)
    [server] = forked.servers() - before
    assert ran.stdout == "of one test\n"
    assert b"MARK=of one test" not in Path(f"/proc/{server}/environ").read_bytes().split(b"\0")


def test_its_randomness_is_its_own():
    words = [sys.executable, "-c", "import random, numpy; print(random.random(), numpy.random.random())"]
    said = [forked.run(words, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert not set(said[0].split()) & set(said[1].split())


def test_it_is_waited_for():
    with forked.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as program:
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            forked.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.01, capture_output=True)
    assert program.returncode == 0
    program.kill()
    with pytest.raises(subprocess.CalledProcessError):
        forked.run([sys.executable, "-c", "1 / 0"], check=True, capture_output=True)
