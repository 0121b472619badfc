"""What holds for all of ctxflow's own tests: a warning is an error, and Ctrl-C is heard.

Not in pyproject.toml, because Parsl's own suite, which has warnings of its own, is run from here too.
"""

import signal
from pathlib import Path

import pytest

_OWN = [Path(__file__).parent / folder for folder in ("tests", "src", "examples", "benchmarks")]


def pytest_configure() -> None:
    """Hear SIGINT, so that the programs that tests interrupt do: a shell's background commands start deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make warnings errors in our own tests."""
    for item in items:
        if any(folder in item.path.parents for folder in _OWN):
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)
