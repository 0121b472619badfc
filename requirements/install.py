#!/usr/bin/env python3
"""Install ctxflow, the papers' experiments and what they need for the Python that runs this: the Makefile's rules.

  install.py example|tests|torch locked|newest|lowest [INDEX]

`locked` is what the files beside this one say; `newest` and `lowest` are what setup.cfg and papers/pyproject.toml
allow today. PyTorch comes by itself, as `torch`, from PyPI or from another index: all but the tests that load models
does without it. `tests` is what they need besides the example, and the papers' experiments (papers/), which ctxflow
itself does without.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from lock import BESIDES, HERE, PYTHONS, stale

ROOT = HERE.parent
PYTHON = "{}.{}".format(*sys.version_info)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
COST = """\
Installing {torch}: with CUDA's libraries, as PyPI has it, this environment will be of 5.9 GB.
The build for CPUs makes it 2.2 GB: to have that, stop here (Ctrl-C) and add to the command
TORCH_INDEX=https://download.pytorch.org/whl/cpu
"""


def main(what: str, deps: str, index: str = "") -> None:
    """Do what the command line says."""
    folder = locks(deps)
    if what == "torch":
        torch(folder, index)
        return
    example, _, besides = (folder / f"{PYTHON}.txt").read_text().partition(BESIDES)
    wanted = {"example": example, "tests": besides}[what]
    count = sum("==" in line for line in wanted.splitlines())
    print(f"Installing {count} packages, {deps}, for Python {PYTHON} into {sys.prefix} ...", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(wanted)
        file.flush()
        pip("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", file.name)
    own = {"example": ROOT, "tests": ROOT / "papers"}[what]
    pip("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(own))


def locks(deps: str) -> Path:
    """The folder of the files to install from; but for those that are kept here, they are made now."""
    if deps == "locked":
        if PYTHON not in PYTHONS:
            sys.exit(f"nothing is locked for Python {PYTHON}: give the command with DEPS=newest")
        if stale():
            asking = "setup.cfg or papers/pyproject.toml asks for other packages than requirements/ has"
            sys.exit(f"{asking}: run make lock, or give DEPS=newest")
        return HERE
    resolution = {"newest": "highest", "lowest": "lowest-direct"}[deps]
    folder = Path(sys.prefix) / f"requirements-{deps}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:  # uv is needed for this alone.
            venv.create(scratch, with_pip=True)
            python = Path(scratch) / "bin" / "python"
            subprocess.run([str(python), *PIP[1:], "--quiet", "uv"], check=True)
            command = [str(python), str(HERE / "lock.py"), str(folder), PYTHON, resolution]
            try:
                subprocess.run(command, check=True)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return folder


def torch(folder: Path, index: str) -> None:
    """Install PyTorch, saying first what it takes."""
    wanted = (folder / "torch.txt").read_text().strip()
    try:
        if importlib.metadata.version("torch").partition("+")[0] == wanted.partition("==")[2]:
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    if not index:
        print(COST.format(torch=wanted), flush=True)
    pip(*(["--index-url", index] if index else []), wanted)


def pip(*words: str) -> None:
    """Have pip install something; it says itself what went wrong."""
    done = subprocess.run([*PIP, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
