"""The figures that the documents show are those of benchmarks/RESULTS.md, each with its spread."""

import doctest
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402  (The benchmarks are programs, not a package.)

RESULTS = tables.results((ROOT / "benchmarks/RESULTS.md").read_text())


def test_examples():
    assert doctest.testmod(tables).failed == 0


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_those_of_the_results(name):
    text = (ROOT / name).read_text()
    assert "<!-- figures: " in text
    assert tables.written(text, RESULTS) == text, "run benchmarks/tables.py"


def test_a_figure_that_changes_changes_the_document():
    changed = {**RESULTS, "batch": {**RESULTS["batch"], "rows_per_s": (7.0, " (1.00)")}}
    document = tables.written((ROOT / "docs/batch.md").read_text(), changed)
    assert "| rows/s, from the opened input to the end | 7.00 (1.00) |" in document


def test_no_other_figure_of_these_stands_in_the_readme():
    """The section on speed has no rate of its own beside the tables: it would grow old."""
    section = (ROOT / "README.md").read_text().partition("## How fast")[2].partition("\n## ")[0]
    prose = re.sub(r"<!-- figures: .*?<!-- figures end -->", "", section, flags=re.DOTALL)
    assert not re.search(r"\d[\d,.]* (calls|items|rows)/s", prose)


def test_a_peer_that_is_ahead_is_in_the_table():
    """Every peer that is measured beside ctxflow is shown, whichever way the ratio points."""
    measured = {name for name in RESULTS["dispatch-embedded"] if "_vs_" in name}
    shown = {
        peer.ratio for table in tables.TABLES["dispatch"] for row in table.rows for peer in row.beside if peer.ratio
    }
    assert shown == measured
