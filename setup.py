"""What setup.cfg cannot say: where the project is at home, which who publishes it says, and links that work there.

`CTXFLOW_HOME=https://example.org/ctxflow python -m build` gives the package that address, and README's links to other
files of the tree that of those files there. Without it they are no links in the package's description, which is shown
where there are no such files, but their names in the source distribution.
"""

import os
import re
from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).parent
_LINK = re.compile(r"\[([^]\[]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def description(home: str) -> str:
    """README, for readers who do not have the tree."""

    def outside(link: "re.Match[str]") -> str:
        text, path, place = link[1], link[2], link[3] or ""
        if home:
            kind = "tree" if (_HERE / path).is_dir() else "blob"
            return f"[{text}]({home}/{kind}/main/{path}{place})"
        return f"`{path}`" if text in (path, "") else f"{text} (`{path}`)"

    return _LINK.sub(outside, (_HERE / "README.md").read_text(encoding="utf-8"))


def addresses(home: str) -> "dict[str, str]":
    """What a package index shows beside the description."""
    if not home:
        return {}
    return {
        "Source": home,
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
    }


_home = os.environ.get("CTXFLOW_HOME", "").rstrip("/")
setup(long_description=description(_home), project_urls=addresses(_home))
