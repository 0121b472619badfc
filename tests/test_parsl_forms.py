"""The forms that Parsl's users write: the paper's Figure 3, proposal #3724, memoization, files, joins."""

import parsl
import pytest
from parsl import File, bash_app, join_app, python_app
from parsl.dataflow.errors import DependencyError

from ctxflow import ContextExecutor, batch_app, context, context_app


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    config = ContextExecutor.config(workers=2, retries=2, run_dir=str(tmp_path_factory.mktemp("run")))
    with parsl.load(config) as kernel:
        yield kernel


def load_model(name, scale=1):
    return {"model": f"{name}*{scale}", "count": [0]}


def test_figure_3_of_the_paper(kernel):
    @python_app
    def infer(claims, parsl_resource_specification={}):  # noqa: B006 - the paper's own form
        from ctxflow import load_variable_from_context

        load_variable_from_context("count")[0] += 1
        return load_variable_from_context("model"), load_variable_from_context("count")[0], claims

    spec = {"context": [load_model, ["llama"], {"scale": 3}]}
    results = [infer(n, parsl_resource_specification=spec).result() for n in range(6)]
    assert [(model, n) for model, _, n in results] == [("llama*3", n) for n in range(6)]
    assert max(count for _, count, _ in results) > 1, "the context outlives a call"
    short = {"context": [load_model, ["mini"]]}
    assert infer(0, parsl_resource_specification=short).result()[0] == "mini*1"


def test_the_form_of_parsls_proposal(kernel):
    @python_app
    def infer(n, parsl_resource_specification={}):  # noqa: B006 - the proposal's own form
        from ctxflow import load_variable_in_serverless

        return load_variable_in_serverless("model"), n

    spec = {"function_context": load_model, "function_context_args": ["qwen"], "function_context_kwargs": {"scale": 2}}
    assert infer(1, parsl_resource_specification=spec).result() == ("qwen*2", 1)
    assert infer(
        1, parsl_resource_specification={"function_context": load_model, "function_context_args": ["q"]}
    ).result()


def test_async_functions_are_refused(kernel):
    @python_app
    async def fetch(url):
        return url

    with pytest.raises(TypeError, match=r"^fetch is async, which workers do not await"):
        fetch("a").result()

    @bash_app
    async def shell(url):
        return f"echo {url}"

    with pytest.raises(TypeError, match=r"^shell is async"):
        shell("a").result()

    async def load():
        return 1

    with pytest.raises(TypeError, match=r"^load is async, which workers do not await"):
        kernel.executors["ctxflow"].submit(pow, {"context": [load]}, 2, 5)


def test_a_missing_variable_says_which_there_are(kernel):
    @python_app
    def wrong(parsl_resource_specification={}):  # noqa: B006
        from ctxflow import load_variable_from_context

        return load_variable_from_context("modle")

    with pytest.raises(LookupError, match="the context has no variable 'modle': it holds 'model', 'count'"):
        wrong(parsl_resource_specification={"context": [load_model, ["x"], {}]}).result()


@context
def base(value):
    return value


def runs(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def note_item(base, numbers, *, path, extra=0):
    with open(path, "a") as file:
        file.write("x\n")
    return [base + n + extra for n in numbers]


def note_call(base, n, path, extra=0):
    with open(path, "a") as file:
        file.write("x\n")
    return base + n + extra


@pytest.mark.parametrize("kind", ["batch", "context"])
def test_memoization_tells_contexts_and_constants_apart(kernel, tmp_path, kind):
    path = tmp_path / "runs"
    app = batch_app(base(1), cache=True)(note_item) if kind == "batch" else context_app(base(1), cache=True)(note_call)
    for variant, extra, expected in [
        (app, 0, 6),
        (app.using(base(2)), 0, 7),
        (app, 10, 16),
        (app.using(base(1)), 0, 6),
    ]:
        for _ in range(2):
            assert variant(5, path=str(path), extra=extra).result() == expected
    assert runs(path) == 3, "the same context and constants are answered from the memo"
    assert app.using(cache=False)(5, path=str(path), extra=0).result() == 6
    assert runs(path) == 4


def test_memoization_of_a_plain_app_with_a_context(kernel, tmp_path):
    @python_app(cache=True)
    def infer(n, path, parsl_resource_specification={}):  # noqa: B006
        from ctxflow import load_variable_from_context

        with open(path, "a") as file:
            file.write("x\n")
        return load_variable_from_context("model"), n

    path = tmp_path / "runs"
    for name in ("a", "a", "b"):
        spec = {"context": [load_model, [name], {}]}
        assert infer(1, str(path), parsl_resource_specification=spec).result() == (f"{name}*1", 1)
    assert runs(path) == 2

    recipe = context(load_model)("c")
    for _ in range(2):
        assert infer(1, str(path), parsl_resource_specification={"context": recipe}).result() == ("c*1", 1)
    assert runs(path) == 3


def test_parsl_retries(kernel, tmp_path):
    @context_app(base(1))
    def flaky(base, path):
        import os

        with open(path, "a") as file:
            file.write("x\n")
        if os.path.getsize(path) < 6:
            raise OSError("not yet")
        return "done"

    assert flaky(str(tmp_path / "runs")).result() == "done"
    assert runs(tmp_path / "runs") == 3


@pytest.mark.parametrize(("own", "tries"), [(0, 3), (1, 3), (4, 5)])
def test_parsl_retries_hold_for_the_items_of_a_map(kernel, tmp_path, own, tries):
    """`Config(retries=2)` as for calls; where the app asks for more, those."""

    @batch_app(base(1), retries=own, batch_size=4)
    def flaky(base, names):
        for name in names:
            if name == "bad":
                with open(path, "a") as file:
                    file.write("x" if len(names) == 1 else "")
                raise OSError("never")
        return names

    path = str(tmp_path / "tries")
    answers = list(flaky.map(["a", "bad", "b", "c"], on_error="return"))
    assert answers[::2] == ["a", "b"] and answers[3] == "c"
    assert str(answers[1]) == "never"
    assert (tmp_path / "tries").read_text() == "x" * tries


def test_futures_files_and_joins(kernel, tmp_path):
    @python_app
    def number():
        return 4

    @context_app(base(100))
    def add(base, n, inputs=(), outputs=()):
        import pathlib

        for file in outputs:
            with open(file.filepath, "w") as out:
                out.write(str(base + n))
        return base + n + sum(int(pathlib.Path(file.filepath).read_text()) for file in inputs)

    @batch_app(base(1))
    def increment(base, numbers):
        return [base + n for n in numbers]

    @bash_app
    def copy(inputs=(), outputs=()):
        return f"cat {inputs[0].filepath} > {outputs[0].filepath}"

    @join_app
    def both(n):
        return [add(n), increment(n)]

    assert add(number()).result() == 104
    assert increment(increment(number())).result() == 6
    first = add(1, outputs=[File(str(tmp_path / "one"))])
    copied = copy(inputs=[first.outputs[0]], outputs=[File(str(tmp_path / "two"))])
    assert copied.outputs[0].result().filepath and (tmp_path / "two").read_text() == "101"
    assert both(number()).result() == [104, 5]


def test_an_error_reaches_those_that_depend_on_it(kernel):
    @context_app(base(1))
    def fail(base):
        raise ValueError("no")

    @context_app(base(1))
    def use(base, other):
        return other

    with pytest.raises(DependencyError, match=r"no|fail"):
        use(fail()).result()
