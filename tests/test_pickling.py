"""What functions and values refer to: pickled, or to blame where they cannot be; and looked at again at each call."""

import asyncio
import contextlib
import copyreg
import functools
import importlib
import pickle
import re
import subprocess
import sys
import threading
import types
from concurrent.futures import Future

import cloudpickle
import pytest

import forked
from ctxflow.executors.declarations import UserModules
from ctxflow.pickling import CARRIED, Referents, blame, dumps
from waiting import patience

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.settings = {"guards": [1, threading.Lock()]}

    def use(self):
        return self.settings


def _places():
    local = threading.Lock()
    holder = Holder()

    def closure():
        return local

    def nested():
        return closure()

    def in_global():
        return LOCK

    def in_inner():
        return [LOCK for _ in range(3)]

    def default(guard=LOCK):
        return guard

    def keyword(*, guard=LOCK):
        return guard

    def recursive(n):
        return recursive(n - 1) if n else local

    def other(n):
        return another(n)

    def another(n):
        return other(n) or local

    class Guarded:
        guard = local

        def use(self):
            return self.guard

    def makes():
        return Guarded()

    return {
        "closure": (closure, "closure() closure variable local"),
        "nested": (nested, "nested() closure variable closure closure() closure variable local"),
        "global": (in_global, "in_global() global LOCK"),
        "inner": (in_inner, "in_inner() global LOCK"),
        "default": (default, "default() defaults[0][0]"),
        "keyword": (keyword, "keyword() defaults[1]['guard']"),
        "recursive": (recursive, "recursive() closure variable local"),
        "mutual": (other, "another() closure variable local"),
        "partial": (functools.partial(print, local), ".args[0]"),
        "method": (holder.use, ".__self__.settings['guards'][1]"),
        "attribute": (holder, ".settings['guards'][1]"),
        "class": (makes, "closure variable Guarded.guard"),
        "instance": (Guarded(), " class.guard"),
    }


@pytest.mark.parametrize("case", _places())
def test_what_cannot_be_pickled_is_named(case):
    value, place = _places()[case]
    where, culprit = blame(value)
    assert where.endswith(place) and type(culprit).__name__ == "lock"
    assert where.count(" recursive()") <= 1
    with pytest.raises(TypeError, match=r"the value cannot be sent: the _thread.lock object at .*; create it inside"):
        dumps(value, "the value")


@pytest.mark.parametrize("kind", [Future, asyncio.Future])
@pytest.mark.parametrize("place", ["[0]", "['a'][1]", ".part"])
def test_a_future_inside_a_value_is_told_as_what_it_is(kind, place):
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        future = kind(loop=loop) if kind is asyncio.Future else kind()
    value = {"[0]": [future], "['a'][1]": {"a": [1, future]}, ".part": types.SimpleNamespace(part=future)}[place]
    assert blame(value) == (place, future)
    with pytest.raises(
        TypeError, match=rf"Future object at {re.escape(place)} .*a future is waited for where .* result"
    ):
        dumps(value, "an item")


PROGRAM = """
from ctxflow import ContextExecutor, batch_app, context, context_app, session_app

K = 2
table = [10]

def helper(x):
    return x * K

@batch_app
def mapped(xs):
    return [helper(x) for x in xs]

@context
def built():
    return K

@context
def from_table():
    return table[0]

@batch_app(built())
def with_context(made, xs):
    return [made for _ in xs]

@batch_app(from_table())
def with_table(made, xs):
    return [made + table[-1] for _ in xs]

@context_app(built())
def single(made, x):
    return made, helper(x)

@session_app(built())
def steps(made, states, prompts):
    for state, prompt in zip(states, prompts):
        yield (made, helper(1)), None

def plain(x):
    return helper(x)

def answers(executor):
    pool = executor.pool()
    with steps.open(0) as session:
        step = next(iter(session))
    return [
        list(mapped.map([1, 2])), mapped(1).result(), list(with_context.map([0])), with_context(0).result(),
        single(1).result(), step, [pool.submit(plain, 1).result() for _ in range(3)],
    ]

if __name__ == "__main__":
    with ContextExecutor(workers=1) as executor:
        print(answers(executor))
        K = 3
        print(answers(executor))
        def helper(x):
            return -x
        print(answers(executor))
        print(list(with_table.map([0])))
        table[0] = 20  # Inside an object: maps look there.
        print(list(with_table.map([0])), with_table(0).result())
"""


