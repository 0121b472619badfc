"""What runs first on a worker's machine: of the file that a worker runs (worker_program.py), or alone, as a probe.

Python 3.6 must be able to read it: the program tells that it is too old, and a probe reports it.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import TYPE_CHECKING
from zipimport import zipimporter

if TYPE_CHECKING:
    import socket

_PROGRAMS = {
    "worker": ("worker", "main"),
    "vine_library": ("vine_library", "main"),
    "doorbell": ("vine_protocol", "answer_rings"),
    "library": ("library", "main"),  # These two for hosts alone (library_start.py).
    "zygote": ("zygote", "main"),
}
_CACHE_MARKS = ({".ctxflow-cache"}, {"kept", "work", "lock"})  # The latter of earlier versions.
_PROBE_SECONDS = 10
_PEER_SECONDS = 90  # For how long a probe may be tried by another.
_REACH_SECONDS = 3
_FILE = os.path.dirname(__file__)


def main() -> None:
    """Start the program that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "probe":
        sys.exit(probe(*sys.argv[2:]))
    if name not in _PROGRAMS:
        sys.exit(f"usage: python {sys.argv[0]} {{{'|'.join(list(_PROGRAMS)[:-2])}}} ...")
    if sys.version_info < (3, 10):  # noqa: UP036 - it is a worker's Python, whichever that is
        sys.exit(f"ctxflow needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}")
    if name not in ("worker", "library", "zygote"):
        with suppress(PermissionError):
            os.setpgid(0, 0)  # Before anything that takes time: see vine_protocol.LibraryPipes.
    if name in ("library", "zygote"):
        # As `python -m` has it: for the user's code, this file is only the last entry of PYTHONPATH.
        sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd()]
    sys.path_hooks.insert(0, _importer)
    sys.path_importer_cache.pop(_FILE, None)
    module, function = _PROGRAMS[name]
    sys.exit(getattr(import_module("ctxflow.host." + module), function)(sys.argv[2:]))


def probe(host: str, port: str, secret: str, cache: str = "", transfer_ports: str = "") -> int:
    """Connect back to whoever sent this job, say what a worker would find here, and return the exit status.

    Then it connects to where it is told that another probe listens, says what came of that, and waits for more.

    :param secret: a file with what proves that the job is one of theirs, and what it is told.
    :param cache: the folder of the host's cache, "" for none.
    :param transfer_ports: LOW:HIGH, where it listens for another; "" if there is none.
    """
    import hashlib  # Here, since every start of a program reads this file.
    import hmac
    import json
    import shutil
    import socket
    import tempfile

    with open(secret, "rb") as file:
        key = file.read()
    place = os.environ.get("_CONDOR_SCRATCH_DIR") or tempfile.gettempdir()
    listener = listening(transfer_ports) if transfer_ports else None
    facts = json.dumps(
        {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:2])),
            "vine_worker": shutil.which("vine_worker"),
            "place": place,
            "free": shutil.disk_usage(place).free,
            "cache": cache and look_at_cache(cache),
            "listens": listener.getsockname()[1] if listener else None,
        }
    ).encode()

    def proof(said: bytes) -> bytes:
        return hmac.new(key, said, hashlib.sha256).hexdigest().encode()

    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS) as line:
            line.sendall(proof(facts) + b" " + facts + b"\n")
            line.settimeout(_PEER_SECONDS)
            while True:
                told, _, peer = line.recv(4096).rstrip(b"\n").partition(b" ")
                if not peer or not hmac.compare_digest(told, proof(peer)):
                    break
                address, _, there = peer.decode().rpartition(" ")
                said = ""
                try:
                    socket.create_connection((address, int(there)), timeout=_REACH_SECONDS).close()
                except OSError as error:
                    said = str(error)
                line.sendall(json.dumps({"trouble": said}).encode() + b"\n")
    except socket.gaierror:
        sys.stdout.write(f"couldn't resolve hostname {host}\n")
        return 1
    except OSError as error:
        sys.stdout.write(f"couldn't connect to {host}:{port}: {error}\n")
        return 1
    return 0


def listening(ports: str) -> "socket.socket | None":
    """Listen at the first free of LOW:HIGH, 0:0 for any; None if there is none."""
    import socket

    low, _, high = ports.partition(":")
    for port in range(int(low), int(high or low) + 1):
        listener = socket.socket()
        try:
            listener.bind(("", port))
            listener.listen()
            return listener
        except OSError:
            listener.close()
    return None


def look_at_cache(folder: str) -> "dict[str, str | int]":
    """Say what the host's cache in a folder (host_cache.py) has for this user, and what is wrong with it."""
    import json

    own, near = os.path.join(folder, str(os.geteuid())), folder
    while not os.path.isdir(near):
        near = os.path.dirname(near)
    disk = os.statvfs(near)
    entries = size = 0
    problem = ""
    try:
        found = os.lstat(own)
        if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
            problem = "is not a folder of this user alone"
        elif (there := set(os.listdir(own))) and not any(mark <= there for mark in _CACHE_MARKS):
            problem = "holds what is no cache of ctxflow"
        else:
            for key in os.listdir(os.path.join(own, "kept")):
                with open(os.path.join(own, "kept", key, "index")) as file:
                    size += json.load(file)["bytes"]
                entries += 1
    except (OSError, ValueError, KeyError):
        if not os.path.lexists(own) and not os.access(near, os.W_OK | os.X_OK):
            problem = f"cannot be made: {near} is not writable"
    free = disk.f_bavail * disk.f_frsize
    return {"path": own, "free": free, "entries": entries, "bytes": size, "problem": problem}


class Importer(zipimporter):
    """Imports from a zip, and compiles only what it has no bytecode of, for this Python, in `__pycache__`.

    zipimport's own way with bytecode gives modules, and their tracebacks, other file names; and it compiles a module
    once to tell its file name, and once to run it.
    """

    def get_filename(self, fullname: str) -> str:
        """The place of a module's source."""
        ending = "/__init__.py" if self.is_package(fullname) else ".py"
        return os.path.join(self.archive, self.prefix, fullname.rpartition(".")[2] + ending)

    def get_code(self, fullname: str) -> "CodeType":
        """A module's code, with that place in it."""
        code = _Loader(fullname, self).get_code(fullname)
        assert code is not None, "there is a source of each"
        return code


class _Loader(SourceFileLoader):
    """Python's way with files and their `__pycache__`, in a zip."""

    def __init__(self, fullname: str, importer: Importer) -> None:
        super().__init__(fullname, importer.get_filename(fullname))
        self._importer = importer

    def path_stats(self, path: str) -> "dict[str, float]":
        return {"mtime": 0}  # Which the bytecode there does not ask for (see worker_program.py).

    def get_data(self, path: str) -> bytes:
        return self._importer.get_data(path)

    def set_data(self, *_: object, **__: object) -> None:
        """What had to be compiled is not kept."""


def _importer(path: str) -> Importer:
    if path == _FILE or path.startswith(_FILE + "/"):
        return Importer(path)
    raise ImportError


if __name__ == "__main__":
    main()
