"""Parsl's own test suite, with ctxflow's executor: what passes with Parsl's local threads passes here."""

import re
import subprocess
import sys
from pathlib import Path

import parsl
import pytest

from waiting import patience

SUITE = Path(parsl.__file__).parent / "tests"
OURS = Path(__file__).parent / "parsl_suite" / "embedded.py"


# cleannet: needs the network. Two more depend on 5 and 40 ms; test_parsl_apps.py has a bash app's walltime.
# `test_resource` names the executors of Parsl's own that may refuse `cores` and `memory`, as this one does.
CHOSEN = (
    "not cleannet and not test_timeout_after_exception and not test_apptimeout "
    "and not (test_resource_spec and test_resource)"
)


def failures(config, folder, chosen=CHOSEN):
    """The tests that fail with a configuration, and how many passed."""
    command = [sys.executable, "-m", "pytest", str(SUITE), "-k", chosen, "--config", str(config)]
    command += ["-q", "-p", "no:cacheprovider", "--timeout", "60", "--no-header"]
    command += ["--continue-on-collection-errors"]  # Older ones want packages for some that use no executor.
    run = subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True, timeout=patience(240))
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", run.stdout)}
    assert counts, run.stdout[-3000:] + run.stderr[-3000:]
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S*?([\w/]+\.py::\S+)", run.stdout, re.MULTILINE))
    return failed, counts.get("passed", 0)


@pytest.mark.timeout(300)
def test_parsl_suite(tmp_path):
    failed, passed = failures(OURS, tmp_path)
    assert passed > 100
    again = " or ".join({re.sub(r"\[.*", "", name).rpartition("::")[2] for name in failed})
    excused, _ = failures(SUITE / "configs" / "local_threads.py", tmp_path, again) if failed else (set(), 0)
    print(f"{passed} of Parsl's tests passed; these fail with Parsl's local threads here too: {sorted(excused)}")
    short = {name.rpartition("/")[2] for name in excused}
    assert not {name for name in failed if name.rpartition("/")[2] not in short}
