"""On one machine, relative paths mean in calls and contexts what they mean where the program was started."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import parsl
import pytest
from executor_helpers import started
from parsl import File, bash_app, python_app

from ctxflow import ContextError, ContextExecutor, CtxflowError, batch_app, context, context_app, session_app
from waiting import eventually, finished


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory where the program is started, which it leaves at once."""
    before, home = os.getcwd(), tmp_path_factory.mktemp("home")
    (home / "in.txt").write_text("given")
    (home / "model").mkdir()
    (home / "model" / "weights.bin").write_text("heavy")
    os.chdir(home)
    try:
        with parsl.load(ContextExecutor.config(workers=1, run_dir="runinfo")):
            os.chdir(tmp_path_factory.mktemp("elsewhere"))
            yield home
    finally:
        os.chdir(before)


def copied(name):
    """What a call does: reads a file and writes another, by relative paths."""
    Path(name).write_text(Path("in.txt").read_text() + " to " + name)
    return os.getcwd()


@context
def model():
    return Path("model/weights.bin").read_text()


def calls():
    """Each kind of call: name -> a function that makes it with a file's name and gives its result."""
    spec = {"context": [lambda: {"weights": Path("model/weights.bin").read_text()}]}

    @bash_app
    def bash(name):
        return f'printf "%s to {name}" "$(cat in.txt)" > {name}'

    @python_app
    def with_context(name, parsl_resource_specification={}):  # noqa: B006 - the paper's own form
        from ctxflow import load_variable_from_context

        assert load_variable_from_context("weights") == "heavy"
        return copied(name)

    def needs(weights):
        assert weights == "heavy"

    def one(weights, name):
        needs(weights)
        return copied(name)

    def many(weights, names):
        needs(weights)
        return [copied(name) for name in names]

    def stepped(weights, states, prompts):
        needs(weights)
        return [(copied(new[0]), None) for new in prompts]

    def first_turn(name):
        with session_app(model())(stepped).open(name) as session:
            return next(iter(session))

    return {
        "python_app": lambda name: finished(python_app(copied)(name)).result(),
        "bash_app": lambda name: finished(bash(name)).result(),
        "with_context": lambda name: finished(with_context(name, parsl_resource_specification=spec)).result(),
        "context_app": lambda name: finished(context_app(model())(one)(name)).result(),
        "partial": lambda name: finished(context_app(model(), level="partial")(one)(name)).result(),
        "none": lambda name: finished(context_app(model(), level="none")(one)(name)).result(),
        "batch_app": lambda name: finished(batch_app(model())(many)(name)).result(),
        "map": lambda name: next(batch_app(model())(many).map([name])),
        "session_app": first_turn,
    }


@pytest.mark.parametrize("kind", list(calls()))
def test_a_call_reads_and_leaves_files_where_the_program_was_started(home, kind):
    name = f"{kind}.txt"
    assert calls()[kind](name) in (str(home), 0)
    assert (home / name).read_text() == f"given to {name}"


def test_the_next_call_begins_in_the_right_directory_wherever_the_one_before_went(home):
    @python_app
    def wander():
        os.chdir("model")
        return os.listdir(".")

    for _ in range(3):
        assert finished(wander()).result() == ["weights.bin"]


def test_what_a_call_starts_in_the_background_and_temporary_files_are_as_elsewhere(home):
    @python_app
    def temporary():
        import tempfile

        with tempfile.NamedTemporaryFile() as file:
            return os.path.dirname(file.name) == tempfile.gettempdir()

    assert finished(temporary()).result()
    assert not [name for name in os.listdir(home) if name.startswith("tmp")]


def test_redirects_and_files_named_in_the_driver_are_those_of_its_current_directory(home):
    @bash_app
    def say(inputs=(), outputs=(), stdout=None):
        return f"cat {inputs[0]}; cat {inputs[0]} > {outputs[0]}"

    Path("here.txt").write_text("here")
    finished(say(inputs=[File("here.txt")], outputs=[File("copy.txt")], stdout="said.txt")).result()
    assert Path("copy.txt").read_text() == Path("said.txt").read_text() == "here"


@pytest.fixture
def web(tmp_path):
    """The address of a web server that has the file `page.html`."""
    (tmp_path / "page.html").write_text("<p>from afar")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_parsls_staging_from_the_web(home, web):
    @python_app
    def read(inputs=()):
        return Path(inputs[0]).read_text()

    assert finished(read(inputs=[File(f"{web}/page.html")])).result() == "<p>from afar"
    assert (home / "page.html").exists(), "it comes to where the program was started, as with Parsl's other executors"


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A directory that the program was started in, and that may be removed; goes back at the end."""
    lost = tmp_path / "lost"
    lost.mkdir()
    monkeypatch.chdir(lost)
    return lost


def test_a_directory_that_is_removed_meanwhile_is_told_in_a_sentence_until_it_is_back(lost, tmp_path):
    with started(tmp_path / "run", workers=1) as executor:
        assert finished(executor.submit(os.getcwd, {})).result() == str(lost)
        shutil.rmtree(lost)
        said = f"calls run in the directory where the executor was started, {lost}, and that cannot be entered"
        with pytest.raises(OSError, match=said) as caught:
            finished(executor.submit(os.getcwd, {})).result()
        assert "put it back, or start the executor in one that stays" in str(caught.value)
        with pytest.raises(ContextError, match=said):
            finished(context_app(model())(lambda weights: weights)()).result()
        lost.mkdir()
        assert finished(executor.submit(os.getcwd, {})).result() == str(lost)


def test_an_executor_is_not_started_in_a_directory_that_is_gone(lost, tmp_path):
    executor = started(tmp_path / "run", workers=1)
    shutil.rmtree(lost)
    said = "calls run in the directory where the executor is started, which is not there any more"
    with pytest.raises(CtxflowError, match=said):
        executor.start()
    executor.shutdown()
    with pytest.raises(CtxflowError, match=said):
        ContextExecutor()


def test_calls_at_the_same_time_share_the_directory(home, tmp_path):
    """As with Parsl's threads: both see it, and what they name alike is one file."""

    @batch_app(batch_size=1)
    def meet(names, others):
        Path(names[0]).touch()
        return [eventually(Path(others[0]).exists)]

    with started(tmp_path / "run", label="two", workers=2):
        assert list(meet.using(executor="two").map(["a", "b"], ["b", "a"])) == [True, True]
