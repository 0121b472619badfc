"""Whole jobs in this process, on the embedded engine."""

import csv
import errno
import io
import json
import os

import pyarrow.parquet
import pytest
from batch_helpers import Notes, read_lines, write_lines

from ctxflow import ContextExecutor
from ctxflow.batch import load_job, pump, work
from ctxflow.batch.driver import run_job
from ctxflow.batch.pump import TooManyErrors
from ctxflow.errors import ContextError, RunEnded, UsageError
from ctxflow.rows import formats
from waiting import FOREVER, eventually

pytestmark = pytest.mark.usefixtures("shared")
WORKERS = 2


def run(name, run_function, output="out.jsonl", display=None, fresh=False, retry_errors=False, **choices):
    choices = {"function": f"batch_functions:{run_function}", "workers": 2, **choices}
    job = load_job(None, input=name, output=output, **choices)
    return run_job(job, fresh=fresh, retry_errors=retry_errors, display=display)


def without_executor(monkeypatch):
    """Let no worker be started."""

    def refuse(*_, **__):
        raise AssertionError("an executor was started")

    monkeypatch.setattr(work, "BareExecutor", refuse)


@pytest.fixture
def letters(folder):
    """Rows of which some are bad in many ways."""
    lines = [{"custom_id": f"id {n}", "text": f"text {n}"} for n in range(40)]
    lines[3] = "broken"
    lines[5] = {"custom_id": "id 4", "text": "a repeated id"}
    lines[7] = {"text": "no id"}
    lines[11] = {"custom_id": "id 11"}
    lines[13] = {"custom_id": "id 13", "text": "bad"}
    lines[17] = {"custom_id": {"a": 1}, "text": "strange id"}
    return write_lines(folder / "in.jsonl", lines)


BAD = {3, 5, 7, 11, 13, 17}
CHOICES = {"id_column": "custom_id", "column": ["text"]}


@pytest.mark.parametrize("order", ["completed", "input"])
def test_each_bad_row_gets_a_line_and_good_ones_run(letters, folder, order):
    notes = Notes()
    outcome = run("in.jsonl", "upper", display=notes, order=order, **CHOICES)
    assert (outcome.done, outcome.dead, outcome.exit_status) == (34, 6, 3)
    results = read_lines(folder / "out.jsonl")
    assert [each["row"] for each in sorted(results, key=lambda r: r["row"])] == sorted(set(range(40)) - BAD)
    assert all(each["result"] == f"TEXT {each['row']}" for each in results)
    errors = {each["row"]: each for each in read_lines(folder / "out.jsonl.errors.jsonl")}
    assert errors.keys() == BAD
    if order == "input":
        assert [each["row"] for each in results] == sorted(each["row"] for each in results)
        assert list(errors) == sorted(BAD)
    assert errors[5]["error"]["message"] == "the custom_id 'id 4' is that of an earlier row: each needs its own"
    assert errors[11]["error"]["message"] == "the row has no 'text': it has 'custom_id'"
    assert errors[11]["custom_id"] == "id 11"
    assert errors[13]["error"]["code"] == "ValueError"
    assert "in upper" in errors[13]["traceback"]
    told = {n: " ".join(errors[n]["error"]["message"].split()) for n in BAD}
    told[13] = "ValueError: bad is bad in two lines"  # What the function raised is named.
    assert sorted(notes.said) == sorted(f"in.jsonl, line {n + 1}: {message}" for n, message in told.items())


def test_a_finished_job_starts_nothing_again(letters, monkeypatch):
    run("in.jsonl", "upper", **CHOICES)
    without_executor(monkeypatch)
    outcome = run("in.jsonl", "upper", **CHOICES)
    assert outcome.already and (outcome.done, outcome.dead, outcome.done_now) == (34, 6, 0)


def test_the_dead_are_tried_again_alone(letters, folder):
    run("in.jsonl", "upper", **CHOICES)
    before = read_lines(folder / "out.jsonl")
    text = letters.read_text().replace("broken", '{"custom_id": "id 3", "text": "mended"}').replace('"bad"', '"good"')
    letters.write_text(text)
    notes = Notes()
    outcome = run("in.jsonl", "upper", retry_errors=True, display=notes, **CHOICES)
    assert (outcome.done, outcome.dead, outcome.done_now, outcome.dead_now) == (36, 4, 2, 4)
    after = read_lines(folder / "out.jsonl")
    assert after[:34] == before
    assert sorted(each["result"] for each in after[34:]) == ["GOOD", "MENDED"]
    assert {each["row"] for each in read_lines(folder / "out.jsonl.errors.jsonl")} == {5, 7, 11, 17}
    assert any("the input has changed" in said for said in notes.said)


