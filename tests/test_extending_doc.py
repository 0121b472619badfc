"""The policy of docs/extending.md: its package is made of the page's blocks, tested by the suite, and selected."""

import re
import sys
from pathlib import Path

import pytest
import tomllib

import forked
from waiting import patience

SECTION = re.search(
    r"## A policy\n(.*?)\n## ", (Path(__file__).parent.parent / "docs" / "extending.md").read_text(), re.DOTALL
)[1]
BLOCKS = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", SECTION, re.DOTALL))
PROGRAM = """
from ctxflow import ContextExecutor, batch_app

@batch_app
def double(numbers):
    return [2 * number for number in numbers]

executor = ContextExecutor(site="site.toml")
executor.run_dir = "run"
if __name__ == "__main__":
    with executor:
        print(list(double.map(range(5))), executor._policies.choices["routing"])
"""


@pytest.fixture
def package(tmp_path):
    """The page's files, and what pip leaves in site-packages."""
    assert set(BLOCKS) == {
        "fastest_first.py", "test_fastest_first.py", "test_order.py", "pyproject.toml", "site.toml"
    } and SECTION.count("```") == 2 * len(BLOCKS)  # fmt: skip
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    project = tomllib.loads(BLOCKS["pyproject.toml"])["project"]
    info = tmp_path / "fastest_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    offered = "\n".join(f"{name} = {place}" for name, place in project["entry-points"]["ctxflow.policies"].items())
    (info / "entry_points.txt").write_text(f"[ctxflow.policies]\n{offered}\n")
    return tmp_path


def run(package, *words):
    found = forked.run(
        [sys.executable, *words], cwd=package, capture_output=True, check=False, text=True, timeout=patience(200)
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_policy_passes_the_suite(package):
    assert re.search(r"\d\d passed", run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."))


def test_the_policy_is_selected_by_a_site(package):
    (package / "program.py").write_text(PROGRAM)
    shown = run(package, "program.py")
    assert shown == "[0, 2, 4, 6, 8] {'policy': 'fastest-first', 'untried': False}\n"
