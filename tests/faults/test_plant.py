from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from fault_operators import OPERATORS, units
from fault_reach import ARRAY, attaching, instrument
from fault_session import packed, unpacked
from hypothesis import given
from hypothesis import strategies as st
from plant import (
    FOUND,
    ROOMS,
    Fault,
    Map,
    Result,
    compare,
    draw,
    find,
    load_results,
    main,
    memory_of_namespace,
    save_results,
    shares,
    still_to_run,
)

PLANTED = {
    "boundary": [("return a < b", "return a <= b"), ("return (a) >= (b)", "return (a) > (b)")],
    "compare": [("return a is  not b", "return a is b"), ("return x not in y in z", "return x in y in z")],
    "negate": [("if a or b: pass", "if (not (a or b)): pass"), ("[x for x in y if x]", "[x for x in y if (not (x))]")],
    "drop-not": [("return not a == b", "return (a == b)")],
    "and-or": [("return a and b", "return a or b"), ("return (a or\n  b)", "return (a and\n  b)")],
    "arithmetic": [
        ("return 'ä', a + b", "return 'ä', a - b"),
        ("a.b -= c", "a.b += c"),
        ("return a // b", "return a * b"),
    ],
    "constant": [
        ("return 0", "return 1"),
        ("return 2", "return 3"),
        ("return True", "return False"),
        ("f(.5)", "f(1.0)"),
    ],
    "return-none": [("return a", "return None")],
    "drop-call": [("a.b(c)", "pass"), ("await a.b(c)", "pass")],
    "drop-cleanup": [("a.close()", "pass"), ("try: a\nfinally: b()", "try: a\nfinally: pass"), ("del a[b]", "pass")],
    "drop-assignment": [("a.b = c", "pass"), ("a[b]: int = c", "pass"), ("a.b += c", "pass")],
    "drop-raise": [("raise a from b", "pass")],
    "swap-arguments": [("return f(a, g(b), c)", "return f(g(b), a, c)")],
    "break-continue": [("for a in b: break", "for a in b: continue"), ("while a: continue", "while a: break")],
    "narrow-except": [
        ("try: a\nexcept (B, C): d", "try: a\nexcept (B,): d"),
        ("try: a\nexcept B: d", "try: a\nexcept (): d"),
    ],
    "min-max": [("return min(a, b)", "return max(a, b)"), ("return all(a)", "return any(a)")],
}
LEFT_ALONE = [
    '"""One + two."""',
    "log.info(1, 2)",
    "print(a < b)",
    "a: Literal[1]",
    "raise A(1 + 1) from b",
    "if TYPE_CHECKING: a = 1",
    'return f"{a + 1}"',
    "return 'a' + b",
    "assert a < b",
    "return None",
]


def of(body: str, operator: str | None = None) -> list[str]:
    """Plant each fault in a function, and return its bodies."""
    source = "async def f(a: Literal[1] = b) -> Literal[2]:\n" + textwrap.indent(body, "    ") + "\n"
    (unit,) = units(source)
    found = [change.apply(source) for change in unit.changes if operator in (None, change.operator)]
    for text in found:
        compile(text, "planted", "exec")
        assert text != source
    return [textwrap.dedent(text.partition("\n")[2]).rstrip("\n") for text in found]


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_plants_its_fault(operator):
    for body, planted in PLANTED[operator]:
        assert planted in of(body, operator), body


@pytest.mark.parametrize("body", LEFT_ALONE)
def test_what_only_describes_is_left_alone(body):
    assert not set(of(body)) - {"pass"} - ({"None"} if "return" in body else set()) - {"return None"}


def test_no_faults_in_texts_protocols_and_annotations():
    source = """
        from a import b
        if TYPE_CHECKING:
            one = 1
        class A(Protocol):
            def f(self): return 1
        class B:
            size: Literal[1]
            def __repr__(self): return 1
            @property
            @abstractmethod
            def g(self): return 1
    """
    assert [change for unit in units(textwrap.dedent(source)) for change in unit.changes] == []


def test_units_are_named_by_where_they_are():
    source = (
        "x = 1\nclass A:\n    y = 2\n    def f(self):\n        if a:\n            def g(): return 3\n        return 4\n"
    )
    assert [unit.name for unit in units(source)] == ["<module>", "A", "A.f", "A.f.g"]


def test_a_docstring_is_no_unit():
    found = units('"""Say."""\nclass A:\n    """Say."""\n    x = 1\n    """Say."""\n')
    assert [unit.name for unit in found] == ["A"] and len(found[0].digest) == 12


