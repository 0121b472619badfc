"""Decide which files make up an environment, and where each goes in a Python installation that can be moved.

The result is one installation: the base interpreter, its standard library and headers, and in its site directory
everything that the environment sees on its path, as far as the first of each name.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ctxflow.environments import opening
from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install_ctxflow

_CACHES = {"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".cache"}
_NOT_ON_WORKERS = {"test", "tests", "idle_test", "idlelib", "turtledemo", "ensurepip", "tkinter"}
_NOT_LIBRARY = re.compile(r"_tkinter\..*|_test.*\.so|_ctypes_test.*\.so|_xxtestfuzz.*|xxlimited.*|.*\.[ao]")
_SITES = {"site-packages", "dist-packages"}
_METADATA_KEY = "metadata of "
_METADATA = re.compile(r"(.+?)(-\d[^/]*)?\.(dist-info|egg-info|egg-link)")
# Valid shell, which starts the interpreter beside the script, and valid Python, which is one string.
_SHEBANG = b"""#!/bin/sh
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"
' '''
"""
_SHEBANGS = re.compile(rb"#!([^\n]*python[^\n]*)\n|#!/bin/sh\n'''exec' ([^\n]*)\n' '''\n")
# What lies in a home directory on a worker is no part of the environment. (`site` itself is frozen since Python 3.11.)
_NO_USER_SITE = (
    b"import site, sys; site.ENABLE_USER_SITE = False; site.USER_SITE in sys.path and sys.path.remove(site.USER_SITE)\n"
)


class PackedFile(NamedTuple):
    """A file of the environment."""

    source: str  # The file whose content it has; of a link, what it points to.
    executable: bool = False
    link: bool = False


def is_conda(prefix: Path) -> bool:
    """Return whether conda made the prefix."""
    return (prefix / "conda-meta").is_dir()


def inspect(prefix: Path) -> dict[str, Any]:
    """Return what the interpreter of a prefix says about itself; see `opening.describe_interpreter`.

    A virtual environment is taken with all that it sees, on PYTHONPATH too; a conda environment by itself.
    """
    python = next((str(path) for name in ("python", "python3") if (path := prefix / "bin" / name).exists()), None)
    if python is None:
        raise CtxflowError(f"{prefix} is not an environment, since it has no bin/python: give the path of one")
    about: dict[str, Any] = json.loads(_answer(python, *(["-I"] if is_conda(prefix) else []), "-B", opening.__file__))
    if about["missing"]:
        lacking = " and ".join(about["missing"])
        raise CtxflowError(f"{prefix} has no {lacking}, which a worker needs: {how_to_install_ctxflow(python)}")
    if about["hooks"]:
        raise CtxflowError(
            f"{prefix} holds an editable install that cannot be followed ({', '.join(about['hooks'])}): "
            "install that package again without -e"
        )
    # Of the base interpreter, since a distribution's own answers otherwise within a virtual environment.
    question = "import site, json; print(json.dumps(site.getsitepackages(['/'])))"
    about["site"] = json.loads(_answer(about["executable"], "-I", "-S", "-B", "-c", question))[0].strip("/")
    return about


def _answer(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=os.sep)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise CtxflowError(f"the interpreter {command[0]} does not answer, so its environment cannot be packed: {last}")
    return run.stdout


class Collection:
    """The files of an environment that is about to be packed, by their path in it.

    :param scratch: a folder for the files that are written anew.
    :param exclude: shell patterns of what is left out: paths in the environment, or below its site directory.
    """

    def __init__(self, scratch: Path, exclude: Iterable[str] = ()) -> None:
        self.entries: dict[str, PackedFile] = {}
        self.scratch = scratch
        self.site = ""
        self._exclude = list(exclude)
        self._placed: dict[str, str] = {}  # Where each file's content is, by its real path.
        self._inside: list[str] = []  # The real paths of the folders that are being walked.

    def add_python(self, about: dict[str, Any]) -> None:
        """Add the interpreter, its standard library, and what is on its path."""
        base, self.site = about["base_prefix"], about["site"]
        self.add(about["executable"], f"bin/python{about['tag']}", "")
        for alias in ("python3", "python"):
            self.entries[f"bin/{alias}"] = PackedFile(f"python{about['tag']}", link=True)
        for library in dict.fromkeys(about["library"]):
            self._tree(library, os.path.relpath(library, base), library, _of_standard_library)
        self.rewrite(f"{self.site}/ctxflow-environment.pth", _NO_USER_SITE)
        if os.path.isdir(about["headers"]):
            self._tree(about["headers"], os.path.relpath(about["headers"], base), about["headers"])
        for name, place in about["editable"].items():
            self._followed(name, place)
        self._sites(about)
        if about["prefix"] != base:
            self._rest_of(about["prefix"], about["executable"])

    def add_conda(self, root: str, about: dict[str, Any]) -> None:
        """Add what conda-pack made of a conda environment."""
        self._tree(root, "", root)
        self.rewrite(f"{about['site']}/ctxflow-environment.pth", _NO_USER_SITE)
        for target in list(self.entries):
            if os.path.dirname(target) == "bin":
                self._move_script(target)
        script = Path(self.entries["bin/conda-unpack"].source).read_text()
        before, start, rest = script.partition("_prefix_records = [\n")
        records, end, after = rest.partition("\n]\n")
        # In an order of their own, which conda-pack does not give them, so that the digest is one.
        ordered = ",\n".join(sorted(records.split(",\n")))
        self.rewrite("bin/conda-unpack", "".join((before, start, ordered, end, after)).encode())

    def add(self, path: str, target: str, root: str) -> None:
        """Add a file, folder or link; links that lead out of the root are followed."""
        if target in self.entries or self._excluded(target):
            return
        link = os.readlink(path) if os.path.islink(path) else ""
        real = os.path.realpath(path)
        if link and not os.path.isabs(link) and os.path.exists(path):
            where = os.path.normpath(os.path.join(os.path.dirname(path), link))
            if root and where.startswith(root.rstrip("/") + "/"):
                self.entries[target] = PackedFile(link, link=True)
                return
        if os.path.isdir(path):
            if real not in self._inside:
                self._inside.append(real)
                self._tree(path, target, path if link else root)
                self._inside.pop()
        elif os.path.isfile(path):
            if real in self._placed:
                place = os.path.relpath(self._placed[real], os.path.dirname(target))
                self.entries[target] = PackedFile(place, link=True)
            else:
                self._placed[real] = target
                self.entries[target] = PackedFile(real, os.access(real, os.X_OK))

    def rewrite(self, target: str, content: bytes) -> str:
        """Replace a file's content; return the path of what is packed in its place, which may be edited."""
        with tempfile.NamedTemporaryFile(dir=self.scratch, delete=False) as file:
            file.write(content)
        self.entries[target] = PackedFile(file.name, target in self.entries and self.entries[target].executable)
        return file.name

    def copy(self, target: str) -> str:
        """Have a copy of a file packed in its place, and return the copy's path."""
        source = self.entries[target].source
        return str(shutil.copyfile(source, self.rewrite(target, b"")))

    def _tree(self, source: str, target: str, root: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        for name in sorted(os.listdir(source)):
            path = os.path.join(source, name)
            if name in _CACHES or not wanted(name):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                place = os.path.join(target, name)
                if not self._excluded(place):
                    self._tree(path, place, root, wanted)
            else:
                self.add(path, os.path.join(target, name), root)

    def _excluded(self, target: str) -> bool:
        names = (target, target.removeprefix(self.site + "/"))
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self._exclude)

    def _followed(self, name: str, place: str) -> None:
        """Add a package that an import hook finds elsewhere."""
        path = place if os.path.exists(place) else f"{place}.py"
        suffix = "".join(Path(path).suffixes) if os.path.isfile(path) else ""
        target = os.path.join(self.site, *name.split(".")) + suffix
        if os.path.isdir(path):
            self._tree(path, target, path)
        else:
            self.add(path, target, "")

    def _sites(self, about: dict[str, Any]) -> None:
        """Add what is on the path: of each name what comes first, as the interpreter would find it."""
        library = about["library"][0].rstrip("/") + "/"
        roots: list[str] = []
        for path in dict.fromkeys(about["path"]):
            own = f"{path}/".startswith(library) and os.path.basename(path) not in _SITES
            if os.path.isfile(path):
                raise CtxflowError(
                    f"{path} is on the path as an archive: install that package unpacked, then pack again"
                )
            if os.path.isdir(path) and not own and not any(path.startswith(root + "/") for root in roots):
                roots.append(path)
        taken: dict[str, bool] = {name.partition(".")[0]: False for name in about["editable"]}
        for root in roots:
            new: dict[str, bool] = {}
            for name in sorted(os.listdir(root)):
                path, key = os.path.join(root, name), _key(name)
                package = os.path.isdir(path) and not key.startswith(_METADATA_KEY)
                spread = package and not os.path.exists(os.path.join(path, "__init__.py"))
                if name in _CACHES or "__editable__" in name or (key in taken and not (spread and taken[key])):
                    continue
                if os.path.basename(root) not in _SITES and not _importable(path):
                    continue
                new[key] = spread
                if name.endswith(".pth"):
                    self._path_file(path)
                else:
                    self.add(path, os.path.join(self.site, name), root)
            taken.update(new)

    def _path_file(self, path: str) -> None:
        """Add a .pth file without the lines that lead out of its folder, which were followed."""
        folder, kept = os.path.dirname(path), []
        for line in Path(path).read_text(errors="surrogateescape").splitlines():
            place = os.path.normpath(os.path.join(folder, line.strip()))
            if line.startswith(("import ", "import\t")):
                kept.append(line)
            elif line.strip() and place.startswith(folder + "/"):
                kept.append(os.path.relpath(place, folder))
        target = os.path.join(self.site, os.path.basename(path))
        if kept and not self._excluded(target):
            self.rewrite(target, ("\n".join(kept) + "\n").encode(errors="surrogateescape"))

    def _rest_of(self, prefix: str, executable: str) -> None:
        """Add what else a virtual environment holds: scripts, and packages' data."""
        for name in sorted(os.listdir(prefix)):
            if name in ("bin", "lib64", "pyvenv.cfg", ".gitignore", ".lock", "include") or name in _CACHES:
                continue
            path = os.path.join(prefix, name)
            if os.path.isdir(path):
                self._tree(path, name, prefix, lambda inner: inner not in _SITES)
        for name in sorted(os.listdir(os.path.join(prefix, "bin"))):
            path = os.path.join(prefix, "bin", name)
            own = not name.lower().startswith("activate") and os.path.realpath(path) != executable
            if own and os.path.isfile(path):
                self.add(path, f"bin/{name}", prefix)
                self._move_script(f"bin/{name}")

    def _move_script(self, target: str) -> None:
        if (entry := self.entries.get(target)) is None or entry.link:
            return
        content = Path(entry.source).read_bytes()
        if match := _SHEBANGS.match(content):
            self.rewrite(target, _SHEBANG + content[match.end() :])


def _of_standard_library(name: str) -> bool:
    return name not in _NOT_ON_WORKERS | _SITES and not _NOT_LIBRARY.fullmatch(name)


def _key(name: str) -> str:
    """Return what a name in a site directory stands for: a module, or a distribution's metadata."""
    if match := _METADATA.fullmatch(name):
        return _METADATA_KEY + re.sub("[-_.]+", "-", match[1]).lower()
    return name if name.endswith(".pth") else name.partition(".")[0]


def _importable(path: str) -> bool:
    """Return whether something in a folder that is no site directory is a module, a package, or metadata."""
    name = os.path.basename(path)
    if os.path.isdir(path):
        return bool(_METADATA.fullmatch(name)) or os.path.exists(os.path.join(path, "__init__.py"))
    return name.endswith((".py", ".so"))
