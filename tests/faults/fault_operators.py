"""Enumerate the faults that can be planted in a Python module, each a small edit of its source with a stable name.

A fault belongs to a unit: a function, or one statement of a module's or class's body. Its name is the unit's qualified
name and digest, the operator, and its ordinal among the operator's faults in the unit, so it survives edits elsewhere
in the file. The digest ignores comments, layout, docstrings, annotations and the wording of messages.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

OPERATORS = {
    "boundary": "< to <=, > to >=, and back",
    "compare": "== to !=, is to is not, in to not in, and back",
    "negate": "a condition negated",
    "drop-not": "a `not` removed",
    "and-or": "and to or, and back",
    "arithmetic": "+ to -, * to +, / to *, and the like",
    "constant": "an integer one higher or lower, a float doubled, True to False and back",
    "return-none": "None returned in place of a value",
    "drop-call": "a statement that calls removed",
    "drop-cleanup": "a call removed that closes, ends, deletes or releases something, or is in a `finally`",
    "drop-assignment": "an assignment to an attribute or an item removed",
    "drop-raise": "a raise removed",
    "swap-arguments": "the first two arguments of a call swapped",
    "break-continue": "break to continue, and back",
    "narrow-except": "an exception handler that catches one class less, or nothing",
    "min-max": "min to max, any to all, and back",
}
"""The operators, and what each does."""

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str, str]] = {
    ast.Lt: ("boundary", "<", "<="),
    ast.LtE: ("boundary", "<=", "<"),
    ast.Gt: ("boundary", ">", ">="),
    ast.GtE: ("boundary", ">=", ">"),
    ast.Eq: ("compare", "==", "!="),
    ast.NotEq: ("compare", "!=", "=="),
    ast.Is: ("compare", "is", "is not"),
    ast.IsNot: ("compare", r"is\s+not", "is"),
    ast.In: ("compare", "in", "not in"),
    ast.NotIn: ("compare", r"not\s+in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_CLEANUP = re.compile(
    "close|stop|kill|terminate|unlink|rmtree|remove|shutdown|release|cancel|join|discard|clear|cleanup|killpg|end|pop"
)
_COSMETIC = re.compile(
    r"(?:\w*log(?:ger)?\w*\.(?:debug|info|warning|error|exception|log)|warnings\.warn|print|\w+\.echo)"
)
_UNORDERED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "TypeVar", "namedtuple"}
_NAMES_OF_TEXT = {"__repr__", "__str__", "__rich__", "__rich_console__"}
_SKIPPED_DECORATORS = {"overload", "abstractmethod"}


@dataclass(frozen=True)
class Change:
    """One edit that plants a fault.

    :param operator: its name, a key of `OPERATORS`.
    :param ordinal: which of the operator's changes in the unit, in the order of the source.
    :param start: where it starts, in bytes of the module's UTF-8 source; `end` likewise.
    :param text: what stands there instead.
    :param statement: line and column (in bytes) of the innermost statement around it.
    """

    operator: str
    ordinal: int
    start: int
    end: int
    text: str
    statement: tuple[int, int]

    def apply(self, source: str) -> str:
        """Return the module's source with the fault."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()


class Unit:
    """A function, or one statement of a module's or class's body: what a fault's name is relative to."""

    def __init__(self, source: bytes, starts: list[int], name: str, node: ast.stmt) -> None:
        self.name = name
        self.node = node
        self._source = source
        self._starts = starts

    @cached_property
    def digest(self) -> str:
        """Identify the code apart from its comments, layout, docstrings, annotations and messages."""
        bare = _Bare().visit(copy.deepcopy(self.node))
        return hashlib.sha256(ast.dump(bare).encode()).hexdigest()[:12]

    @cached_property
    def changes(self) -> list[Change]:
        """Return the faults that can be planted in the unit; nested functions and classes are units of their own."""
        counts: Counter[str] = Counter()
        found = []
        for operator, start, end, text, statement in _Sites(self._source, self._starts).of(self.node):
            found.append(Change(operator, counts[operator], start, end, text, statement))
            counts[operator] += 1
        return found


def units(source: str) -> list[Unit]:
    """Split a module into its units, without those that only annotate or describe."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def split(body: list[ast.stmt], name: str) -> Iterator[Unit]:
        for node in body:
            inner = f"{name}.{getattr(node, 'name', '')}".lstrip(".")
            if isinstance(node, ast.ClassDef):
                if not any(_last_name(base) == "Protocol" for base in node.bases):
                    yield from split(node.body, inner)
            elif isinstance(node, _Function):
                if node.name not in _NAMES_OF_TEXT and not any(
                    _last_name(each) in _SKIPPED_DECORATORS for each in node.decorator_list
                ):
                    yield Unit(raw, starts, inner, node)
                    yield from split(_definitions(node), inner)
            elif not isinstance(node, ast.Import | ast.ImportFrom) and not _for_types(node) and not _is_docstring(node):
                yield Unit(raw, starts, name or "<module>", node)

    return list(split(ast.parse(source).body, ""))


def _definitions(function: ast.stmt) -> list[ast.stmt]:
    """Return the functions and classes that are defined in a function, however deep in its statements."""
    found: list[ast.stmt] = []
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (*_Function, ast.ClassDef)):
            found.append(node)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return found


def _for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"


def _last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, of the function for a call, of the value for a subscript."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and _is_text(node.value)


class _Bare(ast.NodeTransformer):
    """Remove what does not count for a digest."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_docstring(node) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("text") if isinstance(node.value, str) and " " in node.value else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


_Site = tuple[str, int, int, str, tuple[int, int]]


