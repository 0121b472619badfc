"""Maps that go on where an earlier run was stopped."""

import collections
import enum
import json
import os
import pickle
import random
import sys
import threading
import time

import numpy as np
import pytest

import forked
from ctxflow import ContextExecutor, batch_app, context
from ctxflow.resume import decode, encode, fingerprint
from waiting import eventually, exited, patience


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=2)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture
def calls(tmp_path):
    """A folder in which each computed item leaves a file, and what was computed since the last look."""

    class Calls:
        folder = str(tmp_path / "calls")

        def since(self):
            names = os.listdir(self.folder)
            for name in names:
                os.unlink(os.path.join(self.folder, name))
            return collections.Counter(name.split("~")[0] for name in names)

    os.makedirs(Calls.folder)
    return Calls()


@pytest.fixture
def double(calls):
    return make_double(calls.folder)


def make_double(folder, factor=2):
    @batch_app(batch_size=5)
    def double(numbers, *, extra=0):
        import tempfile

        for n in numbers:
            tempfile.mkstemp(prefix=f"{n}~", dir=folder)
        return [factor * n + extra for n in numbers]

    return double


def names(numbers):
    return collections.Counter(str(n) for n in numbers)


def test_what_is_in_the_file_is_not_computed_again(executor, double, calls, tmp_path):
    path = str(tmp_path / "deep" / "results.jsonl")
    assert list(double.map(range(30), resume=path)) == [2 * n for n in range(30)]
    assert calls.since() == names(range(30))
    assert list(double.map(range(30), resume=path)) == [2 * n for n in range(30)]
    assert not calls.since()
    assert list(double.map(range(40), resume=path)) == [2 * n for n in range(40)]
    assert calls.since() == names(range(30, 40))
    assert dict(double.map(range(40), resume=path, order="completed")) == {n: 2 * n for n in range(40)}
    assert list(double.map(range(5), resume=path)) == [0, 2, 4, 6, 8], "fewer inputs than before"
    assert not calls.since()
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_stopped_map_goes_on(executor, double, calls, tmp_path, order):
    path = tmp_path / "results.jsonl"
    results = double.map(range(60), resume=str(path), window=10, order=order)
    for _ in range(25):
        next(results)
    results.close()
    assert executor.calls.run.wait_idle(patience())  # What ran when the map was closed goes on to its end.
    kept = len(path.read_text().splitlines()) - 1
    assert 25 <= kept < 60
    first = calls.since()
    assert list(double.map(range(60), resume=str(path))) == [2 * n for n in range(60)]
    again = calls.since()
    assert sum(again.values()) == 60 - kept
    assert set(first) | set(again) == set(names(range(60)))


@pytest.mark.parametrize("torn", [1, 8, 30])
def test_a_torn_last_line_is_mended(executor, double, calls, tmp_path, torn):
    path = tmp_path / "results.jsonl"
    list(double.map(range(10), resume=str(path)))
    calls.since()
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])
    assert list(double.map(range(10), resume=str(path))) == [2 * n for n in range(10)]
    assert sum(calls.since().values()) == 1
    lines = path.read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(10))


def test_a_torn_line_in_the_middle_costs_its_item_only(executor, double, calls, tmp_path):
    path = tmp_path / "results.jsonl"
    list(double.map(range(10), resume=str(path)))
    calls.since()
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:10]
    path.write_text("\n".join(lines) + "\n")
    assert list(double.map(range(10), resume=str(path))) == [2 * n for n in range(10)]
    assert sum(calls.since().values()) == 1


@pytest.mark.parametrize("size", [0, 1, 10, 60])
def test_a_torn_header_begins_anew(executor, double, calls, tmp_path, size):
    path = tmp_path / "results.jsonl"
    list(double.map(range(3), resume=str(path)))
    path.write_bytes(path.read_bytes()[:size])
    assert list(double.map(range(3), resume=str(path))) == [0, 2, 4]
    assert len(path.read_text().splitlines()) == 4


def test_lines_that_another_program_wrote_anew_are_read_alike(executor, double, calls, tmp_path):
    path = tmp_path / "results.jsonl"
    list(double.map(range(10), resume=str(path)))
    calls.since()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mended = [json.dumps(dict(reversed(line.items())), separators=(",", ":")) for line in lines]
    path.write_text(
        "\n".join([*mended[:1], "", "null", '{"index": "1"}', '{"index": 99999999999}', *mended[1:]]) + "\n"
    )
    assert list(double.map(range(10), resume=path)) == [2 * n for n in range(10)]
    assert not calls.since()


