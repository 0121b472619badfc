"""What a job leaves in its run's directory, and that a job that is done does not fail for it."""

import shutil

from ctxflow.batch.display import QuietDisplay
from ctxflow.batch.job import Job
from ctxflow.batch.work import kept_summary, note_job
from ctxflow.observe.run_report import BATCH, EVENTS, read_object, read_report
from ctxflow.observe.summary import SUMMARY
from ctxflow.sites import load_site


class Notes(QuietDisplay):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_no_run_no_summary(tmp_path):
    assert kept_summary(None, QuietDisplay()) is None
    assert kept_summary(tmp_path, QuietDisplay()) is None


def test_a_broken_log_is_told_and_fails_nothing(tmp_path):
    (tmp_path / EVENTS).write_text("no event\nlog\n")
    display = Notes()
    assert kept_summary(tmp_path, display) is None
    [note] = display.notes
    assert note.startswith("there is no summary of this run (line 1 is no line of an event log")
    assert not (tmp_path / SUMMARY).exists()


def test_settings_and_dead_letters_are_found_again(tmp_path):
    job = Job(input="in.csv", output="out.jsonl", model="m", task="embed", batch_size=7)
    errors = tmp_path / "out.jsonl.errors.jsonl"
    errors.write_text('{"error": {"code": "InvalidRow", "message": "no text"}, "place": "in.csv, row 3"}\n')
    note_job(tmp_path, job, tmp_path / "out.jsonl", errors, load_site("local"), QuietDisplay())
    noted = read_object(tmp_path / BATCH)
    assert noted["job"] == {"input": "in.csv", "output": "out.jsonl", "model": "m", "task": "embed", "batch_size": 7}
    assert noted["site"]["engine"] == "embedded"
    [cause] = read_report(tmp_path).causes
    assert (cause.error, cause.message, cause.rows, cause.place) == ("InvalidRow", "no text", 1, "in.csv, row 3")


def test_a_directory_that_is_gone_is_told(tmp_path):
    display = Notes()
    run = tmp_path / "gone"
    run.mkdir()
    shutil.rmtree(run)
    job = Job(input="in.csv", output="out.jsonl", model="m")
    note_job(run, job, tmp_path / "o", tmp_path / "e", load_site("local"), display)
    [note] = display.notes
    assert "will not tell its settings" in note