def test_a_nested_function_has_its_own_faults_only():
    source = "def f():\n    def g(): return 3\n    return 4\n"
    assert [len([c for c in unit.changes if c.operator == "constant"]) for unit in units(source)] == [2, 2]


@pytest.mark.parametrize("same", ["f(a)  # more", '"""Say."""\nf(a)', "f(\n  a)"])
def test_a_digest_ignores_what_does_not_count(same):
    def digest(body: str, annotation: str = "int") -> str:
        return units(f"def f(a: {annotation}) -> {annotation}:\n{textwrap.indent(body, '    ')}")[0].digest

    assert digest(same) == digest("'''Something else.'''\nf(a)", "str")
    assert digest("raise A('Some text.')") == digest("raise A('Another text.')")
    assert digest("f(a)") != digest("f(b)") != digest("f('b')")


MODULE = """
def one(a, b):
    if a < b and a:
        return min(a, b + 2)
    return 7

def two(items):
    for item in items:
        if not item:
            break
        item.value = 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a module in each of three rooms."""
    for room in ROOMS[:3]:
        path = tmp_path / "src/ctxflow" / room / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(MODULE)
        for number in range(20):
            path.with_name(f"more_{number}.py").write_text(MODULE)
    return tmp_path


def test_a_draw_is_repeated_by_its_seed(tree):
    chosen = draw(tree, 1, 31, ROOMS[:3])
    assert chosen == draw(tree, 1, 31, ROOMS[:3])
    assert {fault.id for fault in chosen} != {fault.id for fault in draw(tree, 2, 31, ROOMS[:3])}


def test_a_draw_is_stratified(tree):
    chosen = draw(tree, 1, 31, ROOMS[:3])
    assert [sum(fault.room == room for fault in chosen) for room in ROOMS[:3]] == [11, 10, 10]
    assert len({(fault.file, fault.unit) for fault in chosen}) == len({fault.id for fault in chosen}) == 31
    counts = [sum(fault.operator == operator for fault in chosen) for operator in {fault.operator for fault in chosen}]
    assert max(counts) - min(counts) <= 2
    # A room does not change what another gets.
    assert draw(tree, 1, 10, ROOMS[1:2]) == [fault for fault in chosen if fault.room == ROOMS[1]]


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_is_found_again_after_edits_elsewhere(tmp_path, seed):
    path = tmp_path / "src/ctxflow/host/module.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODULE)
    for fault in draw(tmp_path, seed, 2, ["host"]):
        planted = find(fault, tmp_path)
        added = next(line[1:] for line in fault.diff.splitlines()[3:] if line.startswith("+"))
        assert planted.text.split("\n")[fault.line - 1] == added
        path.write_text("import more\n\n\n" + MODULE.replace("\n    ", "\n    # A comment.\n    "))
        again = find(fault, tmp_path)
        assert added in again.text.split("\n") and len(again.text.split("\n")) > len(planted.text.split("\n"))
        moved = path.rename(path.with_name("moved.py"))
        assert find(fault, tmp_path).file == str(moved.relative_to(tmp_path))
        moved.write_text(MODULE.replace("):\n", "):\n    more()\n"))
        assert find(fault, tmp_path) is None
        moved.rename(path)
        path.write_text(MODULE)


PROBED = '''"""Doc."""
from __future__ import annotations
import os

class A:
    """Doc."""

    def f(self, n):
        """Doc."""
        for each in range(n): self.value = each
        with open(os.devnull) as file, open(os.devnull): pass
        while n:
            n -= 1
            if n == 7: return "seven"
            elif n == 8:
                try:
                    raise KeyError
                except KeyError: pass
                finally:
                    match n, 1:
                        case 8, _:
                            def g(m=n): return m
                            self.g = g()
                        case _: pass
        else:
            return "none"
        return "some"
'''


def reached(monkeypatch: pytest.MonkeyPatch, call: str) -> tuple[object, set[int]]:
    """Run a call in the module with probes, and return its result and the lines of the statements that it reached."""
    text, probes = instrument(PROBED, 5, "/nowhere")
    assert text.count("\n") == PROBED.count("\n")
    array = bytearray(5 + probes.count)
    monkeypatch.setattr(builtins, ARRAY, array, raising=False)
    text = text.replace(".get_data('/nowhere')", ".get_data(__file__)")
    there: dict[str, object] = {"__file__": os.devnull}
    exec(compile(text, "probed", "exec", dont_inherit=True), there)
    assert not any(array)
    assert there["A"].f.__doc__ == there["__doc__"] == "Doc."
    result = eval(call, there)
    assert not any(array[:5])
    return result, {line for (line, _), probe in probes.of_statement.items() if array[probe]}


