"""Sessions on the testbed: the engines' contract, and 24 sessions that are moved, suspended and evicted meanwhile.

sessions_inside.py is what runs there.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from driver import INSIDE

if TYPE_CHECKING:
    from conftest import Testbed


def inside(testbed: Testbed, *words: str, limit: float) -> str:
    """What the program in the testbed writes, run in a fresh directory."""
    command = f"cd $(mktemp -d) && python {INSIDE}/sessions_inside.py {' '.join(words)} 2>&1"
    done = testbed.command("run", "bash", "-c", command, check=False, limit=limit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.timeout(150)
def test_contract(testbed: Testbed) -> None:
    out = inside(testbed, "contract", limit=120)
    assert re.search(r"\d\d passed", out) and "skipped" not in out, out[-500:]


@pytest.mark.timeout(150)
def test_sessions_give_what_undisturbed_ones_do(testbed: Testbed) -> None:
    out = inside(testbed, "wander", "--site", "/checkout/site-configs/testbed.toml", limit=120)
    found = json.loads(out.splitlines()[-1])
    assert (found["right"], found["wrong"], found["errors"]) == (24, {}, []), found
    assert found["migrations"] and found["suspensions"] and found["evictions"], found