def test_a_changed_input_goes_on_by_ids_and_not_by_numbers(folder):
    rows = [{"name": f"n{n}", "text": f"t{n}"} for n in range(5)]
    write_lines(folder / "in.jsonl", rows)
    run("in.jsonl", "upper", id_column="name", column=["text"])
    run("in.jsonl", "upper", output="numbers.jsonl", column=["text"])
    write_lines(folder / "in.jsonl", [{"name": "new", "text": "t"}, *rows])
    outcome = run("in.jsonl", "upper", id_column="name", column=["text"])
    assert (outcome.done_now, outcome.done) == (1, 6)
    with pytest.raises(ValueError, match=r"in.jsonl, line 1: .*numbers.jsonl holds the result of another row"):
        run("in.jsonl", "upper", output="numbers.jsonl", column=["text"])
    assert run("in.jsonl", "upper", output="numbers.jsonl", column=["text"], fresh=True).done == 6


def test_another_job_does_not_mix_with_the_results_of_the_first(folder):
    write_lines(folder / "in.jsonl", [{"first": "a", "second": "b"}])
    run("in.jsonl", "joined", constants={"between": "-"})
    with pytest.raises(ValueError, match=r"another job \(constants was .*'-'.* and is .*'\+'"):
        run("in.jsonl", "joined", constants={"between": "+"})
    assert read_lines(folder / "out.jsonl") == [{"row": 0, "result": "a-b"}]
    run("in.jsonl", "joined", constants={"between": "+"}, fresh=True)
    assert read_lines(folder / "out.jsonl") == [{"row": 0, "result": "a+b"}]


@pytest.mark.parametrize("order", ["completed", "input"])
@pytest.mark.parametrize("cut", [0.2, 0.7])
def test_a_job_that_broke_off_goes_on(folder, monkeypatch, order, cut):
    """As if it had been killed: what is on disk after so many commits, and a torn line beyond."""
    # Every tenth row has an id that others may have too.
    write_lines(folder / "in.jsonl", [{"n": n, "id": n - n % 8 - 1 if n % 10 == 9 else n} for n in range(600)])
    monkeypatch.setattr(pump, "WINDOW_ROWS", 100)
    monkeypatch.setattr(formats, "CHUNK_ROWS", 50)  # So that there are several commits, however late the driver is.
    choices = {"column": ["n"], "order": order, "id_column": "id", "constants": {"seconds": 0.02}}
    whole = run("in.jsonl", "slow", output="whole.jsonl", **choices)
    assert whole.dead >= 50
    keep = pump.Ledger.commit

    def commit(ledger, lines, errors, done, *given):
        if ledger.done and ledger.done + len(done) > cut * 600:
            raise KeyboardInterrupt
        keep(ledger, lines, errors, done, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pump.Ledger, "commit", commit)
        run("in.jsonl", "slow", **choices)
    with open(folder / "out.jsonl", "ab") as file:
        file.write(b'{"row": 1, "resu')
    outcome = run("in.jsonl", "slow", **choices)
    assert 0 < outcome.done_now < whole.done
    assert (outcome.done, outcome.dead) == (whole.done, whole.dead)
    for suffix in ("", ".errors.jsonl"):
        found, expected = [
            (folder / (name + suffix)).read_bytes().splitlines() for name in ("out.jsonl", "whole.jsonl")
        ]
        assert sorted(found) == sorted(expected)
        assert order == "completed" or found == expected


