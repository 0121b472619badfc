from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_host import Driven

from ctxflow.host.library_process import HostPatience

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def driven(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driven]:
    """A context host, without artifacts; its patience is an indirect parameter."""
    (tmp_path / "logs").mkdir()
    driven = Driven(tmp_path, patience=getattr(request, "param", HostPatience()))
    yield driven
    driven.close()
