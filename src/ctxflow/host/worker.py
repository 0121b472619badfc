"""The wrapper around a vine_worker: names it, passes an eviction notice on, and leaves nothing behind.

`python ctxflow.pyz worker HOST:PORT --password FILE` is the command of a pilot job. The vine_worker starts the context
host (vine_library.py) when its manager says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from ctxflow.host.linux import (
    adopt_orphans,
    die_with_parent,
    kill_children,
    kill_session,
    next_signal,
    package_root,
)
from ctxflow.host.local_files import Scratch, sweep
from ctxflow.host.vine_protocol import host_died, key_of, noted_host
from ctxflow.host.worker_program import build_program

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_END_SECONDS = 0.8  # How long a vine_worker may take to end by itself.
_CONNECT_SECONDS = 20  # A job that begins after its run has ended must not stay for TaskVine's quarter of an hour.
_KILL_SECONDS = 5.0  # A process that hangs in the kernel cannot be waited for for ever.
_HOST_SECONDS, _DEAD_LOOKS = 0.5, 4  # How often, and how often in a row, the host must be gone for the worker to end.
_LOOK_SECONDS = 0.005  # How often it is looked whether the vine_worker has read the password.
_NOT_FOUND = 127
HOST = 'exec "$CTXFLOW_HOST_PYTHON" "$CTXFLOW_HOST"'
"""How a shell of the vine_worker's starts this ctxflow; the name of one of its programs comes next."""


def main(argv: Sequence[str]) -> int:
    """Run a vine_worker until it ends, it is released, or the batch system takes the worker."""
    options = _parser().parse_args(argv)
    program = shutil.which(options.vine_worker)
    if program is None:
        sys.stderr.write(
            f"the program {options.vine_worker} is not on this machine: install coop-computing-tools (Debian) or "
            "ndcctools (conda-forge), or name it with --vine-worker\n"
        )
        return _NOT_FOUND
    signal.pthread_sigmask(signal.SIG_BLOCK, [*_SIGNALS, signal.SIGALRM])
    if options.parent:
        die_with_parent(options.parent)
    adopt_orphans()
    try:
        scratch = _make_scratch(options.workdir)
    except OSError as error:
        sys.stderr.write(f"the worker gets no directory: {error}; make room there, or name another with --workdir\n")
        return 1
    try:
        return Wrapper(program, options, scratch.path).run()
    except OSError as error:
        sys.stderr.write(f"the worker cannot start: {error}\n")
        return 1
    finally:
        _end_descendants()
        scratch.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "worker", description="A worker of a run: joins its manager, and stays until the end."
    )
    parser.add_argument("manager", metavar="HOST:PORT", help="where the manager listens")
    parser.add_argument("--password", metavar="FILE", help="the file with the run's password")
    parser.add_argument("--remove-password", action="store_true", help="remove that file once it is read")
    parser.add_argument("--transfer-port", metavar="PORT", help="where it serves its peers: a port, or LOW:HIGH")
    parser.add_argument("--name-prefix", metavar="JOB", default=socket.gethostname(), help="what its name begins with")
    parser.add_argument("--tier", help="the site's tier that it is one of (default: its first)")
    parser.add_argument(
        "--workdir", metavar="DIR", help="where it makes its directory (default: the job's scratch space)"
    )
    for name, unit in (("cores", ""), ("memory", ", in MB"), ("disk", ", in MB"), ("gpus", "")):
        parser.add_argument(f"--{name}", metavar="N", help=f"what it offers{unit} (default: all that is found)")
    parser.add_argument("--cache", metavar="DIR", help="the host's cache, which outlives the worker (default: none)")
    parser.add_argument("--cache-gb", metavar="GB", type=float, help="how much that may hold (default: any)")
    parser.add_argument("--ssl", action="store_true", help="encrypt the connection to the manager")
    parser.add_argument("--vine-worker", metavar="PROGRAM", default="vine_worker", help="TaskVine's worker")
    parser.add_argument("--idle-timeout", metavar="S", help="leave after so many seconds without work")
    parser.add_argument("--parent", metavar="PID", type=int, help="end with this process, which started it")
    parser.add_argument("--debug-file", metavar="FILE", help="where TaskVine writes what it does")
    return parser


