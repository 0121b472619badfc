"""The Debian root that every host runs: built by `provision`, cached, refreshed where its inputs changed.

Each part leaves a stamp in the root with the digest of what it was made from, so that a second `up` finds
nothing to do.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from .machine import run
from .progress import work
from .settings import CHECKOUT, MINUTES, TESTBED, CannotBuild, TestbedError, cache

PROVISION = TESTBED / "provision"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# ndcctools cannot make a library without the last two; Parsl's own suite needs what comes before them.
TOOLS_OF_TESTS = (
    "setuptools",
    "pytest >= 8, < 9",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "mock",
    "pandas",
    "sqlalchemy >= 2",
    "conda-pack",
    "threadpoolctl",
    "py-spy",
)


def prepare(with_torch: bool) -> Path:
    """The path of a root in which everything is up to date; what is missing is built, shown step by step.

    :raises CannotBuild: debootstrap could not make a Debian root.
    :raises TestbedError: a step failed; what it began is done anew the next time.
    """
    root = find()
    if root is None:
        root = cache() / f"root-{digest([PROVISION])}"
        _bootstrap(root)
    python = digest([PROVISION], requirements())
    if _stamp(root, "python") != python:
        for stamp in ("python", "torch", "sources"):
            _stamps(root).joinpath(stamp).unlink(missing_ok=True)
        _provision(root, "Installing Python packages", "python", requirements())
        _write_stamp(root, "python", python)
    torch = digest([PROVISION], requirements("example"))
    if with_torch and _stamp(root, "torch") != torch:
        _provision(root, "Installing PyTorch and the example's packages", "torch", requirements("example"))
        _write_stamp(root, "torch", torch)
    sources = digest(_sources())
    if _stamp(root, "sources") != sources:
        _provision(root, "Installing ctxflow from the checkout", "sources", [])
        _write_stamp(root, "sources", sources)
    return root


def find() -> Path | None:
    """The root that is there: this very system if testbed/Dockerfile built it, else the cached one."""
    if _stamp(Path("/"), "base"):
        return Path("/")
    root = cache() / f"root-{digest([PROVISION])}"
    return root if _stamp(root, "base") else None


def prune(keep: Path) -> None:
    """Delete the roots of other versions of the provisioning script that no `up` wanted for a week."""
    if keep != Path("/"):
        os.utime(keep)
    for old in cache().glob("root-*"):
        if old != keep and time.time() - old.stat().st_mtime > 7 * 24 * 3600:
            shutil.rmtree(old)


def digest(files: Iterable[Path], words: Iterable[str] = ()) -> str:
    """A short digest of files' names and bytes, and of words."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    total.update("\0".join(words).encode())
    return total.hexdigest()[:12]


def requirements(extra: str | None = None) -> list[str]:
    """What pip has to install: for ctxflow, its policies, servers and tests, or for one of its extras.

    Extras that name other extras of ctxflow are followed; PyTorch and transformers are Debian's.
    """
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg")
    if extra is None:
        return [
            *_lines(config["options"]["install_requires"]),
            *requirements("policies"),
            *requirements("server"),
            *TOOLS_OF_TESTS,
        ]
    found: list[str] = []
    for line in _lines(config["options.extras_require"][extra]):
        nested = re.fullmatch(r"parsl-ctxflow\[(.*)]", line)
        names = nested[1].split(",") if nested else []
        found += [line for name in names for line in requirements(name.strip())] if nested else [line]
    return [line for line in found if not re.match(r"(torch|transformers)\b", line)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _sources() -> list[Path]:
    files = (path for path in (CHECKOUT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [
        *sorted(files),
        *(CHECKOUT / name for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")),
    ]


def _stamps(root: Path) -> Path:
    return root / "etc/ctxflow-testbed"


def _stamp(root: Path, part: str) -> str | None:
    path = _stamps(root) / part
    return path.read_text().strip() if path.is_file() else None


def _write_stamp(root: Path, part: str, value: str) -> None:
    (_stamps(root) / part).write_text(value + "\n")


def _bootstrap(root: Path) -> None:
    partial = root.with_name(root.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    scripts = Path("/usr/share/debootstrap/scripts")
    script = [] if (scripts / "forky").exists() else [str(scripts / "sid")]
    command = [
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates",
        "forky",
        str(partial),
        *_mirror(script),
    ]
    try:
        work("Making a Debian root", command, log(), 20 * MINUTES, _environment(PATH=os.environ["PATH"]))
    except TestbedError as error:
        raise CannotBuild(str(error)) from None  # No mirror within reach, or a machine that lets root make no devices.
    _provision(partial, "Installing HTCondor, Slurm, TaskVine and llama.cpp", "packages", [])
    _write_stamp(partial, "base", digest([PROVISION]))
    partial.rename(root)


def _mirror(script: list[str]) -> list[str]:
    """The Debian mirror that this machine itself uses, if any, and the script of debootstrap."""
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(path.read_text() for path in lists if path.suffix in (".list", ".sources") and path.is_file())
    found = re.search(r"^(?:URIs:|deb\b.*?)\s+(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    if found:
        return [found[1], *script]
    return ["", *script] if script else []


def _configure(root: Path) -> None:
    """Give the root this machine's certificates, name servers, and settings of apt and pip."""
    if root == Path("/"):
        return
    settings = _pip_settings()
    constraints = [Path(path) for path in settings.get("constraint", "").split() if path.startswith("/")]
    for path in (CERTIFICATES, Path("/etc/resolv.conf"), *constraints):
        target = root / path.relative_to("/")
        if path.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(path.read_bytes())
    dump = run(["apt-config", "dump"], check=False).stdout if shutil.which("apt-config") else ""
    kept = re.findall(r"^Acquire::(?:https?|Check-\S+)\b.*;$", dump, re.MULTILINE)
    (root / "etc/apt/apt.conf.d/90machine").write_text("\n".join(kept) + "\n")
    lines = ["[global]\n", *(f"{key} = {value}\n" for key, value in settings.items())]
    (root / "etc/pip.conf").write_text("".join(lines))


def _pip_settings() -> dict[str, str]:
    listed = run([sys.executable, "-m", "pip", "config", "list"], check=False).stdout
    found = re.findall(
        r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed.replace(":env:.", "global."), re.MULTILINE
    )
    return dict(found)


def _environment(**more: str) -> dict[str, str]:
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    plain = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": plain, "HOME": "/root", "LC_ALL": "C.UTF-8", **proxies, **more}


def log() -> Path:
    """Where the output of programs goes that build the root."""
    return cache() / "provision.log"


def _provision(root: Path, text: str, part: str, words: list[str]) -> None:
    cache().mkdir(parents=True, exist_ok=True)
    _configure(root)
    script = PROVISION.read_text()
    values = " ".join(_pip_settings().values())
    local = {match for match in re.findall(r"(?:file://|(?<=\s)|^)(/[^\s,]+)", values) if Path(match).is_dir()}
    # Wheels that a local index refers to lie beside it.
    folders = sorted({str(Path(path).parent) if Path(path).name == "simple" else path for path in local})
    if root == Path("/"):
        inside: list[str] = []
    else:
        boot = [str(TESTBED / "boot"), "inside", str(root), str(CHECKOUT), *folders, "--"]
        inside = boot
    command = [*inside, "/bin/bash", "-c", script, "provision", part, *words]
    work(text, command, log(), 20 * MINUTES, _environment(), fenced=root != Path("/"))
