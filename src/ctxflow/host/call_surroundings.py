"""What surrounds a call in a library process: where it runs, its files, notices of eviction, and its output.

A call runs in one directory with all others, or in a folder of its own (`BuildContext` says which), with copies of its
input files; outputs are sent to the driver from where they are put. Calls that overlap, of items, run in one folder of
the process, which nobody empties meanwhile.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from types import FrameType
from typing import Any, TextIO

from ctxflow.host.library_messages import PartFinished

AROUND = "CTXFLOW_AROUND_CALLS"
"""A variable that names `module:function`, which gets each app's function and returns what is called in its place."""


class InPlace:
    """All calls run in one directory, which is the user's: nothing in it is removed.

    :param directory: an absolute path without symbolic links, as `os.getcwd` gives it.
    """

    def __init__(self, directory: str) -> None:
        self.folder = directory

    def enter(self) -> None:
        """Begin a call, or a context's build, there, wherever the one before has gone."""
        try:
            if os.getcwd() == self.folder:
                return
        except OSError:  # It was removed; perhaps another of its name is there by now.
            pass
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"calls run in the directory where the executor was started, {self.folder}, and that cannot be "
                f"entered any more ({error.strerror}): put it back, or start the executor in one that stays",
            ) from None

    def rest(self, known: Set[str]) -> list[str]:
        """Return what a call has left that will be removed: nothing."""
        return []

    def hint(self, error: BaseException) -> str:
        """Return what to add to an error of a call or a build: nothing, since paths are as in the user's programs."""
        return ""

    def leave(self) -> None:
        """End a call."""


class FolderEach:
    """Each call has a folder of its own, which is removed after it; one that is left empty serves the next.

    :param scratch: a directory of the library process's own.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = os.path.realpath(scratch)
        self.folder = ""
        self._made = 0

    def enter(self) -> None:
        """Begin a call."""
        if self.folder:
            return
        self._made += 1
        folder = os.path.join(self._scratch, f"call-{self._made}")
        try:
            os.makedirs(folder)
            os.chdir(folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the call got no directory to run in ({error}): make room there, or put scratch= of the site on "
                "another disk",
            ) from None
        self.folder = folder

    def rest(self, known: Set[str]) -> list[str]:
        """Return the names, but `known` ones, that a call has left in its folder; a folder's ends in a slash."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as found:
            return sorted(entry.name + "/" * entry.is_dir() for entry in found if entry.name not in known)
        return []

    def hint(self, error: BaseException) -> str:
        """Return what to add to an error of a call or a build: why a file with a relative path is not here."""
        path = getattr(error, "filename", None)
        if not isinstance(error, FileNotFoundError) or not isinstance(path, str) or os.path.isabs(path):
            return ""
        return (
            f"{path} was looked for in an empty folder on a worker: name it in inputs=[File(...)] of the call, or in "
            "files= of the context, and it is brought there (docs/where-your-code-runs.md)"
        )

    def leave(self) -> None:
        """End a call."""
        try:
            clean = os.getcwd() == self.folder and not os.listdir(self.folder)
        except OSError:
            clean = False
        if not clean:
            # The call may have removed even the directory above.
            with contextlib.suppress(OSError):
                os.makedirs(self._scratch, exist_ok=True)
                os.chdir(self._scratch)
            with contextlib.suppress(OSError):  # An import needs a descriptor, which the call may have taken.
                import shutil

                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


STAGED = ".staged"
"""The folder, in a call's, of files that have no place of their own in it."""
_CONNECT_SECONDS = 60.0  # How long a web server may keep silent.


class FolderFiles:
    """The files of one call.

    :param inputs: each a name in the call's folder and where it comes from (a name in `sandbox`, or a web address).
    :param outputs: each a name in the call's folder, one in `sandbox`, and whether the call must make it.
    :param folder: the call's.
    """

    def __init__(
        self, inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str, bool]], sandbox: str, folder: str
    ) -> None:
        self._inputs, self._outputs, self._sandbox = inputs, outputs, sandbox
        self._names = [name for name, _ in self._inputs] + [name for name, _, _ in self._outputs]
        self._folder = folder

    def bring(self) -> None:
        """Put the inputs, and the folders of the outputs, where the call will look for them."""
        import shutil  # Here, as below: few library processes need it, and all would start the later.

        for name in self._names:
            os.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
        for name, source in self._inputs:
            if "://" in source:
                _download(source, self._path(name))
            else:
                shutil.copy(os.path.join(self._sandbox, source), self._path(name))

    def take(self, failed: bool) -> dict[str, int]:
        """Take the outputs away (of a failed call, only what it printed); return their sizes by name in `sandbox`.

        :raises OSError: if one is missing that the call had to make.
        """
        import shutil

        sizes = {}
        for name, target, required in self._outputs:
            path = self._path(name)
            if failed and (required or not os.path.isfile(path)):
                continue
            if os.path.isdir(path):
                raise IsADirectoryError(
                    f"the call made a folder of its output {name}: have it make one file, an archive"
                )
            if os.path.exists(path):
                sizes[target] = os.path.getsize(path)
                take = shutil.copy if os.path.islink(path) else shutil.move
                take(path, os.path.join(self._sandbox, target))
            elif required:
                raise FileNotFoundError(f"the call ended without making its output {name}: it has to write it there")
        return sizes

    @property
    def known(self) -> set[str]:
        """The names in the call's folder that are its inputs and outputs."""
        return {name.split(os.sep)[0] for name in self._names}

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def complete(sandbox: str, outputs: Sequence[str]) -> None:
    """Make a file for each output that has none: without one, TaskVine would give the worker up."""
    for name in outputs:
        with contextlib.suppress(OSError), open(os.path.join(sandbox, name), "ab"):
            pass


