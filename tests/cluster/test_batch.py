"""`ctxflow batch` on the testbed: batch_inside.py is run there, with TaskVine's workers and HTCondor's jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])


def inside(testbed: Testbed, step: str) -> dict[str, Any]:
    """What a step found."""
    done = testbed.command("run", "python", f"{INSIDE}/batch_inside.py", step, check=False, limit=480)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_real_models_answer_as_on_one_machine(testbed_with_torch: Testbed) -> None:
    found = inside(testbed_with_torch, "models")
    assert found["chats"] == [True] * 4, "greedy text is that of a plain loop, whatever the batch size"
    assert (found["texts"], found["width"]) == (120, 384)
    assert found["distance"] < 1e-5
    assert found["same labels"] and found["labels"] > 1


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_detached_driver_is_vacated_twice_and_another_job_cancelled(testbed: Testbed) -> None:
    found = inside(testbed, "detached")
    assert found["seen"] == ["running", True, 3000], "`ctxflow status` follows it from another terminal"
    assert found["refused"][0] == 1
    assert re.search(r"job 1 writes out\.jsonl and is (queued|running)", found["refused"][1]), found["refused"]
    assert (found["followed"], found["whole"], found["starts"]) == (0, True, 3), found["job"]
    job = found["job"]
    assert (job["state"], job["status"], job["restarts"], job["done"], job["dead"]) == ("done", 0, 2, 3000, 0)
    assert "out.jsonl" in found["table"] and "3,000 of 3,000" in found["table"]
    assert found["queue"] == []
    assert found["cancelled"][::2] == [0, []], found["cancelled"]
    assert "is cancelled" in found["cancelled"][1] and "out.jsonl keeps" in found["cancelled"][1]
    assert found["ended"] == [130, 0]
    assert found["states"] == ["done", "cancelled"]
    assert found["kept"] == [True, 0, True], "the same command goes on, on another site"


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_killed_driver_goes_on_where_it_was(testbed: Testbed) -> None:
    found = inside(testbed, "killed")
    assert (found["kills"], found["status"], found["whole"]) == (2, 0, True), found["said"]
