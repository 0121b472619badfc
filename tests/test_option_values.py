"""Options of every kind and of every wrong type: refused where they are written, by their names, with what to write."""

import datetime
import inspect
import pydoc
import re
from decimal import Decimal
from pathlib import Path

import numpy
import parsl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow import Alternative, ContextExecutor, batch_app, context, context_app, session_app
from ctxflow.app_options import Options
from ctxflow.errors import closest, short
from ctxflow.option_values import number, whole
from ctxflow.scheduler import Limits
from ctxflow.sessions import SessionOptions
from waiting import finished

NAN, INF = float("nan"), float("inf")
NO_TEXT = [3, True, 2.5, [], {}, b"x", object()]
NO_WHOLE = ["2", "high", 1.5, NAN, INF, True, [1], {}, b"1", Decimal(2), numpy.array([1, 2]), numpy.bool_(True)]
NO_NUMBER = ["60", "high", NAN, INF, -INF, True, [1], {}, datetime.timedelta(seconds=3), 1j]
NO_FLAG = [1, 0, "no", "true", None, [], NAN]
NO_ITEMS = [3, "text", b"bytes", {"a": 1}, None, object]
NO_MAPPING = ["weights", ["weights"], 3, True]


@context
def recipe():
    return 1


PRIORITY = [*NO_WHOLE]
SECONDS = [*NO_NUMBER, 0, -1, -0.5]
APP = {
    "priority": PRIORITY,
    "deadline": [*NO_NUMBER, -1, datetime.date(2030, 1, 1)],
    "timeout": SECONDS,
    "retries": [*NO_WHOLE, -1, None],
    "batch_size": [*NO_WHOLE, 0, -1],
    "executor": [*NO_TEXT, ""],
    "cache": NO_FLAG,
    "max_delay": SECONDS,
    "max_error": [*NO_NUMBER, -0.1, 1.1],
    "level": [*NO_TEXT, "", "total"],
    "error": [*NO_NUMBER, -0.1, 1.1, None],
    "alternatives": [*NO_ITEMS, Alternative(recipe()), [3], [recipe()]],
}
CONTEXT = {
    "files": [*NO_MAPPING, None, {"weights": 3}, {3: "weights"}],
    "env": [*NO_MAPPING, None, {"NAME": None}, {3: "x"}],
    "gpus": [*NO_WHOLE, -1, None],
    "memory": [0, "0 GB", -1, 1.5, NAN, True, [1], "lots", "-1 GB", b"1"],
    "gpu_memory": [-1, 1.5, NAN, True, [1], "lots", "-1 GB", b"1"],
    "load_timeout": SECONDS,
    "affinity": [*NO_TEXT, "", "close"],
    "priority": [*PRIORITY, None],
    "concurrency": [*NO_WHOLE, 0, -1],
    "preload": [3, True, "torch", [3], ["not a name"]],
    "park": NO_FLAG,
    "artifacts": [3, True, ["X"], {"a": 3}, {"../a": "X"}, {"a": ""}, {"a": "/tmp"}, {"a": "../x"}],
}
SESSION = {
    "chunk_target": [*NO_NUMBER, -1],
    "keep_every": [*NO_WHOLE, 0, -1],
    "ahead": [*NO_WHOLE, 0, None],
    "timeout": SECONDS,
    "retries": [*NO_WHOLE, -1, None],
    "executor": [*NO_TEXT, ""],
}
EXECUTOR = {
    "site": [3, None, True, b"local", ["local"]],
    "label": [*NO_TEXT, "", None],
    "workers": [*NO_WHOLE, 0, -1],
    "routing": [3, True, "nowhere", {}],
    "batching": [3, "huge", {"policy": "fixed", "size": "4"}, {"policy": "fixed", "sise": 4}],
    "placement": [3, "nowhere", [1]],
    "preemption": [3, "never"],
    "scaling": [3, "always", {"policy": "fixed", "workers": 1, "x": 2}],
    "health": [3, "robust", {"policy": "sequential", "slow": "twice"}],
    "sessions": [3, "none of them"],
    "level": [*NO_TEXT, "", "total"],
    "limits": [{}, 3, {"losses": 1}],
    "log_events": NO_FLAG,
    "working_dir": [3, True, ["."]],
    "storage_access": [3, "http", [3]],
    "remote_monitoring_radio": [3, "udp"],
}
LIMITS = {name: [*NO_WHOLE, 0, -1, None] for name in ("losses", "crashes", "failures")} | {
    name: [*NO_NUMBER, -1, None] for name in ("retry_seconds", "verdict")
}
MAP = {
    "columns": [3, True, [3], {"a": 1}, b"a", None],
    "resume": [3, True, b"file", ["file"], {}],
    "resume_by": [*NO_TEXT, "name", None],
    "on_error": [*NO_TEXT, "ignore", None],
    "order": [*NO_TEXT, "any", None],
    "window": [*NO_WHOLE, 0, -1],
    "progress": [each for each in NO_FLAG if each is not None],
}
SPECIFICATION = {
    "priority": PRIORITY,
    "timeout": SECONDS,
    "level": [*NO_TEXT, "", "total"],
    "context": [3, "model", [], [3], [len, 3], [len, [], 3], [len, [], {}, 4], {"model": 1}],
}


