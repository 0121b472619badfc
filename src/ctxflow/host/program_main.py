"""The first thing that runs of the one file that a worker runs (worker_program.py): starts one of its programs.

Python 3.6 must be able to read it, to be told that it is too old.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import CodeType
from zipimport import zipimporter

_PROGRAMS = ("worker", "vine_library", "doorbell")
_FILE = os.path.dirname(__file__)


def main() -> None:
    """Start the program that the first argument names; `library` is for hosts alone (library_process.py)."""
    if len(sys.argv) < 2 or sys.argv[1] not in (*_PROGRAMS, "library"):
        sys.exit(f"usage: python {sys.argv[0]} {{{'|'.join(_PROGRAMS)}}} ...")
    if sys.version_info < (3, 10):  # noqa: UP036 - it is a worker's Python, whichever that is
        sys.exit(f"ctxflow needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}")
    if sys.argv[1] not in ("worker", "library"):
        with suppress(PermissionError):
            os.setpgid(0, 0)  # Before anything that takes time: see vine_protocol.lead_group.
    if sys.argv[1] == "library":
        # As `python -m` has it: for the user's code, this file is only the last entry of PYTHONPATH.
        sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd()]
    sys.path_hooks.insert(0, _importer)
    sys.path_importer_cache.pop(_FILE, None)
    sys.exit(import_module("ctxflow.host." + sys.argv[1]).main(sys.argv[2:]))


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
