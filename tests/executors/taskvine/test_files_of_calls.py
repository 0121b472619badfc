"""Files of calls on workers that do not see the driver's disk: brought there, brought back, told of where lost."""

import functools
import http.server
import logging
import os
import re
import threading
from pathlib import Path

import parsl
import pytest
from parsl import File, bash_app, python_app
from parsl.app.errors import BadStdStreamFile, BashExitFailure, MissingOutputs
from parsl.config import Config
from played_engine import PlayedExecutor

from ctxflow import CallCrashed, ContextError, batch_app, context, context_app
from ctxflow.executors.executor import SharedDiskStaging
from waiting import finished


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = PlayedExecutor(tmp_path_factory.mktemp("worker"))
    run_dir = str(tmp_path_factory.mktemp("run"))
    with parsl.load(Config([executor], run_dir=run_dir, initialize_logging=False, strategy="none")):
        yield executor
    assert not list(Path(run_dir).rglob("output-*")), "nothing is left beside where outputs belong"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, executor):
    """Where the program stands: another folder for each test, which the worker does not know."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@context
def ten():
    return 10


def told(caplog):
    return [record.getMessage() for record in caplog.records if "in its folder on a worker" in record.getMessage()]


# --- inputs


def read(file):
    return Path(file).read_text(), os.path.isabs(file), sorted(os.listdir("."))


@pytest.mark.parametrize("how", ["argument", "keyword", "inputs"])
def test_an_input_has_its_relative_path_in_the_calls_folder(home, how):
    (home / "data").mkdir()
    (home / "data" / "in.txt").write_text("given")
    file = File("data/in.txt")
    if how == "argument":
        future = python_app(read)(file)
    elif how == "keyword":
        future = python_app(read)(file=file)
    else:
        future = python_app(lambda inputs: read(inputs[0]))(inputs=[file])
    assert finished(future).result() == ("given", False, ["data"])


def test_inputs_from_elsewhere_do_not_meet_each_other(home, tmp_path_factory):
    others = [tmp_path_factory.mktemp("other") / "in.txt" for _ in range(2)]
    for number, other in enumerate(others):
        other.write_text(str(number))

    @bash_app
    def join(inputs=(), outputs=()):
        return f"cat {inputs[0]} {inputs[1]} > {outputs[0]}"

    (home / "deep").mkdir()
    os.chdir("deep")
    (home / "in.txt").write_text("up")
    finished(join(inputs=[File(str(others[0])), File("../in.txt")], outputs=[File("out.txt")])).result()
    assert (home / "deep" / "out.txt").read_text() == "0up"


def test_a_call_may_do_with_its_input_what_it_likes(home, executor):
    (home / "in.txt").write_text("given")
    executor.engine.manager.sent.clear()

    @python_app
    def spoil(file):
        Path(file).write_text(Path(file).read_text() + "!")
        return Path(file).read_text()

    assert [finished(spoil(File("in.txt"))).result() for _ in range(3)] == ["given!"] * 3
    assert executor.engine.manager.sent == [str(home / "in.txt")], "it stays on the worker for the next call"
    assert (home / "in.txt").read_text() == "given"
    (home / "in.txt").write_text("other")
    assert finished(spoil(File("in.txt"))).result() == "other!"


@pytest.mark.parametrize(("name", "said"), [("none.txt", "No such file"), ("folder", "send a folder as an archive")])
def test_an_input_that_cannot_be_sent_is_told_in_a_sentence(home, name, said):
    (home / "folder").mkdir()
    with pytest.raises(OSError, match=f"the input {home / name} .*{said}"):
        finished(python_app(read)(File(name))).result()


def test_items_of_a_batch_app_and_of_a_map(home):
    for number in range(3):
        (home / f"in-{number}").write_text(str(number))

    @batch_app(ten())
    def add(ten, files):
        return [ten + int(Path(file).read_text()) for file in files]

    futures = [add(File(f"in-{number}")) for number in range(3)]
    assert [finished(future).result() for future in futures] == [10, 11, 12]
    assert list(add.map(File(f"in-{number}") for number in range(3))) == [10, 11, 12]


@pytest.fixture
def web(tmp_path_factory):
    """The address of a web server that has the file `page.html`."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "page.html").write_text("<p>from afar")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_workers_fetch_from_the_web(home, web, caplog):
    assert finished(python_app(read)(File(f"{web}/page.html"))).result() == ("<p>from afar", False, [".staged"])
    with pytest.raises(OSError, match=rf"the worker cannot have {web}/none.html \(.*\): see that it is there"):
        finished(python_app(read)(File(f"{web}/none.html"))).result()
    assert os.listdir(home) == [], "nothing comes to the driver's disk"
    assert not told(caplog)


