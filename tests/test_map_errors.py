"""What a map says when something fails: which item, which option; and what it does not lose."""

import contextlib
import itertools
import json
import sqlite3
import threading
import time
import traceback
from concurrent.futures import CancelledError, Future

import parsl
import pytest

from ctxflow import (
    ContextExecutor,
    DependencyFailed,
    RemoteError,
    TurnOver,
    batch_app,
    context,
    context_app,
    idle,
    session_app,
)
from ctxflow.errors import add_note
from waiting import eventually, finished


@context
def ten():
    return 10


@batch_app
def half(numbers):
    return [n // 2 if n % 2 == 0 else 1 // 0 for n in numbers]


@batch_app(ten())
def add(base, left, right, extra=0, *, scale=1):
    return [base + a + b * scale for a, b in zip(left, right, strict=True)]


@batch_app
def lengths(texts):
    return [len(text) // (len(text) < 1000) for text in texts]


@batch_app
def join(pairs):
    return ["-".join(map(str, pair)) for pair in pairs]


@context_app(ten())
def twice(base, number):
    if number < 0:
        raise ValueError("negative")
    return 2 * number


@pytest.fixture(scope="module", params=["alone", "with parsl"])
def executor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    if request.param == "alone":
        executor = ContextExecutor(workers=2, log_events=False)
        executor.run_dir = str(folder)
        with executor:
            yield executor
        return
    with parsl.load(ContextExecutor.config(workers=2, run_dir=str(folder), log_events=False)) as kernel:
        yield kernel.executors["ctxflow"]


@pytest.mark.parametrize("order", ["input", "completed"])
def test_an_error_names_its_item(executor, order):
    with pytest.raises(ZeroDivisionError) as caught:
        list(half.map([0, 2, 4, 7], order=order))
    assert caught.value.__notes__ == ["item 3 of half.map: 7"]
    assert "item 3 of half.map: 7" in "".join(traceback.format_exception(caught.value)), "where people look"
    with pytest.raises(ZeroDivisionError) as plain:
        1 // 0
    assert str(caught.value) == str(plain.value), "and nothing else is changed"


def test_each_error_that_is_returned_names_its_own_item(executor):
    results = list(half.map(range(10), on_error="return"))
    assert [result.__notes__ for result in results[1::2]] == [[f"item {n} of half.map: {n}"] for n in range(1, 10, 2)]


def test_many_items_of_one_failure_name_themselves(executor):
    @context
    def broken():
        raise OSError("no weights")

    @batch_app(broken())
    def use(live, numbers):
        return numbers

    results = list(use.map(range(50), on_error="return"))
    assert [result.__notes__ for result in results] == [[f"item {n} of use.map: {n}"] for n in range(50)]


def test_a_long_item_is_shown_in_short_and_several_values_one_by_one(executor):
    with pytest.raises(ZeroDivisionError) as caught:
        list(lengths.map(["x" * 5000]))
    [note] = caught.value.__notes__
    assert note.startswith("item 0 of lengths.map: 'xxx") and len(note) < 100
    with pytest.raises(TypeError) as caught:
        list(add.map([1], ["y"], [0]))
    assert caught.value.__notes__ == ["item 0 of add.map: 1, 'y', 0"]


# --- inputs that raise


def broken(good, error):
    yield from range(0, 2 * good, 2)
    raise error


@pytest.mark.parametrize("order", ["input", "completed"])
@pytest.mark.parametrize("good", [0, 1, 5, 3000])
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_inputs_that_raise_lose_no_result(executor, tmp_path, good, order, on_error):
    results = half.map(broken(good, LookupError("gone")), order=order, on_error=on_error, resume=tmp_path / "r.jsonl")
    taken = []
    with pytest.raises(LookupError, match="gone") as caught:
        for result in results:
            taken.append(result)
    assert sorted(taken) == ([(n, n) for n in range(good)] if order == "completed" else list(range(good)))
    assert caught.value.__notes__ == [f"raised by the inputs of half.map, after {good:,} item{'s' * (good != 1)}"]
    assert any(frame.name == "broken" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert list(results) == []
    kept = [json.loads(line)["index"] for line in (tmp_path / "r.jsonl").read_text().splitlines()[1:]]
    assert sorted(kept) == list(range(good)), "and the file has them"


def test_an_item_that_fails_comes_before_inputs_that_raise(executor):
    with pytest.raises(ZeroDivisionError):
        list(half.map(itertools.chain([1], broken(1, LookupError("gone")))))


# --- futures among the items


def later(value, seconds=0.05):
    future = Future()
    done = future.set_exception if isinstance(value, BaseException) else future.set_result
    threading.Timer(seconds, done, [value]).start()
    return future


@pytest.mark.parametrize("order", ["input", "completed"])
def test_futures_among_the_items_are_waited_for(executor, order):
    items = [later(10), 2, twice(3), 4, half(40)]
    results = list(half.map(items, order=order))
    expected = [5, 1, 3, 2, 10]
    assert sorted(results) == sorted(enumerate(expected)) if order == "completed" else results == expected


def test_futures_in_tuples_and_side_by_side(executor):
    assert list(join.map([(1, later(2)), (later("a"), later("b")), (3, 4)])) == ["1-2", "a-b", "3-4"]
    assert list(add.map([later(1), 2], [3, later(4)], [0, 0], scale=2)) == [17, 20]


def test_an_item_that_waits_holds_up_no_other(executor):
    never = Future()
    results = half.map([never, *range(0, 200, 2)], order="completed")
    assert sorted(next(results)[0] for _ in range(100)) == list(range(1, 101))
    never.set_result(8)
    assert list(results) == [(0, 4)]


def test_waiting_items_count_for_the_window(executor):
    pulled = []
    never = [Future() for _ in range(50)]
    results = half.map((pulled.append(1) or future for future in never), window=10)
    eventually(lambda: len(pulled) == 10)
    time.sleep(0.02)  # In which more could be taken.
    assert len(pulled) == 10
    for future in never:
        future.set_result(2)
    assert list(results) == [1] * 50


def test_an_item_whose_future_failed_fails_alone(executor):
    cancelled = Future()
    cancelled.cancel()
    items = [2, later(ValueError("no")), twice(-1), cancelled, 4]
    results = list(half.map(items, on_error="return"))
    assert [results[0], results[4]] == [1, 2]
    assert all(isinstance(result, DependencyFailed) for result in results[1:4])
    assert [type(result.__cause__) for result in results[1:4]] == [ValueError, ValueError, CancelledError]
    assert str(results[1]) == "a future among the values of this item failed: ValueError: no"
    assert str(results[3]) == "a future among the values of this item was cancelled"
    assert results[2].__notes__[0].startswith("item 2 of half.map: <")
    with pytest.raises(DependencyFailed):
        list(half.map([later(ValueError("no"))]))


def test_items_are_known_by_what_their_futures_gave(executor, tmp_path):
    file = tmp_path / "r.jsonl"
    assert list(half.map([later(2), 4, later(6)], resume=file)) == [1, 2, 3]
    before = file.read_text()
    assert list(half.map([2, later(4), later(6)], resume=file)) == [1, 2, 3]
    assert list(half.map([later(2), later(4), 6], resume=file, order="completed")) != []
    assert file.read_text() == before, "nothing was computed again"


def test_closing_a_map_that_waits_for_futures(executor):
    never = Future()
    results = half.map([2, never])
    assert next(results) == 1
    results.close()
    never.set_result(4)
    assert list(results) == []
    assert finished(half(4)).result() == 2


# --- options and constants


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: half.map([1], batch_size=5),
            r"batch_size is an option .*: write half.using\(batch_size=...\).map",
        ),
        (
            lambda: half.map([1], timeout=5),
            r"timeout is an option of the app, not of map: write half.using\(time",
        ),
        (lambda: half.map([1], priority=5), r"write half.using\(priority=...\).map"),
        (lambda: half.map([1], chunksize=5), r"no chunksize, .*: leave it out, or .* half.using\(batch_size=...\).map"),
        (
            lambda: add.map([1], [2], extra=3),
            r"extra is a parameter .* a constant: def add\(..., \*, extra=...\)",
        ),
        (lambda: add.map([1], [2]), r"takes 3 values .* but got 2; extra has a default: make it a constant: def add"),
        (lambda: add(1, 2), r"takes 3 values an item .* but got 2; extra has a default: make it a constant"),
        (lambda: add.map([1]), r"takes 3 values an item \(left, right, extra\), but got 1$"),
        (lambda: half.map([1], on_eror="return"), r"no option 'on_eror'.*; did you mean 'on_error'\?"),
        (lambda: add.map([1], [2], [3], scal=3), r"no option 'scal': .* are scale; did you mean 'scale'\?"),
        (lambda: half.map([1], colour=3), "half.map has no option 'colour': its keyword-only parameters are none$"),
    ],
)
def test_what_is_written_at_the_wrong_place_is_told_where_to_write_it(executor, call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()


# --- StopIteration


@batch_app
def first_letters(texts):
    return [next(iter(text)) for text in texts]


@batch_app
def first_letters_yielded(texts):
    for text in texts:
        yield next(iter(text))


@context_app
def first_letter(text):
    return next(iter(text))


@session_app
def letters(states, prompts):
    for _, new in zip(states, prompts, strict=True):
        yield next(iter(new[0])), None


def test_a_stop_iteration_of_an_app_ends_no_loop(executor):
    sentence = "the app let StopIteration out, which would silently end the loop .* give next.. a default"
    for app in (first_letters, first_letters_yielded):
        taken = []
        with pytest.raises(RemoteError, match=sentence) as caught:
            for letter in app.map(["a", "b", "", "c"]):
                taken.append(letter)
        assert taken == ["a", "b"]
        assert caught.value.__notes__ == [f"item 2 of {app.__name__}.map: ''"]
        assert "next(iter(text))" in str(caught.value.__cause__)
    with pytest.raises(RemoteError, match=sentence):
        finished(first_letter("")).result()

    def through():
        yield from [finished(first_letter("")).result()]

    with pytest.raises(RemoteError, match=sentence):
        list(through())


def test_a_stop_iteration_of_a_session_app_ends_no_loop(executor):
    with letters.open("") as session, pytest.raises(RemoteError, match="the app let StopIteration out"):
        list(session)


def test_the_end_of_a_turn_is_no_stop_iteration(executor):
    @session_app
    def once(states, prompts):
        return [(idle("chunk"), None) for _ in states]

    with once.open("prompt") as session:
        assert session.take(30) == "chunk"

        def chunks():
            yield session.take(30)

        with pytest.raises(TurnOver, match="the session's turn is over: give it another prompt"):
            list(chunks())


def test_inputs_that_let_a_stop_iteration_out_are_told(executor):
    def inputs():
        yield 2
        yield next(iter(()))

    results = half.map(inputs())
    assert next(results) == 1
    with pytest.raises(RuntimeError, match="generator raised StopIteration") as caught:
        next(results)
    assert caught.value.__notes__ == ["raised by the inputs of half.map, after 1 item"]


def test_several_notes_are_all_told_by_any_python():
    class Early(ValueError):  # As of Python 3.10.
        @property
        def add_note(self):
            raise AttributeError

    error = Early("gone")
    for note in ("one", "two"):
        add_note(error, note)
    assert error.__notes__ == ["one", "two"] and "one\ntwo" in "".join(traceback.format_exception(error))


def test_a_cursor_that_was_opened_elsewhere_says_where_to_open_it(executor):
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        cursor = connection.execute("select 2")
        with pytest.raises(sqlite3.ProgrammingError, match="SQLite objects created in a thread") as caught:
            list(half.map(number for (number,) in cursor))
        told = "".join(traceback.format_exception(caught.value))
        assert "open what belongs to one thread inside of the generator, as in def rows(): yield from sqlite3" in told

    def rows():
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            for (number,) in connection.execute("select 2"):
                yield number

    assert list(half.map(rows())) == [1]
