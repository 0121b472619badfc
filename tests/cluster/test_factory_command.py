"""`ctxflow factory` on the testbed: factory_command_inside.py is run there, with HTCondor's workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])


def inside(testbed: Testbed, step: str) -> dict[str, Any]:
    """What a step found."""
    done = testbed.command("run", "python", f"{INSIDE}/factory_command_inside.py", step, check=False, limit=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_one_factory_serves_the_runs_of_its_user(testbed: Testbed) -> None:
    found = inside(testbed, "serve")
    assert found["kept"], "a raised maximum costs no worker"
    assert found["taken over"], "a killed factory costs no worker, and none is doubled"
    assert found["losses"] == [True, True], "those that the second run got, and nobody is to blame"
    assert found["lowered"], "each run keeps a worker that it had"
    assert found["statuses"] == [0, 0, 0] and found["outputs"] == [True, True], found["log"]
    assert "gives 2 running workers" in found["log"] and "nothing is left" in found["log"]
    testbed.eventually(lambda: not testbed.jobs())


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_what_a_killed_program_left_is_cleaned_up(testbed: Testbed) -> None:
    found = inside(testbed, "clean")
    assert found["while it lived"] == []
    assert found["status"] == 0 and found["clean"]["removed"] and found["clean"]["troubles"] == []
    assert [job["state"] for job in found["clean"]["jobs"]] == ["queued"] * 3
    testbed.eventually(lambda: not testbed.jobs())
