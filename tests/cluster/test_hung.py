"""Each process of a run on TaskVine is stopped in turn; hung_inside.py is run in the testbed, three tests at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout/tests/cluster/hung_inside.py")
PYTEST = f"python -m pytest -q -p no:cacheprovider --no-header --noconftest --timeout {patience(300)} -n 3 -rP"


@pytest.mark.release
@pytest.mark.timeout(700)
def test_what_hangs_is_noticed_and_the_run_goes_on(testbed: Testbed) -> None:
    words = f"export OMP_NUM_THREADS=1 PYTHONPATH=/checkout/tests; cd $(mktemp -d) && {PYTEST} {INSIDE} 2>&1"
    done = testbed.command("run", "bash", "-c", words, check=False, limit=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d\d passed in", done.stdout), done.stdout[-500:]
