"""The tests of TaskVine's engine play a vine_worker with what the tests of its library play it with."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "host"))