def test_calls_maps_and_sessions_use_what_names_mean_now(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    run = forked.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "[[2, 4], 2, [2], 2, (2, 2), (2, 2), [2, 2, 2]]",
        "[[3, 6], 3, [3], 3, (3, 3), (3, 3), [3, 3, 3]]",
        "[[-1, -2], -1, [3], 3, (3, -1), (3, -1), [-1, -1, -1]]",
        "[20]",
        "[40] 40",
    ]


MODULES = """
import importlib, pathlib, sys, threading
from ctxflow import ContextExecutor, batch_app

sys.dont_write_bytecode = True


def write(k):
    other = "#" * k  # Python takes a file of the same size and second for the one that a worker has compiled.
    pathlib.Path("helping.py").write_text(
        f"K = {k} {other}\\ndef f(x):\\n    return (x, K, {k} * 10)\\ndef g(xs):\\n    return [f(x) for x in xs]\\n"
        f"class C:\\n    def m(self): return {k}\\n"
    )
    pathlib.Path("locking.py").write_text(
        f"import threading\\nlock = threading.Lock()\\ndef locked(xs):\\n    with lock: return [{k} for x in xs]\\n"
    )


write(1)
import helping, locking


@batch_app
def outer(xs):
    return [helping.f(x) + (helping.C().m(),) for x in xs]


if __name__ == "__main__":
    with ContextExecutor(workers=1) as executor:
        def answers():
            pool = executor.pool()
            new = lambda x: helping.f(x)  # Which nobody has seen before.
            print(*outer.map([0]), *batch_app(helping.g).map([0]), outer(0).result(), pool.submit(new, 0).result(),
                  pool.submit(helping.f, 0).result())

        answers()
        print(executor.pool().submit(locking.locked, [0]).result())
        helping.K = 5
        answers()
        write(2)
        importlib.reload(helping)
        answers()
        helping.f = lambda x: ("other", x)
        answers()
        helping.C.m = lambda self: "method"
        answers()
        importlib.reload(locking)
        print(executor.pool().submit(locking.locked, [0]).result())
"""


def test_code_that_changes_in_a_module_reaches_workers_that_run_or_a_line_says_that_it_does_not(tmp_path):
    (tmp_path / "program.py").write_text(MODULES)
    run = forked.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert run.returncode == 0, run.stderr
    plain, other = "(0, {0}, {1})", "('other', 0)"

    def line(f, of_class):
        return f"{f[:-1]}, {of_class!r}) {f} {f[:-1]}, {of_class!r}) {f} {f}"

    assert run.stdout.splitlines() == [
        line(plain.format(1, 10), 1), "[1]", line(plain.format(5, 10), 1), line(plain.format(2, 20), 2), line(other, 2),
        line(other, "method"), "[1]",
    ]  # fmt: skip
    assert run.stderr.count("what has changed in your modules does not reach workers that run") == 1


KEEPING = """
import pickle
count, cache, K = 0, None, 1
class Item:
    def __init__(self, x):
        self.x = x
def bump():
    global count, cache
    count += 1
    cache = [count]
    return count
def item(x):
    return Item(x)
"""

