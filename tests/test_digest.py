"""Identity by content: the same in every process and on any day, another when the code or the data changes."""

import abc
import collections
import copyreg
import dataclasses
import enum
import functools
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
import typing

import numpy as np
import pydantic
import pytest

import forked
from ctxflow.digest import digest, is_library_module
from ctxflow.files import digest_path
from waiting import patience

PROGRAM = """
import dataclasses
import enum
import functools
import json
import re

import numpy as np

import recipe_helpers
from ctxflow import context

STOP_WORDS = {"a", "an", "the", "of", "in"}
TABLE = {"b": 2, "a": [1, (2, 3)], "c": {"x", "y"}}
PATTERN = re.compile("[a-z]+")
WEIGHTS = np.arange(6.0).reshape(2, 3)
MIXED = np.array([1, "one", None], dtype=object)

class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2

@dataclasses.dataclass
class Config:
    kind: Kind = Kind.SMALL
    layers: list = dataclasses.field(default_factory=lambda: [1, 2])

@functools.lru_cache
def cached(n):
    return n * 3

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def make_scaler(factor):
    def scale(x, offset=5):
        return factor * x + offset
    return scale

scale = make_scaler(7)

class Tokenizer:
    vocabulary = frozenset({"p", "q", "r"})

    def __init__(self, size):
        self.size = size

    @property
    def half(self):
        return self.size // 2

    @staticmethod
    def split(text):
        return [word for word in PATTERN.findall(text) if word not in STOP_WORDS]

@context
def model(name, tokenizer=Tokenizer(3), *, mode="fast"):
    import recipe_late
    kinds = {Kind.SMALL, Kind.LARGE}
    return (recipe_helpers.prepare(name), recipe_late.finish, Tokenizer.split(name), TABLE, WEIGHTS, MIXED,
            Config(), kinds, cached(2), even(4), scale(1), json.dumps({}))

recipe = model("tiny", mode="slow")

if __name__ == "__main__":
    print(recipe.id)
"""
HELPERS = "LIMIT = 3\ndef prepare(name):\n    return clean(name)[:LIMIT]\ndef clean(name):\n    return name.strip()\n"
LATE = "def finish(x):\n    return x\n"


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Runs the program (perhaps changed), perhaps imported, and gives the recipe's id."""
    seeds = iter(range(1, 100))

    def run(change=("", ""), helpers=HELPERS, late=LATE, imported=False, prefix="", how=forked):
        folder = tmp_path_factory.mktemp("program")
        assert change[0] in PROGRAM
        (folder / "recipe_main.py").write_text(prefix + PROGRAM.replace(*change, 1))
        (folder / "recipe_helpers.py").write_text(helpers)
        (folder / "recipe_late.py").write_text(late)
        import_it = ["-c", "import recipe_main; print(recipe_main.recipe.id)"]
        command = [sys.executable, *(import_it if imported else ["recipe_main.py"])]
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONHASHSEED": str(next(seeds)), "PYTHONPATH": path}
        done = how.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(), check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def first(ids):
    """The id of the program as it is."""
    return ids()


def test_the_id_is_the_same_in_any_process_and_place(ids, first):
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert ids(how=subprocess) == first, "another hash seed and folder"
    assert ids(imported=True) == first, "imported instead of run"
    assert ids(prefix="# moved down\n" * 300) == first, "other lines"
    assert ids(change=("STOP_WORDS = ", "# a comment\nSTOP_WORDS =   ")) == first, "another layout"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the function", ("json.dumps({})", "json.dumps([])")),
        ("a global constant", ('"of", "in"', '"of", "on"')),
        ("a value in a table", ("(2, 3)", "(2, 4)")),
        ("an array's number", ("np.arange(6.0)", "np.arange(1.0, 7.0)")),
        ("a helper behind a cache", ("n * 3", "n * 4")),
        ("one of two that call each other", ("n != 0 and", "n > 0 and")),
        ("a closure's variable", ("make_scaler(7)", "make_scaler(8)")),
        ("a closure's code", ("factor * x + offset", "factor * x - offset")),
        ("a default", ("offset=5", "offset=6")),
        ("the recipe's own default", ("Tokenizer(3)", "Tokenizer(4)")),
        ("a keyword default", ('mode="fast"', 'mode="faster"')),
        ("a static method", ("if word not in", "if word in")),
        ("a property", ("self.size // 2", "self.size // 3")),
        ("a class attribute", ('{"p", "q", "r"}', '{"p", "q", "s"}')),
        ("a dataclass's default", ("Kind = Kind.SMALL", "Kind = Kind.LARGE")),
        ("an enum's value", ("LARGE = 2", "LARGE = 3")),
        ("an input", ('model("tiny"', 'model("large"')),
        ("a pattern", ("[a-z]+", "[a-z]*")),
    ],
)
def test_changed_code_has_another_id(ids, first, what, change):
    assert ids(change) != first, what


