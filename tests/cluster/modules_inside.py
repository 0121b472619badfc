"""Runs inside the testbed: functions that use a module which lies beside the program, and nowhere else; and a module
of ctxflow that workers do not have from the first.

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


def modules_of_ctxflow():
    """Where a worker finds what all have, and what few want: the files' names."""
    from ctxflow.models import Generation
    from ctxflow.observe.progress import Rates

    return [Path(sys.modules[each.__module__].__file__).parents[2].name for each in (Generation, Rates)]


@batch_app(table(10))
def look_up(values, numbers):
    return [values[n] + beside.times(n) for n in numbers]


if __name__ == "__main__":
    with ContextExecutor(site=str(SITE), workers=2) as executor:
        print(list(look_up.map(range(10))), executor.submit(beside.times, {}, 5).result())
        print(*{str(executor.submit(modules_of_ctxflow, {}).result()) for _ in range(10)})
