"""What a wheel built from this tree holds, and how it looks from the front door."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ctxflow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from what git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
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
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    subprocess.run(build, cwd=tree, check=True, timeout=110, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_holds_everything(wheel):
    held = set(wheel.namelist())
    for source in (ROOT / "src" / "ctxflow").rglob("*.py"):
        assert source.relative_to(ROOT / "src").as_posix() in held
    assert "ctxflow/py.typed" in held
    for source in (ROOT / "examples" / "prompt_for_fact").rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            assert f"ctxflow/examples/{source.relative_to(ROOT / 'examples').as_posix()}" in held


def test_wheel_declares_what_it_needs(wheel):
    name = next(n for n in wheel.namelist() if n.endswith("METADATA"))
    needed = re.findall(r"^Requires-Dist: ([\w.-]+)(?![^\n]*extra ==)", wheel.read(name).decode(), re.MULTILINE)
    assert {n.lower() for n in needed} == {
        "parsl", "cloudpickle", "numpy", "psutil", "pydantic", "rich", "typer", "tomli"
    }  # fmt: skip


@pytest.mark.parametrize("room", ["executors", "policies"])
def test_rooms_open_at_the_top(room):
    assert (ROOT / room).is_symlink()
    assert (ROOT / room / "__init__.py").is_file()


def test_the_public_names_are_offered_before_they_are_used():
    program = (
        "import rlcompleter, ctxflow; complete = rlcompleter.Completer({'ctxflow': ctxflow}).complete\n"
        "n = 0\n"
        "while (name := complete('ctxflow.', n)) is not None:\n"
        "    print(name.removeprefix('ctxflow.').rstrip('('))\n"
        "    n += 1\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=60)
    assert set(run.stdout.split()) == set(ctxflow.__all__) - {"__version__"}
    assert all(hasattr(ctxflow, name) for name in ctxflow.__all__)