def test_csv_to_parquet_with_kept_columns(folder):
    (folder / "in.csv").write_text("first,second,k\na,b,1\nc,d,2\ne\n")
    outcome = run("in.csv", "joined", output="out.parquet", keep=["k"], order="input")
    assert (outcome.done, outcome.dead) == (2, 1)
    table = pyarrow.parquet.read_table(folder / "out.parquet").to_pylist()
    assert table == [{"row": 0, "k": "1", "result": "a b"}, {"row": 1, "k": "2", "result": "c d"}]
    assert run("in.csv", "joined", output="out.parquet", keep=["k"], order="input").already
    (folder / "out.parquet").unlink()
    assert run("in.csv", "joined", output="out.parquet", keep=["k"], order="input").done_now == 0
    assert (folder / "out.parquet").exists()


@pytest.mark.parametrize("rows", ["", "e\n"])
def test_csv_without_a_result_has_its_header(folder, rows):
    (folder / "in.csv").write_text(f"first,second,k\n{rows}")
    run("in.csv", "joined", output="out.csv", keep=["k"], id_column="first")
    assert (folder / "out.csv").read_text() == "row,first,k,result\n"


@pytest.mark.parametrize("name", ["out.csv", "out.tsv"])
def test_csv_that_is_resumed(folder, name):
    write_lines(folder / "in.jsonl", [{"text": f'say "{n}",\nagain', "k": {"n": n}} for n in range(60)])
    choices = {"column": ["text"], "keep": ["text", "k"], "order": "input", "output": name}
    assert run("in.jsonl", "upper", **choices).done == 60
    delimiter = "\t" if name.endswith(".tsv") else ","
    text = (folder / name).read_text()
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    assert rows[0] == ["row", "text", "k", "result"]
    assert rows[8] == ["7", 'say "7",\nagain', '{"n": 7}', 'SAY "7",\nAGAIN']
    assert len(rows) == 61
    (folder / name).unlink()
    assert run("in.jsonl", "upper", **choices).done_now == 0
    assert (folder / name).read_text() == text


