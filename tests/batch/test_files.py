"""No job writes a file that it reads, whatever the file is called there."""

import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from batch_helpers import read_lines, write_lines

import forked
from ctxflow.batch import load_job
from ctxflow.batch.driver import begin_job, run_job
from ctxflow.batch.job_files import check_apart, files_of
from ctxflow.errors import UsageError

SITE = 'name = "here"\nengine = "embedded"\nworkers = 1\n'


@pytest.fixture
def read(folder):
    """What a job reads, by what a person calls it."""
    write_lines(folder / "in.jsonl", [{"text": "a"}, {"text": "b"}])
    (folder / "shards").mkdir()
    for name in ("train-0.parquet", "train-1.parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), folder / "shards" / name)
    (folder / "prompt.j2").write_text("Is it {{ text }}?\n")
    (folder / "site.toml").write_text(SITE)
    (folder / "job.toml").write_text('function = "batch_functions:upper"\n')
    return {
        "input": folder / "in.jsonl",
        "second shard": folder / "shards" / "train-1.parquet",
        "template": folder / "prompt.j2",
        "site": folder / "site.toml",
        "job": folder / "job.toml",
    }


def job_that_reads(what, output):
    source = "shards" if what == "second shard" else "in.jsonl"
    return load_job(Path("job.toml"), input=source, output=output, template="@prompt.j2", site="site.toml")


def linked(way, link, to):
    if way == "hard link":
        os.link(to, link)
    elif way == "symbolic link":
        link.symlink_to(to)
    else:
        (link.parent / "between").symlink_to(to)
        link.symlink_to("between")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


READS = ("input", "second shard", "template", "site", "job")
SUFFIXES = ("", ".rows.jsonl", ".errors.jsonl", ".progress", ".status.json", ".status.json.part", ".part")


@pytest.mark.parametrize("way", ["hard link", "symbolic link", "links of links"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("what", READS)
def test_nothing_that_is_read_is_written(read, folder, what, suffix, way):
    output = folder / "out.parquet"
    linked(way, output.with_name(output.name + suffix), read[what])
    before = contents(folder)
    for begin in (run_job, begin_job):
        for fresh in (False, True):
            with pytest.raises(UsageError, match="name another output") as told:
                begin(job_that_reads(what, output), fresh=fresh)
            assert read[what].name in str(told.value) and "\n" not in str(told.value)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "name",
    ["in.jsonl", "./in.jsonl", "nowhere/../in.jsonl", "shards/../in.jsonl", "linked/in.jsonl", "/proc/self/fd/{}"],
)
def test_the_input_by_any_path(read, folder, name):
    (folder / "linked").symlink_to(folder)
    before = contents(folder)
    with open(folder / "in.jsonl") as file, pytest.raises(UsageError, match=r"the output .* is the input"):
        run_job(job_that_reads("input", name.format(file.fileno())), fresh=True)
    assert contents(folder) == before


def test_the_input_by_a_descriptor(read, folder):
    descriptor = os.open(folder / "in.jsonl", os.O_RDONLY)
    try:
        with pytest.raises(UsageError, match="is the input /proc/self/fd/"):
            run_job(load_job(None, input=f"/proc/self/fd/{descriptor}", output="in.jsonl", function="copy:copy",
                             input_format="jsonl"), fresh=True)  # fmt: skip
    finally:
        os.close(descriptor)
    assert len(read_lines(folder / "in.jsonl")) == 2


def test_the_dead_letters_of_a_job_are_no_input_of_it(folder):
    write_lines(folder / "in.jsonl", [{"text": "bad"}, {"text": "good"}])
    choices = {"function": "batch_functions:upper", "column": ["text"], "output": "out.jsonl"}
    run_job(load_job(None, input="in.jsonl", **choices))
    with pytest.raises(UsageError, match=r"the file of dead letters .* is the input out\.jsonl\.errors\.jsonl"):
        run_job(load_job(None, input="out.jsonl.errors.jsonl", **choices), fresh=True)
    assert len(read_lines(folder / "out.jsonl.errors.jsonl")) == 1


def test_two_files_of_a_job_are_not_one(read, folder):
    (folder / "out.parquet.errors.jsonl").symlink_to("out.parquet.rows.jsonl")
    with pytest.raises(UsageError, match="one file by two names"):
        run_job(job_that_reads("input", "out.parquet"))


def test_an_output_is_no_shard_of_the_next_start(read, folder):
    with pytest.raises(UsageError, match="would be a part of the input shards"):
        run_job(job_that_reads("second shard", "shards/out.parquet"))
    begin_job(job_that_reads("second shard", "shards/out.jsonl"))


def test_names_that_a_filesystem_takes_for_one(tmp_path):
    """As where letters' case does not tell names apart: the same inode by two names of one folder."""
    (tmp_path / "IN.jsonl").write_text("")
    os.link(tmp_path / "IN.jsonl", tmp_path / "in.jsonl")
    with pytest.raises(UsageError):
        check_apart([("the input", tmp_path / "IN.jsonl")], files_of(tmp_path / "in.jsonl", "jsonl").written)


def test_the_exit_status_is_that_of_a_wrong_command_line(folder):
    write_lines(folder / "in.jsonl", [{"text": "a"}])
    os.link("in.jsonl", "out.jsonl")
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", "out.jsonl", "--function", "copy:copy"]
    ended = forked.run([*words, "--fresh"], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ctxflow: the output") and ended.stderr.count("\n") == 1
    assert read_lines(folder / "in.jsonl") == [{"text": "a"}]
