"""Count the package's modules, lines, repeated names and import circles, and refuse what its rules forbid.

`make lint` runs it; ``--json`` prints the counts, ``--at REV`` counts another revision beside today's tree.

The rules: no two modules (or packages) and no two public classes have one name, but the implementations of one
protocol, which may share the name of the module (`PROTOCOLS`); and no modules import each other in a circle, whether
at the top, in a function, or for annotations alone.
"""

import argparse
import ast
import collections
import dataclasses
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Module names that implementations of one protocol may share: a module of this name, but the one that defines the
#: protocol, has a class with at least these methods.
PROTOCOLS = {
    "engine": ("Engine", {"start", "execute", "poll", "stop"}),
    "routing": ("RoutingPolicy", {"assign"}),
    "batching": ("BatchingPolicy", {"size", "duplicate"}),
    "placement": ("PlacementPolicy", {"plan"}),
    "preemption": ("PreemptionPolicy", {"victims"}),
    "scaling": ("ScalingPolicy", {"target"}),
}

#: Contract suites, which are named after what they test.
SUITES = {"ctxflow.testing.policies"}


def modules(root: Path) -> dict[str, Path]:
    """Return the file of each module of the package below `root`, by dotted name; packages by their own."""
    found = {}
    package = root / "src" / "ctxflow"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(root / "src").with_suffix("").parts
        if "examples" in parts:  # A link to the examples, which are programs.
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules of the package that the module `name` imports anywhere in its file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return {one for one in found if one in known and one != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle (strongly connected components, Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def public_classes(path: Path) -> Iterator[ast.ClassDef]:
    """Yield the public classes that stand at the top of the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node


def methods(path: Path) -> list[set[str]]:
    """Return the names of the methods of each class of the module."""
    return [{one.name for one in node.body if isinstance(one, ast.FunctionDef)} for node in public_classes(path)]


def implements(path: Path, required: set[str]) -> bool:
    """Return whether a class of the module has these methods."""
    return any(required <= names for names in methods(path))


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the tree has.

    :ivar repeated_modules, repeated_classes: name -> the modules that have it, where the rule forbids it.
    :ivar shared_modules: name -> the modules that share it as implementations of one protocol.
    :ivar circles: groups of modules that import each other.
    :ivar long_modules: those of more than 400 lines; `short_modules`, how many have fewer than 60.
    """

    modules: int
    lines: int
    repeated_modules: dict[str, list[str]]
    repeated_classes: dict[str, list[str]]
    shared_modules: dict[str, list[str]]
    circles: list[list[str]]
    long_modules: list[str]
    short_modules: int

    def figures(self) -> dict[str, int]:
        """Return the counts alone."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value if isinstance(value, int) else len(value) for name, value in values}

    def complaints(self) -> Iterator[str]:
        """Yield a sentence for each rule that is broken."""
        for what, repeated in (("module", self.repeated_modules), ("public class", self.repeated_classes)):
            for name, where in repeated.items():
                yield f"{len(where)} {what}s are called {name}: {', '.join(where)}: rename all but one"
        for group in self.circles:
            yield f"these modules import each other in a circle: {', '.join(group)}"


def count(root: Path) -> Counts:
    """Return all counts of the tree below `root`."""
    found = modules(root)
    stems = collections.defaultdict(list)
    classes = collections.defaultdict(list)
    for name, path in found.items():
        if name != "ctxflow" and not name.endswith("__main__") and name not in SUITES:
            stems[name.rsplit(".", 1)[-1]].append(name)
        for node in public_classes(path):
            classes[node.name].append(name)
    repeated = {stem: names for stem, names in sorted(stems.items()) if len(names) > 1}
    shared = {
        stem: repeated.pop(stem)
        for stem, (_, required) in PROTOCOLS.items()
        if stem in repeated and all(implements(found[name], required) for name in repeated[stem])
    }
    known = set(found)
    lines = {name: len(path.read_text().splitlines()) for name, path in found.items()}
    return Counts(
        modules=len(found),
        lines=sum(lines.values()),
        repeated_modules=repeated,
        repeated_classes={name: where for name, where in sorted(classes.items()) if len(where) > 1},
        shared_modules=shared,
        circles=circles({name: imports(name, path, known) for name, path in found.items()}),
        long_modules=sorted(name for name, length in lines.items() if length > 400),
        short_modules=sum(length < 60 for length in lines.values()),
    )


def count_at(revision: str) -> Counts:
    """Return the counts of another revision."""
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder)
        return count(Path(folder))


def main() -> int:
    """Print the counts; return 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--at", metavar="REV", help="count this revision too")
    arguments = parser.parse_args()
    now = count(ROOT)
    before = count_at(arguments.at) if arguments.at else None
    if arguments.json:
        both = {"now": now, "before": before} if before else {"now": now}
        print(json.dumps({name: dataclasses.asdict(counts) for name, counts in both.items()}, indent=1))
    else:
        then = before.figures() if before else {}
        for name, value in now.figures().items():
            print(f"{name:18}{value:8,}" + (f"   {then[name]:8,} at {arguments.at}" if then else ""))
    complaints = list(now.complaints())
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
