"""The examples are programs, not packages: their folders go on the path, as when a person runs them."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

sys.path.insert(0, str(EXAMPLES / "prompt_for_fact"))
