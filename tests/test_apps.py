"""How people call: batch apps and context apps, their options, and what they say of wrong use."""

import datetime
import functools

import pytest

import ctxflow
from ctxflow import ContextExecutor, batch_app, context, context_app, session_app
from ctxflow.app_options import Options
from waiting import FOREVER, eventually


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """One worker, so that the order of calls is the scheduler's."""
    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@context
def base(value):
    return {"value": value}


@batch_app(base(10))
def combine(base, left, right, *, times=1, mark=None):
    """Combine."""
    assert type(left) is list and len(left) == len(right)
    return [(base["value"] + a * b * times, mark) for a, b in zip(left, right, strict=True)]


@batch_app
def plain(numbers):
    return [n + 1 for n in numbers]


@context_app(base(5))
def call(base, *args, **kwargs):
    return base["value"], args, kwargs


def test_several_parameters_come_as_lists_side_by_side(executor):
    assert combine(2, 3).result() == (16, None)
    assert combine(2, right=3).result() == (16, None)
    assert combine(right=3, left=2).result() == (16, None)
    assert combine(2, 3, times=2, mark="x").result() == (22, "x")
    assert [future.result()[0] for future in [combine(n, n) for n in range(5)]] == [10 + n * n for n in range(5)]
    assert list(combine.map([1, 2], [3, 4], times=10)) == [(40, None), (90, None)]
    assert (combine.__name__, combine.__doc__) == ("combine", "Combine.")


def test_the_function_gets_real_lists(executor):
    @batch_app(base(1))
    def kinds(base, left, right):
        found = [(type(left).__name__, type(right).__name__)] * len(left)
        left.sort()
        right.clear()
        return found

    assert list(kinds.map([3, 1], ["a", "b"])) == [("list", "list")] * 2
    assert kinds(1, 2).result() == ("list", "list")


def test_a_changed_constant_counts_and_equal_ones_of_other_types_too(executor):
    @batch_app
    def shown(numbers, *, mark):
        return [repr(vars(mark) if hasattr(mark, "__dict__") else mark) for _ in numbers]

    class Setting:
        def __init__(self, value):
            self.value = value

    setting = Setting(1)
    assert list(shown.map([0], mark=setting)) == ["{'value': 1}"]
    setting.value = 2
    assert shown(0, mark=setting).result() == "{'value': 2}"
    for mark in [(1,), (True,), (1.0,), 0.0, -0.0, 1, True, b"1", float("nan")]:
        assert shown(0, mark=mark).result() == repr(mark)


def test_constants_are_kept_apart_by_value_and_type(executor):
    marks = [1, True, 1.0, "1", [1], {"a": 1}, {"a": 2}, None]
    futures = [combine(0, 0, mark=mark) for mark in marks]
    for mark, future in zip(marks, futures, strict=True):
        assert future.result() == (10, mark) and type(future.result()[1]) is type(mark)


def test_any_number_of_parameters(executor):
    @batch_app
    def row(*columns):
        return [sum(row) for row in zip(*columns, strict=True)]

    assert row(1, 2, 3).result() == 6
    assert list(row.map([1, 2], [3, 4])) == [4, 6]
    with pytest.raises(
        TypeError, match=r"row takes any number of values an item \(\*columns\), but got none: give one"
    ):
        row()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {}, r"combine takes 2 values an item \(left, right\), but got 1"),
        ((1, 2, 3), {}, r"combine takes 2 values an item \(left, right\), but got 3"),
        ((1,), {"right": 2, "tims": 3}, "combine has no parameter 'tims': its keyword-only parameters are mark, times"),
        ((1, 2), {"left": 3}, "combine has no parameter 'left'"),
    ],
)
def test_wrong_arguments_say_what_is_taken(executor, args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        combine(*args, **kwargs)


@pytest.mark.parametrize("decorate", [batch_app, context_app])
@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (
            base,
            {},
            TypeError,
            r"base is a context function, not a recipe: call it with its inputs, as in base\(\.\.\.\)",
        ),
        ("model", {}, TypeError, "the context of an app is a recipe made by a @context function, not a str"),
        (None, {"priorty": 1}, TypeError, "an app has no option 'priorty': it takes priority, deadline, timeout"),
        (
            None,
            {"batch_size": 0},
            ValueError,
            "batch_size=0 makes no sense: give the number of items in a batch, 1 or more",
        ),
        (None, {"timeout": 0}, ValueError, "timeout=0 makes no sense: give seconds that a call may take, more than 0"),
        (base(1), {"level": "total"}, ValueError, "level='total' is not known: write 'none', 'partial' or 'pervasive'"),
        (
            None,
            {"retries": -1},
            ValueError,
            "retries=-1 makes no sense: give how often an item is tried again, 0 or more",
        ),
    ],
)
def test_wrong_options_say_what_to_write(decorate, given, options, error, message):
    with pytest.raises(error, match=message):
        decorate(given, **options)(lambda base, x: x)
    app = decorate(base(1))(lambda base, x: x)
    with pytest.raises(error, match=message):
        app.using(given, **options)