def test_changed_modules_of_the_users_have_another_id(ids, first):
    assert ids(helpers=HELPERS.replace("LIMIT = 3", "LIMIT = 4")) != first, "a constant in an imported module"
    assert ids(helpers=HELPERS.replace(".strip()", ".lower()")) != first, "a helper's helper in an imported module"
    assert ids(late=LATE.replace("return x", "return 2 * x")) != first, "a module imported when the function runs"
    assert ids(helpers=HELPERS + "def unused():\n    return 1\n") == first, "what nobody calls does not count"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package, and imports what a function needs of it anew."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "acme"
    (folder / "inner").mkdir(parents=True)

    def write(leaf="def f(x):\n    return x + 1\n", main="import acme.inner.leaf\ndef go():\n    pass\n"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
            del sys.modules[name]
        (folder / "__init__.py").write_text("")
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "leaf.py").write_text(leaf)
        (folder / "main.py").write_text(main)
        os.utime(folder / "inner" / "leaf.py", ns=(write.time, write.time))
        write.time += 10**9
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return __import__("acme.main", fromlist=["go"]).go
        finally:
            sys.dont_write_bytecode = before

    write.time = 10**18
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "main",
    [
        "import acme.inner.leaf\ndef go():\n    return acme.inner.leaf.f(1)\n",
        "from acme.inner import leaf as it\ndef go():\n    return it.f(1)\n",
        "def go():\n    import acme.inner.leaf\n    return acme.inner.leaf.f(1)\n",
        "def go():\n    from acme.inner import leaf\n    return leaf.f(1)\n",
        "def go():\n    from acme.inner.leaf import f\n    return f(1)\n",
        "def go():\n    from .inner import leaf\n    return leaf.f(1)\n",
        "def go():\n    def deeper():\n        from .inner.leaf import f\n        return f(1)\n    return deeper()\n",
    ],
)
def test_modules_in_packages_are_found_however_they_are_imported(package, main):
    before = digest(package(main=main))
    assert digest(package(main=main)) == before
    assert digest(package("def f(x):\n    return x + 2\n", main=main)) != before


def test_equal_data_has_equal_digests():
    assert digest({"a": 1, "b": {2, 3}}) == digest({"b": {3, 2}, "a": 1})
    assert digest([1, 2]) != digest((1, 2))
    assert digest(1) != digest(1.0) != digest(True)
    assert digest("1") != digest(b"1") != digest(1)
    assert digest({1: 2}) != digest({2: 1})
    assert digest([[], [[]]]) != digest([[[]], []])
    assert digest(np.zeros((2, 3))) != digest(np.zeros((3, 2)))
    assert digest(np.zeros(2, "f4")) != digest(np.zeros(2, "f8"))


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side**2

    @functools.cached_property
    def cube(self):
        return self.side**3


class Point(typing.NamedTuple):
    x: int
    y: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int = 1


class Flag(enum.IntFlag):
    A = 1
    B = 2


class Settings(pydantic.BaseModel):
    size: int = 1


@functools.singledispatch
def describe(value):
    return "something"


@describe.register
def _(value: int):
    return "a number"


