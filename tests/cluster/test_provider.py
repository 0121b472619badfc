"""The HTCondor provider, on the testbed: provider_inside.py is run there, where HTCondor and its bindings are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from waiting import exited, patience

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])


TESTBED = Path(__file__).resolve().parents[2] / "testbed"
DRIVER = """
import json, os, sys, tempfile, time
from ctxflow.factory import CondorProvider, WorkerJob
provider = CondorProvider()
with tempfile.TemporaryDirectory(dir=os.path.expanduser("~")) as directory:
    provider.start(directory)
    provider.submit(WorkerJob("any", ["sleep", "4321"], memory=10**8, disk=10**8), 1)
    running = 0
    while running < 2:
        for change in provider.changes():
            running += change.state == "running"
            print(json.dumps([change.state, change.reason, change.host]), flush=True)
        time.sleep(0.1)
    provider.stop()
"""
# The parent of the job's first process, and so on, up to HTCondor's starter.
KILL_STARTER = """
until process=$(pgrep -fx "sleep 4321"); do sleep 0.1; done
until [ "$(cat /proc/$process/comm)" = condor_starter ]; do process=$(awk '{print $4}' /proc/$process/stat); done
kill -9 $process
"""


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_worker_that_htcondor_loses_is_evicted_and_runs_again(testbed: Testbed) -> None:
    command = [sys.executable, str(TESTBED / "run"), "python", "-u", "-c", DRIVER]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout
            state, _, host = json.loads(driver.stdout.readline())
            assert state == "running"
            testbed.run("bash", "-ec", KILL_STARTER, user="root", host=host.partition(".")[0])
            state, reason, _ = json.loads(driver.stdout.readline())
            assert state == "evicted" and "connection" in reason
            assert json.loads(driver.stdout.readline())[0] == "running"
            assert exited(driver) == 0
        finally:
            driver.terminate()


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_the_provider_holds_its_promises_in_a_real_pool(testbed: Testbed) -> None:
    # Neither pyproject.toml nor conftest.py holds inside: both need what only the checkout's environment has.
    words = [
        "python",
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--timeout",
        f"{patience(300)}",
    ]
    done = testbed.command("run", *words, "-q", f"{INSIDE}/provider_inside.py", check=False, limit=900)
    assert done.returncode == 0, done.stdout + done.stderr
    testbed.eventually(lambda: not testbed.jobs())
