"""A job whose input was edited: no row ever gets the answer of another."""

import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from batch_helpers import Notes, as_of_an_earlier_ctxflow, read_lines, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxflow.batch import load_job
from ctxflow.batch.driver import begin_job, run_job
from ctxflow.rows.source import file_identity

pytestmark = pytest.mark.usefixtures("shared")


def job(name="in.jsonl", **choices):
    chosen = {"function": "batch_functions:upper", "column": ["text"], "output": "out.jsonl", **choices}
    return load_job(None, input=name, **chosen)


def rows_of(texts, **more):
    return [{"text": text, **{name: f"{value}{text}" for name, value in more.items()}} for text in texts]


texts = st.lists(st.sampled_from(["a", "b", "c", "d", "bad"]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=texts, after=texts, retry=st.booleans())
def test_by_numbers_a_result_is_that_of_its_row_or_the_job_is_refused(folder, before, after, retry):
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    source, chosen = folder / "case" / "in.jsonl", {"output": folder / "case" / "out.jsonl"}
    write_lines(source, rows_of(before))
    run_job(job(source, **chosen))
    kept = chosen["output"].read_bytes()
    write_lines(source, rows_of(after))
    done = {n for n, text in enumerate(before) if text != "bad"}
    moved = {n for n in done if n >= len(after) or after[n] != before[n]}
    if moved and done:
        with pytest.raises(ValueError, match=r"another row in its place|done before"):
            run_job(job(source, **chosen), retry_errors=retry)
        assert chosen["output"].read_bytes() == kept
        return
    outcome = run_job(job(source, **chosen), retry_errors=retry)
    results = {each["row"]: each["result"] for each in read_lines(chosen["output"])}
    assert all(result == after[n].upper() for n, result in results.items())
    tried_again = retry or not done
    missing = {n for n, text in enumerate(after) if text != "bad"} - results.keys()
    assert not missing if tried_again else all(before[n] == "bad" for n in missing if n < len(before))
    assert outcome.done == len(results)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_by_ids_rows_may_come_go_and_move_but_not_change(folder, data):
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    source, chosen = folder / "case" / "in.jsonl", {"output": folder / "case" / "out.jsonl", "id_column": "id"}
    some = st.dictionaries(st.sampled_from("pqrst"), st.sampled_from(["a", "b", "bad"]), min_size=1)
    before, after = data.draw(some), data.draw(some)
    write_lines(source, [{"id": name, "text": text} for name, text in before.items()])
    run_job(job(source, **chosen))
    order = data.draw(st.permutations(sorted(after)))
    write_lines(source, [{"id": name, "text": after[name], "new": 1} for name in order])
    changed = {name for name, text in before.items() if text != "bad" and after.get(name, text) != text}
    if changed:
        with pytest.raises(ValueError, match="is not what it was when"):
            run_job(job(source, **chosen), retry_errors=True)
        return
    run_job(job(source, **chosen), retry_errors=True)
    results = {each["id"]: each["result"] for each in read_lines(chosen["output"])}
    assert results == {name: text.upper() for name, text in {**before, **after}.items() if text != "bad"}


def test_a_deleted_line_is_told_by_its_place(folder):
    """As somebody does who deletes a bad row and tries the others again."""
    write_lines(folder / "in.jsonl", rows_of(["a", "bad", "b", "c"]))
    run_job(job())
    write_lines(folder / "in.jsonl", rows_of(["a", "b", "c"]))
    kept = (folder / "out.jsonl").read_bytes()
    for attempt in (begin_job, run_job):
        with pytest.raises(ValueError, match=r"in.jsonl, line 3: .*out.jsonl holds the result of another row"):
            attempt(job(), retry_errors=True)
    assert (folder / "out.jsonl").read_bytes() == kept
    write_lines(folder / "in.jsonl", rows_of(["a", "mended", "b", "c", "d"]))
    assert run_job(job(), retry_errors=True).done == 5
    assert [each["result"] for each in sorted(read_lines(folder / "out.jsonl"), key=lambda each: each["row"])] == [
        "A", "MENDED", "B", "C", "D",
    ]  # fmt: skip


def test_a_row_that_cannot_be_read_any_more_is_a_changed_one(folder):
    write_lines(folder / "in.jsonl", rows_of(["a", "b"]))
    run_job(job())
    write_lines(folder / "in.jsonl", [{"text": "a"}, "broken"])
    with pytest.raises(ValueError, match=r"line 2: .* in its place \(the line is not JSON"):
        run_job(job())


@pytest.mark.parametrize("known", [{}, {"id_column": "id"}])
def test_a_done_row_that_would_be_refused_now_keeps_its_result(folder, known):
    """As one may be that an earlier ctxflow took."""
    rows = [{"id": name, "text": name} for name in "abc"]
    write_lines(folder / "in.jsonl", rows)
    run_job(job(**known))
    write_lines(folder / "in.jsonl", [rows[0], {"id": "b"}, {"id": "c"}, {"id": "d", "text": "d"}])
    notes = Notes()
    assert run_job(job(**known), display=notes).done == 4
    assert sorted(each["result"] for each in read_lines(folder / "out.jsonl")) == ["A", "B", "C", "D"]
    said = "2 rows done before would be refused now, such as in.jsonl, line 2: the row has no 'text'"
    assert sum(said in each and each.endswith("results are kept") for each in notes.said) == 1


def test_a_kept_column_that_changed_is_a_changed_row(folder):
    write_lines(folder / "in.jsonl", rows_of(["a", "b"], source="from "))
    run_job(job(keep=["source"]))
    write_lines(folder / "in.jsonl", rows_of(["a", "b"], source="of "))
    with pytest.raises(ValueError, match=r"line 1: .*another row in its place"):
        run_job(job(keep=["source"]))


def test_settings_may_change_with_the_rows_as_they_were(folder):
    """With another template the prompts are others, but the rows that are done are what they were."""
    write_lines(folder / "in.jsonl", rows_of(["a", "bad", "b"]))
    run_job(job(column=None, template="{{ text }}"))
    write_lines(folder / "in.jsonl", rows_of(["a", "good", "b"]))
    assert run_job(job(column=None, template="is {{ text }}"), retry_errors=True).done == 3
    assert [each["result"] for each in read_lines(folder / "out.jsonl")] == ["A", "B", "IS GOOD"]
    write_lines(folder / "other.jsonl", rows_of(["a", "bad", "b"]))
    run_job(job("other.jsonl", column=None, template="{{ text }}", output="other-out.jsonl"))
    write_lines(folder / "other.jsonl", rows_of(["good", "b"]))
    with pytest.raises(ValueError, match="another row in its place"):
        run_job(job("other.jsonl", column=None, template="is {{ text }}", output="other-out.jsonl"), retry_errors=True)


def test_a_large_input_that_was_changed_in_place_is_noticed(folder):
    """Of equal size, and between the samples that tell large inputs apart quickly."""
    texts = [f"{n:05}" * 500 for n in range(700)]
    write_lines(folder / "in.jsonl", rows_of(texts))
    run_job(job())
    before = file_identity([folder / "in.jsonl"])
    for n in range(700):
        write_lines(folder / "in.jsonl", rows_of([*texts[:n], "other" * 500, *texts[n + 1 :]]))
        if file_identity([folder / "in.jsonl"]) == before:
            break
    assert file_identity([folder / "in.jsonl"]) == before
    with pytest.raises(ValueError, match=rf"line {n + 1}: .*another row in its place"):
        run_job(job())


def test_a_copy_of_the_input_goes_on(folder):
    write_lines(folder / "in.jsonl", rows_of(["a", "bad"]))
    run_job(job())
    os.utime(folder / "in.jsonl", ns=(10**18, 10**18))
    notes = Notes()
    assert run_job(job(), display=notes).already
    assert "ctxflow: the input has changed; its rows that are done (1) are as they were" in notes.said
    notes.said.clear()
    assert run_job(job(), display=notes).already and not notes.said, "it is told once"


def test_forms_of_the_input_may_change(folder):
    """A row is what is asked of it, however it is written."""
    write_lines(folder / "in.jsonl", rows_of(["a", "b"], id="n"))
    run_job(job(id_column="id", input_format="jsonl"))
    (folder / "in.jsonl").write_text('{"id":"nb","text":"b"}\r\n{"id":  "na", "other": 1, "text": "\\u0061"}\r\n')
    assert not begin_job(job(id_column="id", input_format="jsonl"))


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_every_form_of_input_is_compared(folder, suffix):
    def write(values):
        path = folder / f"in.{suffix}"
        if suffix == "csv":
            path.write_text("text\n" + "".join(f"{value}\n" for value in values))
        elif suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
        else:
            write_lines(path, rows_of(values))

    write(["a", "bad", "b"])
    run_job(job(f"in.{suffix}"))
    write(["a", "b"])
    with pytest.raises(ValueError, match=r"done before|another row in its place"):
        run_job(job(f"in.{suffix}"), retry_errors=True)
    write(["a", "good", "b"])
    assert run_job(job(f"in.{suffix}"), retry_errors=True).done == 3


def test_a_job_that_an_earlier_ctxflow_began_goes_on(folder):
    write_lines(folder / "in.jsonl", rows_of(["a", "bad", "b"]))
    run_job(job())
    as_of_an_earlier_ctxflow(folder / "out.jsonl.progress")
    notes = Notes()
    assert run_job(job(), display=notes).done == 2
    assert sum("begun by an earlier ctxflow" in said for said in notes.said) == 1
    notes.said.clear()
    assert run_job(job(), display=notes).already and not notes.said
    assert (folder / "out.jsonl.progress").read_bytes().startswith(b'{"ctxflow": "batch journal", "version": 2}')


def test_rows_that_an_earlier_ctxflow_did_cannot_be_compared(folder):
    write_lines(folder / "in.jsonl", rows_of(["a", "bad", "b"], id="n"))
    run_job(job())
    run_job(job(output="ids.jsonl", id_column="id"))
    for name in ("out.jsonl", "ids.jsonl"):
        as_of_an_earlier_ctxflow(folder / f"{name}.progress")
    write_lines(folder / "in.jsonl", rows_of(["a", "good", "b"], id="n"))
    with pytest.raises(ValueError, match="an earlier ctxflow did it cannot be known"):
        run_job(job(), retry_errors=True)
    assert run_job(job(output="ids.jsonl", id_column="id"), retry_errors=True).done == 3
    assert len({json.dumps(each) for each in read_lines(folder / "ids.jsonl")}) == 3


def killed_before_its_last_frame(folder, texts):
    """A job of one commit for each row, the last of which has its line in the output and no frame in the journal."""
    write_lines(folder / "in.jsonl", rows_of(texts))
    sizes = []
    for limit in (len(texts) - 1, len(texts)):
        run_job(job(limit=limit))
        sizes.append((folder / "out.jsonl.progress").stat().st_size)
    frames = (folder / "out.jsonl.progress").read_bytes()
    (folder / "out.jsonl.progress").write_bytes(frames[: sizes[0]])


def test_an_input_that_grows_after_a_kill_goes_on(folder):
    killed_before_its_last_frame(folder, ["a", "b", "c"])
    write_lines(folder / "in.jsonl", rows_of(["a", "b", "c", "d"]))
    notes = Notes()
    assert run_job(job(), display=notes).done_now == 2
    assert [each["result"] for each in read_lines(folder / "out.jsonl")] == ["A", "B", "C", "D"]
    assert any("1 row that its journal does not know, and the input has changed since" in said for said in notes.said)
    assert [each["result"] for each in read_lines(folder / "out.jsonl.cut")] == ["C"]


def test_a_job_that_went_on_after_a_kill_goes_on_where_its_input_grows_then(folder):
    killed_before_its_last_frame(folder, ["a", "b", "c"])
    assert run_job(job(limit=3)).done_now == 0
    write_lines(folder / "in.jsonl", rows_of(["a", "b", "c", "d"]))
    assert run_job(job()).done_now == 1
    write_lines(folder / "in.jsonl", rows_of(["a", "b", "x", "d"]))
    with pytest.raises(ValueError, match=r"line 3: .*another row in its place"):
        run_job(job())