VALUES = [
    Square,
    Square(2),
    Square(2).area,
    Point,
    Point(1),
    Frozen,
    Frozen(2),
    Flag.A | Flag.B,
    Settings,
    Settings(size=3),
    describe,
    functools.partial(digest, 1),
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    collections.defaultdict(list, a=[1]),
    types.MappingProxyType({"a": 1}),
    re.compile("x"),
    logging.getLogger("ctxflow.x"),
    np.float64(1.5),
    np.random.default_rng(3),
    typing.Optional[int],  # noqa: UP045 - the old form is what is tested
    int | None,
    slice(1, 2),
    range(3),
    ...,
    len,
    np.sin,
    "text".upper,
    os,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_people_keep_in_globals_can_be_identified(value):
    first = digest(value)
    assert describe(3) == "a number"  # What its use leaves in a cache does not count.
    assert digest(value) == first


def test_values_of_classes_are_told_apart():
    assert digest(Square(2)) != digest(Square(3))
    assert digest(Settings(size=1)) != digest(Settings(size=2))
    assert digest(Frozen(1)) != digest(Frozen(2))
    assert digest(functools.partial(pow, 2)) != digest(functools.partial(pow, 3))
    assert digest(Square(2).area) != digest(Square(3).area)
    both_forms_are_one = sys.version_info >= (3, 14)  # Optional[int] is int | None.
    assert len({digest(value) for value in VALUES}) == len(VALUES) - both_forms_are_one


def test_pydantic_defaults_count():
    def model(default):
        class Options(pydantic.BaseModel):
            size: int = default

        return Options

    assert digest(model(1)) == digest(model(1))
    assert digest(model(1)) != digest(model(2))


def test_what_python_adds_to_a_class_in_use_is_not_of_its_content():
    class Plain:
        def __init__(self):
            self.x = 1

    before = digest(Plain)
    copyreg._slotnames(Plain)  # As pickle does.
    assert (Plain.__annotations__, vars(Plain)["__slotnames__"]) == ({}, [])
    assert digest(Plain) == before


def test_digests_that_files_hold_stay(monkeypatch):
    """An upgrade must not take the results of a job for another's."""
    kept = types.ModuleType("kept")
    monkeypatch.setitem(sys.modules, "kept", kept)
    exec("from typing import NamedTuple\nclass Plain:\n    x = 1\nclass Pair(NamedTuple):\n    left: str\n", vars(kept))
    assert digest(kept.Plain) == "d9544105b2275dc428fec5c81356bae6"
    assert digest(kept.Plain()) == "6476efe647cb5b8b056bfac24e332c30"
    assert digest({"pair": kept.Pair("a"), "several": [1, 2.5, b"c", None]}) == "b8938edb32810529aeb6ef2da3abcf4a"


def test_cycles_end():
    ring: list[object] = [1]
    ring.append(ring)
    other: list[object] = [1]
    other.append(other)
    assert digest(ring) == digest(other)
    assert digest(ring) != digest([1, [1]])

    def countdown(n):
        return n and countdown(n - 1)

    assert digest(countdown) == digest(countdown)


def test_a_walk_takes_time_in_proportion_to_the_code():
    """Forty functions that all call each other: every path through them would take longer than anybody lives."""
    names = [f"f{n}" for n in range(40)]
    source = "\n".join(f"def {name}(x):\n    return [{', '.join(names)}][x](x)" for name in names)

    def make(text):
        space: dict[str, object] = {"__name__": "__main__"}
        exec(text, space)
        return space["f0"]

    first = digest(make(source))
    assert digest(make(source)) == first
    assert digest(make(source.replace("def f39(x):\n    return", "def f39(x):\n    y = x; return"))) != first


def test_what_has_no_content_is_named_with_its_place():
    lock = threading.Lock()
    table = {"guards": [lock]}

    def helper():
        return table

    def load():
        return helper()

    with pytest.raises(TypeError, match=r"helper\(\) closure variable table\['guards'\]\[0\]: a _thread.lock"):
        digest(load)
    with pytest.raises(TypeError, match=r"cannot identify the value itself: a _thread.lock .* create it inside"):
        digest(lock)


def test_libraries_are_known_by_name():
    module = {"__name__": "textwrap"}
    one, two = (eval(f"lambda x: x + {n}", module) for n in (1, 2))
    assert digest(one) != digest(two), "a name that several have is no name"
    assert digest(textwrap.dedent) != digest(textwrap.indent)
    assert is_library_module("json") and is_library_module("numpy.linalg") and is_library_module("ctxflow.apps")
    assert not is_library_module("__main__") and not is_library_module(None)
    assert not is_library_module("no_such_module_anywhere")


def test_files_by_content(tmp_path):
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(b"weights" * 1000)
    second.write_bytes(b"weights" * 1000)
    assert digest_path(first) == digest_path(second)
    second.write_bytes(b"weightS" * 1000)
    assert digest_path(first) != digest_path(second)
    with pytest.raises(FileNotFoundError, match=r"gone.bin does not exist: give the path"):
        digest_path(tmp_path / "gone.bin")


def test_folders_by_names_and_contents(tmp_path):
    def folder(name, files):
        for relative, content in files.items():
            path = tmp_path / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return digest_path(tmp_path / name)

    first = folder("one", {"config.json": "{}", "deep/weights.bin": "w"})
    assert folder("two", {"deep/weights.bin": "w", "config.json": "{}"}) == first
    assert folder("three", {"config.json": "{}", "deep/weights.bin": "v"}) != first
    assert folder("four", {"config.json": "{}", "deeper/weights.bin": "w"}) != first
    (tmp_path / "five").mkdir()
    (tmp_path / "five" / "config.json").symlink_to(tmp_path / "one" / "config.json")
    assert folder("five", {"deep/weights.bin": "w"}) == first, "a link counts as what it points to"


def test_a_file_changed_in_place_is_read_again(tmp_path):
    path = tmp_path / "weights"
    path.write_text("aaaa")
    before = digest_path(path)
    os.utime(path, ns=(10**18, 10**18))
    assert digest_path(path) == before
    path.write_text("bbbb")
    assert digest_path(path) != before
