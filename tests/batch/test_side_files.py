"""Whatever becomes of one of the files beside a job's output, results stand, and only what is missing alone is run."""

import os
import random
from pathlib import Path

import pytest
from batch_helpers import Notes, read_lines, write_lines

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job
from ctxflow.batch.ledger import MAGIC, Ledger
from ctxflow.errors import CtxflowError

pytestmark = pytest.mark.usefixtures("shared")

ROWS, FIRST = 24, 13
BAD = {3, 7, 15, 20}
_states = {}


def run(output, id_column=None, limit=None, **flags):
    choices = {"function": "batch_functions:upper", "column": ["text"], "id_column": id_column, "limit": limit}
    return run_job(load_job(None, input="in.jsonl", output=output, batch_size=5, **choices), **flags)


@pytest.fixture(params=["out.jsonl", "out.csv"])
def output(request, folder):
    """A job's output, of lines or made of them at the end; its input is there."""
    rows = [{"id": f"i{n}", "text": "bad" if n in BAD else f"text {n}"} for n in range(ROWS)]
    os.utime(write_lines(folder / "in.jsonl", rows), ns=(10**18, 10**18))
    return request.param


def states(folder, output, id_column):
    """Return the files of a job that has done the first rows, and those of the same job at its end."""
    if (output, id_column) not in _states:
        found = []
        for limit in (FIRST, None):
            run(output, id_column, limit)
            found.append({path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("out.")})
            found[-1].pop(f"{output}.status.json")  # Which names the folder.
        _states[output, id_column] = found
    return _states[output, id_column]


def put(folder, files):
    for path in folder.iterdir():
        if path.name.startswith("out."):
            path.rmdir() if path.is_dir() else path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def flipped(data, place):
    changed = bytearray(data)
    changed[place] ^= 1 << place % 8
    return bytes(changed)


def harms(earlier, later, name):
    """Yield what becomes of a file, the files that are there, and what is in it (None: nothing; a list: a folder)."""
    data = later[name]
    yield "absent", later, None
    yield "a folder", later, []
    yield "older", later, earlier[name]
    yield "newer", earlier, data
    for size in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1}):
        yield f"cut at {size}", later, data[:size]
    for place in sorted(random.Random(name).sample(range(len(data)), 25)):
        yield f"flipped at {place}", later, flipped(data, place)


@pytest.mark.parametrize("id_column", [None, "id"])
@pytest.mark.parametrize("suffix", [".errors.jsonl", ".progress", ".rows.jsonl"])
def test_a_side_file_that_is_not_what_it_was_costs_no_result(folder, output, suffix, id_column):
    lines = output if output.endswith("jsonl") else f"{output}.rows.jsonl"
    if suffix == ".rows.jsonl" and lines == output:
        pytest.skip("the output is the file of results itself")
    earlier, later = states(folder, output, id_column)
    name, refusals = f"{output}{suffix}", set()
    for harm, files, harmed in harms(earlier, later, name):
        put(folder, {each: data for each, data in files.items() if each != name or isinstance(harmed, bytes)})
        if harmed == []:
            (folder / name).mkdir()
        elif harmed is not None:
            (folder / name).write_bytes(harmed)
        results = {each: files[each] for each in {lines, output} - {name}}
        notes = Notes()
        try:
            outcome = run(output, id_column, display=notes)
        except (ValueError, OSError, CtxflowError) as error:
            refusals.add(harm.split()[0])
            assert name in str(error) or (harm == "newer" and lines in str(error)), harm
            assert len(str(error).splitlines()) == 1, harm
            if harmed is None:
                assert not (folder / name).exists(), harm
            elif harmed and not MAGIC.startswith(harmed):  # Of which there is nothing to lose.
                assert (folder / name).read_bytes() == harmed, harm
            for each, data in results.items():
                assert (folder / each).read_bytes() == data, harm
            continue
        if name != lines:
            assert (folder / lines).read_bytes().startswith(files[lines]), harm
            had = files[lines].count(b"\n")
            assert outcome.done_now == ROWS - len(BAD) - had, f"{harm}: only what is missing is done"
            told = sorted(each["row"] for each in read_lines(folder / lines))
            assert told == sorted(set(range(ROWS)) - BAD), harm
            if not harm.startswith("flipped"):  # Which may be in a letter.
                letters = read_lines(folder / f"{output}.errors.jsonl")
                assert sorted(each["row"] for each in letters) == sorted(BAD), harm
        elif harm == "newer":
            assert (outcome.done, outcome.done_now) == (ROWS - len(BAD), 0)
        else:
            assert outcome.already and (folder / output).read_bytes() == files[output], harm
            assert harm != "absent" or any(f"{name}, of which" in note for note in notes.said)
        assert not (folder / f"{lines}.cut").exists(), harm
    assert "a" in refusals
    assert ("absent" in refusals) == (suffix == ".progress") and ("older" in refusals) == (suffix == ".rows.jsonl")
    assert "flipped" in refusals or suffix != ".progress"