class _Sites:
    """Walk a unit in the order of its source, and yield the edits that its nodes allow."""

    def __init__(self, source: bytes, starts: list[int]) -> None:
        self._source = source
        self._starts = starts
        self._statement = (0, 0)
        self._finally = 0

    def of(self, unit: ast.stmt) -> Iterator[_Site]:
        """Yield the edits of a unit."""
        if isinstance(unit, _Function):
            self._statement = (unit.lineno, unit.col_offset)
            for default in [*unit.args.defaults, *filter(None, unit.args.kw_defaults)]:
                yield from self._visit(default)
            for node in unit.body:
                yield from self._visit(node)
        else:
            yield from self._visit(unit)

    def _visit(self, node: ast.AST) -> Iterator[_Site]:
        if isinstance(node, (*_Function, ast.ClassDef, ast.JoinedStr, ast.Assert)):
            return
        if isinstance(node, ast.stmt):
            if _is_docstring(node) or _for_types(node):
                return
            before, self._statement = self._statement, (node.lineno, node.col_offset)
            yield from self._statement_sites(node)
            if not isinstance(node, ast.Raise):  # Else the arguments of its exception are a message.
                yield from self._children(node)
            self._statement = before
        elif isinstance(node, ast.Call) and _COSMETIC.fullmatch(ast.unparse(node.func)):
            return
        else:
            if isinstance(node, ast.expr | ast.comprehension | ast.ExceptHandler):
                yield from self._expression_sites(node)
            yield from self._children(node)

    def _children(self, node: ast.AST) -> Iterator[_Site]:
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list", "type_params"}:
                continue
            self._finally += name == "finalbody"
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child)
            self._finally -= name == "finalbody"

    def _statement_sites(self, node: ast.stmt) -> Iterator[_Site]:
        if isinstance(node, ast.If | ast.While):
            yield from self._negated(node.test)
        elif isinstance(node, ast.Expr):
            call = node.value.value if isinstance(node.value, ast.Await) else node.value
            if isinstance(call, ast.Call) and not _COSMETIC.fullmatch(ast.unparse(call.func)):
                cleanup = self._finally or _CLEANUP.fullmatch(_last_name(call).strip("_"))
                yield self._site("drop-cleanup" if cleanup else "drop-call", node, "pass")
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
                yield self._site("drop-assignment", node, "pass")
            if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
                old, new = _ARITHMETIC[type(node.op)]
                yield from self._between("arithmetic", node.target, node.value, re.escape(old) + "=", new + "=")
        elif isinstance(node, ast.Delete):
            yield self._site("drop-cleanup", node, "pass")
        elif isinstance(node, ast.Raise):
            yield self._site("drop-raise", node, "pass")
        elif isinstance(node, ast.Return):
            value = node.value
            if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                yield self._site("return-none", value, "None")
        elif isinstance(node, ast.Break | ast.Continue):
            yield self._site("break-continue", node, "continue" if isinstance(node, ast.Break) else "break")

    def _expression_sites(self, node: ast.expr | ast.comprehension | ast.ExceptHandler) -> Iterator[_Site]:
        if isinstance(node, ast.IfExp):
            yield from self._negated(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from self._negated(test)
        elif isinstance(node, ast.ExceptHandler):
            if isinstance(node.type, ast.Tuple) and len(node.type.elts) > 1:
                kept = ", ".join(self._text(each) for each in node.type.elts[:-1])
                yield self._site("narrow-except", node.type, f"({kept},)")
            elif node.type is not None:
                yield self._site("narrow-except", node.type, "()")
        elif isinstance(node, ast.Compare):
            for left, operation, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                name, old, new = _COMPARISONS[type(operation)]
                yield from self._between(name, left, right, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._site("drop-not", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between("and-or", left, right, old, new)
        elif isinstance(node, ast.BinOp):
            if type(node.op) in _ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
                old, new = _ARITHMETIC[type(node.op)]
                yield from self._between("arithmetic", node.left, node.right, re.escape(old), new)
        elif isinstance(node, ast.Constant):
            yield from self._constants(node)
        elif isinstance(node, ast.Call):
            yield from self._calls(node)

    def _negated(self, test: ast.expr) -> Iterator[_Site]:
        if not isinstance(test, ast.Constant) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield self._site("negate", test, f"(not ({self._text(test)}))")

    def _constants(self, node: ast.Constant) -> Iterator[_Site]:
        value = node.value
        if isinstance(value, bool):
            yield self._site("constant", node, str(not value))
        elif isinstance(value, int):
            for other in (value + 1, value - 1) if value else (1,):
                yield self._site("constant", node, str(other))
        elif isinstance(value, float):
            yield self._site("constant", node, repr(2 * value or 1.0))

    def _calls(self, node: ast.Call) -> Iterator[_Site]:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
            yield self._site("min-max", node.func, _SWAPPED[node.func.id])
        elif len(node.args) > 1 and _last_name(node) not in _UNORDERED:
            first, second = node.args[:2]
            if not any(isinstance(each, ast.Starred) or _is_text(each) for each in (first, second)):
                one, other = self._text(first), self._text(second)
                if one != other:
                    between = self._source[self._end(first) : self._start(second)].decode()
                    yield (
                        "swap-arguments",
                        self._start(first),
                        self._end(second),
                        other + between + one,
                        self._statement,
                    )

    def _between(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[_Site]:
        """Replace the token between two expressions."""
        word = rf"\b{old}\b" if old[-1].isalpha() else old
        start = self._end(left)
        if found := re.search(word.encode(), self._source[start : self._start(right)]):
            yield operator, start + found.start(), start + found.end(), new, self._statement

    def _site(self, operator: str, node: ast.expr | ast.stmt, text: str) -> _Site:
        return operator, self._start(node), self._end(node), text, self._statement

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()