def test_kept_parquet_columns_keep_their_types(folder):
    table = pyarrow.table(
        {
            "id": pyarrow.array([7, 8], pyarrow.int16()),
            "text": ["a", "b"],
            "when": pyarrow.array([1, 2], pyarrow.timestamp("ms", "UTC")),
            "price": pyarrow.array(["1.50", "2.25"]).cast(pyarrow.decimal128(6, 2)),
            "kind": pyarrow.array(["x", "x"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, folder / "in.parquet")
    keep = ["when", "price", "kind"]
    choices = {"column": ["text"], "keep": keep, "id_column": "id", "order": "input", "output": "out.parquet"}
    assert run("in.parquet", "upper", **choices).done == 2
    found = pyarrow.parquet.read_table(folder / "out.parquet")
    source = pyarrow.parquet.read_table(folder / "in.parquet")
    assert found.select(["id", *keep]).equals(source.select(["id", *keep]))
    assert found.column("result").to_pylist() == ["A", "B"]


def test_parquet_of_others_is_not_overwritten(folder):
    write_lines(folder / "in.jsonl", [{"t": "a"}])
    (folder / "out.parquet").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        run("in.jsonl", "upper", output="out.parquet", column=["t"])
    assert (folder / "out.parquet").read_text() == "mine"
    run("in.jsonl", "upper", output="out.parquet", column=["t"], fresh=True)
    assert pyarrow.parquet.read_table(folder / "out.parquet").num_rows == 1


def test_templates_and_whole_rows(folder):
    write_lines(folder / "in.jsonl", [{"text": "a", "n": 1}, {"text": "b"}])
    run("in.jsonl", "upper", template="{{ text }}{{ n }}")
    assert read_lines(folder / "out.jsonl") == [{"row": 0, "result": "A1"}]
    run("in.jsonl", "wide", output="wide.jsonl")
    assert [each["result"] for each in read_lines(folder / "wide.jsonl")] == [{"length": 1}, {"length": 1}]


def test_results_that_cannot_be_written_are_dead_letters(folder):
    write_lines(folder / "in.jsonl", [{"t": "nan"}, {"t": "object"}, {"t": "fine"}])
    assert run("in.jsonl", "odd", column=["t"]).dead == 2
    messages = {each["row"]: each["error"]["message"] for each in read_lines(folder / "out.jsonl.errors.jsonl")}
    assert "the result is nan, which JSON cannot hold" in messages[0] and "an object, which JSON cannot" in messages[1]
    assert read_lines(folder / "out.jsonl") == [{"row": 2, "result": [1, 2]}]


def test_a_context_that_cannot_be_built_ends_the_job_and_buries_nobody(folder):
    write_lines(folder / "in.jsonl", [{"t": n} for n in range(5)])
    with pytest.raises(ContextError, match="no such weights"):
        run("in.jsonl", "hopeless")
    assert not (folder / "out.jsonl.errors.jsonl").exists()
    with pytest.raises(ContextError, match="no such weights"):
        run("in.jsonl", "hopeless")


def test_a_full_disk_ends_the_job_and_loses_nothing(folder, monkeypatch):
    write_lines(folder / "in.jsonl", [{"n": n} for n in range(600)])
    monkeypatch.setattr(pump, "WINDOW_ROWS", 100)
    room = 3000
    write = os.pwrite

    def pwrite(descriptor, data, offset):
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: max(1, room)], offset)
        room -= written
        return written

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", pwrite)
        run("in.jsonl", "slow", column=["n"], constants={"seconds": 0.001})
    outcome = run("in.jsonl", "slow", column=["n"], constants={"seconds": 0.001})
    assert outcome.done == 600 and not outcome.dead
    found = {each["row"]: each["result"] for each in read_lines(folder / "out.jsonl")}
    assert found == {n: 2 * n for n in range(600)}


def test_an_engine_that_fails_buries_nobody(folder, monkeypatch):
    write_lines(folder / "in.jsonl", [{"t": "a"}])
    stopped = []

    class Stopped(ContextExecutor):
        """Its run ends as soon as it has something to do."""

        def __enter__(self):
            executor = super().__enter__()
            stopped.append(executor)
            submit = executor.run.submit

            def stop(*given, **more):
                items = submit(*given, **more)
                executor.run.stop()
                return items

            executor.run.submit = stop
            return executor

    with monkeypatch.context() as patch, pytest.raises(RunEnded):
        patch.setattr(work, "BareExecutor", Stopped)
        run("in.jsonl", "slow", column=["t"], constants={"seconds": FOREVER})
    assert stopped and not (folder / "out.jsonl.errors.jsonl").exists()


def test_a_mistake_is_mended_at_once_where_nothing_was_done(folder):
    write_lines(folder / "in.jsonl", [{"t": "a", "n": 1}])
    assert run("in.jsonl", "upper", column=["n"]).dead == 1
    outcome = run("in.jsonl", "upper", column=["t"])
    assert (outcome.done, outcome.dead, outcome.exit_status) == (1, 0, 0)
    assert not (folder / "out.jsonl.errors.jsonl").exists()


def test_an_empty_input(folder, monkeypatch):
    without_executor(monkeypatch)
    (folder / "in.jsonl").write_text("")
    notes = Notes()
    outcome = run("in.jsonl", "upper", display=notes)
    assert (outcome.done, outcome.exit_status) == (0, 0)
    assert notes.said == ["ctxflow: in.jsonl holds no rows: nothing to do"]


def test_what_was_read_before_an_input_breaks_is_run(folder):
    path = folder / "in.parquet"
    table = pyarrow.table({"text": [f"text {n}" for n in range(2000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    second = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[second : second + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read on from row 1000"):
        run("in.parquet", "upper", column=["text"])
    assert len(read_lines(folder / "out.jsonl")) == 1000


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("batch_functions:missing", "has nothing called 'missing'"),
        ("batch_functions:not_callable", "is an int, not a function"),
        ("no_such_module:f", "is not found"),
        ("batch_functions", "module:name"),
    ],
)
def test_what_is_no_function_is_told_before_anything_is_written(folder, function, sentence):
    write_lines(folder / "in.jsonl", [{"t": "a"}])
    with pytest.raises(ValueError, match=sentence):
        run("in.jsonl", "", function=function)
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"output": "in.jsonl"}, r"the output .* is the input in\.jsonl: name"),
        ({"output": "."}, "is a folder: name a file"),
        ({"output_format": "openai"}, "choose jsonl, csv or parquet"),
        (
            {"function": None, "model": "m", "task": "generate", "output_format": "openai"},
            "choose jsonl, csv or parquet",
        ),
        ({"site": "nowhere.toml"}, "there is no site"),
        ({"function": None, "model": "m", "template": "{{"}, "no Jinja2 template"),
    ],
)
def test_what_does_not_fit_is_told(folder, choices, sentence):
    write_lines(folder / "in.jsonl", [{"t": "a"}])
    with pytest.raises(ValueError, match=sentence):
        run("in.jsonl", "upper", **choices)
    assert not [name for name in os.listdir(folder) if name.endswith(".progress")]
    assert read_lines(folder / "in.jsonl") == [{"t": "a"}]


