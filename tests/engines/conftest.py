"""Real engines in library processes: the Python that has them, models of random weights, and what a run leaves behind.

One engine a module: a start takes ten seconds of a core, with processes of its own twice that.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_belongings import Belongings

from ctxflow.testing.small_models import make_causal_lm


@pytest.fixture(scope="package")
def engine_environment(vllm_python: Path) -> Iterator[Path]:
    """Variables by which library processes run the Python with vLLM; workers share the cores unbound."""
    variables = {
        "CTXFLOW_PYTHON": str(vllm_python),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
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