async def fetch(urls):
    return urls


async def fetch_each(urls):
    for url in urls:
        yield url


class Fetcher:
    async def __call__(self, urls):
        return urls


def fetched(urls):
    return urls


ASYNC = r" is async, which workers do not await: write def \w+\(\.\.\.\), with asyncio\.run\(\.\.\.\) in it"
ASYNC += ", or make it an @item_app"


@pytest.mark.parametrize("function", [fetch, fetch_each, Fetcher(), functools.partial(fetch)])
@pytest.mark.parametrize("decorate", [batch_app, batch_app(base(1)), context_app, context_app(base(1)), session_app])
def test_async_functions_are_refused_where_they_are_declared(decorate, function):
    with pytest.raises(TypeError, match=r"^(fetch|fetch_each|Fetcher)" + ASYNC):
        decorate(function)


@pytest.mark.parametrize(
    ("decorate", "function", "message"),
    [
        (batch_app(None), None, "an app is made of a function, not of None"),
        (context_app(base(1)), "text", "an app is made of a function, not of a str"),
        (batch_app, 3, "the context of an app is a recipe made by a @context function, not an int"),
        (
            batch_app,
            str,
            r"str is a class, and a batch app is made of .*: write lambda items: \[str\(item\) for item in",
        ),
        (batch_app, Options, r"Options is a class, .*: write lambda items: \[Options\(item\) for item in items\]"),
        (batch_app, min, "min does not tell its parameters: write a function around it"),
        (batch_app, lambda: (), r"called with lists of items, but it has no parameter .*: write def f\(items\)"),
        (batch_app(base(1)), lambda: (), r"it has no parameter for its items: write def f\(context, items\)"),
        (batch_app(base(1)), fetched, r"urls gets its context, and nothing .*: write def fetched\(context, urls\)"),
        (batch_app(fetched).using, base(1), r"urls gets its context, and nothing its items"),
        (context_app(base(1)), lambda: 1, r"no parameter for its context, which comes first: write def f\(context\)"),
        (batch_app, plain, r"plain is an app already: plain.using\(\.\.\.\) gives it another context or other options"),
        (context_app, call, "call is an app already"),
    ],
)
def test_what_cannot_be_an_app_is_refused_where_it_is_declared(decorate, function, message):
    with pytest.raises(TypeError, match=message) as refused:
        decorate(function)
    assert "\n" not in str(refused.value)


def test_without_an_executor_the_error_says_how_to_get_one(executor):
    with pytest.raises(ctxflow.CtxflowError, match="no executor labelled 'elsewhere' is running: load one with parsl"):
        plain.using(executor="elsewhere")(1)
    with pytest.raises(ctxflow.CtxflowError, match="no executor labelled 'elsewhere'"):
        call.using(executor="elsewhere")(1)


