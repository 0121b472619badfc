"""One running executor for the tests of executors that do not end it."""

import pytest
from executor_helpers import started

from ctxflow.scheduler import Limits


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An executor of two workers for a whole module; a test that breaks it breaks those that follow."""
    executor = started(tmp_path_factory.mktemp("running"), limits=Limits(retry_seconds=0.1))
    with executor:
        yield executor