def test_a_job_that_goes_wrong_throughout_is_ended(folder, monkeypatch):
    monkeypatch.setattr(pump, "WINDOW_ROWS", 200)
    monkeypatch.setattr(formats, "CHUNK_ROWS", 100)
    write_lines(folder / "in.jsonl", [{"t": "bad", "n": n} for n in range(1000)])
    with pytest.raises(TooManyErrors, match="each of the first 100 rows failed: ValueError: bad is bad in two lines"):
        run("in.jsonl", "upper", column=["t"])
    errors = read_lines(folder / "out.jsonl.errors.jsonl")
    assert 100 <= len(errors) < 1000
    outcome = run("in.jsonl", "upper", column=["t"], max_errors="100%")
    assert (outcome.dead, outcome.dead_now, outcome.exit_status) == (1000, 1000 - len(errors), 3)


def test_a_job_whose_first_rows_are_bad_goes_on_once_one_went_well(folder):
    """Rows that cannot be read are dead before any other has an answer: 150 in a chunk with good ones are no end."""
    rows = [{"t": "good"}, *["broken"] * 150, *[{"t": "good"}] * 50]
    write_lines(folder / "in.jsonl", rows)
    outcome = run("in.jsonl", "upper", column=["t"])
    assert (outcome.done, outcome.dead) == (51, 150)


@pytest.mark.parametrize(("most", "ended"), [("0", True), ("9", True), ("10", False), ("4%", True), ("90%", False)])
def test_the_most_errors_are_a_number_or_a_share(folder, monkeypatch, most, ended):
    monkeypatch.setattr(pump, "WINDOW_ROWS", 50)
    texts = ["bad" if n % 20 == 10 else "good" for n in range(200)] if "%" not in most else ["bad", "good"] * 100
    write_lines(folder / "in.jsonl", [{"t": text} for text in [*texts, *["good"] * 2000]])
    if ended:
        with pytest.raises(TooManyErrors, match=f"failed, and --max-errors allows {most[:1]}"):
            run("in.jsonl", "upper", column=["t"], max_errors=most)
        assert len(read_lines(folder / "out.jsonl")) < 2000, "the rest is not run"
    outcome = run("in.jsonl", "upper", column=["t"])
    assert (outcome.done, outcome.dead) == (2000 + texts.count("good"), texts.count("bad"))