def test_probes_tell_which_statements_were_reached(monkeypatch):
    always = {10, 11, 12}
    assert reached(monkeypatch, "A().f(0)") == ("none", always | {26})
    assert reached(monkeypatch, "A().f(8)") == ("seven", always | {13, 14})
    result, lines = reached(monkeypatch, "A().f(9)")
    assert (result, lines) == ("seven", always | {*range(13, 16), *range(16, 19), 20, 22, 23})


def test_what_a_killed_process_reached_is_kept(tmp_path):
    array, attach, module = tmp_path / "array", tmp_path / "attach.py", tmp_path / "killed.py"
    source = f"def f(n):\n    if n: os.kill(os.getpid(), {signal.SIGKILL:d})\n    return n\n"
    source = f"import os\n{source}child = os.fork()\nf(1) if child == 0 else os.waitpid(child, 0)\nf(0)\n"
    text, probes = instrument(source, 0, str(attach))
    array.write_bytes(bytes(probes.count))
    attach.write_text(attaching(str(array), probes.count))
    module.write_text(text)
    subprocess.run([sys.executable, str(module)], check=True, timeout=60)
    assert array.read_bytes() == bytes([1] * 3)


@given(st.binary(max_size=40).map(lambda drawn: bytes(each & 1 for each in drawn)))
def test_what_was_reached_is_packed(array):
    bits = unpacked(packed(array))
    assert [bits[n // 8] >> n % 8 & 1 for n in range(len(array))] == list(array)


def result(number: int, status: str, room: str = "host", **more: object) -> Result:
    """A result of some fault."""
    fault = Fault(str(number), room, f"src/{number}.py", "f", "0", "negate", 0, 1, f"diff of {number}")
    return Result(fault, status, **more)


def test_results_are_kept(tmp_path):
    results = [result(1, "failed", test="a", unstable=["b"]), result(2, "survived", equivalent="why")]
    save_results(tmp_path / "in" / "results.json", results, {"commit": "abc"})
    assert load_results(tmp_path / "in" / "results.json") == results


def test_shares_count_what_can_be_found():
    results = [result(n, status) for n, status in enumerate([*FOUND, "survived", "limit", "uncovered", "gone"])]
    results += [result(10, "survived", "batch"), result(11, "survived", "batch", equivalent="why")]
    assert shares(results) == {"host": (5, 8), "batch": (0, 1), "all": (5, 9)}


def test_what_was_not_found_is_run_again_only_if_asked_for():
    results = [result(1, "failed"), result(2, "survived"), result(3, "limit"), result(4, "limit", equivalent="why")]
    faults = [each.fault for each in (*results[:2], results[3], result(5, "failed"))]
    assert still_to_run(faults, results, again=False) == (results, [faults[3]])
    assert still_to_run(faults, results, again=True) == ([results[0], *results[2:]], [faults[1], faults[3]])


def test_runs_are_compared_by_the_faults_that_count_in_both():
    before = [result(n, "failed", test="t") for n in range(4)] + [result(4, "survived"), result(5, "gone")]
    after = [result(0, "hang"), result(1, "limit"), result(2, "gone"), result(3, "uncovered", equivalent="why")]
    after += [result(4, "uncovered"), result(5, "failed"), result(6, "failed")]
    text = compare(before, after)
    assert text.splitlines()[1].split() == ["host", "3", "66.7%", "33.3%", "-33.3"]
    assert "left out: 3 of 6 before, 4 of 7 after" in text
    assert "Found before, not after: 1\n  1 src/1.py:1 f negate: failed t -> limit\n" in text
    assert "Found after, not before: 0\n" in text
    assert "Found by neither: 1\n  4 src/4.py:1 f negate: survived -> uncovered" in text


def test_tests_that_reach_a_fault_are_tried_nearest_and_cheapest_first(tree, tmp_path):
    fault = next(each for each in draw(tree, 1, 40, ROOMS[:1]) if each.file.endswith("/module.py"))
    planted = find(fault, tree)
    room, folder = fault.room, tmp_path / "map"
    known = Map(folder, tree)
    size = sum(probes.count for probes in known.probes.values())
    probe = known.probes[fault.file].of_statement[planted.statement]
    reaching = packed(bytes(n == probe for n in range(size)))
    tests = {
        "tests/test_far.py::a": (reaching, "passed", 1),
        f"tests/{room}/test_near.py::dear": (reaching, "passed", 9),
        f"tests/{room}/test_near.py::a": (reaching, "passed", 5),
        f"tests/{room}/test_module.py::a": (reaching, "passed", 7),
        f"tests/{room}/test_module.py::b": (packed(bytes(size)), "passed", 1),
        f"tests/{room}/test_module.py::c": (reaching, "failed", 1),
    }
    folder.mkdir()
    lines = [{"test": t, "reached": r, "outcome": o, "seconds": s} for t, (r, o, s) in tests.items()]
    (folder / "map.json").write_text(json.dumps({"sources": known.digest}))
    (folder / "tests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    names = ["test_module.py::a", "test_near.py::a", "test_near.py::dear"]
    assert Map(folder, tree).reaching(planted) == [*(f"tests/{room}/{name}" for name in names), "tests/test_far.py::a"]
    # What runs when the module is imported is reached by what reaches any of its functions.
    assert len(Map(folder, tree).reaching(replace(planted, statement=(1, 0)))) == 4
    (tree / fault.file).write_text(MODULE + "\n")
    with pytest.raises(SystemExit, match="of other sources"):
        Map(folder, tree)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Needs Linux.")
def test_the_memory_of_the_machine_is_not_that_of_a_namespace():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # As one that has not made its own yet.
        assert memory_of_namespace(process.pid) == 0
        process.stdin.close()


@pytest.mark.release
@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="Needs root on Linux.")
def test_faults_are_planted_and_found(tmp_path, capsys):
    tree, module = tmp_path / "tree", "src/ctxflow/scheduler/module.py"
    (tree / module).parent.mkdir(parents=True)
    more = "def three(a):\n    while a > 0:\n        a -= 1\ndef four(a):\n    return a\ndef five(a):\n    return a\n"
    (tree / module).write_text(MODULE + more)
    (tree / "src/ctxflow/__init__.py").write_text("")
    (tree / "src/ctxflow/scheduler/__init__.py").write_text("")
    (tree / "tests/scheduler").mkdir(parents=True)
    (tree / "tests/scheduler/test_module.py").write_text(
        "import os, subprocess, sys\n"
        "from ctxflow.scheduler.module import *\n"
        "def test_one(): assert (one(1, 2), one(2, 1)) == (1, 7)\n"
        "def test_two_in_a_process():\n"
        "    subprocess.run([sys.executable, '-c', 'from ctxflow.scheduler.module import *; two([0])'], check=True)\n"
        "def test_three(): three(1)\n"
        "def test_wrong(): assert four(1) == 2\n"
        f"def test_apart():\n    try: os.mkdir({str(tmp_path / 'made')!r})\n    except OSError: one(1, 2)\n"
    )
    (tree / "tests/scheduler/test_more.py").write_text(
        "from ctxflow.scheduler import module\n"
        "AT_IMPORT = range(module.five(7))\n"
        "def test_five(): module.five(7)\n"
        "def test_as_it_is_written(): assert '_faults' not in open(module.__file__, 'rb').read().decode()\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    faults, map_, out = tmp_path / "faults.json", tmp_path / "map", tmp_path / "results.json"
    main(["draw", "--tree", str(tree), "--rooms", "scheduler", "--count", "5", "--seed", "3"])
    drawn = capsys.readouterr().out
    assert {each["unit"] for each in json.loads(drawn)} == {"one", "two", "three", "four", "five"}
    faults.write_text(drawn)
    main(["map", "--tree", str(tree), "--out", str(map_), "--tests", "tests"])
    said = capsys.readouterr().err
    assert "fails without a fault: tests/scheduler/test_module.py::test_wrong" in said
    assert said.count("fails without a fault") == 1
    known = {name.partition("::")[2] for name in Map(map_, tree).lines}
    assert known == {"test_one", "test_two_in_a_process", "test_three", "test_wrong", "test_apart"} | {
        "test_five",
        "test_as_it_is_written",
    }
    assert not (tmp_path / "made").exists()
    for _ in range(2):  # The second time, nothing is left to do.
        main(["run", str(faults), "--tree", str(tree), "--map", str(map_), "--out", str(out)])
    found = {each.fault.unit: (each.status, each.test.partition("::")[2]) for each in load_results(out)}
    assert found == {
        "one": ("failed", "test_one"),
        "two": ("failed", "test_two_in_a_process"),
        "three": ("survived", ""),
        "four": ("uncovered", ""),
        "five": ("broken", ""),
    }
