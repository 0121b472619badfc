"""Count the package's modules, lines, repeated names and import circles, and refuse what its rules forbid.

`make lint` runs it; ``--json`` prints the counts, ``--at REV`` counts another revision beside today's tree.

The rules: no two modules (or packages) and no two public classes have one name, but the implementations of one
protocol, which may share the name of the module (`PROTOCOLS`); and no modules import each other in a circle, whether
at the top, in a function, or for annotations alone.
"""

import argparse
import ast
import collections
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


def survey(root: Path) -> dict[str, object]:
    """Return all counts of the tree below `root`, and what breaks the rules."""
    found = modules(root)
    stems = collections.defaultdict(list)
    classes = collections.defaultdict(list)
    for name, path in found.items():
        if name != "ctxflow" and not name.endswith("__main__") and name not in SUITES:
            stems[name.rsplit(".", 1)[-1]].append(name)
        for node in public_classes(path):
            classes[node.name].append(name)
    repeated = {stem: names for stem, names in sorted(stems.items()) if len(names) > 1}
    shared = {}
    for stem, names in list(repeated.items()):
        protocol, required = PROTOCOLS.get(stem, ("", set()))
        if protocol and all(implements(found[name], required) for name in names):
            shared[stem] = {"protocol": protocol, "modules": repeated.pop(stem)}
    known = set(found)
    lines = {name: len(path.read_text().splitlines()) for name, path in found.items()}
    return {
        "modules": len(found),
        "lines": sum(lines.values()),
        "module_homonyms": repeated,
        "class_homonyms": {name: where for name, where in sorted(classes.items()) if len(where) > 1},
        "implementations_of_one_protocol": shared,
        "circles": circles({name: imports(name, path, known) for name, path in found.items()}),
        "over_400_lines": sorted(name for name, count in lines.items() if count > 400),
        "under_60_lines": sum(count < 60 for count in lines.values()),
    }


def survey_at(revision: str) -> dict[str, object]:
    """Return the counts of another revision."""
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder)
        return survey(Path(folder))


def figures(counts: dict[str, object]) -> dict[str, int]:
    """Return the counts alone."""
    return {name: len(value) if isinstance(value, list | dict) else int(str(value)) for name, value in counts.items()}


def main() -> int:
    """Print the counts; return 1 where a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--at", metavar="REV", help="count this revision too")
    arguments = parser.parse_args()
    now = survey(ROOT)
    before = survey_at(arguments.at) if arguments.at else None
    if arguments.json:
        print(json.dumps({"now": now, **({"before": before} if before else {})}, indent=1))
    else:
        then = figures(before) if before else {}
        for name, value in figures(now).items():
            print(f"{name:34}{value:8}" + (f"  (before: {then[name]})" if then else ""))
    broken = False
    for rule in ("module_homonyms", "class_homonyms"):
        for name, where in now[rule].items():  # type: ignore[attr-defined]
            broken = True
            print(f"{rule[:-9]} name {name} stands for {len(where)}: {', '.join(where)}", file=sys.stderr)
    for group in now["circles"]:  # type: ignore[attr-defined]
        broken = True
        print(f"these import each other in a circle: {', '.join(group)}", file=sys.stderr)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
