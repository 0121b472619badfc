"""OUTPUT.status.json: what a driver leaves there, and how it is found."""

import contextlib
import errno
import json
import os
import threading
import time

import pytest
from batch_helpers import write_lines

from ctxflow import ContextExecutor
from ctxflow.batch import job_status, load_job
from ctxflow.batch.driver import run_job
from ctxflow.batch.job_status import StatusFile, exit_status, find_status, found_below, read_status, told
from ctxflow.errors import ContextError
from ctxflow.executors import kept_files
from ctxflow.observe import progress
from ctxflow.observe.progress import Progress, condition
from waiting import FOREVER, eventually


def run(function, output="out.jsonl", **choices):
    job = load_job(None, input="in.jsonl", output=output, function=f"batch_functions:{function}", workers=1, **choices)
    return run_job(job)


def test_a_job_leaves_its_last_figures_beside_its_output_and_with_its_run(folder):
    write_lines(folder / "in.jsonl", [{"text": text} for text in ("one", "two", "four")])
    run("look_up", column=["text"])
    status = read_status(folder / "out.jsonl")
    assert (status["state"], status["done"], status["dead"], status["total"]) == ("done", 2, 1, 3)
    assert status["newest_dead"].startswith("in.jsonl, line 3: ") and "four" in status["newest_dead"]
    assert status["contexts"] == {"table": {"warm": 1}} and status["workers"] == 1
    assert status["tiers"]["local"]["joined"] == 1 and status["worker_hours"] > 0 and status["gpu_hours"] == 0
    assert status["tokens"] is None and status["left"] == 0
    assert (status["pid"], status["output"]) == (os.getpid(), str(folder / "out.jsonl"))
    assert read_status(status["run"]) == status == read_status(folder / "out.jsonl.status.json")
    assert exit_status(status) == 3
    assert not list(folder.rglob("*.part"))


def test_a_failure_is_told_with_its_reason(folder):
    write_lines(folder / "in.jsonl", [{"text": "a"}])
    with pytest.raises(ContextError):
        run("hopeless")
    status = read_status(folder / "out.jsonl")
    assert status["state"] == "failed" and "no such weights" in status["reason"] and "\n" not in status["reason"]
    assert exit_status(status) == 1 and told(status)[1] == status["reason"]


def test_an_interrupted_job_says_so_and_the_next_run_replaces_it(folder, monkeypatch):
    write_lines(folder / "in.jsonl", [{"text": str(n)} for n in range(30)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ctxflow.batch.pump.Ledger.commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run("upper", column=["text"])
    assert read_status(folder / "out.jsonl")["state"] == "interrupted"
    run("upper", column=["text"])
    assert read_status(folder / "out.jsonl")["state"] == "done"


def test_a_driver_that_finished_but_could_not_say_so_is_set_right_by_the_next(folder):
    write_lines(folder / "in.jsonl", [{"text": "a"}])
    run("upper", column=["text"])
    path = folder / "out.jsonl.status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "pid": 2**22 + 1, "updated": 1.0}))
    assert condition(read_status(path)) == "died"
    assert run("upper", column=["text"]).already
    assert (read_status(path)["state"], read_status(path)["done"]) == ("done", 1)
    before = path.read_bytes()
    assert run("upper", column=["text"]).already
    assert path.read_bytes() == before  # It tells of the run that did the work.


def test_it_is_rewritten_also_while_nothing_changes(folder, monkeypatch):
    monkeypatch.setattr(job_status, "_SECONDS", 0.01)
    with StatusFile(folder / "out.jsonl") as file:
        first = read_status(folder / "out.jsonl")
        assert (first["state"], exit_status(first)) == ("starting", 0)
        file.update(Progress(done=1, total=2))
        seen = set()
        eventually(lambda: seen.add(read_status(folder / "out.jsonl")["updated"]) or len(seen) >= 4)
    assert read_status(folder / "out.jsonl")["state"] == "done"


def test_the_outcome_is_written_last_also_where_the_disk_is_slow(folder, monkeypatch):
    monkeypatch.setattr(job_status, "_SECONDS", 0.001)
    write, begun, over = kept_files.write_status, threading.Event(), threading.Event()

    def written(path, status):
        if threading.current_thread().name == "ctxflow-status":
            begun.set()
            over.wait(0.05)  # Long enough for an end that does not wait for this.
        write(path, status)
        if status["state"] == "done":
            over.set()

    monkeypatch.setattr(kept_files, "write_status", written)
    with StatusFile(folder / "out.jsonl") as file:
        file.update(Progress(done=1))
        assert begun.wait(FOREVER)
    for thread in threading.enumerate():
        if thread.name == "ctxflow-status":
            thread.join()
    assert read_status(folder / "out.jsonl")["state"] == "done"


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_a_disk_that_is_full_by_then_has_the_outcome_all_the_same(folder, monkeypatch, error):
    @contextlib.contextmanager
    def full(path, **options):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    many = {f"tier{n}": {"joined": 1, "asked": 1, "reason": "x" * 200} for n in range(5)}
    with pytest.raises(OSError) if error else contextlib.nullcontext(), StatusFile(folder / "out.jsonl") as file:
        file.update(Progress(done=7, total=9))
        eventually(lambda: read_status(folder / "out.jsonl")["done"] == 7)
        file.update(Progress(done=8, total=9, tiers=many))
        monkeypatch.setattr(progress, "written_whole", full)
        if error:
            raise error
    status = read_status(folder / "out.jsonl")
    assert (status["state"], status["done"]) == ("failed" if error else "done", 8)
    assert "died" not in told(status) and (not error or "No space left" in told(status)[1])


def test_a_disk_that_takes_no_status_ends_no_job(folder):
    write_lines(folder / "in.jsonl", [{"text": "a"}])
    (folder / "out.jsonl.status.json").mkdir()
    assert run("upper", column=["text"]).done == 1


def write_status_of(folder, output, **changes):
    with StatusFile(folder / output) as file:
        file.update(Progress(done=1))
    path = folder / f"{output}.status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_the_newest_live_one_is_found_first_and_a_jobs_own_file_before_its_runs_copy(folder):
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    now = time.time()
    old = write_status_of(folder, "old.jsonl", state="done", updated=now + 5)
    live = write_status_of(folder / "deep" / "er", "live.jsonl", state="running", updated=now)
    write_status_of(folder / ".hidden", "hidden.jsonl", state="running", updated=now + 9)
    copy = folder / "runs" / "1" / "ctxflow" / "status.json"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(live.read_bytes())
    assert [path for path, _ in found_below(folder)] == [live, old]
    live.unlink()
    assert [path for path, _ in found_below(folder)] == [copy, old]
    assert find_status(folder / "runs" / "1") == copy == find_status(copy.parent)
    assert find_status(folder / "old.jsonl") == old and find_status(folder / "none.jsonl") is None


def test_a_program_without_a_batch_has_a_status_file_in_its_runs_directory(tmp_path):
    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        directory = executor.calls.run.directory
        assert condition(read_status(tmp_path)) == "running"
        assert executor.submit(pow, {}, 2, 5).result() == 32
        eventually(lambda: read_status(tmp_path)["done"])
    status = read_status(directory)
    assert (status["state"], status["unit"], status["done"], status["run"]) == ("done", "items", 1, directory)
    assert exit_status(status) == 0
