"""Maps that go on by what their items are, wherever these stand now."""

import collections
import json
import os
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxflow import ContextExecutor, batch_app, resume
from ctxflow.identity import identity_of, reading
from ctxflow.resume import ResultsByContent, fingerprint


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=1, log_events=False)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@batch_app
def double(numbers):
    return [2 * n for n in numbers]


class Kept:
    """Maps through one file, and how many items each has computed."""

    def __init__(self, path):
        self.path = path

    def lines(self):
        return len(self.path.read_text().splitlines()) - 1 if self.path.exists() else 0

    def run(self, items, **options):
        before = self.lines()
        results = list(double.map(items, resume=self.path, resume_by="content", **options))
        return results, self.lines() - before


@pytest.fixture
def kept(executor, tmp_path):
    return Kept(tmp_path / "r.jsonl")


def test_a_row_put_in_front_computes_one(kept):
    assert kept.run(range(100)) == ([2 * n for n in range(100)], 100)
    assert kept.run([1000, *range(100)]) == ([2000, *(2 * n for n in range(100))], 1)
    assert kept.run([1000, *range(100)]) == ([2000, *(2 * n for n in range(100))], 0)
    assert kept.run(range(99, -1, -1)) == ([2 * n for n in range(99, -1, -1)], 0), "in another order"
    assert kept.run([5]) == ([10], 0)
    pairs, computed = kept.run([*range(50), "x"], order="completed")
    assert (sorted(pairs[:50]), computed) == ([(n, 2 * n) for n in range(50)], 1)


def test_by_index_the_same_computes_all(kept):
    kept.run(range(100))
    before = kept.lines()
    assert list(double.map([1000, *range(100)], resume=kept.path)) == [2000, *(2 * n for n in range(100))]
    assert kept.lines() - before == 101


def test_equal_items_have_a_result_each(kept):
    assert kept.run(["a", "a", "b"]) == (["aa", "aa", "bb"], 3)
    assert kept.run(["a", "b", "a", "a"]) == (["aa", "bb", "aa", "aa"], 1)
    assert kept.run(["a"] * 5) == (["aa"] * 5, 2)
    kept.path.write_text(kept.path.read_text().replace('"aa"', '"first"', 1))
    assert sorted(kept.run(["a"] * 5)[0]) == ["aa"] * 4 + ["first"], "each is used once"


def test_types_are_told_apart(kept):
    assert kept.run([1, 1.0, True, "1"])[1] == 4
    assert kept.run(["1", True, 1.0, 1]) == (["11", 2, 2.0, 2], 0)


def test_many_equal_items_take_no_time_with_their_square(kept):
    assert kept.run([7] * 20_000) == ([14] * 20_000, 20_000)
    assert kept.run([7] * 20_001) == ([14] * 20_001, 1)


def test_sets_have_no_places_and_need_none(kept):
    assert kept.run({3, 1, 2})[1] == 3
    assert kept.run({2, 4, 3})[1] == 1


@pytest.mark.parametrize("harm", ["torn end", "torn middle", "blank", "spaced"])
def test_lines_that_are_harmed_cost_their_items(kept, harm):
    kept.run(range(10))
    lines = kept.path.read_text().splitlines()
    if harm == "torn end":
        kept.path.write_text("\n".join(lines)[:-4])
    elif harm == "torn middle":
        lines[4] = lines[4][:-5]
        kept.path.write_text("\n".join(lines) + "\n")
    elif harm == "blank":
        lines[4] = ""
        kept.path.write_text("\n".join(lines) + "\n")
    else:
        lines[1:] = [json.dumps(json.loads(line), separators=(",", ":")) for line in lines[1:]]
        kept.path.write_text("\n".join(lines) + "\n")
    results, _ = kept.run([99, *range(10)])
    assert results == [198, *(2 * n for n in range(10))]
    assert kept.run([99, *range(10)]) == (results, 0)


def test_a_line_that_was_changed_is_told(kept):
    kept.run(range(3))
    text = kept.path.read_text()
    kept.path.write_text(text.replace('"result": 2}', '"result": }'))
    with pytest.raises(ValueError, match=r"the result of item 1, at byte [0-9]+, cannot be read; remove that line"):
        kept.run([0, 1, 2])


def test_options_that_make_no_sense(executor):
    with pytest.raises(ValueError, match="resume_by='content' says how results are found again: name their file"):
        double.map([1], resume_by="content")


def test_another_app_is_refused(kept):
    kept.run(range(3))

    @batch_app
    def triple(numbers):
        return [3 * n for n in numbers]

    with pytest.raises(ValueError, match="holds results of another app"):
        triple.map([1], resume=kept.path, resume_by="content")


@given(runs=st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_as_many_are_computed_as_there_never_were_before(executor, tmp_path, runs):
    path = tmp_path / f"{random.getrandbits(64)}.jsonl"
    there = collections.Counter()
    for items in runs:
        results, computed = Kept(path).run(items)
        assert results == [2 * n for n in items]
        missing = collections.Counter(items) - there
        assert computed == missing.total()
        there += missing
    os.unlink(path)


def test_memory_is_16_bytes_a_result(executor, tmp_path):
    path, count = tmp_path / "r.jsonl", 50_000
    Kept(path).run([1])
    header = path.read_text().splitlines()[0]
    with path.open("w") as file:
        file.write(header + "\n")
        for n in range(count):
            file.write(f'{{"index": {n}, "key": "{n * 7919:016x}", "result": {n}}}\n')
    tracemalloc.start()
    try:
        results = ResultsByContent(path, double, {}, identity_of(double, {}, reading))
        held, _ = tracemalloc.get_traced_memory()
        results.close()
    finally:
        tracemalloc.stop()
    assert held < 24 * count


def test_items_whose_fingerprints_begin_alike_have_results_of_their_own(kept, monkeypatch):
    """As those that somebody looks for who supplies them: 64 bits take an hour."""
    whole = resume.fingerprint
    monkeypatch.setattr(resume, "fingerprint", lambda item, size: "0" * 16 + whole(item, size)[16:])
    assert kept.run([1, 2, 3]) == ([2, 4, 6], 3)
    assert kept.run([3, 5])[0] == [6, 10]
    assert kept.run([2, 1, 7])[0] == [4, 2, 14]


@pytest.mark.parametrize("by", ["content", "index"])
def test_a_file_with_shorter_fingerprints_is_read_and_added_to(kept, by):
    items = [5, "a", 5]
    assert kept.run(items)[1] == 3
    header, *lines = kept.path.read_text().splitlines()
    about = json.loads(header)
    assert about.pop("key_bytes") == 16
    records = [{**json.loads(line), "key": fingerprint((item,), 8)} for line, item in zip(lines, items, strict=True)]
    kept.path.write_text("".join(json.dumps(each) + "\n" for each in [about, *records]))
    for _ in range(2):
        before = kept.lines()
        assert list(double.map([*items, 6], resume=kept.path, resume_by=by)) == [10, "aa", 10, 12]
        assert kept.lines() - before in (0, 1)
    assert kept.lines() == 4 and len(json.loads(kept.path.read_text().splitlines()[-1])["key"]) == 16