def test_a_job_that_has_tried_all_its_rows_ends_as_always(folder):
    write_lines(folder / "in.jsonl", [{"t": "bad"}])
    assert run("in.jsonl", "upper", column=["t"], max_errors="0").exit_status == 3


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet", "shards"])
def test_a_limit_takes_the_first_rows_and_a_larger_one_goes_on(folder, name):
    rows = [{"t": f"t{n}"} for n in range(40)]
    (folder / "shards").mkdir()
    write_lines(folder / "shards" / "a.jsonl", rows[:7])
    write_lines(folder / "shards" / "b.jsonl", rows[7:])
    write_lines(folder / "in.jsonl", rows)
    (folder / "in.csv").write_text("t\n" + "".join(f"t{n}\n" for n in range(40)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "in.parquet")
    choices = {"column": ["t"], "order": "input", "output": "out.csv"}

    def done(**more):
        outcome = run(name, "upper", **choices, **more)
        results = list(csv.DictReader(io.StringIO((folder / "out.csv").read_text())))
        assert [each["result"] for each in results] == [f"T{n}" for n in range(outcome.done)]
        return outcome.done_now, outcome.done, outcome.already

    assert done(limit=10) == (10, 10, False)
    assert done(limit=10) == (0, 10, True)
    assert done(limit=25) == (15, 25, False)
    assert done(limit=3) == (0, 25, False)
    assert done() == (15, 40, False)
    assert done() == (0, 40, True)
    assert done(limit=1000) == (0, 40, False)


def test_progress_of_the_first_rows_is_of_these(folder):
    write_lines(folder / "in.jsonl", [{"n": n} for n in range(3000)])
    notes = Notes()
    run("in.jsonl", "slow", column=["n"], limit=50, display=notes)
    assert notes.shown[-1].total == 50 and not notes.shown[-1].guessed


def test_inputs_of_other_delimiters_and_encodings(folder):
    (folder / "in.csv").write_bytes("first;second\nä;b\n".encode("cp1252"))
    with pytest.raises(UsageError, match="give --delimiter ';'"):
        run("in.csv", "joined")
    outcome = run("in.csv", "joined", delimiter=";", encoding="cp1252")
    assert (outcome.done, read_lines(folder / "out.jsonl")) == (1, [{"row": 0, "result": "ä b"}])
    (folder / "more.csv").write_bytes("first,second\nä,b\n".encode("utf-16"))
    run("more.csv", "joined", output="more.jsonl")
    assert read_lines(folder / "more.jsonl") == [{"row": 0, "result": "ä b"}]
    with pytest.raises(ValueError, match=r"another job \(delimiter was ';' and is None|encoding was"):
        run("in.csv", "joined", encoding="latin-1", input_format="csv", delimiter=";")


def test_lines_of_text(folder):
    (folder / "in.txt").write_text("one\n\ntwo\n")
    run("in.txt", "upper", order="input")
    assert read_lines(folder / "out.jsonl") == [{"row": 0, "result": "ONE"}, {"row": 2, "result": "TWO"}]


def test_documents_are_rows_that_name_their_files_and_are_known_by_them(folder):
    (folder / "docs" / "sub").mkdir(parents=True)
    (folder / "docs" / "b.txt").write_text("one\n\ntwo")
    (folder / "docs" / "sub" / "c.html").write_text("<p>three")
    run("docs", "upper", column=["text"], order="input")
    first = [{"row": 0, "file": "b.txt", "result": "ONE\n\nTWO"}, {"row": 1, "file": "sub/c.html", "result": "THREE"}]
    assert read_lines(folder / "out.jsonl") == first
    (folder / "docs" / "a.md").write_text("zero")
    notes = Notes()
    assert run("docs", "upper", column=["text"], order="input", display=notes).done_now == 1
    assert read_lines(folder / "out.jsonl") == [*first, {"row": 0, "file": "a.md", "result": "ZERO"}]
    for output in ("docs/out.jsonl", "docs/sub/out.csv"):
        with pytest.raises(UsageError, match="would be a part of the input docs at the next start"):
            run("docs", "upper", output, column=["text"])
    (folder / "docs" / "scan.pdf").write_bytes(b"%PDF")
    run("docs", "upper", "again.jsonl", column=["text"], display=notes)
    assert "ctxflow: 1 file in docs is not read: scan.pdf" in notes.said


def test_progress_counts_what_is_done_and_left(folder, executor):
    eventually(lambda: executor.connected_workers == WORKERS)
    write_lines(folder / "in.jsonl", [{"n": n} for n in range(300)])
    notes = Notes()
    run("in.jsonl", "slow", column=["n"], constants={"seconds": 0.4}, display=notes)
    last = notes.shown[-1]
    assert last.total == 300 and not last.guessed and last.workers == 2
    assert [each.done for each in notes.shown] == sorted(each.done for each in notes.shown)
    assert all(each.done + each.running <= 300 for each in notes.shown)


def test_memory_is_bounded_by_rows_and_by_bytes(folder, monkeypatch):
    monkeypatch.setattr(pump, "WINDOW_BYTES", 200_000)
    on_their_way = []
    write_lines(folder / "in.jsonl", [{"t": "x" * 50_000} for _ in range(60)])

    class Watching(Notes):
        def progress(self, now):
            on_their_way.append(now.running)

    monkeypatch.setattr(work, "_SHOW_SECONDS", 0)
    assert run("in.jsonl", "upper", column=["t"], display=Watching()).done == 60
    # A chunk is a megabyte at most, 20 of these rows, and is taken in whole.
    assert max(on_their_way) <= 24
    assert json.loads((folder / "out.jsonl").read_text().splitlines()[0])["result"] == "X" * 50_000
