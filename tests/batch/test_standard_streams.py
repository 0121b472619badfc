"""`-` in the place of a file: what is piped in is kept for restarts, what is piped out is not."""

import errno
import io
import json
import os
import pty
import subprocess
import sys

import pytest
from batch_helpers import read_lines

import forked
from ctxflow.batch import driver, load_job
from ctxflow.batch.driver import run_job
from ctxflow.batch.job_files import with_input
from ctxflow.errors import UsageError
from waiting import patience

ROWS = b'{"text": "a"}\n{"text": "b"}\n'


def job(**choices):
    chosen = {"function": "batch_functions:upper", "column": ["text"], "output": "out.jsonl", **choices}
    return load_job(None, input="-", **chosen)


def run(data, said=None, fresh=False, **choices):
    told = [] if said is None else said
    return run_job(with_input(job(**choices), io.BytesIO(data), told.append), fresh=fresh)


def results(path="out.jsonl"):
    return sorted(each["result"] for each in read_lines(path))


def test_a_copy_lies_beside_the_output_and_a_restart_takes_it(folder, shared):
    said = []
    assert run(ROWS, said).done == 2
    assert (folder / "out.jsonl.input").read_bytes() == ROWS and not said
    assert run(ROWS, said).already and not said
    assert run(b"", said).already
    assert said == [f"the standard input is empty: going on with its copy of before, {folder}/out.jsonl.input"]
    assert sorted(os.listdir(folder)) == ["out.jsonl", "out.jsonl.input", "out.jsonl.progress", "out.jsonl.status.json"]


def test_another_stream_is_compared_with_what_is_done(folder, shared):
    run(ROWS)
    said = []
    assert run(ROWS + b'{"text": "c"}\n', said).done == 3
    assert said == [f"the standard input is not what it was; its copy of before is {folder}/out.jsonl.input.before"]
    assert (folder / "out.jsonl.input.before").read_bytes() == ROWS
    with pytest.raises(ValueError, match=r"^the standard input, line 1: .*another row in its place"):
        run(b'{"text": "other"}\n')
    assert results(folder / "out.jsonl") == ["A", "B", "C"]
    assert run(b'{"text": "other"}\n', fresh=True).done == 1


def test_a_stream_is_not_swapped_under_a_driver_that_reads_it(folder, shared):
    run(ROWS)
    with driver._begun(with_input(job(), io.BytesIO(ROWS), print), False, False, driver.QuietDisplay()):
        with pytest.raises(ValueError, match="is being written by another driver"):
            run(b'{"text": "other"}\n')
        assert (folder / "out.jsonl.input").read_bytes() == ROWS
    assert not list(folder.glob("*.part"))


def test_nothing_to_read_is_a_wrong_command_line(folder):
    with pytest.raises(UsageError, match="the standard input is empty: pipe rows into it"):
        with_input(job(), io.BytesIO(), print)
    ours, theirs = pty.openpty()
    with open(ours, "wb"), open(theirs, "rb", buffering=0) as terminal:
        with pytest.raises(UsageError, match="which is a terminal: pipe rows into it"):
            with_input(job(), terminal, print)
        (folder / "out.jsonl.input").write_bytes(ROWS)
        said = []
        assert with_input(job(), terminal, said.append).input == folder / "out.jsonl.input"
        assert "going on with its copy" in said[0]
    assert os.listdir(folder) == ["out.jsonl.input"]


@pytest.mark.parametrize(
    ("data", "choices", "sentence"),
    [
        (b"id,text\n1,a\n", {}, "the format of the standard input cannot be told: name it with --input-format"),
        (b"id,text\n1,a\n", {"input_format": "csv", "column": ["txt"]}, "the standard input has no column 'txt'"),
        (
            b"k\xf6ln\n1\n",
            {"input_format": "csv"},
            r"the header of the standard input is not UTF-8 .*: give --encoding",
        ),
        (b'[{"text": "a"}]', {}, r"the standard input is a JSON array, not an object a line: jq -c '\.\[\]' makes one"),
        (
            b"i\0d\0",
            {"input_format": "csv"},
            "the standard input seems to be of UTF-16: give --encoding, such as utf-16",
        ),
        (
            b"PAR1",
            {"delimiter": ";", "input_format": "jsonl"},
            "the standard input is read as jsonl, which has no delim",
        ),
    ],
)
def test_what_is_wrong_with_a_stream_names_the_stream(folder, data, choices, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        run(data, **choices)
    assert "out.jsonl.input" not in str(refused.value)


def test_nothing_is_kept_in_dev(folder):
    with pytest.raises(UsageError, match="keeps nothing: name another"):
        with_input(job(output="/dev/null"), io.BytesIO(ROWS), print)


def test_a_full_disk_leaves_the_copy_of_before(folder):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "out.jsonl.input").write_bytes(ROWS)
    with pytest.raises(OSError, match=r"cannot be copied to .*out.jsonl.input: No space left"):
        with_input(job(), Broken(), print)
    assert os.listdir(folder) == ["out.jsonl.input"]
    assert (folder / "out.jsonl.input").read_bytes() == ROWS


def command(folder, *words, data=ROWS, **more):
    """A command as in a shell's pipe."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    words = [sys.executable, "-m", "ctxflow", "batch", *words]
    return forked.run(words, cwd=folder, input=data, env=environment, capture_output=True, check=False, **more)


UPPER = ("--function", "batch_functions:upper", "--column", "text", "--workers", "1")


def test_a_filter(folder):
    data = ROWS + b'{"text": "bad"}\n'
    ended = command(folder, "-", "-o", "-", *UPPER, "--order", "input", data=data)
    assert ended.returncode == 3, ended.stderr
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [
        {"row": 0, "result": "A"},
        {"row": 1, "result": "B"},
    ]
    said = ended.stderr.decode()
    assert "results go to the standard output: nothing is kept of them" in said
    assert "1 row failed, see standard-output.errors.jsonl\n" in said and "--retry-errors" not in said
    [dead] = read_lines(folder / "standard-output.errors.jsonl")
    assert dead["row"] == 2
    assert sorted(os.listdir(folder)) == ["runs", "standard-output.errors.jsonl"]


def test_a_form_that_is_made_at_the_end_is_piped_whole(folder):
    ended = command(folder, "-", "-o", "-", "--output-format", "csv", *UPPER, "--order", "input", "--quiet")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"row,result\n0,A\n1,B\n", b"")


def test_a_reader_that_goes_away_ends_the_job(folder):
    rows = b"".join(b'{"text": "%d"}\n' % n for n in range(30_000))
    with open(folder / "in.jsonl", "wb") as file:
        file.write(rows)
    words = (
        f"{sys.executable} -m ctxflow batch in.jsonl -o - --function batch_functions:upper --column text --workers 1"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = f"set -o pipefail; {words} | head -n 3 >/dev/null"
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(),
    )
    assert ended.returncode == 1
    assert "nobody reads the standard output any more" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-", "-o", "-", "--json"), "cannot hold both results and the figures"),
        (("-", "-o", "-", "--retry-errors"), "--retry-errors is for a job whose results are kept"),
        (("-", "-o", "out.jsonl", "--dry-run"), "--dry-run takes files"),
    ],
)
def test_what_makes_no_sense_with_streams(folder, words, sentence):
    ended = command(folder, *words, *UPPER)
    assert ended.returncode == 2 and sentence in ended.stderr.decode() and os.listdir(folder) == []
