"""What runs under whichever Python a machine has: opening a packed environment, and describing an interpreter.

It needs the standard library of Python 3.9 alone, also as a program: `python3 opening.py ARCHIVE DIRECTORY` prints the
opened environment's interpreter; without arguments it prints as JSON what `describe_interpreter` returns.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "ctxflow-environment.json"
_RUN_SECONDS = 300.0
_DAMAGED = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)

# conda-pack's own script knows what names the old place; this passes it the new one, where the folder is yet to go.
_MOVE_CONDA = """
import os, runpy, sys
new, final = sys.argv[1:]
sys.path.insert(0, os.path.join(new, "bin"))
script = runpy.run_path(os.path.join(new, "bin", "conda-unpack"))
for path, placeholder, mode in script["_prefix_records"]:
    if os.path.exists(os.path.join(new, path)):  # It knows of files that were left out, too.
        script["update_prefix"](os.path.join(new, path), final, placeholder, mode)
"""


class UnusableEnvironment(ValueError):
    """A file is no packed environment, or does not fit this machine; the message says what to do."""


def open_environment(archive: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Unpack an environment into a folder, unless it is there already, and start its interpreter once.

    The folder appears whole or not at all; processes that do this at the same time get the same path.

    :param archive: what `ctxflow env pack` wrote.
    :param directory: the folder that it becomes.
    :returns: the path of its interpreter.
    :raises UnusableEnvironment: if it is damaged, does not fit this machine or does not start.
    :raises OSError: if the disk is full, or the folder cannot be written.
    """
    target = Path(os.path.abspath(directory))
    manifest = read_manifest(archive)
    if not _is_open(target, manifest):
        check_machine(manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _unpack(archive, new)
            if (new / "bin" / "conda-unpack").exists():
                _run(new, "-c", _MOVE_CONDA, str(new), str(target))
            _run(new, "-c", "pass")
            os.chmod(new, 0o755)
            try:
                os.rename(new, target)
            except OSError:
                if not _is_open(target, manifest):  # Else another process was faster.
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return target / "bin" / "python"


def read_manifest(archive: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is in an archive, from its first member; raise `UnusableEnvironment` if it is none of ours."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            member = tar.next()
            file = tar.extractfile(member) if member and member.name == MANIFEST else None
            manifest = json.loads(file.read()) if file else {}
    except (*_DAMAGED, ValueError):
        manifest = {}
    if manifest.get("format") != 1:
        raise UnusableEnvironment(
            f"{archive} is no packed environment that this version of ctxflow knows: make one with `ctxflow env pack`"
        )
    return dict(manifest)


def check_machine(manifest: dict[str, Any]) -> None:
    """Raise `UnusableEnvironment` if this machine lacks what an environment needs."""
    machine = f"{sys.platform}-{platform.machine()}"
    if machine != manifest["platform"]:
        raise UnusableEnvironment(
            f"the environment {manifest['name']} was packed for {manifest['platform']} and this machine is {machine}: "
            "pack it on a machine like this one, or ask the site for workers like the one it was packed on"
        )
    try:
        library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        library, version = "", ""
    if library != "glibc" or _numbers(version) < _numbers(manifest["glibc"]):
        raise UnusableEnvironment(
            f"the environment {manifest['name']} needs the C library glibc {manifest['glibc']} or newer and this "
            f"machine has {version or 'another one'}: pack it on an older system, or use a container image"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _is_open(target: Path, manifest: dict[str, Any]) -> bool:
    """Return whether the environment is in the folder; an error if something else is."""
    if not os.path.lexists(target) or (target.is_dir() and not os.listdir(target)):
        return False
    digest = None
    with contextlib.suppress(OSError, ValueError):
        digest = json.loads((target / MANIFEST).read_text()).get("digest")
    if digest != manifest["digest"]:
        raise UnusableEnvironment(f"{target} holds something else than this environment: give a folder of its own")
    return True


def _unpack(archive: str | os.PathLike[str], new: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            extract_inside(tar, new)
            # What follows the last member says whether all came as it was sent: tarfile does not read it.
            while tar.fileobj and tar.fileobj.read(1 << 20):
                pass
    except _DAMAGED as error:
        raise UnusableEnvironment(f"{archive} is damaged ({error}): copy or pack it again") from None


def _run(new: Path, *arguments: str) -> None:
    try:
        command = [str(new / "bin" / "python"), "-I", "-B", *arguments]
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd=new,
            timeout=_RUN_SECONDS,
        )
        problem = "" if run.returncode == 0 else (run.stderr.strip().splitlines() or [f"status {run.returncode}"])[-1]
    except OSError as error:
        problem = f"{error.strerror}; is that file system mounted noexec?"
    except subprocess.TimeoutExpired:
        problem = f"it does not answer for {_RUN_SECONDS:.0f} s; does its disk hang?"
    if problem:
        raise UnusableEnvironment(f"the environment in {new.parent} does not start on {platform.node()}: {problem}")


def extract_inside(tar: tarfile.TarFile, directory: str | Path) -> None:
    """Extract an archive; raise `tarfile.TarError` at a member that reaches out of the directory."""
    if hasattr(tarfile, "tar_filter"):
        tar.extraction_filter = tarfile.tar_filter
        tar.extractall(directory)
    else:  # Python 3.10 and 3.11 before their last releases.
        tar.extractall(directory, members=_staying_inside(tar, os.path.realpath(directory)))


def _staying_inside(tar: tarfile.TarFile, directory: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members, each only once those before it, which may be links, are extracted."""
    for member in tar:
        names = [member.name, member.linkname] if member.islnk() else [member.name]
        places = [os.path.realpath(os.path.join(directory, name)) for name in names]
        if os.path.commonpath([directory, *places]) != directory:
            raise tarfile.ExtractError(f"{member.name!r} reaches out of the folder that the archive holds")
        yield member


def describe_interpreter() -> dict[str, Any]:
    """Return where this interpreter's parts lie, what is on its path, and which packages it sees.

    `editable` names the places of packages that are installed as links by setuptools' import hooks; `hooks`, the
    modules of other tools' import hooks, whose places are not known.
    """
    import importlib.metadata  # Here: opening an environment needs none of them.
    import importlib.util
    import re
    import sysconfig

    finders = {name: module for name, module in sys.modules.items() if re.search("_editable_|^_editable", name)}
    packages: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # What is left of a broken installation has none.
            packages.setdefault(re.sub("[-_.]+", "-", name).lower(), distribution.version)
    return {
        "python": platform.python_version(),
        "tag": "{}.{}".format(*sys.version_info),
        "machine": platform.machine(),
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "library": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
        "headers": sysconfig.get_path("include"),
        "path": [os.path.abspath(entry) for entry in sys.path if entry],
        "packages": dict(sorted(packages.items())),
        "editable": {
            name: place for module in finders.values() for name, place in getattr(module, "MAPPING", {}).items()
        },
        "hooks": sorted(name for name, module in finders.items() if not hasattr(module, "MAPPING")),
        "missing": [name for name in ("ctxflow", "cloudpickle") if importlib.util.find_spec(name) is None],
    }


if __name__ == "__main__":
    if len(sys.argv) == 1:
        del sys.path[0]  # This file's folder.
        json.dump(describe_interpreter(), sys.stdout)
        sys.exit()
    try:
        sys.stdout.write(f"{open_environment(*sys.argv[1:])}\n")
    except (OSError, UnusableEnvironment) as problem:
        sys.exit(f"ctxflow: {problem}")
