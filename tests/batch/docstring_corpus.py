"""A real corpus that every machine has: the docstrings of the standard library and of the installed packages.

    python tests/batch/docstring_corpus.py texts.csv [COUNT]

It writes CSV with the columns `name` and `text`: each docstring once, under the name of the first object that has it.
With COUNT, so many of them, from all over the corpus: files are taken in an order that mixes packages.
"""

from __future__ import annotations

import ast
import csv
import itertools
import site
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path


def docstrings() -> Iterator[tuple[str, str]]:
    """All of them, the object's name and its docstring, with files in an order that mixes packages."""
    seen = set()
    roots = dict.fromkeys([sysconfig.get_path("stdlib"), *site.getsitepackages(), sysconfig.get_path("purelib")])
    files = {path: str(path.relative_to(root)) for root in roots for path in Path(root).rglob("*.py")}
    for path, name in sorted(files.items(), key=lambda each: zlib.crc32(each[1].encode())):
        for inside, text in _in_file(path):
            if text not in seen:
                seen.add(text)
                yield f"{name}:{inside}", text


def _in_file(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of other people's code.
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def write_corpus(path: Path, count: int | None = None) -> int:
    """Write a corpus; gives how many texts it holds.

    :param count: how many are wanted, fewer if there are not so many.
    """
    found = list(itertools.islice(docstrings(), count))
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "text"])
        writer.writerows(found)
    return len(found)


if __name__ == "__main__":
    print(write_corpus(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
