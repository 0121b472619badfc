"""Runs inside the testbed: a program whose functions use a module that lies beside it, and nowhere else.

Prints what its workers made of it.
"""

import sys
import tempfile
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context

SITE = Path(__file__).resolve().parents[2] / "site-configs" / "testbed.toml"
FOLDER = tempfile.mkdtemp()
Path(FOLDER, "beside.py").write_text("FACTOR = 3\n\ndef times(number):\n    return number * FACTOR\n")
sys.path.insert(0, FOLDER)
import beside  # noqa: E402


@context
def table(size):
    return [beside.times(n) for n in range(size)]


@batch_app(table(10))
def look_up(values, numbers):
    return [values[n] + beside.times(n) for n in numbers]


if __name__ == "__main__":
    with ContextExecutor(site=str(SITE), workers=1) as executor:
        print(list(look_up.map(range(10))), executor.submit(beside.times, {}, 5).result())