def test_a_damaged_result_is_told_with_what_to_do(executor, double, calls, tmp_path):
    path = tmp_path / "results.jsonl"
    list(double.map(range(4), resume=str(path)))
    calls.since()
    path.write_bytes(path.read_bytes().replace(b'"result": 4}', b'"result": /}'))
    with pytest.raises(
        ValueError, match=r"the result of item 2, at byte \d+, cannot be read; remove that line"
    ) as caught:
        list(double.map(range(4), resume=path))
    assert "\n" not in str(caught.value)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "/}" not in line))
    assert list(double.map(range(4), resume=path)) == [0, 2, 4, 6]
    assert calls.since() == names([2])


KILLED = """
import os, sys, time
from ctxflow import ContextExecutor, batch_app

@batch_app(batch_size=10)
def double(numbers):
    time.sleep(0.005)
    return [2 * n for n in numbers]

if __name__ == "__main__":
    with ContextExecutor(workers=2, log_events=False):
        for n, result in enumerate(double.map(range(1000), resume="results.jsonl")):
            assert result == 2 * n
"""


def test_killed_at_any_moment_it_goes_on_and_nothing_is_there_twice(tmp_path):
    (tmp_path / "program.py").write_text(KILLED)
    path, chance, kept = tmp_path / "results.jsonl", random.Random(5), 0
    for attempt in range(3):
        with forked.Popen([sys.executable, "program.py"], cwd=tmp_path) as process:
            until = kept + chance.randrange(2, 400)
            if attempt < 2:
                eventually(
                    lambda process=process, until=until: (
                        process.poll() is not None or (path.exists() and path.read_bytes().count(b"\n") >= until)
                    ),
                    pause=0.002,
                )
                time.sleep(chance.uniform(0, 0.02))
                process.kill()
            assert exited(process) in (0, -9)
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        assert len(lines) >= kept, "nothing that was kept is lost"
        kept = len(lines)
    assert process.returncode == 0
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(1000))


def test_changed_inputs_are_computed_again(executor, double, calls, tmp_path):
    path = str(tmp_path / "results.jsonl")
    list(double.map([1, 2, 3, 4], resume=path))
    calls.since()
    assert list(double.map([1, 20, 3, 40], resume=path)) == [2, 40, 6, 80]
    assert calls.since() == names([20, 40])
    assert list(double.map([1, 20, 3, 40], resume=path)) == [2, 40, 6, 80], "the later line counts"
    assert not calls.since()
    assert list(double.map([0, 1, 20, 3], resume=path)) == [0, 2, 40, 6], "results stand by their index"
    assert calls.since() == names([0, 1, 20, 3])


def test_another_app_context_or_constant_is_refused(executor, double, calls, tmp_path):
    path = str(tmp_path / "results.jsonl")
    list(double.map([1, 2], resume=path))
    before = (tmp_path / "results.jsonl").read_text()

    @context
    def base(value):
        return value

    @batch_app(base(1))
    def using(base, numbers):
        return [base + n for n in numbers]

    other = str(tmp_path / "other.jsonl")
    assert list(using.map([1], resume=other)) == [2]
    refused = {
        "the function .*double in test_resume, or something of yours": lambda: make_double(calls.folder, factor=3).map(
            [1, 2], resume=path
        ),
        "the constant extra changed": lambda: double.map([1, 2], resume=path, extra=1),
        "the context base, or something of yours": lambda: using.using(base(2)).map([1], resume=other),
    }
    for sentence, attempt in refused.items():
        with pytest.raises(ValueError, match=rf"holds results of another app, or of .* as it was \({sentence}"):
            attempt()
    assert (tmp_path / "results.jsonl").read_text() == before
    assert list(make_double(calls.folder).map([1, 2], resume=path)) == [2, 4], "the same app made again is the same"
    assert list(double.using(priority=3).map([1, 2], resume=path)) == [2, 4], "options do not count"


@pytest.mark.parametrize("text", ["hello", "hello\n", '{"a": 1}\n', "[1]\n", '{"ctxflow": "other"}\n', "\0\n"])
def test_a_file_that_is_something_else_is_left_as_it_is(executor, double, tmp_path, text):
    path = tmp_path / "thesis.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a results file of a map: name another file"):
        double.map([1], resume=str(path))
    assert path.read_text() == text


