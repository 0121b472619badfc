"""Maps over many items on real workers: order, laziness, errors, closing, with Parsl and without."""

import gc
import itertools
import threading
import time

import parsl
import pytest
from parsl.dataflow.dflow import DataFlowKernelLoader

import ctxflow
from ctxflow import ContextExecutor, batch_app, context
from waiting import eventually, happened, joined


@context
def offset(value):
    return value


@batch_app(offset(100))
def add(base, numbers):
    return [base + n for n in numbers]


@batch_app(batch_size=5)
def slow(numbers):

    time.sleep(0.005 * len(numbers))
    return list(numbers)


@batch_app(batch_size=10)
def picky(numbers):
    for n in numbers:
        if n % 10 == 3:
            raise ValueError(f"{n} is not liked")
    return [-n for n in numbers]


@pytest.fixture(scope="module", params=["alone", "with parsl"])
def executor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    if request.param == "alone":
        executor = ContextExecutor(workers=2)
        executor.run_dir = str(folder)
        with executor:
            yield executor
        return
    with parsl.load(ContextExecutor.config(workers=2, run_dir=str(folder))) as kernel:
        yield kernel.executors["ctxflow"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One worker without Parsl, apart from the other executor."""
    executor = ContextExecutor(workers=1, label="alone", batching={"policy": "fixed", "size": 4})
    executor.run_dir = str(tmp_path_factory.mktemp("alone"))
    with executor:
        yield executor


def test_results_come_in_the_order_of_the_inputs(executor):
    assert list(add.map(range(5000))) == [100 + n for n in range(5000)]


def test_results_as_they_are_completed(executor):
    pairs = list(add.map(range(500), order="completed"))
    assert sorted(pairs) == [(n, 100 + n) for n in range(500)]


def test_several_parameters_stop_at_the_shortest_as_zip_does(executor):
    @batch_app
    def join(left, right, *, mark="-"):
        return [f"{a}{mark}{b}" for a, b in zip(left, right, strict=True)]

    assert list(join.map(list("abcd"), itertools.count())) == ["a-0", "b-1", "c-2", "d-3"]
    assert list(join.map(["a", "b"], range(9), mark="+")) == ["a+0", "b+1"]


def test_nothing_in_nothing_out(executor):
    assert list(add.map([])) == []
    assert list(add.map(iter(()), order="completed")) == []
    with pytest.raises(StopIteration):
        next(add.map([]))


class Counted:
    """An endless input that counts how far it was read, and knows the thread that reads it."""

    def __init__(self):
        self.taken = 0

    def __iter__(self):
        self.reader = threading.current_thread()
        for n in itertools.count():
            self.taken += 1
            yield n


@pytest.mark.parametrize("order", ["input", "completed"])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_inputs_are_pulled_no_further_than_the_window(executor, order, window):
    source = Counted()
    results = slow.map(source, window=window, order=order)
    for taken in range(1, 100):
        result = next(results)
        assert result == taken - 1 if order == "input" else result[0] == result[1]
        # Nothing beyond the window is on its way; a batch that has arrived is handed out item by item.
        assert source.taken <= taken + window + (5 if order == "completed" else 0)
    results.close()
    joined(source.reader)
    taken = source.taken
    assert list(add.map(range(3))) == [100, 101, 102]
    assert source.taken == taken, "a closed map reads nothing"
    with pytest.raises(StopIteration):
        next(results)


def test_a_small_window_keeps_all_workers_busy(executor):
    """It is refilled before it is empty, also while nobody reads on."""
    submitted = []
    source = (submitted.append(n) or n for n in range(40))
    results = slow.map(source, window=20)
    for taken in range(1, 30):
        next(results)
        eventually(lambda taken=taken: len(submitted) > taken)  # It is read on a thread of its own.
    results.close()


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_window_that_is_answered_whole_is_refilled_while_it_is_read(executor, order):
    """By a slow reader: workers are not idle until it has taken the last of them."""
    submitted, before = [], executor.status().items_done
    results = slow.map((submitted.append(n) or n for n in range(60)), window=20, order=order)
    eventually(lambda: executor.status().items_done == before + 20)
    for _ in range(10):
        next(results)
    eventually(lambda: len(submitted) > 20)
    results.close()


@pytest.mark.parametrize("order", ["input", "completed"])
def test_inputs_that_come_slowly_are_not_waited_for(executor, order):
    answered = threading.Event()

    def source():
        yield 0
        happened(answered)
        yield 1

    results = add.map(source(), order=order)
    assert next(results) in (100, (0, 100))
    answered.set()
    results.close()


def test_an_error_is_raised_in_its_place(executor):
    results = picky.map(range(20))
    assert [next(results) for _ in range(3)] == [0, -1, -2]
    with pytest.raises(ValueError, match="3 is not liked") as caught:
        next(results)
    assert "in picky" in str(caught.value.__cause__), "with the traceback of the worker"
    with pytest.raises(StopIteration):
        next(results)
    assert list(add.map(range(2))) == [100, 101]


def test_errors_are_returned_in_the_places_of_results(executor):
    results = list(picky.map(range(40), on_error="return"))
    errors = [n for n, result in enumerate(results) if isinstance(result, ValueError)]
    assert errors == [3, 13, 23, 33]
    assert [results[n] for n in range(40) if n not in errors] == [-n for n in range(40) if n not in errors]
    pairs = dict(picky.map(range(20), on_error="return", order="completed"))
    assert sorted(n for n, result in pairs.items() if isinstance(result, ValueError)) == [3, 13]


def test_errors_of_a_map_as_completed_are_raised(executor):
    with pytest.raises(ValueError, match="is not liked"):
        list(picky.map(range(20), order="completed"))


def test_an_input_that_raises_reaches_the_consumer(executor):
    def broken(good):
        yield from range(good)
        raise LookupError("the input ends badly")

    with pytest.raises(LookupError, match="the input ends badly"):
        list(add.map(broken(10)))
    with pytest.raises(LookupError, match="the input ends badly"):
        list(add.map(broken(3000), window=100))
    assert list(add.map(range(2))) == [100, 101]


def queued(executor):
    return executor.status().items_queued


@pytest.mark.parametrize("way", ["close", "break", "drop", "error"])
def test_a_map_that_is_left_cancels_what_is_queued(executor, way):
    gc.disable()  # What ends a map must not be the garbage collector.
    try:
        if way == "close":
            results = slow.map(range(1000), window=900)
            assert next(results) == 0
            results.close()
        elif way == "break":
            for result in slow.map(range(1000), window=900):
                if result == 3:
                    break
        elif way == "drop":
            slow.map(range(1000), window=900)
        else:
            with pytest.raises(ZeroDivisionError):
                for result in slow.map(range(1000), window=900):
                    1 // (result - 2)
        assert next(add.map(range(1))) == 100, "another map works at once"
        eventually(lambda: queued(executor) == 0)
        assert executor.status().items_cancelled > 0
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_leaves_the_executor_usable(executor, error):
    with pytest.raises(error):
        for _ in slow.map(range(500)):
            raise error
    assert list(add.map(range(3))) == [100, 101, 102]
    eventually(lambda: queued(executor) == 0)


def test_two_maps_side_by_side(executor):
    ones, others = add.map(range(300)), slow.map(range(300))
    assert [next(ones) + next(others) for _ in range(300)] == [100 + 2 * n for n in range(300)]
    assert list(ones) == list(others) == []


def test_maps_in_threads(executor):
    results = {}

    def use(name):
        results[name] = list(add.map(range(name, name + 200)))

    threads = [threading.Thread(target=use, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n * 1000: [100 + n * 1000 + i for i in range(200)] for n in range(4)}


def test_a_map_is_one_task_of_parsls(executor):
    kernel = DataFlowKernelLoader._dfk
    if kernel is None:
        pytest.skip("Parsl is not loaded")
    before = kernel.task_count
    assert len(list(add.map(range(3000)))) == 3000
    for _ in add.map(range(3000)):
        break
    assert kernel.task_count == before + 2
    kernel.wait_for_current_tasks()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1],), {"on_error": "ignore"}, ValueError, "on_error='ignore' is not known: write 'raise' or 'return'"),
        (([1],), {"order": "random"}, ValueError, "order='random' is not known: write 'input' or 'completed'"),
        (
            ([1],),
            {"window": 0},
            ValueError,
            "window=0 makes no sense: give how many items may be",
        ),
        (([1], [2]), {}, TypeError, r"add takes 1 value an item \(numbers\), but got 2"),
        ((), {}, TypeError, r"add takes 1 value an item \(numbers\), but got 0"),
        (([1],), {"scale": 2}, TypeError, "add.map has no option 'scale': its keyword-only parameters are none"),
        ((5,), {}, TypeError, "not iterable|must support iteration"),
    ],
)
def test_wrong_use_says_what_to_write(executor, arguments, options, error, message):
    with pytest.raises(error, match=message):
        add.map(*arguments, **options)


def test_a_map_without_an_executor_says_what_to_do(alone):
    with pytest.raises(ctxflow.CtxflowError, match="no executor labelled 'nobody' is running: load one with"):
        add.using(executor="nobody").map([1])


def test_a_map_whose_executor_is_shut_down_ends_with_an_error(tmp_path):
    executor = ContextExecutor(workers=1, label="short")
    executor.run_dir = str(tmp_path)
    with executor:
        results = slow.using(executor="short").map(range(1000))
        assert next(results) == 0
    with pytest.raises(ctxflow.RunEnded, match="the map was not read to its end before its executor ended"):
        list(results)


def test_results_are_right_when_batches_come_back_out_of_order(alone):
    """Workers that are lost send their items back to the front of the queue, in any order."""
    app = slow.using(executor="alone")
    stop = threading.Event()

    def evict():
        for _ in range(5):
            if stop.wait(0.15):
                return
            alone.engine.evict(seconds=0.01)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        assert list(app.map(range(300))) == list(range(300))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_long_map_forgets_what_was_answered(alone, order):
    results = add.using(executor="alone").map(range(2000), window=20, order=order)
    longest = 0
    for _ in results:
        longest = max(longest, len(results._mapping._spans))
    assert longest <= 50
    assert len(results._mapping._spans) == 0


@pytest.mark.parametrize("way", ["end", "close", "drop"])
def test_the_executor_forgets_maps_that_are_over(alone, way):
    app = add.using(executor="alone")
    before = len(alone._maps)
    results = app.map(range(50))
    assert len(alone._maps) == before + 1
    if way == "end":
        list(results)
    elif way == "close":
        results.close()
    del results
    eventually(lambda: len(alone._maps) == before)
