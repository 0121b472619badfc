"""A run as a `concurrent.futures.Executor`: what that protocol promises, held to."""

import asyncio
import concurrent.futures
import itertools
import operator
import threading
import time
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError, Executor, as_completed, wait

import pytest

from ctxflow import ContextExecutor
from waiting import FOREVER, eventually, happened, joined, patience


def capitalize(*args, **kwargs):
    return [str(each).upper() for each in args], kwargs


def nap(seconds):
    time.sleep(seconds)
    return seconds


def held(gate):
    while not gate.exists():
        time.sleep(0.01)
    return gate


def fail(message):
    raise ValueError(message)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=2, log_events=False)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture
def pool(executor):
    with executor.pool() as pool:
        yield pool


@pytest.fixture
def gate(tmp_path):
    gate = tmp_path / "gate"
    yield gate
    gate.touch()


@pytest.fixture
def busy(pool, gate):
    """Both workers have something to do until the gate is there."""
    return [pool.submit(held, gate) for _ in range(2)]


def test_submit(pool):
    assert isinstance(pool, Executor)
    assert pool.submit(pow, 2, 8).result() == 256
    assert pool.submit(capitalize, "a", 2, fn=4, self=3).result() == (["A", "2"], {"fn": 4, "self": 3})
    assert pool.submit(lambda: 7).result() == 7
    with pytest.raises(TypeError):
        pool.submit()
    with pytest.raises(TypeError):
        pool.submit(fn=pow)


def test_exceptions(pool):
    future = pool.submit(fail, "no")
    assert isinstance(future.exception(), ValueError) and future.done() and not future.cancelled()
    with pytest.raises(ValueError, match="no"):
        future.result()
    assert pool.submit(pow, 2, 3).exception() is None


def test_result_with_a_timeout(pool, busy):
    with pytest.raises(concurrent.futures.TimeoutError):
        pool.submit(pow, 2, 3).result(timeout=0.05)


@pytest.mark.parametrize("chunksize", [1, 2, 7, 100])
def test_map(pool, chunksize):
    assert list(pool.map(pow, range(10), range(10), chunksize=chunksize)) == list(map(pow, range(10), range(10)))
    assert list(pool.map(pow, range(10), itertools.repeat(2), chunksize=chunksize)) == [n * n for n in range(10)]
    assert list(pool.map(pow, [], [], chunksize=chunksize)) == []


@pytest.mark.parametrize("chunksize", [1, 3])
def test_map_raises_where_the_call_did(pool, chunksize):
    results = pool.map(divmod, [1, 1, 1, 1], [1, 1, 1, 0], chunksize=chunksize)
    assert [next(results) for _ in range(3)] == [(1, 0)] * 3
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_with_a_timeout(pool, gate, tmp_path):
    results = pool.map(held, [tmp_path, tmp_path, gate], timeout=FOREVER)
    assert [next(results), next(results)] == [tmp_path, tmp_path]
    with pytest.raises(concurrent.futures.TimeoutError):
        list(pool.map(held, [tmp_path, tmp_path, gate], timeout=0.5))
    gate.touch()
    assert list(results) == [gate]


def test_map_with_no_chunks(pool):
    for size in (0, -1):
        with pytest.raises(ValueError, match=r"chunksize=.* makes no sense: give how many calls"):
            pool.map(pow, [1], [1], chunksize=size)


def test_map_begins_at_once_and_reads_all(pool):
    taken = []
    results = pool.map(abs, (taken.append(n) or n for n in range(5)))
    assert taken == [0, 1, 2, 3, 4], "as CPython's does"
    assert list(results) == [0, 1, 2, 3, 4]


def test_shutdown(executor):
    pool = executor.pool()
    futures = [pool.submit(nap, 0.1) for _ in range(4)]
    pool.shutdown()
    assert all(future.done() for future in futures)
    for again in (pool.submit, pool.map):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            again(pow, [2], [5]) if again == pool.map else again(pow, 2, 5)
    pool.shutdown()
    assert executor.submit(pow, {}, 2, 5).result() == 32, "the run goes on, and keeps Parsl's way of submitting"


