"""What a wheel built from this tree holds, and how it looks from the front door."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ctxflow
from waiting import patience

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(wheel_file):
    """What is in a wheel that was built from what git knows."""
    return zipfile.ZipFile(wheel_file)


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
        "parsl", "cloudpickle", "highspy", "numpy", "pydantic", "rich", "typer", "tomli"
    }  # fmt: skip


def test_the_wheel_has_nothing_of_the_papers_experiments(wheel):
    """They are a distribution of their own, and what only they need is no need of ctxflow's users."""
    held = [name for name in wheel.namelist() if not name.startswith("ctxflow/examples/")]
    papers = [path.name for path in (ROOT / "papers" / "ctxflow_papers").iterdir() if path.is_dir()]
    assert {"gh_agh", "flextopo", "torta", "turboserve", "pervasive_context"} <= set(papers)
    assert not [name for name in held if name.startswith("papers") or "ctxflow_papers" in name]
    assert not [name for name in held if re.match(rf"ctxflow/simulator/({'|'.join(papers)})/", name)]
    metadata = wheel.read(next(name for name in held if name.endswith("METADATA"))).decode()
    assert "gymnasium" not in metadata.partition("\n\n")[0]


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
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=patience()
    )
    assert set(run.stdout.split()) == set(ctxflow.__all__) - {"__version__"}
    assert all(hasattr(ctxflow, name) for name in ctxflow.__all__)


@pytest.mark.parametrize("first", ["ctxflow.context", "ctxflow.decorators", "ctxflow.host.library", "ctxflow"])
def test_context_is_the_decorator_whatever_is_imported_first(first):
    program = (
        f"import {first}; import ctxflow; from ctxflow import context; print(type(ctxflow.context), type(context))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=patience()
    )
    assert run.stdout == "<class 'function'> <class 'function'>\n"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("__main__", {"ctxflow.context", "tarfile", "urllib.request"}),
        ("library", {"tarfile", "urllib.request"}),
        ("vine_library", {"ctxflow.context", "tarfile", "urllib.request"}),
        ("worker", {"ctxflow.context", "urllib.request"}),
    ],
)
def test_what_a_worker_can_do_without_when_it_starts_is_not_imported(program, unneeded):
    program = f"import sys, ctxflow.host.{program}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=patience()
    )
    assert not unneeded & set(run.stdout.split())


def test_what_has_no_use_for_parsl_does_not_import_it():
    program = (
        "import sys, ctxflow.batch.driver, ctxflow.simulator, ctxflow.executors.bare\n"
        "import ctxflow.cli.batch_command\n"
        "import ctxflow.cli.simulate_command, ctxflow.cli.decision_commands, ctxflow.cli.run_commands\n"
        "import ctxflow.cli.report_command\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('parsl', 'torch')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, timeout=patience()
    )
    assert run.stdout == "[]\n"
