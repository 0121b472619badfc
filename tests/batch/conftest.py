"""What the tests of this room share: functions to run."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctxflow.batch import work
from ctxflow.cli import main
from ctxflow.executors.bare import BareExecutor

FUNCTIONS = """
import time
from ctxflow import batch_app, context


@context
def table():
    return {"one": 1, "two": 2}


@batch_app(table())
def look_up(known, words):
    return [known[word] for word in words]


@batch_app(batch_size=7)
def upper(texts):
    for text in texts:
        if text == "bad":
            raise ValueError(f"{text} is bad\\nin two lines")
    return [text.upper() for text in texts]


@batch_app(batch_size=50)
def slow(numbers, *, seconds=0.01):
    time.sleep(seconds)
    return [int(number) * 2 for number in numbers]


@batch_app
def joined(first, second, *, between=" "):
    return [a + between + b for a, b in zip(first, second)]


@batch_app
def odd(texts):
    return [{"nan": float("nan"), "object": object(), "fine": {1, 2}}[text] for text in texts]


@context
def broken():
    raise RuntimeError("no such weights")


@batch_app(broken())
def hopeless(model, rows):
    return rows


@batch_app
def wide(rows):
    return [{"length": len(row["text"])} for row in rows]


@batch_app
def shout(texts):  # Texts, or what holds one under "text" or "input".
    inner = [each if isinstance(each, str) else each["text"] if "text" in each else each["input"] for each in texts]
    return [each.upper() for each in inner]


not_callable = 3
"""


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module of functions, `batch_functions`."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "batch_functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def executor(
    functions: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[BareExecutor]:
    """One for all jobs of a module, which may set WORKERS: each start takes a good part of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(functions))
        executor = BareExecutor(workers=getattr(request.module, "WORKERS", 1), log_events=False)
        executor.run_dir = str(tmp_path_factory.mktemp("runs"))
        with executor:
            yield executor


@pytest.fixture
def shared(executor: BareExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the jobs of a test run on the module's executor."""
    monkeypatch.setattr(work, "BareExecutor", lambda site: contextlib.nullcontext(executor))


@pytest.fixture
def folder(tmp_path: Path, functions: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, from which `batch_functions` can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(functions))
    return tmp_path


@contextlib.contextmanager
def _own_imports() -> Iterator[None]:
    """Forget what is imported within, which lies in a test's own folder, and what was done to the path for it."""
    before, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path.cwd())):
                del sys.modules[name]


@pytest.fixture
def command(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int | str, ...]]]:
    """Gives a command's exit status and what it said to standard error (and its output), as if run in the folder."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str, output: bool = False) -> tuple[int | str, ...]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["ctxflow", *words])
        with pytest.raises(SystemExit) as ended, _own_imports():
            main()
        out, said = capfd.readouterr()
        return (int(ended.value.code or 0), said, *([out] if output else []))

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