# --- outputs


def test_outputs_come_where_they_belong_and_on_to_other_calls(home, caplog):
    @context_app(ten())
    def write(ten, outputs=()):
        for number, file in enumerate(outputs):
            Path(file).write_text(str(ten + number))

    @bash_app
    def cat(inputs=(), outputs=()):
        return "cat " + " ".join(map(str, inputs)) + f" > {outputs[0]}"

    names = ["one.txt", "folder/two.txt", str(home / "three.txt")]
    first = write(outputs=[File(name) for name in names])
    last = cat(inputs=first.outputs, outputs=[File("all.txt")])
    assert Path(finished(last.outputs[0]).result()).read_text() == "101112"
    assert [(home / name).read_text() for name in names] == ["10", "11", "12"]
    assert not told(caplog)


def test_an_output_that_is_an_input_too(home):
    (home / "count").write_text("1")

    @python_app
    def count(inputs=(), outputs=()):
        Path(outputs[0]).write_text(str(1 + int(Path(inputs[0]).read_text())))

    for _ in range(2):
        finished(count(inputs=[File("count")], outputs=[File("count")])).result()
    assert (home / "count").read_text() == "3"


def test_an_output_that_is_a_link(home):
    @bash_app
    def link(outputs=()):
        return f"echo real > real; ln -s real {outputs[0]}"

    finished(link(outputs=[File("out.txt")])).result()
    assert (home / "out.txt").read_text() == "real\n"
    assert not (home / "out.txt").is_symlink()


def test_twenty_megabytes(home):
    @python_app
    def big(outputs=()):
        Path(outputs[0]).write_bytes(b"x" * 20_000_000)

    finished(big(outputs=[File("big")])).result()
    assert (home / "big").stat().st_size == 20_000_000


def test_an_output_that_is_not_made_is_an_error_and_what_was_there_stays(home, executor):
    (home / "out.txt").write_text("before")
    with pytest.raises(FileNotFoundError, match=r"the call ended without making its output out.txt"):
        finished(python_app(lambda outputs=(): None)(outputs=[File("out.txt")])).result()
    with pytest.raises(MissingOutputs):
        finished(bash_app(lambda outputs=(): "true")(outputs=[File("out.txt")])).result()

    @context_app(ten())
    def fail(ten, outputs=()):
        Path(outputs[0]).write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        finished(fail(outputs=[File("out.txt")])).result()
    assert (home / "out.txt").read_text() == "before"
    assert finished(executor.submit(pow, {}, 2, 2)).result() == 4, "the worker is none the worse for it"


def test_a_call_that_crashes_costs_its_outputs_and_not_its_worker(home, executor):
    @python_app
    def crash(outputs=()):
        Path(outputs[0]).write_text("half")
        os._exit(1)

    with pytest.raises(CallCrashed):
        finished(crash(outputs=[File("out.txt")])).result()
    assert finished(executor.submit(pow, {}, 2, 2)).result() == 4
    assert os.listdir(home) == []


def test_an_output_that_cannot_be_put_in_its_place_is_an_error(home):
    (home / "out").mkdir()
    with pytest.raises(OSError, match=f"the call's output {home}/out cannot be put there: Is a dir"):
        finished(python_app(lambda outputs: Path(outputs[0]).write_text("x"))(outputs=[File("out")])).result()


def test_what_bash_apps_print_comes_also_where_they_fail_and_is_added(home, caplog):
    @bash_app
    def say(what, stdout=None, stderr=None):
        return f"echo {what}; echo no >&2; {what}"

    log = str(home / "logs" / "err.txt")
    finished(say("true", stdout="out.txt", stderr=(log, "w"))).result()
    with pytest.raises(BashExitFailure):
        finished(say("false", stdout="out.txt", stderr=(log, "w"))).result()
    assert (home / "out.txt").read_text() == "true\nfalse\n"
    assert Path(log).read_text().endswith("no\n") and Path(log).read_text().count("no\n") == 1
    future = say("true", stdout=File("file.txt"))
    finished(future).result()
    assert Path(finished(future.stdout).result()).read_text() == "true\n"
    automatic = say("true", stdout=parsl.AUTO_LOGNAME)
    finished(automatic).result()
    assert Path(automatic.stdout).read_text() == "true\n"
    assert not told(caplog)


