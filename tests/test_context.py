"""Recipes: their options, identity, composition, and how they travel."""

import asyncio
import collections
import contextlib
import pickle
import threading

import cloudpickle
import pytest

import ctxflow
from ctxflow import Context, ContextExecutor, context, context_app
from ctxflow.context import parse_size
from ctxflow.recipe import needs_loop


@context(gpus=2, memory="8 GB", gpu_memory="6GiB", load_timeout=60, env={"MODE": 1})
def model(name, *, scale=1):
    """A model."""
    return {"name": name, "scale": scale}


@context
def pair(first, second=None):
    return first, second


def test_calling_gives_a_recipe_and_builds_nothing():
    built = []

    @context
    def noisy(value):
        built.append(value)
        return value

    recipe = noisy(3)
    assert isinstance(recipe, Context) and built == []
    assert recipe.build() == 3 and built == [3]


def test_options():
    recipe = model("tiny", scale=2)
    assert (recipe.name, recipe.gpus, recipe.memory, recipe.gpu_memory) == ("model", 2, 8 * 10**9, 6 * 2**30)
    assert recipe.load_timeout == 60 and recipe.env == {"MODE": "1"}
    assert (model.__name__, model.__doc__) == ("model", "A model.")
    variant = model.options(gpus=0, env={})("tiny", scale=2)
    assert variant.gpus == 0 and variant.memory == 8 * 10**9 and variant.env == {}
    assert repr(recipe) == "<context model('tiny', scale=2)>"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpu": 1}, TypeError, "@context has no option 'gpu': it takes files, env, gpus, memory, gpu_memory"),
        ({"affinity": "close"}, ValueError, "affinity='close' is not known: write 'guaranteed' or 'best-effort'"),
        ({"gpus": -1}, ValueError, "gpus=-1 makes no sense: give the number of GPUs"),
        ({"memory": "lots"}, ValueError, "'lots' is no size: write a number of bytes, or text such as '10 GB'"),
        ({"memory": 0}, ValueError, "memory=0 makes no sense: give the bytes that it takes .* or leave it out"),
        ({"memory": "0.2"}, ValueError, "memory='0.2' makes no sense: give the bytes that it takes"),
        ({"gpu_memory": -5}, ValueError, "gpu_memory=-5 makes no sense: give a number of bytes, or text such as"),
    ],
)
def test_wrong_options_say_what_to_write(options, error, message):
    with pytest.raises(error, match=message):
        context(**options)
    with pytest.raises(error, match=message):
        model.options(**options)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1.5k", 1500), ("2 KiB", 2048), ("3MB", 3 * 10**6), ("1 gib", 2**30), (" 4 T ", 4 * 10**12), (0, 0)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_equal_recipes_are_one():
    assert model("a") == model("a") and hash(model("a")) == hash(model("a"))
    assert model("a") != model("b") != model("a", scale=2)
    assert model("a") != "a recipe"
    assert model("a") == model.options(gpus=1, memory=None)("a"), "resources are no part of the identity"
    assert model("a") != model.options(env={"MODE": "2"})("a")


def test_files_count_by_content_not_by_place(tmp_path):
    for name, text in {"one": "w", "two": "w", "three": "v"}.items():
        (tmp_path / name).write_text(text)

    def load(path):
        return context(files={"path": tmp_path / path})(read)().id

    def read(path):
        with open(path) as file:
            return file.read()

    assert load("one") == load("two") != load("three")
    with pytest.raises(FileNotFoundError, match="gone does not exist: give the path of a file or folder"):
        load("gone")
    assert context(files={"path": tmp_path / "one"})(read)().build() == "w"
    assert context(files={"path": tmp_path / "one"})(read)().build({"path": str(tmp_path / "three")}) == "v"


def test_recipes_compose():
    inner = model("tiny")
    assert pair(inner, second=pair(1)).build() == ({"name": "tiny", "scale": 1}, (1, None))
    assert pair(model("a")) == pair(model("a")) != pair(model("b"))
    assert pair(model) != pair(pair), "a function that gives recipes is told apart too"


def test_recipes_travel():
    recipe = pair(model("tiny"), 2)
    assert cloudpickle.loads(cloudpickle.dumps(recipe)) == recipe
    assert cloudpickle.loads(cloudpickle.dumps(model))("tiny") == model("tiny")
    function, args, kwargs = pickle.loads(recipe.dumps())
    assert Context("pair", function, args, kwargs).build() == ({"name": "tiny", "scale": 1}, 2)


def test_a_recipe_that_cannot_be_pickled_names_itself_and_the_object():
    with pytest.raises(TypeError) as caught:
        pair(1, second={"guard": threading.Lock()}).dumps()
    assert str(caught.value) == (
        "context pair cannot be sent: the _thread.lock object at [1][1]['guard'] cannot be pickled "
        "(TypeError: cannot pickle '_thread.lock' object); create it inside the function instead of passing or "
        "capturing it"
    )


def test_variables_of_a_context_are_read_inside_calls_only():
    for load in (ctxflow.load_variable_from_context, ctxflow.load_variable_in_serverless):
        with pytest.raises(LookupError, match="there is no variable 'model' here: call this inside an app"):
            load("model")


