"""This copy of ctxflow: its version, where it came from, and how to install what it lacks.

The distribution is called parsl-ctxflow. The one that PyPI calls ctxflow is somebody else's, so that no message may
name it; and until parsl-ctxflow is on an index, messages name a clone, a file, or the missing packages themselves.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__version__ = "0.1.0"
DISTRIBUTION = "parsl-ctxflow"
PAPERS = "ctxflow-papers"
COST_OF_TORCH = "PyTorch and what it needs take 2.2 GB, with CUDA's libraries 5.9 GB"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # Not compiled here: workers import this, and seldom need it.
_EXTRA = r"""extra\s*==\s*["']([\w.-]+)["']"""


def how_to_install(*packages: str, extra: str) -> str:
    """Return the command that installs packages for the Python that runs this, with what else an extra brings.

    For a clone of ctxflow it is the clone with the extra; else, the packages, in the versions that ctxflow works with.
    On a worker of another machine the sentence names the workers' environment.

    :param packages: what is missing, by the names of their distributions; all that the extra brings if none is given.
    :param extra: the extra of setup.cfg that brings them.
    """
    if _on_worker():
        return _for_workers(_requirements(packages, extra))
    clone = _clone()
    if clone is None:
        return f"{_pip_install()} {shlex.join(_requirements(packages, extra))}"
    return _install_clone(f"{clone}[{extra}]")


def how_to_install_package(package: str) -> str:
    """Return the command that installs a package that is none of ctxflow's own needs, for the Python that runs this."""
    return _for_workers([package]) if _on_worker() else f"{_pip_install()} {shlex.quote(package)}"


def how_to_install_ctxflow(python: str) -> str:
    """Return what installs this copy of ctxflow for another Python of this machine, given by its path."""
    source = _clone() or _wheel()
    if source is None:
        return f"install {DISTRIBUTION} {_version()} with {python} -m pip, from where this copy of it came"
    return f"run {shlex.quote(python)} -m pip install {shlex.quote(str(source))}"


def how_to_install_papers() -> str:
    """Return what installs the papers' experiments, a distribution of their own, beside this copy of ctxflow."""
    clone = _clone()
    if clone is None:
        return f"install {PAPERS} with {shlex.quote(sys.executable)} -m pip, from the folder papers of ctxflow's tree"
    return _install_clone(str(clone / "papers"))


def ctxflow_command() -> str:
    """Return what starts this copy's command in a shell: its name where the shell finds it, else its path.

    >>> os.path.basename(ctxflow_command())
    'ctxflow'
    """
    own = os.path.join(os.path.dirname(sys.executable), "ctxflow")
    found = shutil.which("ctxflow")
    if found is None or os.path.realpath(os.path.dirname(found)) != os.path.realpath(os.path.dirname(own)):
        near = os.path.relpath(own)
        return own if near.startswith("..") else near
    return "ctxflow"


def namesake() -> Distribution | None:
    """Return the distribution in this Python's environment that is called ctxflow and is not this one, if there is one.

    Its files lie under the names of ours: where both are installed, one has overwritten parts of the other.
    """
    from importlib.metadata import distributions

    for found in distributions(name="ctxflow"):
        ours = any(point.value.startswith("ctxflow.cli:") for point in found.entry_points)  # As it was called once.
        if not ours and found.metadata["Name"]:
            return found
    return None


def metadata() -> str:
    """Return the text of this distribution's metadata; "" where it is not installed but only found on the path."""
    found = _distribution()
    return (found.read_text("METADATA") or found.read_text("PKG-INFO") or "") if found else ""


def _distribution() -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution  # Not quick: workers seldom need it.

    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _version() -> str:
    found = _distribution()
    return found.version if found else ""


def _requirements(packages: Iterable[str], extra: str) -> list[str]:
    """Return pip's arguments for packages, in the versions that the extra asks for."""
    asked = {_normal(re.findall(_NAME, each)[0]): each for each in _of_extra(extra)}
    return [asked.get(_normal(name), name) for name in packages] or list(asked.values())


def _of_extra(extra: str) -> Iterator[str]:
    found = _distribution()
    for line in (found.requires or []) if found else []:
        requirement, _, marker = line.partition(";")
        if extra not in re.findall(_EXTRA, marker):
            continue
        own = re.fullmatch(rf"{DISTRIBUTION}\[(.*)]", requirement.strip())
        if own:
            for name in own[1].split(","):
                yield from _of_extra(name.strip())
        else:
            yield requirement.strip().replace(" ", "")


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _on_worker() -> bool:
    """Return whether this is a worker, started from the one file that workers get (host/program.py)."""
    return not os.path.exists(__file__)


def _for_workers(requirements: Iterable[str]) -> str:
    wanted = shlex.join(requirements)
    if os.environ.get("CTXFLOW_PYTHON"):
        return f"pip install {wanted} in the environment that was packed, and pack it again (`ctxflow env pack`)"
    host = platform.node()
    if sys.prefix == sys.base_prefix:
        return (
            f"name an environment in the site's `python_environment` after pip install {wanted} in it "
            f"(the workers on {host} run {sys.executable})"
        )
    return f"{shlex.quote(sys.executable)} -m pip install {wanted} (the workers' environment, on {host})"


def _pip_install() -> str:
    """Return the command that installs packages for this Python: `pip` where the shell finds this Python's."""
    found = shutil.which("pip")
    if found and os.path.dirname(found) == os.path.dirname(sys.executable):
        return "pip install"
    from importlib.util import find_spec

    if find_spec("pip"):
        return f"{shlex.quote(sys.executable)} -m pip install"
    return f"uv pip install --python {shlex.quote(sys.executable)}"


def _install_clone(what: str) -> str:
    return f"{_pip_install()} {'-e ' if _is_clone(_root()) else ''}{shlex.quote(what)}"


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _clone() -> Path | None:
    """Return the clone that this copy runs from or was installed from, if it is there."""
    if _is_clone(_root()):
        return _root()
    source = _source()
    return source if source and _is_clone(source) else None


def _is_clone(folder: Path) -> bool:
    try:
        return re.search(rf"^name = {DISTRIBUTION}$", (folder / "setup.cfg").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _wheel() -> Path | None:
    """Return the wheel that this copy was installed from, if it is there."""
    source = _source()
    return source if source and source.is_file() else None


def _source() -> Path | None:
    """Return the folder or file that pip installed this copy from, as it noted it (direct_url.json)."""
    found = _distribution()
    if found is None or Path(str(found.locate_file("ctxflow"))).resolve() != Path(__file__).resolve().parent:
        return None  # Another copy is installed.
    noted = found.read_text("direct_url.json")
    url = urlsplit(json.loads(noted)["url"]) if noted else None
    return Path(unquote(url.path)) if url and url.scheme == "file" else None
