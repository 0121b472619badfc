"""What docs/security.md promises names the tests that show it: they are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_is_named_exists():
    text = (TESTS.parent / "docs" / "security.md").read_text()
    names = set(re.findall(r"`(test_\w+)`", text))
    assert len(names) >= 12
    known = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    assert not {name for name in names if f"def {name}(" not in known}
    assert not {path for path in re.findall(r"`([\w/]+\.py)`", text) if not (TESTS.parent / path).exists()
                and not (TESTS / path).exists()}  # fmt: skip