def told(call, name, value):
    """The sentence that a call is refused with."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**{name: value})
    sentence = str(caught.value)
    assert name in sentence, "it names the option"
    assert "\n" not in sentence and len(sentence) < 400
    assert any(word in sentence for word in ("give ", "write ", "choose ", "cannot be made so", "are of the form"))
    return sentence


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}={re.sub(' at 0x.*', '', short(value))}")
        for name in table
        for value in table[name]
    ]


@pytest.mark.parametrize(("name", "value"), cases(APP))
def test_options_of_apps(name, value):
    for decorate in (batch_app, context_app):
        sentence = told(lambda decorate=decorate, **options: decorate(recipe(), **options), name, value)
        app = decorate(recipe())(lambda live, xs: xs)
        if value is not None:
            assert told(app.using, name, value) == sentence


@pytest.mark.parametrize(("name", "value"), cases(CONTEXT))
def test_options_of_contexts(name, value):
    assert told(context, name, value) == told(recipe.options, name, value)


@pytest.mark.parametrize(("name", "value"), cases(SESSION))
def test_options_of_sessions(name, value):
    told(session_app, name, value)


@pytest.mark.parametrize(("name", "value"), cases(EXECUTOR))
def test_arguments_of_executors(name, value):
    told(ContextExecutor, name, value)
    told(ContextExecutor.config, name, value)


@pytest.mark.parametrize(("name", "value"), cases(LIMITS))
def test_limits(name, value):
    told(Limits, name, value)


@pytest.mark.parametrize(("known", "table"), [(Options, APP), (SessionOptions, SESSION), (Limits, LIMITS)])
def test_no_option_is_left_out_of_these_tables(known, table):
    assert list(inspect.signature(known).parameters) == list(table)


def test_no_argument_is_left_out_of_these_tables():
    assert list(inspect.signature(ContextExecutor).parameters) == ["site", *list(EXECUTOR)[1:]]
    assert [p.name for p in inspect.signature(context).parameters.values() if p.kind is p.KEYWORD_ONLY] == list(CONTEXT)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run"))
    with parsl.load(ContextExecutor.config(workers=1, run_dir=folder, log_events=False)) as kernel:
        yield kernel


@batch_app
def negative(numbers):
    return [-n for n in numbers]


@pytest.mark.parametrize(("name", "value"), cases(MAP))
def test_options_of_maps(kernel, name, value):
    if value is None and name in ("resume", "window"):
        return
    told(lambda **options: negative.map([1], **options), name, value)


@pytest.mark.parametrize(("name", "value"), cases(SPECIFICATION))
def test_resource_specifications(kernel, name, value):
    executor = kernel.executors["ctxflow"]
    sentence = told(lambda **keys: executor.submit(pow, keys, 2, 5), name, value)

    @parsl.python_app
    def power(parsl_resource_specification={}):  # noqa: B006 - Parsl's own form
        return 2**5

    with pytest.raises((TypeError, ValueError), match="^" + re.escape(sentence)):
        finished(power(parsl_resource_specification={name: value})).result()
    assert finished(executor.submit(pow, {}, 2, 5)).result() == 32, "the run goes on"


def test_a_key_of_a_resource_specification_that_is_not_supported_is_refused(kernel):
    executor = kernel.executors["ctxflow"]
    with pytest.raises(TypeError, match=r"has no key 'priorty': did you mean 'priority'\?"):
        executor.submit(pow, {"priorty": 1}, 2, 5)
    with pytest.raises(TypeError, match="parsl_resource_specification='fast' makes no sense: give a dict"):
        executor.submit(pow, "fast", 2, 5)
    supported = "ctxflow supports context, priority, timeout, level and gpus"
    with pytest.raises(TypeError, match=f"has no key 'walltime': {supported}$"):
        executor.submit(pow, {"walltime": 1}, 2, 5)
    for name in ("cores", "memory", "disk"):
        with pytest.raises(TypeError, match=f"has no key {name!r} here: {supported}; what a worker has stands in the"):
            executor.submit(pow, {"priority": 1, name: 1}, 2, 5)
    assert finished(executor.submit(pow, {"priority": 1}, 2, 5)).result() == 32


def test_what_is_like_the_right_type_is_taken():
    app = batch_app(recipe(), priority=numpy.int64(3), timeout=numpy.float32(0.5), retries=numpy.uint8(2))(lambda *a: a)
    assert (app.options.priority, app.options.timeout, app.options.retries) == (3, 0.5, 2)
    assert {type(app.options.priority), type(app.options.retries)} == {int} and type(app.options.timeout) is float
    assert context(files={"weights": Path("model")}, env={"N": 4}, memory=None, load_timeout=None)
    assert batch_app(recipe(), deadline=datetime.datetime(2030, 1, 1), alternatives=(Alternative(recipe()),))
    assert app.using(timeout=None, priority=None).options.timeout is None


def test_options_that_there_are_not_are_refused_with_those_that_there_are():
    for call, sentence in [
        (
            lambda: batch_app(priorty=1),
            "an app has no option 'priorty': it takes priority, .*; did you mean 'priority'?",
        ),
        (lambda: batch_app(lambda x: x).using(colour=1), "an app has no option 'colour': it takes priority, deadline,"),
        (lambda: context(gpu=1), "@context has no option 'gpu': it takes files, .*; did you mean 'gpus'?"),
        (lambda: session_app(aheads=1), "a session app has no option 'aheads': it takes chunk_target"),
        (lambda: ContextExecutor.config(worker=1), "neither .* has an option 'worker': did you mean 'workers'?"),
        (lambda: ContextExecutor(worker=1), "unexpected keyword argument 'worker': .* workers=, .* a site file"),
        (
            lambda: ContextExecutor(provider=None, max_workers_per_node=2),
            "argument 'provider': .* workers=, .* site file",
        ),
    ]:
        with pytest.raises(TypeError, match=sentence):
            call()


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (batch_app, APP),
        (context_app, APP),
        (batch_app(lambda xs: xs).using, APP),
        (context, CONTEXT),
        (recipe.options, CONTEXT),
        (session_app, SESSION),
        (negative.map, MAP),
    ],
)
def test_help_shows_every_option(what, options):
    shown = pydoc.plain(pydoc.render_doc(what))
    assert [name for name in options if f"{name}:" not in shown] == []
    if what.__name__ not in ("using", "options"):
        assert [name for name in options if f":param {name}:" not in shown] == []


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=200), st.binary(max_size=200), st.booleans(), st.none()))
@settings(max_examples=200, deadline=None)
def test_whatever_is_given_is_taken_as_it_is_or_refused_by_name(value):
    for check in (whole, number):
        try:
            assert check("size", value, "a size", 1) == value >= 1
        except (TypeError, ValueError) as error:
            assert str(error).startswith("size=") and len(str(error)) < 200


def test_what_was_meant():
    assert (closest("timout", APP), closest("x", APP)) == ("timeout", "")
