"""What the README's two commands install is written down for each Python, and told when setup.cfg asks for more."""

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from waiting import patience

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
_spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)


def run(program, *words):
    return subprocess.run(
        [sys.executable, program, *words], capture_output=True, text=True, check=False, timeout=patience()
    )


def locked(python):
    """Package -> the version that is installed on a Python."""
    text = (FOLDER / f"{python}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def test_the_files_are_of_what_setup_cfg_asks_for_now():
    done = run(FOLDER / "lock.py", "--check")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def changed(tmp_path):
    """The folder of a tree whose setup.cfg has got one more requirement."""
    shutil.copytree(FOLDER, tmp_path / "requirements")
    (tmp_path / "papers").mkdir()
    shutil.copy(ROOT / "papers" / "pyproject.toml", tmp_path / "papers")
    text = (ROOT / "setup.cfg").read_text()
    (tmp_path / "setup.cfg").write_text(text.replace("    pytest >=", "    lorem-ipsum >= 1\n    pytest >="))
    return tmp_path / "requirements"


def test_a_changed_setup_cfg_is_told(changed):
    done = run(changed / "lock.py", "--check")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == len(lock.PYTHONS)
    assert "3.13.txt is older than setup.cfg's requirements: run make lock" in done.stdout


def test_nothing_is_installed_from_files_of_another_setup_cfg(changed):
    done = run(changed / "install.py", "tests", "locked")
    assert (done.returncode, done.stdout) == (1, "")
    assert "run make lock, or give DEPS=newest" in done.stderr


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_each_python_has_versions_that_setup_cfg_allows(python):
    versions = locked(python)
    environment = {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64"}
    for line in lock.all_requirements():
        asked = Requirement(line)
        name = canonicalize_name(asked.name)
        if name != "torch" and (asked.marker is None or asked.marker.evaluate(environment)):
            assert asked.specifier.contains(versions[name]), line


def test_a_package_that_several_extras_need_has_one_bound():
    """A lower one in `test` would have the lowest versions tried that users do not get."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    bounds = defaultdict(set)
    for extra in config["options.extras_require"].values():
        for asked in map(Requirement, filter(None, extra.splitlines())):
            bounds[canonicalize_name(asked.name)].add(str(asked.specifier))
    assert {name: asked for name, asked in bounds.items() if len(asked) > 1} == {}


@pytest.mark.parametrize("python", lock.PYTHONS)
def test_every_file_has_a_digest_and_no_index_an_address(python):
    text = (FOLDER / f"{python}.txt").read_text()
    entries = re.split(r"\n(?=[a-z])", text.partition("\n")[2])
    assert len(entries) > 80 and all("--hash=sha256:" in entry for entry in entries)
    assert not re.search("https?:|file:|--index|--find-links", text)
    assert not any(re.match("torch|nvidia|cuda|triton", name) for name in locked(python))  # Builds differ.


def test_the_tests_pythons_are_those_that_ctxflow_is_for():
    named = re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert named == list(lock.PYTHONS)
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()
