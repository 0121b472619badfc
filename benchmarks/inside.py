"""How a benchmark gets into the testbed, and where its sources are there.

The testbed's hosts see the checkout that it was brought up from as /checkout. For another one, which must lie where
they see it too, set CTXFLOW_BENCHMARK_CHECKOUT to its path there, and CTXFLOW_BENCHMARK_PATHS to what else is to be
on Python's path. What does not live here: anything that is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(__file__).resolve().parent
TESTBED = FOLDER.parent / "testbed"
CHECKOUT = os.environ.get("CTXFLOW_BENCHMARK_CHECKOUT", "/checkout")
SKIPPED = 3
"""The exit status of a benchmark that cannot run here."""


def why_not() -> str | None:
    """Why nothing can run in the testbed from here, as a sentence; None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "it runs in the testbed, which needs root on Linux"
    asked = subprocess.run([str(TESTBED / "status"), "--json"], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or ["it says nothing"]
        return f"it runs in the testbed ({said[-1]})"
    return None


def skip(reason: str) -> NoReturn:
    """End, saying why; with `--json` also as data."""
    print(f"skipped: {reason}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"skipped": reason}))
    sys.exit(SKIPPED)


def command(*words: str) -> list[str]:
    """The words that run a command on the testbed's submit host, in the checkout, with its sources."""
    return [
        str(TESTBED / "run"), "--directory", CHECKOUT, "env", f"PYTHONPATH={_paths()}", *words,
    ]  # fmt: skip


def _paths() -> str:
    more = os.environ.get("CTXFLOW_BENCHMARK_PATHS", "")
    return os.pathsep.join(filter(None, [f"{CHECKOUT}/src", more]))


def go(program: str, options: Sequence[str], complaint: str) -> NoReturn:
    """Become the same benchmark in the testbed, or skip it.

    :param complaint: why it cannot run out here.
    """
    if os.path.isdir("/run/testbed"):
        skip(complaint)
    reason = why_not()
    if reason:
        skip(f"{reason}; {complaint}")
    words = command("python", f"{CHECKOUT}/benchmarks/{Path(program).name}", *options)
    os.execv(words[0], words)


def status() -> dict[str, Any]:
    """The testbed's hosts, with their links' speeds and the bytes that they sent and received."""
    asked = subprocess.run([str(TESTBED / "status"), "--json"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def taskvine_version() -> str:
    """The version of the vine_worker on this machine."""
    told = subprocess.run(["vine_worker", "--version"], capture_output=True, text=True, check=False).stdout.split()
    return next((word for word in told if word[:1].isdigit()), "unknown")
