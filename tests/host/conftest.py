from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_host import Driven

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    """A context host, without artifacts."""
    (tmp_path / "logs").mkdir()
    driven = Driven(tmp_path)
    yield driven
    driven.close()