def test_where_what_is_printed_cannot_be_kept_nothing_is_run(home):
    (home / "folder").mkdir()
    for given in ("folder", File("folder"), ("in.txt/out.txt", "w")):
        (home / "in.txt").touch()
        with pytest.raises(BadStdStreamFile):
            finished(bash_app(lambda stdout=None: "true")(stdout=given)).result()


def test_without_parsls_kernel(home, executor):
    """`submit`, as libraries on top of an executor use it."""
    (home / "in.txt").write_text("given")

    def copy(source, outputs):
        Path(outputs[0]).write_text(Path(source).read_text())

    finished(executor.submit(copy, {}, File("in.txt"), outputs=[File("out.txt")])).result()
    assert (home / "out.txt").read_text() == "given"
    with pytest.raises(ValueError, match=r"an output cannot be sent to https://example.org/x: give the path of a file"):
        executor.submit(copy, {}, File("in.txt"), outputs=[File("https://example.org/x")])


def test_the_documents_program(home, capsys):
    """The second one of docs/where-your-code-runs.md; tests/test_where_doc.py runs the first."""
    text = (Path(__file__).parents[3] / "docs" / "where-your-code-runs.md").read_text()
    _, program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (home / "claims").mkdir()
    (home / "claims" / "one.txt").write_text("Paris is in France.")
    exec(program, {"__name__": "__main__", "File": File, "Path": Path, "python_app": python_app})
    assert capsys.readouterr().out == "4\n"


def test_where_workers_see_the_drivers_disk_files_stay_where_they_are(home, tmp_path_factory):
    """As docs/where-your-code-runs.md says to write it for a shared disk."""
    shared = PlayedExecutor(tmp_path_factory.mktemp("shared"), SharedDiskStaging())
    config = Config([shared], run_dir=str(tmp_path_factory.mktemp("run")), initialize_logging=False, strategy="none")
    with parsl.DataFlowKernel(config) as kernel:

        @bash_app(data_flow_kernel=kernel)
        def copy(inputs=(), outputs=(), stdout=None):
            return f"cp {inputs[0]} {outputs[0]}; echo {inputs[0]}"

        (home / "in.txt").write_text("given")
        finished(copy(inputs=[File("in.txt")], outputs=[File("out.txt")], stdout="said.txt")).result()
        assert (home / "out.txt").read_text() == "given"
        assert (home / "said.txt").read_text() == f"{home}/in.txt\n"
        assert shared.engine.manager.sent == []


# --- what is lost is told


def test_what_a_call_leaves_behind_is_told_once_for_each_app_and_kind_of_name(home, caplog):
    def leave(*names):
        for name in names:
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).touch()

    @python_app
    def first(*names, outputs=()):
        leave(*names)

    @batch_app(ten())
    def second(ten, names):
        leave(*names)
        return names

    with caplog.at_level(logging.WARNING, "ctxflow"):
        for number in range(3):
            finished(first(f"part-{number}.txt", "folder/deep", "kept", outputs=[File("kept")])).result()
        assert list(second.map(["part-7.txt"])) == ["part-7.txt"]
        finished(first("other")).result()
    assert [message.partition(" in its folder")[0] for message in told(caplog)] == [
        "a call of first left folder/, part-0.txt",
        "a call of second left part-7.txt",
        "a call of first left other",
    ]
    assert "outputs=[File(...)]" in told(caplog)[0]
    assert os.listdir(home) == ["kept"]


def test_a_relative_path_that_was_not_declared_is_explained():
    @context_app(ten())
    def look(ten):
        return Path("in.txt").read_text()

    with pytest.raises(FileNotFoundError) as caught:
        finished(look()).result()
    assert "in.txt was looked for in an empty folder on a worker: name it in inputs=" in str(caught.value.__cause__)

    @context
    def model():
        return Path("model/weights.bin").read_text()

    with pytest.raises(ContextError, match=r"name it in inputs=.* or in files= of the context"):
        finished(context_app(model())(lambda weights: weights)()).result()
