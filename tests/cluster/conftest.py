"""The testbed for the cluster tests: brought up once, mended before every test, taken down at the end.

Tests here are marked `cluster`; where no testbed can be built they are skipped, with one line that says why. Where
it has to be built first, the steps are shown as they go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import SECONDS, eventually, patience

TESTBED = Path(__file__).resolve().parents[2] / "testbed"
# Processes of tests side by side have a testbed each.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["CTXFLOW_TESTBED"] = worker
sys.path.insert(0, str(TESTBED))
from pool.cluster import command_on  # noqa: E402
from pool.settings import NAME, STATE, TestbedError  # noqa: E402

FORGET_SECONDS = 10.0

NO_TESTBED = "No testbed: "


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: runs on the testbed, a real HTCondor pool with TaskVine")
    config.addinivalue_line("markers", "xdist_group(name): tests on a pool of another kind, made once for all of them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the tests' own time: the fixtures of the first may have to build the testbed.

    Those that need no testbed come last: what waits behind a test when all others are given out is soon done.
    """
    items.sort(key=lambda item: not _wants_testbed(item, "any_testbed"))
    for item in items:
        if Path(__file__).parent in item.path.parents and (limit := item.get_closest_marker("timeout")):
            item.add_marker(pytest.mark.timeout(*limit.args, func_only=True), append=False)


def _wants_testbed(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped and why, not in one for each test."""
    reasons = (str(report.longrepr[-1]).partition(NO_TESTBED) for report in terminalreporter.getreports("skipped"))
    if whys := [why for _, found, why in reasons if found]:
        terminalreporter.write_line(f"Tests that need the testbed: {len(whys)} skipped. {whys[0]}", yellow=True)


class Testbed:
    """The testbed's commands, as a test calls them."""

    __test__ = False
    name = NAME
    state = STATE
    shared = STATE / "shared"

    def command(
        self, name: str, *words: str, check: bool = True, limit: float = 120, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run testbed/NAME and return what it wrote; where `check` is set it must succeed."""
        done = subprocess.run(
            [sys.executable, str(TESTBED / name), *words],
            capture_output=True, check=False, cwd="/", input=text, text=True, timeout=patience(limit),
        )  # fmt: skip
        assert not check or done.returncode == 0, f"testbed/{name} {words}: {done.stdout} {done.stderr}"
        return done

    def run(self, *words: str, user: str = "alice", host: str = "submit", text: str = "") -> str:
        """Run a command in the testbed and return its output.

        As `testbed/run` does, without its interpreter: what is waited for is asked for again and again.
        """
        try:
            command = command_on(host, user, "", list(words))
        except TestbedError as error:
            raise AssertionError(str(error)) from None
        done = subprocess.run(
            command, capture_output=True, check=False, cwd="/", input=text, text=True, timeout=patience()
        )  # fmt: skip
        assert done.returncode == 0, f"{words} on {host}: {done.stdout} {done.stderr}"
        return done.stdout.strip()

    def status(self) -> dict[str, Any]:
        """The pool as data."""
        found: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return found

    def submit(self, description: dict[str, object], count: int = 1, user: str = "alice") -> str:
        """Submit jobs from a fresh directory under the user's home; its name is returned."""
        needs = {"request_cpus": 1, "request_memory": "100MB", "request_disk": "100MB"}
        common = {"should_transfer_files": "YES", "transfer_executable": "false", "log": "log"}
        lines = [f"{key} = {value}" for key, value in {**needs, **common, **description}.items()]
        script = (
            "directory=$(mktemp -d $HOME/job.XXXXXX) && cd $directory && cat >job.sub"
            " && condor_submit job.sub >/dev/null && echo $directory"
        )
        return self.run("bash", "-c", script, user=user, text="\n".join([*lines, f"queue {count}\n"]))

    def running(self, user: str) -> int:
        """How many of a user's jobs run."""
        return self.run("condor_q", user, "-af", "JobStatus").split().count("2")

    def jobs(self) -> list[str]:
        """All jobs in HTCondor's queue, each with its state."""
        return self.run("condor_q", "-allusers", "-af:j", "JobStatus").splitlines()

    def clear(self) -> None:
        """See that no job and no job's slot is left in HTCondor; a pool where that fails is ended, and made anew.

        Jobs on a host that was killed would stay for a minute: HTCondor is told to forget what does not go by itself.
        """
        remove, force = "condor_rm -all", "condor_rm -forcex -all"
        begun = time.monotonic()

        def cleared() -> bool:
            how = f"{remove}; {force}" if time.monotonic() - begun > FORGET_SECONDS else remove
            script = f"{{ {how}; }} >/dev/null 2>&1; condor_q -allusers -af:j JobStatus"
            slots = "condor_status -const 'DynamicSlot =?= true' -af Name"
            return not self.run("bash", "-c", f"{script} && {slots}", user="root")

        try:
            self.eventually(cleared)
        except AssertionError:
            self.command("down")

    def eventually(self, condition: Callable[[], object], within: float = SECONDS) -> None:
        """Wait until a condition holds. A command of it that fails is tried again, too."""
        eventually(condition, within=within, retry=(AssertionError, subprocess.TimeoutExpired), pause=0.3)


@pytest.fixture(scope="session")
def any_testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """The testbed in whatever state the test before left it, none at first, for tests that set it up themselves."""
    torch = any(_wants_testbed(item, "testbed_with_torch") for item in request.session.items)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        code, complaint = build(["--root-only", *(["--with-torch"] if torch else [])])
    if code == 3:
        pytest.skip(NO_TESTBED + complaint)
    assert code == 0, complaint
    testbed = Testbed()
    yield testbed
    testbed.command("down")


def build(options: list[str]) -> tuple[int, str]:
    """Build the testbed and show its steps; the exit code, and its complaint if there is one."""
    complaint, sign = "", "testbed: "
    command = [sys.executable, str(TESTBED / "up"), *options]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith(sign):
                complaint = line.removeprefix(sign).strip()
            else:
                sys.stderr.write(f"\n{line.rstrip()}")
        sys.stderr.write("\n")
    return process.returncode, complaint


@pytest.fixture
def testbed(any_testbed: Testbed) -> Iterator[Testbed]:
    """The testbed with its default settings, every host up and on the network, without jobs."""
    any_testbed.command("up", limit=600)
    yield any_testbed
    any_testbed.clear()


@pytest.fixture
def testbed_with_torch(testbed: Testbed) -> Testbed:
    """The same with PyTorch, transformers and what the example needs: one test that asks is enough to install them."""
    return testbed