# --- on workers


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=2)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


def counting(folder):
    """A context function that leaves a file for each time it is built."""

    @context
    def counted(value):
        import os
        import tempfile

        tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=folder)
        return value

    return counted


def test_equal_recipes_share_a_library_process(executor, tmp_path):
    first, second = counting(str(tmp_path))("same"), counting(str(tmp_path))("same")
    assert first is not second and first.function is not second.function and first == second

    def where(value):
        import os
        import time

        time.sleep(0.02)
        return os.getpid(), value

    calls = [context_app(recipe)(where)() for _ in range(20) for recipe in (first, second)]
    seen = {call.result() for call in calls}
    built = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert len(built) == len(set(built)) <= 2, "built once in each library process, one a worker"
    assert {str(pid) for pid, _ in seen} <= set(built) and {value for _, value in seen} == {"same"}
    other = context_app(counting(str(tmp_path))("other"))(where)().result()
    assert other[0] not in {pid for pid, _ in seen}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files_reach_the_function_as_local_paths(executor, tmp_path, kind):
    source = tmp_path / "model.bin"
    if kind == "folder":
        (source / "deep").mkdir(parents=True)
        (source / "config.json").write_text("{}")
        (source / "deep" / "weights").write_bytes(b"\0\1" * 2_500_000)
    else:
        source.write_bytes(b"\0\1" * 2_500_000)

    @context(files={"path": source})
    def weights(scale, path):
        import os

        file = os.path.join(path, "deep", "weights") if os.path.isdir(path) else path
        with open(file, "rb") as opened:
            return {"path": path, "content": opened.read() * scale, "inode": os.stat(file).st_ino}

    look = context_app(weights(2))(lambda found: found)
    found = look().result()
    assert found["content"] == b"\0\1" * 5_000_000
    assert found["path"] != str(source) and found["path"].endswith("/model.bin")
    real = source / "deep" / "weights" if kind == "folder" else source
    assert found["inode"] == real.stat().st_ino, "linked, not copied, on the same disk"


def test_the_same_content_under_two_names(executor, tmp_path):
    def read(path):
        with open(path) as file:
            return path, file.read()

    for name in ("first.txt", "second.txt"):
        (tmp_path / name).write_text("the same")
        recipe = context(env={"NAME": name}, files={"path": tmp_path / name})(read)()
        path, content = context_app(recipe)(lambda found: found)().result()
        assert path.endswith(name) and content == "the same"


def test_a_missing_file_is_an_error_of_the_call_that_needs_it(executor, tmp_path):
    @context(files={"path": tmp_path / "gone.bin"})
    def weights(path):
        return path

    with pytest.raises(FileNotFoundError, match=r"gone.bin does not exist: give the path of a file or folder"):
        context_app(weights())(lambda found: found)().result()
    assert executor.submit(pow, {}, 2, 3).result() == 8


def test_a_file_that_goes_away_before_it_is_staged_breaks_the_context(executor, tmp_path):
    path = tmp_path / "soon-gone.bin"
    path.write_text("here")

    @context(files={"path": path})
    def weights(path):
        return path

    recipe = weights()
    assert recipe.id
    executor.calls.run.declare_context(recipe)
    path.unlink()
    with pytest.raises((ctxflow.ContextError, FileNotFoundError), match=r"soon-gone.bin"):
        context_app(recipe)(lambda found: found)().result()


def test_environment_and_composition_on_a_worker(executor):
    @context(env={"CTXFLOW_TEST_MODE": "quiet"})
    def outer(inner):
        import os

        return inner["name"], os.environ["CTXFLOW_TEST_MODE"]

    light = model.options(gpus=0, gpu_memory=None)
    assert context_app(outer(light("tiny")))(lambda value: value)().result() == ("tiny", "quiet")