def test_a_finished_table_whose_rows_are_gone_is_not_added_to(folder):
    os.utime(write_lines(folder / "in.jsonl", [{"text": f"t{n}"} for n in range(9)]), ns=(10**18, 10**18))
    run("out.csv", limit=6)
    rows, made = folder / "out.csv.rows.jsonl", (folder / "out.csv").read_bytes()
    kept = rows.read_bytes()
    rows.unlink()
    for limit, flags in ((6, {"retry_errors": True}), (None, {})):
        with pytest.raises(ValueError, match=r"rows.jsonl, of which .*out.csv was made, is gone, so .*: put it back"):
            run("out.csv", limit=limit, **flags)
        assert not rows.exists() and (folder / "out.csv").read_bytes() == made
    assert run("out.csv", limit=6).already
    rows.write_bytes(kept)
    assert run("out.csv").done_now == 3
    rows.unlink()
    (folder / "out.csv").unlink()
    assert run("out.csv").done_now == 9, "nobody has the results any more"


@pytest.mark.parametrize("harm", ["absent", "a folder", "half", "another type"])
def test_a_status_file_that_is_not_what_it_was_costs_nothing(folder, harm):
    write_lines(folder / "in.jsonl", [{"text": f"t{n}"} for n in range(9)])
    run("out.jsonl", limit=6)
    status, kept = folder / "out.jsonl.status.json", (folder / "out.jsonl").read_bytes()
    data = status.read_bytes()
    status.unlink()
    if harm == "a folder":
        status.mkdir()
    elif harm != "absent":
        status.write_bytes(data[:50] if harm == "half" else data.replace(b'"done": 6', b'"done": "six"'))
    assert run("out.jsonl", limit=6).already
    assert run("out.jsonl").done_now == 3
    assert (folder / "out.jsonl").read_bytes().startswith(kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("suffix", ["", ".errors.jsonl", ".progress"])
def test_files_of_another_user_are_refused_and_left_as_they_are(folder, suffix):
    paths = [Path(f"out.jsonl{each}") for each in ("", ".errors.jsonl", ".progress")]  # Others see no folder above.
    with Ledger(*paths) as ledger:
        ledger.note({"settings": {}})
        ledger.commit(b'{"row": 0}\n', b'{"row": 1}\n', [(0, 0)], [(1, 1)])
    before = {path: path.read_bytes() for path in paths}
    os.chmod(folder, 0o777)
    for path in paths:
        os.chown(path, 65534, 65534)
        os.chmod(path, 0o644)
    theirs = Path(f"out.jsonl{suffix}")
    os.chown(theirs, 12345, 12345)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setresuid(65534, 65534, 65534)
            Ledger(*paths)
        except ValueError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as said:
        assert said.read().decode() == f"{theirs} cannot be written: Permission denied"
    assert {path: path.read_bytes() for path in paths} == before
