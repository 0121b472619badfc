"""Run the parts of the suite beside each other: lint, local tests, those of the testbed, those of real engines.

Each part's output is in `build/NAME.log`, its times in `build/times/NAME.xml`. Tests of engines run after the
testbed's: starts of engines beside clusters wait for minutes. All but the testbed's are nice, so that these, which
mostly wait for daemons, need not wait for a core too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from suite import starts
from suite.depth import VARIABLE as DEPTH

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
ALL = ("lint", "local", "cluster", "engines")
_VLLM = "vllm-environment"
_AFTER = {"engines": ("cluster", _VLLM)}
_BIN = Path(sys.executable).parent
_END_SECONDS = 180.0
"""How long a part may take to end after Ctrl-C: a testbed is taken down."""
_SHOWN_SECONDS = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports",),
    ("lint-imports", "--config", "papers/pyproject.toml"),
    ("python", "lint/house.py"),
)
_IMAGE = "ctxflow-testbed"


@dataclass(frozen=True)
class How:
    """How to run the suite.

    :ivar depth: see `suite.depth`.
    :ivar seed: of the order of tests; a new one each time if empty.
    :ivar shard: K/N, the part of the tests that is run; all if empty.
    :ivar testbeds: how many testbeds are used side by side.
    :ivar words: more of pytest's options.
    """

    depth: str = "test"
    seed: str = ""
    shard: str = ""
    testbeds: int = 3
    words: Sequence[str] = ()


@dataclass
class Part:
    """A part that runs, and how long it took."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


def interrupt_at_signals() -> None:
    """Raise KeyboardInterrupt at SIGINT and at SIGTERM, so that parts are ended when a CI cancels a run.

    SIGINT too is set: a shell's background commands start with it ignored, and so would all that tests start.
    """

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    for number in _SIGNALS:
        signal.signal(number, interrupt)


def run(names: Sequence[str], how: How) -> int:
    """Run parts of the suite, print what they say and which tests failed, and return the exit status."""
    shutil.rmtree(BUILD / "times", ignore_errors=True)
    (BUILD / "times" / "starts").mkdir(parents=True)
    environment = {**os.environ, DEPTH: how.depth, starts.VARIABLE: str(BUILD / "times" / "starts")}
    commands = {name: _command(name, how) for name in names}
    if len(names) == 1:
        return _alone(names[0], commands[names[0]], environment)
    if "engines" in names:  # The environment is built meanwhile; the tests, which wait for it, say it if that fails.
        commands = {_VLLM: [sys.executable, "requirements/vllm_environment.py"], **commands}
    return beside(commands, environment, BUILD)