def test_inputs_by_place_or_by_name_are_one_recipe():
    assert model("a") == model(name="a") and model("a", scale=2) == model(scale=2, name="a")
    assert repr(model(scale=2, name="a")) == "<context model('a', scale=2)>"

    @context
    def loose(first, /, second=2, *rest, third=3, **more):
        return first, second, rest, third, more

    assert loose(1, second=5) == loose(1, 5) != loose(1, 5, 6)
    assert loose(1, third=1, x=1) == loose(1, x=1, third=1)
    assert loose(1, 5, 6, third=7, first=8).build() == (1, 5, (6,), 7, {"first": 8})
    assert loose(1, third=0).build() == (1, 2, (), 0, {})
    assert context(max)(3, 4).build() == 4, "a function that tells no signature"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: model(scale=2),
            r"model cannot be called with these inputs: missing a required argument: 'name'; it takes \(",
        ),
        (lambda: model("a", size=2), "model cannot be called with these inputs: got an unexpected .* 'size'"),
        (lambda: model("a", name="a"), "multiple values for argument 'name'"),
        (lambda: model("a", 2), "too many positional arguments"),
        (lambda: model.options(files={"weights": "w"})("a"), "no parameter 'weights' that files= could give by name"),
        (lambda: model.options(files={"name": "w"})(name="a"), "model gets 'name' from files=: leave it out"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_at_once(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_the_parameters_of_files_stay_free(tmp_path):
    (tmp_path / "w").write_text("the weights")

    @context(files={"weights": tmp_path / "w"})
    def first(weights, name, size=1):
        return weights, name, size

    assert first("a", 2) == first(name="a", size=2)
    assert first("a", 2).build({"weights": "/local"}) == ("/local", "a", 2)

    @context(files={"weights": tmp_path / "w"})
    def any_names(*args, **kwargs):
        return args, kwargs

    assert any_names(1, x=2).build({"weights": "/local"}) == ((1,), {"x": 2, "weights": "/local"})


def test_a_composed_recipe_needs_what_its_parts_need():
    @context(gpus=1, memory=100, gpu_memory=10, env={"A": 1, "B": 2})
    def small(n):
        return n

    @context(gpus=2, memory=1000, env={"B": 2, "C": 3})
    def large(n):
        return n

    @context(memory=5, env={"D": 4})
    def both(*parts):
        return parts

    recipe = both(small(1), [large(2), small(3)])
    assert (recipe.gpus, recipe.memory, recipe.gpu_memory) == (2, 1205, 20)
    assert recipe.env == {"A": "1", "B": "2", "C": "3", "D": "4"}
    outer = pair(recipe, second=small(4))
    assert (outer.gpus, outer.memory, outer.gpu_memory) == (2, 1305, 30)
    assert outer.build() == ((1, [2, 3]), 4)
    assert (pair(1).gpus, pair(1).memory, pair(1).gpu_memory) == (0, None, None)
    with pytest.raises(ValueError, match=r"small.1.. inside both wants B='2' in the environment, where another .* '9'"):
        both.options(env={"B": 9})(small(1))


def test_recipes_in_lists_tuples_and_dicts_are_built():
    @context
    def one(n):
        return n

    plain = [1, [2]]
    recipe = pair([one(1), (one(2), {"key": one(3)}), "x"], second=plain)
    assert recipe.build() == ([1, (2, {"key": 3}), "x"], plain)
    assert recipe.build()[1] is plain
    cycle = [1]
    cycle.append(cycle)
    assert pair(cycle).build()[0] is cycle
    for wrong in ({one(1)}, {one(1): 2}, collections.OrderedDict(key=one(1)), [frozenset([one(1)])]):
        with pytest.raises(ValueError, match="put recipes in plain lists, tuples, or the values of dicts"):
            pair(wrong)


def test_the_files_of_inner_recipes_are_staged_too(executor, tmp_path):
    import os

    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
        (folder / "data").write_text(folder.name)

    def reader(folder, **files):
        @context(files={"path": folder / "data", **files})
        def read(path, inner=None):
            with open(path) as file:
                return file.read(), os.path.realpath(path), inner

        return read

    deep = reader(folders[0])(inner=[reader(folders[1])(reader(folders[2])())])

    @context_app(deep)
    def get(built):
        return built

    texts, paths = [], []
    built = get().result()
    while built:
        built = built[0] if isinstance(built, list) else built
        text, path, built = built
        texts.append(text)
        paths.append(path)
    assert texts == ["one", "two", "three"]
    assert not any(path.startswith(str(folder)) for path in paths for folder in folders), "they read staged copies"
    assert deep.build()[0] == "one"


def test_an_async_recipe_is_built_on_an_event_loop_with_those_among_its_inputs():
    log = []

    class Closable:
        async def aclose(self):
            log.append("closed")

    @context
    async def inner(name):
        await asyncio.sleep(0)
        return Closable()

    @context
    def plain(one):
        return [one]

    @context
    async def outer(parts):
        yield parts
        log.append("cleaned up")

    async def main():
        async with contextlib.AsyncExitStack() as closing:
            [[found], text] = await outer([plain(inner("a")), "text"]).build_async(closing)
            assert (type(found), text, log) == (Closable, "text", [])

    recipe = outer([plain(inner("a")), "text"])
    assert recipe.is_async and plain(inner("a")).is_async and not plain(1).is_async
    asyncio.run(main())
    assert log == ["cleaned up", "closed"], "the last first"
    with pytest.raises(TypeError, match="inner is async: await build_async"):
        plain(inner("a")).build()
    assert pickle.loads(recipe.dumps())[0] is not None
    assert needs_loop(recipe.dumps()) and not needs_loop(plain(1).dumps())


def test_how_many_calls_a_context_bears_is_no_part_of_what_it_is():
    @context
    def table():
        return {}

    assert table.options(concurrency=4)() == table()
    assert table.options(concurrency=4)().concurrency == 4
    with pytest.raises(ValueError, match="concurrency=0 makes no sense: give the most calls"):
        table.options(concurrency=0)

    @context
    def both(one, two):
        return one, two

    assert both(table.options(concurrency=4)(), table.options(concurrency=2)()).concurrency == 2
    assert both.options(concurrency=8)(table.options(concurrency=4)(), 1).concurrency == 8


def test_a_function_that_names_the_package_itself_can_be_sent():
    assert pickle.loads(cloudpickle.dumps(ctxflow)) is ctxflow
