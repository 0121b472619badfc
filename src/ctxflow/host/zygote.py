"""The zygote: a process that has imported what contexts of an environment import, and forks library processes.

A forked library process has at once what takes a spawned one seconds to import. The zygote runs no code of the user's:
it imports installed packages alone, has no key of the run and no socket but that to its host, and touches no device.
Where forking it would not be safe, it says why, becomes the library process that it was asked for, so that nothing is
imported twice, and library processes are spawned from then on.

With the embedded engine one zygote forks the hosts of workers (`HOST`), each of which takes a copy of it along.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from ctxflow.host import library
from ctxflow.host.context_building import seldom_collecting
from ctxflow.host.forking import FIRST_VARIABLE, LIBRARY, MARK_BYTES, receive, send
from ctxflow.host.installed_modules import import_installed, is_installed, shadowing
from ctxflow.host.linux import descendants, die_with_parent, is_exiting, name_process, package_root, readable_soon
from ctxflow.host.local_files import OF_LIBRARY

UNSAFE = "__fork_unsafe__"
"""What a module has that must not be imported before a fork: True, or why."""
_ADOPTION_SECONDS = 60.0
_PID_BYTES = 16
# Threads whose library sees to forks: jemalloc's, of which pyarrow has one, by pthread_atfork.
_READY_FOR_FORKS = {"jemalloc_bg_thd"}
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/neuron")


def main(argv: Sequence[str]) -> None:
    """Serve until the other end of the socket is closed.

    :param argv: the socket's descriptor; and the parent with which it ends, 0 if it is to end with the socket alone.
    """
    descriptor, parent = map(int, argv)
    if parent:
        die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    name_process("ctxflow-zygote")
    act: Callable[[], object] = ZygoteServer(socket.socket(fileno=descriptor)).serve
    status = 1
    try:
        while True:
            try:
                act()
                break
            except _Forked as forked:
                act = forked.act
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:  # Nothing of a process goes on in one that was forked from it.
        os._exit(status)


class ZygoteServer:
    """What the zygote does: imports modules, and forks.

    :param host: the socket to whoever asks.
    :param like: one that this process was forked from, whose modules it has.
    """

    def __init__(self, host: socket.socket, like: ZygoteServer | None = None) -> None:
        self._host = host
        self._path: list[str] = like._path if like else list(sys.path)  # As a spawned process has it.
        self._before: frozenset[str] = like._before if like else frozenset(sys.modules)
        self._tried: set[str] = set(like._tried) if like else set()
        self._unsafe: str = like._unsafe if like else ""
        self._mark: _Mark = like._mark if like else _Mark()
        self._hosts: set[int] = set()  # That it has forked, and that were not buried.
        self._dead: set[int] = set()  # Those of which nobody asks any more.
        if like is None:
            own = package_root()
            sys.path[:] = [path for path in sys.path if path and (path == own or is_installed(path))]

    def serve(self) -> None:
        """Do what is asked, until nobody can ask any more."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                message, descriptors = receive(self._host)
                if "preload" in message:
                    send(self._host, self._preload(message["preload"]))
                elif "bury" in message:
                    self._dead.add(message["bury"])
                else:
                    self._fork(message, descriptors)
                self._bury()

    def _bury(self) -> None:
        """Reap hosts that have ended; one that hangs in the kernel another time."""
        for pid in list(self._dead):
            ended = pid
            with contextlib.suppress(ChildProcessError):
                ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._dead.discard(pid)
                self._hosts.discard(pid)

    def _preload(self, names: Sequence[str]) -> dict[str, Any]:
        """Import modules; return which failed, and why no process can be forked from here now, "" if one can."""
        failed = {}
        with seldom_collecting():
            for name in names:
                if name not in sys.modules and name not in self._tried and (why := import_installed(name)):
                    failed[name] = why
        self._tried.update(names)
        gc.freeze()  # It is shared with those that are forked as long as no collection goes through it.
        self._unsafe = why_unsafe(self._host.fileno(), self._hosts)
        return {"failed": failed, "unsafe": self._unsafe}

    def _fork(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        try:
            path = shadowing(message["path"] or self._path, self._before)
            if path:
                answer: dict[str, Any] = {"error": f"{path} has the name of an installed package"}
            elif self._unsafe and message["fork"] == LIBRARY:
                send(self._host, {"pid": os.getpid()})
                raise _Forked(lambda: library.main(self._become(message, descriptors, "ctxflow-library")))
            elif message["fork"] == LIBRARY:
                answer = {"pid": self._fork_library(message, descriptors)}
            else:
                answer = {"pid": self._fork_host(message, descriptors)}
        except OSError as error:
            answer = {"error": str(error)}
        _close(descriptors)
        send(self._host, answer)

    def _fork_library(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a process that this one's parent adopts, as the subreaper that it is; return its number."""
        told, tell = os.pipe2(os.O_CLOEXEC)
        parent = os.getppid()

        def between() -> None:
            own = os.getpid()
            os.close(told)

            def begin() -> None:
                deadline = time.monotonic() + _ADOPTION_SECONDS
                while os.getppid() == own and time.monotonic() < deadline:
                    time.sleep(0.0002)
                if os.getppid() == parent:  # Else that has ended.
                    os.close(tell)
                    library.main(self._become(message, descriptors, "ctxflow-library"))

            os.write(tell, str(_fork(begin)).encode().ljust(_PID_BYTES))

        try:
            number = _fork(between)
        except OSError:
            _close([told, tell])
            raise
        os.close(tell)
        with os.fdopen(told, "rb") as pipe:
            said = pipe.read(_PID_BYTES)
        os.waitpid(number, 0)
        if not said:
            raise OSError("there is no room for another process")
        return int(said)

    def _fork_host(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        def begin() -> None:
            os.setsid()  # Ctrl-C is the driver's; and the worker can be ended as a whole.
            from ctxflow.host import __main__ as host

            host.main(self._become(message, descriptors, "ctxflow-host"), self.copy)

        pid = _fork(begin)
        self._hosts.add(pid)
        return pid

    def copy(self, descriptor: int, close: Sequence[int]) -> int:
        """Fork a zygote like this one, with the socket `descriptor`, as a child of this process; return its number.

        :param close: this process's descriptors that it is not to have.
        """
        parent, kept = os.getpid(), os.dup(descriptor)

        def begin() -> None:
            die_with_parent(parent)
            _close(close)
            name_process("ctxflow-zygote")
            ZygoteServer(socket.socket(fileno=kept), self).serve()

        try:
            pid = _fork(begin)
        except OSError:
            os.close(kept)
            raise
        os.close(kept)
        return pid

    def _become(self, message: Mapping[str, Any], descriptors: Sequence[int], name: str) -> list[str]:
        """Be as a process is that was spawned with the message's variables, directory and descriptors.

        The last descriptor is what it prints to. Return the words of its command line, after the program: of
        `message["words"]` a number stands for the descriptor of that place.
        """
        self._host.close()
        *given, output = descriptors
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        self._mark.write(message["variables"].get(OF_LIBRARY, ""))
        for gone in set(os.environ) - {FIRST_VARIABLE} - set(message["variables"]):
            del os.environ[gone]
        os.environ.update(message["variables"].items() - os.environ.items())  # Setting an unchanged one would move it.
        os.chdir(message["directory"])
        name_process(name)
        _new_random_state()
        sys.path[:] = self._path
        words = [str(given[word]) if isinstance(word, int) else word for word in message["words"]]
        sys.argv[:] = [name, *words]
        return words


class _Mark:
    """The variable by which a host finds what a library process has started, as the kernel shows it.

    /proc/PID/environ shows the memory that a process got at its start, and those that it forks: what they have as
    their own variables does not show.
    """

    def __init__(self) -> None:
        import ctypes

        get = ctypes.CDLL(None).getenv
        get.restype = ctypes.c_void_p
        there = len(os.environ.get(OF_LIBRARY, "")) == MARK_BYTES
        self._place = get(OF_LIBRARY.encode()) if there else None
        os.environ.pop(OF_LIBRARY, None)
        self.write("")

    def write(self, value: str) -> None:
        """Show another value."""
        import ctypes

        if self._place is not None:
            ctypes.memmove(self._place, os.fsencode(value).ljust(MARK_BYTES, b"\0"), MARK_BYTES)


class _Forked(BaseException):
    """What a forked process is to do, at the bottom of the stack: what it prints of that is its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act


def _fork(act: Callable[[], object]) -> int:
    """Fork a process that does something and ends; return its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    raise _Forked(act)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _new_random_state() -> None:
    """Have random numbers of one's own where a spawned process has; `random` sees to itself, and torch's are fixed."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


# --- whether a process may be forked


def why_unsafe(own: int, children: Collection[int] = ()) -> str:
    """Return why no process can be forked from this one, "" if one can: threads, devices, children, what modules say.

    A fork is tried: the threads of a BLAS end at it, and begin anew when they are needed.

    :param own: the descriptor of a socket that is no reason.
    :param children: processes that are none.
    """
    if not _fork_comes_back():
        return "a package that was imported lets no fork come to its end"
    if threads := _other_threads():
        return f"a package that was imported has started {threads}"
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and (why := module.__dict__.get(UNSAFE)):
            return f"{module.__name__} must not be imported before a fork" + (f": {why}" if why is not True else "")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a package that was imported has initialised CUDA"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_DEVICES) or (target.startswith("socket:") and name != str(own)):
                return f"a package that was imported has opened {target}"
    if set(descendants(os.getpid(), deep=False)).difference(children):
        return "a package that was imported has started a process"
    return ""


def _fork_comes_back() -> bool:
    """Return whether a forked process ends, which does nothing: packages may do something at forks."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    end = os.pidfd_open(pid)
    try:
        comes_back = readable_soon(end)
    finally:
        os.close(end)
    if not comes_back:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return comes_back


def _other_threads() -> str:
    """Return this process's threads but this one, by Python's names or the kernel's."""
    deadline = time.monotonic() + 0.2  # One that ends may still be seen.
    while True:
        names = []
        for task in os.listdir("/proc/self/task"):
            if int(task) != os.getpid() and not is_exiting(int(task)):
                with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
                    names.append(file.read().strip())
        names = [name for name in names if name not in _READY_FOR_FORKS]
        if not names or time.monotonic() > deadline:
            known = sys.modules.get("threading")
            if known is not None and (python := known.enumerate()[1:]):
                names = [thread.name for thread in python]
            return f"threads ({', '.join(sorted(set(names)))})" if names else ""
        time.sleep(0.01)


if __name__ == "__main__":
    from ctxflow.host import zygote  # noqa: PLW0406 - importable under its own name, as of library.py

    zygote.main(sys.argv[1:])
