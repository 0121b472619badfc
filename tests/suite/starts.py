"""Count the Python processes of a test run, and what their imports cost.

    python starts.py PYTHON       install the hook into PYTHON's environment: a .pth file and this module

Every process of that environment in which `CTXFLOW_TEST_STARTS` names a folder then appends lines of JSON to a file
there: the CPU seconds of its start, and of each import of a watched package without those nested in it.
Only the standard library is used, and without the variable nothing but the variable is looked at.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "CTXFLOW_TEST_STARTS"
WATCHED = frozenset({
    "aiohttp", "cloudpickle", "ctxflow", "highspy", "hypothesis", "matplotlib", "numpy", "ot", "pandas", "parsl",
    "pyarrow", "pydantic", "pytest", "rich", "scipy", "sentence_transformers", "sklearn", "torch", "transformers",
    "typer", "vllm",
})  # fmt: skip
_PTH = f"import os; os.environ.get('{VARIABLE}') and __import__('ctxflow_test_starts').watch()\n"
_nested = [0.0]
"""CPU seconds of watched imports inside each import that is under way; the first is of none."""


def watch() -> None:
    """Note this process's start, and from now on its imports; once, though .pth files may be read twice."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _note(start=time.process_time(), argv=sys.orig_argv[1:4])
    sys.meta_path.insert(0, _Finder())


def _note(**line: Any) -> None:
    with contextlib.suppress(OSError), open(Path(os.environ[VARIABLE], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


class _Finder:
    """Finds watched packages by the other finders, and has their import timed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _time(name, spec.loader)
                return spec
        return None


def _time(name: str, loader: Any) -> None:
    """Replace a loader's way to run its module by one that notes what this takes."""
    run = loader.exec_module

    def timed(module: ModuleType) -> None:
        with _timing(name):
            run(module)

    with contextlib.suppress(AttributeError):
        loader.exec_module = timed


@contextlib.contextmanager
def _timing(name: str) -> Iterator[None]:
    begun = time.process_time()
    _nested.append(0.0)
    try:
        yield
    finally:
        taken, inner = time.process_time() - begun, _nested.pop()
        _nested[-1] += taken
        _note(name=name, cpu=taken - inner)


def install(python: str) -> None:
    """Put the hook into an environment."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    folder = Path(found.stdout.strip())
    (folder / "ctxflow_test_starts.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "ctxflow_test_starts.pth").write_text(_PTH, encoding="utf-8")


def totals(folder: Path) -> list[tuple[str, int, float]]:
    """Return what was started, how often, and its CPU seconds: interpreters, then imports, dearest first."""
    count: dict[str, int] = {}
    cpu: dict[str, float] = {}
    for file in folder.glob("*.jsonl"):
        for text in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # A process may be killed while it writes.
                line = json.loads(text)
                name = f"import {line['name']}" if "name" in line else "interpreter"
                count[name] = count.get(name, 0) + 1
                cpu[name] = cpu.get(name, 0.0) + line.get("cpu", line.get("start", 0.0))
    return sorted(((name, count[name], cpu[name]) for name in count), key=lambda each: -each[2])


if __name__ == "__main__":
    install(sys.argv[1])