def test_using_changes_what_it_names_and_nothing_else(executor):
    other = combine.using(base(100), priority=3, timeout=30, deadline=60)
    assert other.options == Options(priority=3, timeout=30, deadline=60) and combine.options == Options()
    assert (other(1, 1).result(), combine(1, 1).result()) == ((101, None), (11, None))
    assert other.using(priority=4).context == base(100)
    assert call.using(base(6))(1).result() == (6, (1,), {})


def test_context_apps_take_any_arguments(executor):
    assert call().result() == (5, (), {})
    assert call(1, [2], key={"a": None}).result() == (5, (1, [2]), {"key": {"a": None}})
    bare = context_app(lambda *args: args)
    assert bare(1, 2).result() == (1, 2)


def test_timeouts_stop_a_call_and_what_follows_runs(executor):
    @context_app(base(1), timeout=0.3)
    def sleep(base, seconds):
        import time

        time.sleep(seconds)
        return seconds

    with pytest.raises(ctxflow.CallTimeout, match="the call took longer than its timeout"):
        sleep(FOREVER).result()
    assert sleep.using(timeout=FOREVER)(0.01).result() == 0.01


def test_retries_are_the_options(executor, tmp_path):
    @batch_app(retries=2)
    def flaky(paths):
        import os

        for path in paths:
            if not os.path.exists(path + ".1"):
                os.close(os.open(path + (".1" if os.path.exists(path + ".0") else ".0"), os.O_CREAT))
                raise OSError("not yet")
        return list(paths)

    path = str(tmp_path / "tries")
    assert flaky(path).result() == path
    with pytest.raises(OSError, match="not yet"):
        flaky.using(retries=0)(str(tmp_path / "once")).result()


def order_of(executor, apps, folder):
    """The order in which one worker begins calls of these apps, which wait behind a call that holds it."""
    gate, begun = folder / "gate", folder / "begun"

    def hold(base, gate, begun):
        import os
        import pathlib
        import time

        pathlib.Path(begun).touch()
        while not os.path.exists(gate):
            time.sleep(0.005)

    held = context_app(base(0))(hold)(str(gate), str(begun))
    eventually(begun.exists)
    futures = [app(name, str(folder / "order")) for name, app in apps.items()]
    gate.touch()
    for future in [held, *futures]:
        future.result()
    return (folder / "order").read_text().split()


def test_priorities_then_deadlines_are_honoured(executor, tmp_path):
    def note(base, name, path):
        with open(path, "a") as file:
            file.write(name + "\n")

    app = context_app(base(0))(note)
    today = datetime.datetime.now() + datetime.timedelta(hours=1)
    apps = {
        "low": app.using(priority=-1),
        "plain": app,
        "later": app.using(deadline=today),
        "soon": app.using(deadline=60),
        "high": app.using(priority=5),
        "higher": app.using(priority=6),
    }
    assert order_of(executor, apps, tmp_path) == ["higher", "high", "soon", "later", "plain", "low"]


def test_a_deadline_makes_one_app_not_one_a_call(executor):
    app = call.using(deadline=600)
    before = len(executor.calls._apps)
    assert [app(n).result()[1] for n in range(5)] == [(n,) for n in range(5)]
    assert len(executor.calls._apps) == before + 1


def test_apps_travel_inside_functions(executor):
    @batch_app
    def outer(numbers):
        # Another app's name, and its own: both are sent along, and can be asked what they are.
        return [(combine.__name__, combine.function({"value": n}, [1], [2]), outer.priority) for n in numbers]

    assert outer(3).result() == ("combine", [(5, None)], 0)
    again = context_app(lambda: (plain.function([1]), call.context.name))
    assert again().result() == ([2], "base")


def test_batches_form_from_single_items(executor):
    @batch_app
    def size(numbers):
        import time

        time.sleep(0.05)
        return [len(numbers)] * len(numbers)

    assert size(0).result() == 1  # By now there is a worker that waits.
    sizes = [future.result() for future in [size(n) for n in range(50)]]
    assert sizes[0] == 1 and max(sizes) > 1, "what waited together went together"