def _download(address: str, path: str) -> None:
    import shutil
    import urllib.error  # Which take a fifth of the time in which a library process starts.
    import urllib.request

    try:
        with urllib.request.urlopen(address, timeout=_CONNECT_SECONDS) as answer, open(path, "wb") as file:
            shutil.copyfileobj(answer, file)
    except urllib.error.URLError as error:  # Some cannot be pickled.
        reason = getattr(error, "reason", error)
        raise OSError(
            f"the worker cannot have {address} ({reason}): see that it is there, and seen from workers"
        ) from None


def state_path(folder: str, session: int, made: int) -> str:
    """Return where the state of a session with so many chunks made is in a worker's cache."""
    return os.path.join(folder, f"{session}-{made}.state")


def digest_of(data: bytes) -> str:
    """Return the digest by which a state is known.

    >>> digest_of(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    import hashlib  # Which takes a twentieth of the time in which a library process starts.

    return hashlib.blake2b(data, digest_size=16).hexdigest()


class StateGone(Exception):
    """A session's state cannot be had; the message says why."""


def read_state(folder: str, session: int, made: int, digest: str) -> bytes:
    """Return a state from the cache, as it was frozen; raise `StateGone` if it is not there, or another."""
    try:
        with open(state_path(folder, session, made), "rb") as file:
            data = file.read()
    except OSError as error:
        raise StateGone(f"the session's frozen state cannot be read: {error}") from None
    if digest_of(data) != digest:
        raise StateGone("the session's frozen state is not what was frozen: its digest differs")
    return data


def write_state(state: bytes, path: str) -> bool:
    """Write a state to the cache, complete or not at all; return whether it is there."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "wb") as file:
            file.write(state)
        os.replace(path + ".part", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + ".part")
        return False
    return True


def remove_states(folder: str, session: int) -> None:
    """Remove a session's states from the cache."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(f"{session}-"):
                os.unlink(os.path.join(folder, name))


def leave_notice_to_host() -> None:
    """Ignore SIGTERM, a notice of eviction which Slurm sends to all processes of a job: the host handles it.

    In processes that the user's code forks it has its default effect, from their first moment on and in system calls,
    where a handler written in Python would not run. While Python is forking, SIGTERM is blocked: it would be lost.
    """
    masks: dict[int, set[int | signal.Signals]] = {}  # By thread, since each forks by itself.

    def noticed(number: int, frame: FrameType | None) -> None:
        pass

    def forks() -> None:
        masks[_thread.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def forked() -> None:
        if signal.getsignal(signal.SIGTERM) is noticed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        goes_on()

    def goes_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(_thread.get_ident()))

    signal.signal(signal.SIGTERM, noticed)
    os.register_at_fork(before=forks, after_in_parent=goes_on, after_in_child=forked)


class Output:
    """Remembers where output goes, so that a call that closes or replaces a descriptor harms no other."""

    def __init__(self) -> None:
        self._spare = os.dup(1)
        self._inode = os.fstat(1).st_ino

    def mend(self) -> None:
        """Flush what was printed, and put back what a call has closed."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fstat(1).st_ino == os.fstat(2).st_ino == self._inode:
                return
        except (OSError, ValueError, AttributeError):
            pass
        for descriptor in (1, 2):
            os.dup2(self._spare, descriptor)
        sys.stdout, sys.stderr = _usable(sys.stdout, 1), _usable(sys.stderr, 2)


def _usable(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not getattr(stream, "closed", False):
        return stream
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


def around_calls(environment: Mapping[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return what `AROUND` names in an environment, None if it names nothing.

    >>> around_calls({AROUND: "functools:partial"}).__name__, around_calls({})
    ('partial', None)
    """
    module, _, name = environment.get(AROUND, "").partition(":")
    return getattr(importlib.import_module(module), name) if module else None


class Later(BaseException):
    """A call whose function is async has begun: it ends when that has been awaited.

    :param finish: makes the results, pickled, of what the function returns.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], finish: Callable[[Any], bytes]) -> None:
        super().__init__(coroutine, finish)
        self.coroutine, self.finish = coroutine, finish
        self.files: FolderFiles | None = None


class CallNotes:
    """What is noted of a call while it runs.

    :ivar tell: sends results that come before its end.
    :ivar app: what its user calls its function. :ivar failed: whether it has given back an error.
    :ivar at: where it answers its items one by one, gives the item that it is about.
    """

    __slots__ = ("app", "at", "failed", "tell")

    def __init__(self, tell: Callable[[PartFinished], None]) -> None:
        self.tell = tell
        self.app, self.failed = "", False
        self.at: Callable[[], int] | None = None