def _alone(name: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one part with its output in the terminal."""
    with subprocess.Popen(words, cwd=ROOT, env=environment) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as interrupt:
            if interrupt.args == (signal.SIGTERM,):  # At SIGINT the terminal interrupts it too.
                process.send_signal(signal.SIGINT)
            process.wait(_END_SECONDS)
            return 130


def beside(commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], logs: Path) -> int:
    """Run commands beside each other, with their output in files, and return the exit status: 0 if all succeed."""
    waiting, running, ended = dict(commands), list[Part](), list[Part]()
    begun = shown = time.monotonic()
    try:
        while waiting or running:
            busy = {*waiting, *(part.name for part in running)}
            for name in [each for each in waiting if busy.isdisjoint(_AFTER.get(each, ()))]:
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # Whatever has begun is in `running`.
                try:
                    running.append(_begin(name, waiting.pop(name), environment, logs))
                finally:
                    _unblock_signals()
            time.sleep(0.2)
            for part in [each for each in running if each.process.poll() is not None]:
                running.remove(part)
                ended.append(part)
                part.seconds = time.monotonic() - part.begun
                how = "passed" if part.process.returncode == 0 else "FAILED"
                print(f"{time.monotonic() - begun:6.0f} s  {part.name} {how}", flush=True)
            if running and time.monotonic() - shown > _SHOWN_SECONDS:
                shown = time.monotonic()
                print(f"{shown - begun:6.0f} s  " + "; ".join(map(_progress, running)), flush=True)
    except KeyboardInterrupt:
        _end(running)
        print(f"Interrupted; the output until then is in {logs}.")
        return 130
    return _summary([part for part in ended if part.name != _VLLM], time.monotonic() - begun)


def _begin(name: str, words: Sequence[str], environment: Mapping[str, str], logs: Path) -> Part:
    log = logs / f"{name}.log"
    nice = [] if name == "cluster" else ["nice", "-n", "5"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*nice, *words],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_unblock_signals,  # noqa: PLW1509 - No thread runs beside.
        )  # fmt: skip
    return Part(name, process, log)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _command(name: str, how: How) -> list[str]:
    """Return the command of a part."""
    if name == "lint":
        return ["sh", "-c", " && ".join(" ".join([str(_BIN / tool), *words]) for tool, *words in _LINT)]
    python = [sys.executable, "-m", "pytest", f"--junitxml=build/times/{name}.xml"]
    python += ["-o", f"junit_suite_name={how.depth}", *how.words]
    if how.seed:
        python += ["-p", "randomly", f"--randomly-seed={how.seed}"]
    if how.shard:
        python += [f"--shard={how.shard}"]
    if name == "engines":
        return [*python, "tests/engines"]
    if name == "cluster":
        return _cluster([*python, "tests/cluster"], how.testbeds)
    left_out = ["tests/cluster", "tests/engines", "src/ctxflow/examples"]
    local = ["tests", "papers", "src/ctxflow", *(f"--ignore={each}" for each in left_out)]
    marks = ["-m", "not model"] if how.depth == "quick" else []
    processes = "logical" if how.depth == "quick" else "auto"  # What is quick does not wait.
    return [*python, "-n", processes, "--dist", "worksteal", "--doctest-modules", *marks, *local]


def _cluster(python: Sequence[str], testbeds: int) -> list[str]:
    """Return the command for the testbed's tests: here, or in a container; else pytest says why they are skipped."""
    side_by_side = " ".join([*python, "-n", str(testbeds), "--dist", "loadgroup"])
    inside = " ".join(["/opt/ctxflow/bin/python", *python[1:]])
    built = f"docker build -t {_IMAGE} --build-arg UP_OPTIONS=--with-torch -f testbed/Dockerfile ."
    script = f"""
if testbed/up --root-only --with-torch; then
    exec {side_by_side}
elif ! testbed/up --check 2>/dev/null && docker info >/dev/null 2>&1; then
    echo "The testbed cannot be built here: running its tests in a container."
    {built} && exec docker run --rm --init --privileged --tmpfs /run:exec {_IMAGE} {inside}
else
    exec {" ".join(python)}
fi"""
    return ["sh", "-c", script]


def _progress(part: Part) -> str:
    """Return how far a part is, as the end of its log says."""
    with part.log.open("rb") as file:
        file.seek(max(0, part.log.stat().st_size - 4000))
        said = file.read().decode(errors="replace")
    percent = re.findall(r"\[ *(\d+%)\]", said)
    last = (said.strip().splitlines() or [""])[-1][-60:]
    return f"{part.name} {percent[-1] if percent else last}"


def _end(running: Sequence[Part]) -> None:
    """Interrupt parts, and kill what does not end."""
    for part in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(part.process.pid, signal.SIGINT)
    for part in running:
        try:
            part.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(part.process.pid, signal.SIGKILL)
        if part.name == "cluster":  # xdist may kill a process of tests before it has taken its testbed down.
            for testbed in Path("/run").glob("ctxflow-testbed-gw[0-9]"):
                down = [sys.executable, "testbed/down"]
                subprocess.run(down, cwd=ROOT, env={**os.environ, "CTXFLOW_TESTBED": testbed.name[16:]}, check=False)


def _summary(ended: Sequence[Part], seconds: float) -> int:
    """Print each part's output, then what failed of all; return the exit status."""
    for part in sorted(ended, key=lambda each: each.begun):
        print(f"\n=== {part.name}, {part.seconds:.0f} s, in {part.log}")
        print(part.log.read_text(encoding="utf-8", errors="replace"), flush=True)
    failed = [part for part in ended if part.process.returncode]
    for part in failed:
        lines = part.log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join([f"FAILED {part.name}", *(each for each in lines if each.startswith(("FAILED ", "ERROR ")))]))
    print(f"{'FAILED' if failed else 'Passed'} in {seconds:.0f} s; make test-times shows where the time went.")
    return int(bool(failed))
