"""Record which parts of the package each test reaches, in all processes that the test starts.

Modules of a copy of the tree get probes: a store into an array of bytes that all processes share, on the line of the
statement that it stands before, so line numbers stay. The array is a file mapped into memory: unlike a measurement that
is saved when an interpreter exits, it keeps what a process reached that was killed, forked, or left by `os._exit`, as
library processes are. What a process reaches counts for the test that runs at the time, whichever it was started for.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

ARRAY = "_faults_reached"
"""The name of the array among the builtins."""

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)

_ATTACH = f"""
import builtins as _builtins
if not hasattr(_builtins, {ARRAY!r}):
    import ctypes as _ctypes
    import os as _os
    try:
        _file = _os.open({{path!r}}, _os.O_RDWR)
        _map = _ctypes.CDLL(None).mmap
        _map.restype = _ctypes.c_void_p
        _map.argtypes = [_ctypes.c_void_p, _ctypes.c_size_t, *[_ctypes.c_int] * 3, _ctypes.c_long]
        _builtins.{ARRAY} = (_ctypes.c_ubyte * {{size}}).from_address(_map(None, {{size}}, 3, 1, _file, 0))
        _os.close(_file)
    except OSError:
        _builtins.{ARRAY} = bytearray({{size}})
"""


def attaching(path: str, size: int) -> str:
    """Return the program that maps the file at `path`, of `size` bytes, as the array; no file stays open."""
    return _ATTACH.format(path=path, size=size)


@dataclass
class Probes:
    """The probes of one module.

    :param first: the number of its first probe; the others follow.
    :param of_statement: the probe that is reached before a statement, by the statement's line and column in bytes.
    """

    first: int
    count: int = 0
    of_statement: dict[tuple[int, int], int] = field(default_factory=dict)


def instrument(source: str, first: int, attach: str) -> tuple[str, Probes]:
    """Put probes into a module's functions: at the start of each block, and after each compound statement.

    :param first: the number of the module's first probe.
    :param attach: the path of the program that `attaching` returned.
    """
    tree = ast.parse(source)
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    probes = Probes(first)
    added: list[tuple[int, int, str]] = []

    def put(line: int, column: int, text: str) -> None:
        added.append((starts[line - 1] + column, len(added), text))

    def probe() -> int:
        probes.count += 1
        return first + probes.count - 1

    def block(body: list[ast.stmt]) -> None:
        current: int | None = None
        pending: list[tuple[int, int]] = []
        for node in body:
            place = (node.lineno, node.col_offset)
            if isinstance(node, (*_Function, ast.ClassDef)):
                pending.append(place)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                pass  # A docstring stays one.
            elif isinstance(node, ast.Try | getattr(ast, "TryStar", ast.Try)):
                pending.append(place)
                for place in pending:
                    probes.of_statement[place] = first + probes.count  # The first of its body.
                pending, current = [], None
            else:
                header = _header(node)
                if current is None:
                    current = probe()
                    if header is None:
                        put(*place, f"{ARRAY}[{current}]=1;")
                    else:
                        put(header.lineno, header.col_offset, f"{ARRAY}.__setitem__({current},1)or(")
                        put(header.end_lineno or 0, header.end_col_offset or 0, ")")
                for each in (*pending, place):
                    probes.of_statement[each] = current
                pending = []
                if header is not None:
                    current = None
            for inner in _blocks(node):
                block(inner)

    def functions(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Function):
                block(child.body)
            else:
                functions(child)

    functions(tree)
    if probes.count:
        load = f'exec(__import__("_frozen_importlib_external").FileLoader("", "").get_data({attach!r}))'
        if future := [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]:
            put(future[-1].end_lineno or 0, future[-1].end_col_offset or 0, f"; {load}")
        else:
            code = next(node for node in tree.body if not isinstance(node, ast.Expr))
            put(min([code.lineno, *(each.lineno for each in getattr(code, "decorator_list", []))]), 0, f"{load}\n")
    for position, _, text in sorted(added, reverse=True):
        raw = raw[:position] + text.encode() + raw[position:]
    return raw.decode(), probes


def _header(node: ast.stmt) -> ast.expr | None:
    """Return the expression that a compound statement begins with."""
    if isinstance(node, ast.If | ast.While):
        return node.test
    if isinstance(node, ast.For | ast.AsyncFor):
        return node.iter
    if isinstance(node, ast.With | ast.AsyncWith):
        return node.items[0].context_expr
    return node.subject if isinstance(node, ast.Match) else None


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a statement, its functions' included."""
    if isinstance(node, ast.ClassDef):
        return [block for inner in node.body for block in _blocks(inner)]
    found = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    found += [each.body for each in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]]
    return [block for block in found if block]
