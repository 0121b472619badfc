"""Fixtures: a copy of what git knows of this tree, and a wheel and a source distribution built from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from waiting import patience

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of this tree."""
    tree = tmp_path_factory.mktemp("clean") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())
    return tree


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """Build a "wheel" or an "sdist" of a tree, into a folder, with variables of the environment."""

    def built(kind: str, tree: Path, folder: Path, **variables: str) -> Path:
        # As pip has it built, which itself takes as long again.
        program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        command = [sys.executable, "-c", program, str(folder)]
        given = {**os.environ, "CTXFLOW_HOME": "", **variables}
        done = subprocess.run(
            command, cwd=tree, env=given, check=True, timeout=patience(110), capture_output=True, text=True
        )
        return folder / done.stdout.split()[-1]

    return built


@pytest.fixture(scope="session")
def wheel_file(clean_tree: Path, build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from what git knows."""
    return build("wheel", clean_tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist_file(clean_tree: Path, build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution made of it."""
    return build("sdist", clean_tree, tmp_path_factory.mktemp("sdist"))
