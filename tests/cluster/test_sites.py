"""`ctxflow site check --live` on the testbed: sites_inside.py is run there, where HTCondor and its bindings are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_what_the_check_says_of_a_real_pool(testbed: Testbed) -> None:
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
    done = testbed.command("run", *words, "-q", f"{INSIDE}/sites_inside.py", check=False, limit=600)
    assert done.returncode == 0, done.stdout + done.stderr
    testbed.eventually(lambda: not testbed.jobs())


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_root_may_not_submit(testbed: Testbed) -> None:
    site = "/checkout/site-configs/testbed.toml"
    done = testbed.command("run", "--user", "root", "ctxflow", "site", "check", site, "--live", check=False)
    assert done.returncode == 1 and "tier gpu: HTCondor takes no jobs of root, nor of its own user" in done.stdout
