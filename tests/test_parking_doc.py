"""The code of docs/parking.md runs, and what it says of parking is so."""

import re
import types
from pathlib import Path

from ctxflow.host.parking import Parking

DOC = Path(__file__).resolve().parents[1] / "docs" / "parking.md"


class Model:
    def __init__(self, name):
        self.name = name


def test_its_code_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL))
    module = types.ModuleType("parking_doc")
    module.__dict__.update(Model=Model, load=lambda path: [path])
    exec(code, module.__dict__)
    assert module.model("small").build().name == "small"
    parking = Parking(module.Index("here"))
    parking.park()
    assert parking._value.table is None
    parking.wake()
    assert parking._value.table == ["here"]
