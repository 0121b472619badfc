"""Programs of tests as forks of one process that has imported all they import: such a start costs no second of a core.

`Popen` and `run` take the command lines of Python programs and give what `subprocess` gives. Each program is a process
of its own, with its own variables (also in /proc), streams and signal handlers; it is `__main__`, and ends as an
interpreter does. What it cannot show: what an interpreter does when it starts, such as the order and cost of imports,
its options (also as variables), another hash seed, or another encoding of the streams. Tests of these, and one test of
each kind of end, run an interpreter: `subprocess` itself. Where a system lacks what is needed here, all do.

There is one server for each interpreter that command lines name: `preload` says what another than this one imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

HERE = str(Path(__file__).parent)
ROOM = 1 << 15
"""How many bytes more than the server's own variables those of a program may take."""

# --- in the test's process

VARIABLES = dict(os.environ)
"""Those before any test: a server outlives the test that starts it, and has none that this test sets."""


class _Popen:
    """A program, as `subprocess.Popen` has it."""

    def __init__(
        self, args, *, stdin=None, stdout=None, stderr=None, text=False, cwd=None, env=None, start_new_session=False
    ):
        self.args, self.returncode, self._said = args, None, {}
        with contextlib.ExitStack() as given:
            streams, theirs = [], []
            for number, asked in enumerate((stdin, stdout, stderr)):
                ours, their = _stream(number, asked, theirs, given)
                mode = ("r" if number else "w") + ("" if text else "b")
                streams.append(None if ours is None else os.fdopen(ours, mode, encoding="utf-8" if text else None))
                theirs.append(their)
            self.stdin, self.stdout, self.stderr = streams
            self._end, end = socket.socketpair()
            request = {
                "words": [os.fspath(word) for word in args[1:]],
                "cwd": os.path.abspath(cwd or "."),
                "environment": dict(os.environ if env is None else env),
                "session": start_new_session,
            }
            with end:
                self.pid = _server(os.fspath(args[0])).start(request, [*theirs, end.fileno()])

    def poll(self):
        return self._await(0)

    def wait(self, timeout=None):
        if self._await(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _await(self, seconds):
        if self.returncode is None:
            self._end.settimeout(seconds)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                self.returncode = os.waitstatus_to_exitcode(int(self._end.recv(16)))
                self._end.close()
        return self.returncode

    def communicate(self, input=None, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout

        def read(stream):
            self._said[stream] = stream.read()

        outputs = [stream for stream in (self.stdout, self.stderr) if stream and stream not in self._said]
        threads = [threading.Thread(target=read, args=[stream], daemon=True) for stream in outputs]
        for thread in threads:
            thread.start()
        if self.stdin:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)
        for thread in threads:
            thread.join(deadline and max(0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(deadline and max(0, deadline - time.monotonic()))
        self.__exit__()
        return self._said.get(self.stdout), self._said.get(self.stderr)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


def _stream(number, asked, theirs, given):
    """The descriptors of this process's end, if any, and of the program's end, which is to be closed here."""
    if asked is None:
        return None, number
    if asked == subprocess.STDOUT:
        return None, theirs[1]
    if asked not in (subprocess.PIPE, subprocess.DEVNULL):
        return None, asked if isinstance(asked, int) else asked.fileno()
    ours = None
    if asked == subprocess.DEVNULL:
        their = os.open(os.devnull, os.O_RDWR)
    else:
        ours, their = os.pipe() if number else reversed(os.pipe())
    given.callback(os.close, their)
    return ours, their


def _run(args, *, input=None, capture_output=False, check=False, timeout=None, **more):
    """A program to its end, as `subprocess.run` has it."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more["stdout"] = more["stderr"] = subprocess.PIPE
    with _Popen(args, **more) as process:
        try:
            out, err = process.communicate(input, timeout)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Server:
    def __init__(self, python):
        self._lock = threading.Lock()
        self._control, far = socket.socketpair()
        modules, variables = _preloaded.get(python, (PRELOADED, {}))
        path = os.pathsep.join(filter(None, [HERE, variables.get("PYTHONPATH")]))
        with far:
            self._process = subprocess.Popen(
                [python, "-c", f"import forked; exec(forked.serve({far.fileno()}, {tuple(modules)!r}))"],
                env={**VARIABLES, **variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ROOM": "x" * ROOM},
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
            )
        _started.append(self)
        atexit.register(self._stop)

    def start(self, request, descriptors):
        """Start a program and give its process id."""
        data = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._control, [len(data).to_bytes(4, "big")], descriptors)
            self._control.sendall(data)
            return int.from_bytes(_read(self._control, 4), "big")

    def _stop(self):
        self._control.close()
        self._process.wait()


@functools.cache
def _server(python):
    return _Server(python)


_preloaded, _started = {}, []


def servers():
    """Return the processes from which programs are forked."""
    return {server._process.pid for server in _started}


def preload(python, modules, variables):
    """Have programs of an interpreter forked from a process with these modules and variables.

    :param variables: among them PYTHONPATH, if any of the modules is not installed there.
    """
    _preloaded[os.fspath(python)] = (modules, variables)


def _read(stream, size):
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise ConnectionError("the server of forked programs is gone")
        data += more
    return data


def _possible():
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


Popen, run = (_Popen, _run) if _possible() else (subprocess.Popen, subprocess.run)


# --- in the server, and in its forks

PRELOADED = (
    "parsl",
    "parsl.monitoring.radios.udp_router",
    "tblib.pickling_support",
    "prometheus_client.exposition",
    "typer._adapters",
    "ctxflow.batch.driver",
    "ctxflow.batch.job_files",
    "ctxflow.cli.batch_command",
    "ctxflow.batch.detached",
    "ctxflow.batch.job_status",
    "ctxflow.factory.tier_providers",
    "ctxflow.factory.service",
    "ctxflow.observe.summary",
    "rich.live",
    "rich.progress",
    "ctxflow.cli.factory_commands",
    "ctxflow.cli.run_commands",
    "ctxflow.decorators",
    "ctxflow.executors.executor",
    "ctxflow.mapping",
    "ctxflow.policies.agh.placement",
    "ctxflow.policies.flextopo.preemption",
    "ctxflow.policies.turboserve.scaling",
    "ctxflow.policies.turboserve.session_placement",
    "ctxflow.sessions",
)
"""What programs import, also while they run; what is missing here costs each of them its time."""


def serve(descriptor, modules):
    """Fork at each request; returns only in forks, with the program's code, to be run at the top of `__main__`."""
    for name in modules:
        with contextlib.suppress(ImportError):  # Of an optional distribution, or of another version of it.
            importlib.import_module(name)
    if "setproctitle" in sys.modules:
        sys.modules["setproctitle"].getproctitle()  # It finds its place now, before forks move their variables.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A person's Ctrl-C is for pytest.
    control, running = socket.socket(fileno=descriptor), {}
    assert len(os.listdir("/proc/self/task")) == 1, "forks have one thread alone"
    gc.collect()
    gc.freeze()  # Four fifths of a program's end were to look for garbage among what is imported.
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready is not control:
                pid, end = running.pop(ready)
                os.close(ready)
                with end, contextlib.suppress(OSError):  # Perhaps nobody waits for it.
                    end.sendall(str(os.waitpid(pid, 0)[1]).encode())
                continue
            head, descriptors, *_ = socket.recv_fds(control, 4, 4)
            if not head:
                os._exit(0)
            request = json.loads(_read(control, int.from_bytes(head, "big")))
            pid = os.fork()
            if not pid:
                return _become(request, descriptors, control, [end for _, end in running.values()])
            *streams, end = descriptors
            for each in streams:
                os.close(each)
            running[os.pidfd_open(pid)] = (pid, socket.socket(fileno=end))


def _become(request, descriptors, control, others):
    """Have nothing of the server left, and return the code of the program."""
    try:
        if request["session"]:
            os.setsid()
        os.chdir(request["cwd"])
        _renew_streams(descriptors)
        _renew_environment(request["environment"])
        tempfile.tempdir = None
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        del sys.modules[__name__]
        signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        control.sendall(os.getpid().to_bytes(4, "big"))
        for each in (control, *others):
            each.detach()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    return _code(*request["words"])


def _renew_streams(descriptors):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[number], number)
        old = getattr(sys, name)
        new = os.fdopen(number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False)
        new.reconfigure(line_buffering=number == 2 or new.isatty())
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _renew_environment(variables):
    """Set the variables and what Python made of them as it started, and have /proc show them."""
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    base = [path for path in sys.path if path not in ("", HERE)]
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *base]
    importlib.invalidate_caches()
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    assert len(shown) <= end - start, "the variables are too long"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _code(word, *words):
    """Make `__main__` that of a command line, and return its code."""
    main = vars(sys.modules["__main__"])
    clean = vars(types.ModuleType("__main__"))
    main.clear()
    main.update(clean, __builtins__=importlib.import_module("builtins"))
    if word == "-c":
        sys.argv, text, place = [word, *words[1:]], words[0], "<string>"
        sys.path.insert(0, "")
    elif word == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(words[0])
        if spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{words[0]}.__main__")
        place = spec.origin
        sys.argv, text = [place, *words[1:]], spec.loader.get_source(spec.name)
        main.update(__spec__=spec, __package__=spec.parent, __file__=place)
    else:
        place = os.path.abspath(word)
        sys.argv, text = [word, *words], Path(place).read_bytes()
        sys.path.insert(0, os.path.dirname(place))
        main.update(__file__=place)
    return compile(text, place, "exec", dont_inherit=True)