STATE = """
import pickle, sys, threading
from ctxflow import ContextExecutor, batch_app, context
import keeping, keeping.user

K = 2

@context
def made():
    return keeping.item(1)

@batch_app(made())
def same(made, xs):
    return [(isinstance(made, keeping.Item), K, keeping.bump()) for x in xs]


def answers():
    print(*same.map([0]), same(0).result(), executor.pool().submit(isinstance, keeping.item(1), keeping.Item).result())


with ContextExecutor(workers=1) as executor:
    answers()
    pickle.loads(pickle.dumps(keeping.item(1)))  # Which writes __slotnames__ into the class.
    import keeping.late
    keeping.bump()
    keeping.user.outside()
    K = 3
    answers()
    keeping.user.K = 4
    print(executor.pool().submit(keeping.user.k).result())
    answers()
"""


def test_state_that_a_program_keeps_in_its_modules_is_no_change_of_their_code(tmp_path):
    package = tmp_path / "keeping"
    package.mkdir()
    (package / "__init__.py").write_text(KEEPING)
    (package / "late.py").write_text("")
    (package / "user.py").write_text(
        "import keeping\nK = 1\ndef k(): return K\ndef outside():\n    keeping.count += 1\n"
    )
    (tmp_path / "program.py").write_text(STATE)
    run = forked.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "(True, 2, 1) (True, 2, 2) True", "(True, 3, 3) (True, 3, 4) True", "4", "(True, 3, 5) (True, 3, 6) True",
    ]  # fmt: skip


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A function that writes modules and imports them."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write_and_import(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        made.extend(texts)
        return [importlib.import_module(name) for name in texts]

    yield write_and_import
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "change", "carried"),
    [
        ("K = 1", "used.K = 2", True),
        ("K = 1.5", "used.K = 3 / 2", False),
        ("TABLE = [1]", "used.TABLE = [1]", True),
        ("def f(): return 1", "used.f = lambda: 2", True),
        ("class C:\n    def m(self): return 1", "used.C.m = lambda self: 2", True),
        ("class C:\n    k = 1", "used.C.k = 2", True),
        ("class C:\n    @property\n    def p(self): return 1", "used.C.p = property(lambda self: 2)", True),
        ("class C: pass", "used.C = type('C', (), {})", True),
        ("", "used.later = lambda: 1", True),
        ("", "importlib.reload(used)", True),
        ("", "used.pickle = pickle", False),
        ("class C: pass", "copyreg._slotnames(used.C), used.C.__annotations__, used.C.__doc__", False),
        ("n = 0\ndef count():\n    global n\n    n += 1", "used.count()", False),
        ("class C:\n    n = 0\n    def __init__(self): C.n += 1", "used.C()", False),
        ("import functools\n@functools.cache\ndef f(): return 1", "used.f()", False),
        ("cache = {}\ndef f(): cache[1] = 1", "used.f()", False),
        ("n = 0", "user.count()", False),
        ("limit = 1\nclass C:\n    def __init__(self): self.limit = limit", "used.limit = 2", True),
        ("value = None\ndef get():\n    global value\n    value = value or object()\n    return value", "used.get()",
         False),
    ],
)  # fmt: skip
def test_a_module_travels_once_its_code_is_another_and_so_does_what_uses_it(imported, text, change, carried):
    used, user, _ = imported(
        somebodys_used=text,
        somebodys_user="import somebodys_used as used\ndef g(): return used.f()\ndef count(): used.n += 1",
        somebodys_own="import somebodys_used\ndef h(): return 1",
    )
    modules = UserModules()
    modules.look()
    modules.look()
    assert not CARRIED
    names = {"__name__": "__main__", "copyreg": copyreg, "importlib": importlib, "pickle": pickle}
    exec(change, {**names, "used": used, "user": user})
    modules.look()
    found, other = set(CARRIED), UserModules()
    modules.close()
    assert found == ({"somebodys_used", "somebodys_user"} if carried else set())
    other.look()
    assert not CARRIED, "another run has met them as they are"


def test_what_its_user_has_travel_stays_so(imported):
    (used,) = imported(somebodys_used="K = 1")
    cloudpickle.register_pickle_by_value(used)
    modules = UserModules()
    modules.look()
    used.K = 2
    modules.look()
    modules.close()
    assert not CARRIED
    cloudpickle.unregister_pickle_by_value(used)


