"""What is refused before anything runs, and another command mends, has the exit status 2; what fails has 1."""

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from batch_helpers import write_lines

from ctxflow import ContextExecutor
from ctxflow.batch import load_job, work
from ctxflow.batch.driver import run_job
from ctxflow.ownership import AppendFile

ROWS = [{"id": n, "text": text, "source": "x"} for n, text in enumerate("abcd")]
JOB = ("--function", "batch_functions:upper", "--column", "text")


@pytest.fixture(scope="module")
def done(functions, tmp_path_factory):
    """A folder with a job that is done: its executor, its input, and what it left."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(functions))
        patch.chdir(folder)
        executor = ContextExecutor(workers=1, log_events=False)
        executor.run_dir = str(tmp_path_factory.mktemp("runs"))
        with executor:
            patch.setattr(work, "BareExecutor", lambda site: contextlib.nullcontext(executor))
            write_lines(folder / "in.jsonl", ROWS)
            for name, more in (("out.jsonl", {}), ("ids.jsonl", {"id_column": "id"}), ("out.csv", {})):
                choices = {"function": "batch_functions:upper", "column": ["text"], **more}
                run_job(load_job(None, input="in.jsonl", output=name, **choices))
            yield folder


@pytest.fixture
def here(done, folder):
    """A copy of that folder."""
    for path in done.iterdir():
        shutil.copy2(path, folder)
    return folder


def edited(rows):
    def edit():
        write_lines(Path("in.jsonl"), rows)

    return edit


def changed_at_its_end():
    path = Path("out.jsonl")
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@contextlib.contextmanager
def locked():
    with contextlib.closing(AppendFile(Path("out.jsonl.progress"))) as journal:
        journal.lock(Path("out.jsonl"))  # As a driver does while it lives.
        yield


@contextlib.contextmanager
def port_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize(
    ("before", "words", "status", "said"),
    [
        (None, "in.jsonl -o out.jsonl", 0, "nothing to do"),
        (None, "in.jsonl -o out.jsonl --keep source", 2, "holds the results of another job (keep was"),
        (None, "in.jsonl -o nowhere.jsonl --site nowhere.toml", 2, "there is no site 'nowhere.toml'"),
        (None, "in.jsonl -o other.jsonl --detach", 2, "--detach makes the driver a job of HTCondor's"),
        (edited(ROWS[::-1]), "in.jsonl -o out.jsonl", 2, "holds the result of another row in its place"),
        (edited(ROWS[:2]), "in.jsonl -o out.jsonl", 2, "its rows are known by their numbers alone"),
        (edited([{**ROWS[0], "text": "x"}]), "in.jsonl -o ids.jsonl --id-column id", 2, "is not what it was when"),
        (lambda: os.remove("out.jsonl.progress"), "in.jsonl -o out.jsonl", 2, "is there already, without the journal"),
        (lambda: Path("a.csv").write_text("mine"), "in.jsonl -o a.csv", 2, "is there already: name another output"),
        (lambda: Path("a.progress").write_text("mine"), "in.jsonl -o a", 2, "is not the journal of a job"),
        (changed_at_its_end, "in.jsonl -o out.jsonl", 2, "was changed by another program"),
        (None, "in.jsonl -o in.jsonl/out.jsonl", 2, "cannot be written: "),
        (port_taken, "in.jsonl -o other.jsonl --metrics PORT", 2, "metrics cannot be served at"),
        (locked, "in.jsonl -o out.jsonl", 1, "is being written by another driver: wait for it"),
        (None, "in.jsonl -o other.jsonl --function batch_functions:hopeless", 1, "no such weights"),
    ],
)
def test_exit_statuses(here, command, before, words, status, said):
    with contextlib.ExitStack() as stack:
        beginning, port = before() if before is not None else None, ""
        if isinstance(beginning, contextlib.AbstractContextManager):
            port = stack.enter_context(beginning)
        given = words.replace("PORT", port or "").split()
        ended, told = command("batch", *given, *(() if "--function" in given else JOB))
    time_of_day = r"\d\d:\d\d:\d\d " if status != 2 else ""  # What is refused has not begun.
    assert (ended, said in told, bool(re.match(time_of_day + "ctxflow: ", told))) == (status, True, True), told
