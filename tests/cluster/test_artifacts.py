"""What a build made, on the testbed: on another host, and in another run, the next build begins with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

PROGRAM = "/checkout/benchmarks/artifacts_inside.py"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_another_host_and_another_run_begin_with_what_a_build_made(testbed: Testbed) -> None:
    done = testbed.command("run", "python", PROGRAM, "--table", "--runs", "2", check=False, limit=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert first["hosts"] == ["host1", "host2"] and first["took"] == [False, True], first
    assert len(first["artifacts"]) == 1 and "artifacts" in first["loads"][1], "it was sent to the driver once"
    assert second["took"] == [True] and not second["artifacts"], second
    assert "WARNING" not in done.stderr, done.stderr