def test_modules_travel_until_the_last_run_of_which_they_have_changed_is_over(imported):
    one, two = imported(somebodys_one="K = 1", somebodys_two="K = 1")
    registered = set(cloudpickle.list_registry_pickle_by_value())
    runs = UserModules(), UserModules()
    for run in runs:
        run.look()
    one.K = 2
    for run in runs:
        run.look()
    two.K = 2
    runs[0].look()
    assert set(CARRIED) == {"somebodys_one", "somebodys_two"}, "what changes after another has changed travels, too"
    imported(somebodys_late="import somebodys_one\ndef f(): return somebodys_one.K")
    runs[0].look()
    assert set(CARRIED) == {"somebodys_one", "somebodys_two", "somebodys_late"}
    runs[0].close()
    assert set(CARRIED) == cloudpickle.list_registry_pickle_by_value() - registered == {"somebodys_one"}
    runs[1].close()
    assert not CARRIED and cloudpickle.list_registry_pickle_by_value() == registered


def module(text):
    made = types.ModuleType("somebodys_module")
    exec(text, vars(made))
    return made


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("def f(): return K\nK = 1", "K = 2"),
        ("def f(): return g()\ndef g(): return 1", "def g(): return 2"),
        ("def f(): return g()\ndef g(): return h()\ndef h(): return 1", "def h(): return 2"),
        ("def f(): return later()", "def later(): return 1"),
        ("def f(): return len([])", "def len(x): return 7"),
        ("def f(): return C().m()\nclass C:\n    def m(self): return K\nK = 1", "K = 2"),
        ("def f(): return C.m(1)\nclass C:\n    @staticmethod\n    def m(x): return K\nK = 1", "K = 2"),
        ("def f(): return C().p\nclass C:\n    @property\n    def p(self): return K\nK = 1", "K = 2"),
        ("def f(): return [K for _ in 'ab']\nK = 1", "K = 2"),
        ("def f(x=1): return x", "f.__defaults__ = (2,)"),
        ("def f(*, x=1): return x", "f.__kwdefaults__ = {'x': 2}"),
        ("def f(): return 1", "f.__code__ = (lambda: 2).__code__"),  # As IPython's autoreload does.
        ("def make():\n    k = 1\n    def f(): return k\n    def to(v):\n        nonlocal k\n        k = v\n"
         "    return f, to\nf, to = make()", "to(2)"),
        ("import functools\n@functools.lru_cache\ndef g(): return K\ndef f(): return g()\nK = 1", "K = 2"),
        ("import functools\ndef g(x): return K\nf = functools.partial(g, 1)\nK = 1", "K = 2"),
    ],
)  # fmt: skip
def test_what_a_function_uses_is_noticed(text, change):
    made = module(text)
    before = Referents(made.f)
    assert not before.changed()
    exec(change, vars(made))
    assert before.changed()
    assert not Referents(made.f).changed()


def test_a_helper_in_a_module_of_the_users_is_noticed():
    helpers = module("def g(): return 1")
    made = module("def f(): return helpers.g()")
    made.helpers = helpers
    before = Referents(made.f)
    exec("unused = 1", vars(helpers))
    exec("unused = 1", vars(made))
    assert not before.changed()
    exec("def g(): return 2", vars(helpers))
    assert before.changed()


def test_what_is_no_function_of_the_users_says_nothing():
    assert not Referents(print, len, "text", None, subprocess.run, object()).changed()


def test_a_function_called_once_is_not_kept(running_executor):
    import gc
    import weakref

    def add(x):
        return x + 1

    gone = weakref.ref(add)
    assert running_executor.submit(add, {}, 1).result() == 2
    del add
    gc.collect()
    assert gone() is None


@pytest.fixture
def running_executor(tmp_path, monkeypatch):
    from ctxflow import ContextExecutor

    monkeypatch.chdir(tmp_path)
    with ContextExecutor(workers=1) as executor:
        yield executor