def test_a_second_writer_is_refused(executor, double, tmp_path):
    path = str(tmp_path / "results.jsonl")
    first = double.map(range(100), resume=path, window=5)
    with pytest.raises(ValueError, match="is being written by another driver: wait for it, or name another file"):
        double.map(range(100), resume=path)
    assert next(first) == 0
    first.close()
    for result in double.map(range(100), resume=path):
        if result == 20:
            break
    assert next(double.map(range(100), resume=path)) == 0, "leaving a map frees its file at once"


def test_failed_items_are_tried_again(executor, calls, tmp_path):
    marker = tmp_path / "fixed"
    folder = calls.folder

    @batch_app(batch_size=4)
    def flaky(numbers):
        import os
        import tempfile

        for n in numbers:
            tempfile.mkstemp(prefix=f"{n}~", dir=folder)
            if n % 4 == 1 and not os.path.exists(marker):
                raise OSError(f"no {n} today")
        return list(numbers)

    path = str(tmp_path / "results.jsonl")
    results = list(flaky.map(range(12), resume=path, on_error="return"))
    assert [n for n, result in enumerate(results) if isinstance(result, OSError)] == [1, 5, 9]
    marker.touch()
    calls.since()
    assert list(flaky.map(range(12), resume=path)) == list(range(12))
    assert calls.since() == names([1, 5, 9])


class Colour(enum.IntEnum):
    RED = 1


VALUES = [
    None, True, 1, 1.5, "text", "\ud800", "line\nbreak", [1, [2, {"a": None}]], {"a": [1.0]},  # as JSON
    (1, 2), [(1, 2)], {1: "a"}, {"a": (1,)}, {1, 2}, b"bytes", 1 + 2j, Colour.RED, [Colour.RED],
    np.float64(0.1), np.int64(3), np.arange(4.0), np.array([[1, 2]], dtype="i2"), float("inf"), 10**30,
    collections.OrderedDict(a=1), ValueError("as a value"),
]  # fmt: skip


def same(left, right):
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, BaseException):
        return type(left) is type(right) and left.args == right.args
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_exactly(value):
    """Types and all; the first nine as JSON that people can read."""
    assert same(decode(json.loads(json.dumps(encode(value)))), value)


def test_plain_values_are_written_as_json():
    assert all(list(encode(value)) == ["result"] for value in VALUES[:9])
    assert all(list(encode(value)) == ["pickle"] for value in VALUES[9:] if type(value) is not int)


def test_not_a_number_comes_back():
    assert np.isnan(decode(json.loads(json.dumps(encode(float("nan"))))))


def test_results_of_any_type_come_back_exactly_from_the_file(executor, tmp_path):
    values = [value for value in VALUES if "Colour" not in repr(value) and not isinstance(value, Exception)]

    @batch_app
    def give(numbers):
        return [values[n] for n in numbers]

    path = str(tmp_path / "results.jsonl")
    first = list(give.map(range(len(values)), resume=path))
    second = list(give.map(range(len(values)), resume=path))
    assert all(map(same, first, values)) and all(map(same, second, values))


def test_a_result_that_cannot_be_kept_names_its_part():
    with pytest.raises(
        TypeError, match=r"a result that resume= keeps cannot be sent: the _thread.lock object at \['l'\]"
    ):
        encode({"l": threading.Lock()})
    assert decode(encode([len, print])) == [len, print]


def test_fingerprints_tell_inputs_apart():
    inputs = [("a",), ("b",), (1,), ("1",), (1.0,), (True,), (None,), ({"a": 1},), ({"a": 2},), (b"1",), ("a", "b")]
    inputs += [(np.arange(3),), (np.arange(4),), ({1, 2},), ((1, 2),)]
    assert len({fingerprint(item) for item in inputs}) == len(inputs)
    assert fingerprint(({"a": 1, "b": 2},)) == fingerprint(({"b": 2, "a": 1},))


def test_inputs_are_pulled_no_further_than_the_window_from_a_file_either(executor, double, calls, tmp_path):
    path = str(tmp_path / "results.jsonl")
    list(double.map(range(200), resume=path))
    taken = []
    source = (taken.append(n) or n for n in range(200))
    results = double.map(source, resume=path, window=10)
    for n in range(150):
        assert next(results) == 2 * n
        assert len(taken) <= n + 1 + 10
    results.close()