def test_shutdown_without_waiting(executor, gate):
    pool = executor.pool()
    future = pool.submit(held, gate)
    pool.shutdown(wait=False)
    assert not future.done()
    gate.touch()
    with pytest.raises(RuntimeError):
        pool.submit(pow, 2, 5)
    assert future.result() == gate


def test_shutdown_that_cancels(executor, gate):
    pool = executor.pool()
    futures = [pool.submit(pow, 2, 3), *(pool.submit(held, gate) for _ in range(29))]
    futures[0].result()

    def opening():
        eventually(lambda: sum(future.cancelled() for future in futures) >= 20)
        gate.touch()

    opener = threading.Thread(target=opening)
    opener.start()
    pool.shutdown(cancel_futures=True)
    joined(opener)
    assert all(future.done() for future in futures)
    assert not futures[0].cancelled()


def test_the_end_of_a_with_statement_waits(executor):
    with executor.pool() as pool:
        futures = [pool.submit(nap, 0.1) for _ in range(4)]
    assert [future.result(timeout=0) for future in futures] == [0.1] * 4


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_with_statement_waits_for_no_call(executor, end):
    with pytest.raises(end), executor.pool() as pool:
        futures = [pool.submit(nap, FOREVER) for _ in range(4)]
        raise end
    assert all(future.cancelled() for future in futures)


def test_a_run_that_has_ended_takes_nothing(tmp_path):
    executor = ContextExecutor(workers=1, log_events=False)
    executor.run_dir = str(tmp_path)
    with executor:
        pool = executor.pool()
        assert pool.submit(pow, 2, 5).result() == 32
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        pool.submit(pow, 2, 5)
    pool.shutdown()


def test_cancelled_calls_are_told_to_whoever_waits(pool, busy, gate):
    future = pool.submit(pow, 2, 5)
    called = threading.Event()
    future.add_done_callback(lambda done: called.set() if done is future else None)
    assert future.cancel() and future.cancelled() and future.cancel()
    happened(called)
    assert wait([future], timeout=patience()) == ({future}, set())
    assert list(as_completed([future], timeout=patience())) == [future]
    with pytest.raises(CancelledError):
        future.result()
    with pytest.raises(CancelledError):
        future.exception()
    gate.touch()
    assert [each.result() for each in busy] == [gate, gate]
    assert not busy[0].cancel(), "what is done cannot be cancelled"


def test_wait_and_as_completed(pool, gate):
    quick, slow, bad = pool.submit(pow, 2, 5), pool.submit(held, gate), pool.submit(fail, "no")
    done, left = wait([quick, slow], return_when=FIRST_COMPLETED)
    assert (done, left) == ({quick}, {slow})
    done, left = wait([slow, bad], return_when=FIRST_EXCEPTION)
    assert bad in done
    done, left = wait([slow], timeout=0.05)
    assert (done, left) == (set(), {slow})
    gate.touch()
    assert wait([quick, slow, bad]) == ({quick, slow, bad}, set())
    assert set(as_completed([quick, slow, bad])) == {quick, slow, bad}


def test_done_callbacks(pool):
    came, threads = [], threading.Event()
    future = pool.submit(pow, 2, 5)
    future.add_done_callback(lambda done: came.append(done.result()) or threads.set())
    happened(threads)
    assert came == [32]
    future.add_done_callback(lambda done: came.append("at once"))
    assert came == [32, "at once"]


def test_futures_that_nobody_holds(pool):
    for _ in range(3):
        pool.submit(operator.add, 1, 2)
    pool.shutdown()
    eventually(lambda: not pool._open)  # Callbacks come after those who wait.


def test_many_threads_submit(pool):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(lambda n: pool.submit(pow, n, 2), range(200)))
    assert [future.result() for future in futures] == [n * n for n in range(200)]


def test_what_cannot_be_pickled_is_told(pool):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pool.submit(id, threading.Lock())
    assert pool.submit(pow, 2, 5).result() == 32


def test_asyncio_runs_functions_on_it(pool):
    async def main():
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(pool, pow, 2, 5) == 32
        return await asyncio.gather(*(loop.run_in_executor(pool, pow, n, 2) for n in range(20)))

    assert asyncio.run(main()) == [n * n for n in range(20)]
