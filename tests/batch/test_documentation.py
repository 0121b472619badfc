"""What docs/batch.md shows is there."""

import re
import sys
from pathlib import Path

import forked
from ctxflow.batch.job import load_job
from ctxflow.cli.batch_command import reference

TEXT = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()


def test_the_job_file_is_one(tmp_path):
    (tmp_path / "job.toml").write_text(re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)[1])
    assert load_job(tmp_path / "job.toml").parameters == {"max_new_tokens": 4}


def test_the_options_are_there():
    words = [sys.executable, "-m", "ctxflow", "batch", "--help"]
    shown = forked.run(words, capture_output=True, text=True, check=True).stdout
    others = {
        "--follow",
        "--html",
        "--install-completion",
        "--log",
        "--older-than",
        "--undo",
        "--yes",
    }  # Of other commands.
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - others:
        assert option in shown, option


def test_the_reference_is_that_of_the_options():
    page = Path(__file__).parents[2] / "docs" / "batch-options.md"
    assert page.read_text() == reference(), "write it anew: python -m ctxflow.cli.batch_command > docs/batch-options.md"
