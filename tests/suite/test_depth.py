"""Depths of the suite, tried on a small suite of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUITE = """
import random
import pytest
from hypothesis import example, given, settings, strategies as st

@pytest.mark.release
def test_dear():
    pass

@pytest.mark.parametrize("name", ["first", "second"])
def test_draws(name):
    print("drawn", name, random.random())

@settings(max_examples=30)
@given(st.integers())
def test_property(number):
    print("example", number)

@example(12345)
@given(st.integers(0, 9))
def test_written_down(number):
    print("written", number)

class TestOfAClass:
    @settings(max_examples=40)
    @given(st.integers())
    def test_property(self, number):
        print("inner", number)
"""


def run(folder, depth, seed):
    (folder / "test_small.py").write_text(SUITE)
    words = [sys.executable, "-m", "pytest", "-s", "-q", "-c", "/dev/null", "--rootdir", folder, "-p", "suite.depth"]
    words += ["-p", "randomly", f"--randomly-seed={seed}", folder]
    given = {**os.environ, "PYTHONPATH": str(TESTS), "CTXFLOW_TEST_DEPTH": depth, "PYTEST_ADDOPTS": ""}
    ended = subprocess.run(words, capture_output=True, text=True, env=given, cwd=folder, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def said(output, word):
    return sorted(re.findall(rf"{word} .*", output))


def test_an_ordinary_run_draws_the_same_in_any_order_and_leaves_out_what_is_for_a_release(tmp_path):
    first, second = run(tmp_path, "test", 1), run(tmp_path, "test", 2)
    for word in ("drawn", "example", "inner"):
        assert said(first, word) == said(second, word)
    assert len(said(first, "example")) == len(said(first, "inner")) == 20
    assert "1 deselected" in first


def test_a_quick_run_tries_a_fifth_and_what_is_written_down(tmp_path):
    output = run(tmp_path, "quick", 1)
    assert (len(said(output, "example")), len(said(output, "inner"))) == (6, 8)
    assert "written 12345" in output


def test_a_release_runs_all_with_more_examples_that_are_new_each_time(tmp_path):
    first, second = run(tmp_path, "release", 1), run(tmp_path, "release", 2)
    assert "deselected" not in first
    assert len(said(first, "example")) == 90 and len(said(first, "inner")) == 120
    assert said(first, "example") != said(second, "example")
    assert said(first, "drawn") != said(second, "drawn")


def test_another_depth_is_refused(tmp_path):
    given = {**os.environ, "PYTHONPATH": str(TESTS), "CTXFLOW_TEST_DEPTH": "deepest"}
    words = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "suite.depth", tmp_path]
    ended = subprocess.run(words, capture_output=True, text=True, env=given, cwd=tmp_path, check=False)
    assert ended.returncode != 0
    assert "choose one of quick, test, release, hunt" in ended.stdout + ended.stderr
