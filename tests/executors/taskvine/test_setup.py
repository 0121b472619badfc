"""A run's own files on TaskVine: who may have put them there."""

import stat
import time
from types import SimpleNamespace

import pytest

from ctxflow.errors import CtxflowError
from ctxflow.executors.taskvine.manager_process import Setup
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

SITE = Site(name="lab", engine="taskvine", tiers=(Tier(provider="local"),))


def test_a_folder_that_others_made_ready_is_refused(tmp_path):
    """Whoever may write there could put another program in the place of the workers' own."""
    run = SimpleNamespace(directory=str(tmp_path), id="7", clock=time.monotonic)
    (tmp_path / "taskvine").mkdir()
    (tmp_path / "taskvine").chmod(0o777)
    with pytest.raises(CtxflowError, match="others may write to"):
        Setup(SITE, run)
    (tmp_path / "taskvine").rmdir()
    setup = Setup(SITE, run)
    assert stat.S_IMODE((tmp_path / "taskvine").stat().st_mode) == 0o700
    setup.close()