class Wrapper:
    """One vine_worker, this incarnation of the worker."""

    def __init__(self, program: str, options: argparse.Namespace, directory: str) -> None:
        self._tier = options.tier
        self._cache, self._cache_gb = options.cache, options.cache_gb
        # Feature characters only; what tells incarnations of one job apart comes last.
        prefix = re.sub(r"[^A-Za-z0-9.-]", "-", options.name_prefix)
        self._name = f"{prefix}.{secrets.token_hex(4)}"
        self._directory = directory
        self._key, self._password = _take_password(options)
        self._workspace = os.path.join(directory, "work")
        self._command = [program, *_vine_options(options, self._name, self._workspace, self._password)]

    def run(self) -> int:
        """Return the exit status: the vine_worker's, or 0 once it was released."""
        worker = self._start()
        _guard(worker, self._directory)
        noticed = False
        while True:
            number = self._next_signal(worker)
            if number == signal.SIGCHLD:
                status = _bury(worker)
                if status is not None:
                    return status
            elif number == signal.SIGUSR1:  # From the host: it was released, or it follows on one that was killed.
                died = host_died(self._directory)
                _end(worker)
                if died:
                    sys.stderr.write("the worker's context host was killed\n")
                return 1 if died else 0
            elif number in (signal.SIGTERM, signal.SIGINT) and not noticed and self._notify_host():
                noticed = True
                if number == signal.SIGINT:
                    sys.stderr.write("the worker leaves as soon as its call is done; again, and it leaves at once\n")
            else:
                _end(worker)
                return 128 + number

    def _start(self) -> int:
        parent = os.getpid()
        environment = {**os.environ, **self._variables()}
        worker = os.fork()
        if worker:
            return worker
        try:
            os.setsid()  # Ctrl-C is for the wrapper alone.
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execve(self._command[0], self._command, environment)
        finally:
            os._exit(_NOT_FOUND)

    def _next_signal(self, worker: int) -> int:
        """Return the next signal; meanwhile forget the password, once the vine_worker has read it.

        It has when its workspace is its working directory, which is before it connects or serves anybody.
        """
        while self._password is not None:
            found = next_signal(_SIGNALS, _LOOK_SECONDS)
            with contextlib.suppress(OSError):  # It has ended, say.
                if os.path.samefile(f"/proc/{worker}/cwd", self._workspace):
                    os.ftruncate(self._password, 0)
                    os.close(self._password)
                    self._password = None
            if found is not None:
                return found
        dead = 0
        while (found := next_signal(_SIGNALS, _HOST_SECONDS)) is None:
            dead = dead + 1 if host_died(self._directory) else 0
            if dead == _DEAD_LOOKS:  # A vine_worker that lost its manager may linger for seconds.
                return signal.SIGHUP
        return found

    def _variables(self) -> dict[str, str]:
        """Return what the context host finds in its environment."""
        program = package_root()  # Where this is not the one file already, it is built.
        if not os.path.isfile(program):
            program = build_program(os.path.join(self._directory, "ctxflow.pyz"))
        variables = {
            "CTXFLOW_KEY": self._key.hex(),
            "CTXFLOW_HOST": program,
            "CTXFLOW_HOST_PYTHON": sys.executable,
            "CTXFLOW_WORKER_DIRECTORY": self._directory,
            "CTXFLOW_WORKER_NAME": self._name,
            "CTXFLOW_WORKER_PID": str(os.getpid()),
        }
        if self._tier:
            variables["CTXFLOW_TIER"] = self._tier
        if self._cache:
            variables["CTXFLOW_CACHE"] = os.path.abspath(self._cache)
        if self._cache_gb is not None:
            variables["CTXFLOW_CACHE_GB"] = str(self._cache_gb)
        # The vine_worker overwrites it with numbers of its own.
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            variables["CTXFLOW_CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        return variables

    def _notify_host(self) -> bool:
        """Pass the batch system's notice on to the host, which tells the manager; False if there is none."""
        try:
            os.kill(noted_host(self._directory), signal.SIGTERM)
        except (OSError, ValueError):
            return False
        return True


def _vine_options(options: argparse.Namespace, name: str, workspace: str, password: int | None) -> list[str]:
    given = ["--single-shot", "--parent-death", "--from-factory", name, "--feature", name, "--workspace", workspace]
    given += ["--connect-timeout", str(_CONNECT_SECONDS)]
    if password is not None:
        given += ["--password", f"/proc/self/fd/{password}"]
    for option in ("cores", "memory", "disk", "gpus", "idle-timeout", "transfer-port"):
        if value := getattr(options, option.replace("-", "_")):
            given += [f"--{option}", value]
    if options.debug_file:
        given += ["--debug", "all", "--debug-file", options.debug_file]
    return [*given, *(["--ssl"] if options.ssl else []), options.manager]


def _take_password(options: argparse.Namespace) -> tuple[bytes, int | None]:
    """Return the key, and the password in memory, for the vine_worker to read, which reads no pipe.

    From a file, TaskVine's transfer server would send it to everybody who reaches that.
    """
    if not options.password:
        return key_of(b""), None
    with open(options.password, "rb") as file:
        password = file.read()
    memory = os.memfd_create("password", 0)
    os.write(memory, password)
    if options.remove_password:
        os.unlink(options.password)
    return key_of(password), memory


def _make_scratch(base: str | None) -> Scratch:
    """Make a directory of this worker's own, which nobody else may enter; remove those that killed ones left."""
    base = os.path.abspath(base or os.environ.get("_CONDOR_SCRATCH_DIR") or tempfile.gettempdir())
    os.makedirs(base, exist_ok=True)
    if len(base.split()) > 1:
        raise OSError(f"TaskVine takes no path with spaces, as {base} is")
    sweep(base)
    return Scratch(base)


def _guard(worker: int, directory: str) -> None:
    """Start a process that cleans up if this one is killed: the vine_worker's transfer server outlives it."""
    ours, theirs = os.pipe()
    if os.fork():
        os.close(ours)  # The other end closes when this process ends, however it does.
        return
    try:
        os.setsid()
        os.close(theirs)
        os.read(ours, 1)
        kill_session(worker)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os._exit(0)


def _bury(worker: int) -> int | None:
    """Reap the children that have ended; return the exit status if the worker was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = os.waitstatus_to_exitcode(ended[1])
                found = status if status >= 0 else 128 - status
    return found


def _end(worker: int) -> None:
    """Have the vine_worker take leave of its manager."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while _bury(worker) is None and (left := deadline - time.monotonic()) > 0:
        next_signal([signal.SIGCHLD], left)


def _end_descendants() -> None:
    """Kill what is left, also what appears meanwhile, until there is nothing."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        kill_children()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        next_signal([signal.SIGCHLD], 0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