def test_many_holes_are_filled_in_their_places(executor, double, calls, tmp_path):
    path = tmp_path / "results.jsonl"
    list(double.map(range(100), resume=str(path)))
    calls.since()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if line.startswith('{"ctxflow"') or json.loads(line)["index"] % 3))
    assert list(double.map(range(100), resume=str(path))) == [2 * n for n in range(100)]
    assert calls.since() == names(range(0, 100, 3))
    assert list(double.map(range(100), resume=str(path))) == [2 * n for n in range(100)]


def test_bad_input_leaves_the_file_free(executor, double, tmp_path):
    path = str(tmp_path / "results.jsonl")
    with pytest.raises(TypeError, match=r"not iterable|must support iteration"):
        double.map(5, resume=path)
    with pytest.raises(TypeError, match="cannot identify"):
        double.map([1], resume=path, extra=threading.Lock())
    assert list(double.map([1], resume=path)) == [2]


def test_a_full_disk_ends_the_map_with_an_error_and_cancels_the_rest(executor, tmp_path):
    folder = str(tmp_path)

    @batch_app(batch_size=5)
    def gated(numbers):
        import os
        import time

        while numbers[0] and not os.path.exists(os.path.join(folder, "full" if numbers[0] < 250 else "over")):
            time.sleep(0.01)
        return numbers

    before = executor.status().items_cancelled
    results = gated.map(range(500), resume=str(tmp_path / "results.jsonl"))
    assert next(results) == 0
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, results._mapping._file._file._file.fileno())
    os.close(full)
    (tmp_path / "full").touch()
    with pytest.raises(OSError, match="No space left"):
        list(results)
    (tmp_path / "over").touch()
    assert results.finished.done()
    eventually(lambda: not executor.status().items_queued)
    assert executor.status().items_cancelled > before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (({1: "x"},), ({"1": "x"},)),
        (((1, 2),), ([1, 2],)),
        (({"a": (1,)},), ({"a": [1]},)),
        ((True,), (1,)),
        ((1,), (1.0,)),
        ((0.0,), (-0.0,)),
        ((None,), ("null",)),
        (({None: 1},), ({"null": 1},)),
        ((np.float64(1.0),), (1.0,)),
    ],
)
def test_fingerprints_are_exact_in_types(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(pickle.loads(pickle.dumps(one)))


def test_an_item_that_contains_itself_has_a_fingerprint():
    item = [1]
    item.append(item)
    assert fingerprint((item,)) == fingerprint((item,)) != fingerprint(([1],))


def test_the_file_of_another_user_is_refused(executor, double, tmp_path, monkeypatch):
    path = str(tmp_path / "results.jsonl")
    assert list(double.map([1], resume=path)) == [2]
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ValueError, match=r"belongs to another user, .* name another file, or copy it"):
        double.map([1], resume=path)
    monkeypatch.undo()
    assert list(double.map([1], resume=path)) == [2]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_have_written_is_not_run(executor, double, tmp_path, mode):
    """Results are pickles: reading one that another user wrote would run their code."""
    path = tmp_path / "results.jsonl"
    list(double.map(range(3), resume=path))
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"others may write to {path}, and reading its results could run their code"):
        double.map(range(3), resume=path)
    path.chmod(0o644)
    assert list(double.map(range(3), resume=path)) == [0, 2, 4]


def test_results_may_lie_behind_a_link_of_ones_own(executor, double, tmp_path):
    (tmp_path / "results.jsonl").symlink_to("disk.jsonl")
    list(double.map(range(3), resume=tmp_path / "results.jsonl"))
    assert (tmp_path / "disk.jsonl").is_file()
    assert list(double.map(range(3), resume=tmp_path / "results.jsonl")) == [0, 2, 4]


def test_a_map_that_a_program_leaves_half_read_at_its_end_is_kept_without_a_word(tmp_path):
    """The executor is never left: all that is there of the run is taken down with the program."""
    (tmp_path / "program.py").write_text(
        "from ctxflow import ContextExecutor, batch_app\n"
        "@batch_app(batch_size=2)\n"
        "def double(numbers):\n"
        "    return [2 * n for n in numbers]\n"
        "executor = ContextExecutor(workers=1)\n"
        "executor.start()\n"
        "doubled = double.map(range(100), resume='results')\n"
        "next(doubled)\n"
    )
    words = [sys.executable, "program.py"]
    run = forked.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=patience())
    assert "Exception" not in run.stderr and "Traceback" not in run.stderr
    assert (tmp_path / "results").stat().st_size
