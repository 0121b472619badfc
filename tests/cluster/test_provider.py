"""The HTCondor provider, on the testbed: provider_inside.py is run there, where HTCondor and its bindings are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_the_provider_holds_its_promises_in_a_real_pool(testbed: Testbed) -> None:
    # Neither pyproject.toml nor conftest.py holds inside: both need what only the checkout's environment has.
    words = ["python", "-m", "pytest", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "--timeout", "300"]
    done = testbed.command("run", *words, "-q", f"{INSIDE}/provider_inside.py", check=False, limit=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert testbed.run("condor_q", "-af", "ClusterId") == ""
