"""Real engines in library processes: the Python that has them, models of random weights, and what a run leaves behind.

One engine a module: a start takes ten seconds of a core, with processes of its own twice that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_belongings import Belongings

from ctxflow.testing.small_models import make_causal_lm
from suite import starts

_BUILDS = Path(__file__).resolve().parents[2] / "requirements" / "vllm_environment.py"
_VLLM_SECONDS = 300
_NO_VLLM = "No vLLM: "


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the tests' own time: the first may have to build the environment."""
    for item in items:
        if "vllm_python" in getattr(item, "fixturenames", ()):
            limit = item.get_closest_marker("timeout") or pytest.mark.timeout(_VLLM_SECONDS).mark
            item.add_marker(pytest.mark.timeout(*limit.args, func_only=True), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped for want of vLLM, not in one for each test."""
    skipped = terminalreporter.getreports("skipped")
    reasons = (str(report.longrepr[-1]).partition(_NO_VLLM) for report in skipped if isinstance(report.longrepr, tuple))
    if whys := [why for _, found, why in reasons if found]:
        terminalreporter.write_line(f"Tests that need vLLM: {len(whys)} skipped. {whys[0]}", yellow=True)


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with a real vLLM for CPUs and what ctxflow needs, but not ctxflow.

    It is the one that CTXFLOW_VLLM_PYTHON names, or is built, once, outside the checkout (requirements/), and then
    named in that variable.
    """
    if named := os.environ.get("CTXFLOW_VLLM_PYTHON"):
        return Path(named)
    command = ["nice", "-n", "5", sys.executable, str(_BUILDS)]
    shown = request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled()
    said = ""
    with shown, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for said in process.stderr:
            sys.stderr.write(f"\n{said.rstrip()}")
        python = process.stdout.read().strip()
    if process.returncode == 3:
        pytest.skip(_NO_VLLM + said.strip())
    assert process.returncode == 0, said
    if os.environ.get(starts.VARIABLE):
        starts.install(python)
    os.environ["CTXFLOW_VLLM_PYTHON"] = python
    return Path(python)


@pytest.fixture(scope="package")
def engine_environment(vllm_python: Path) -> Iterator[Path]:
    """Variables by which library processes run the Python with vLLM; workers share the cores unbound."""
    variables = {
        "CTXFLOW_PYTHON": str(vllm_python),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield vllm_python


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with heads of 32: engines have no kernels for smaller ones."""
    return make_causal_lm(tmp_path_factory.mktemp("llama"), hidden_size=64, head_size=32)


@pytest.fixture
def belongings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Belongings]:
    """What belongs to the drivers that this test starts, here or as programs: `none_left` says what is still there."""
    folder = Path(tempfile.mkdtemp(prefix="ctx"))  # Short: paths of sockets are.
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Belongings(folder) as found:
        monkeypatch.setenv(found.VARIABLE, found.mark)
        yield found
    shutil.rmtree(folder, ignore_errors=True)
