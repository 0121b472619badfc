"""Calls and maps in coroutines: awaited, iterated, cancelled, without a thread for each."""

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from ctxflow import ContextExecutor, RunEnded, batch_app
from waiting import eventually, eventually_async, finished


@batch_app(batch_size=10)
def double(numbers):
    return [2 * n if n != 13 else 1 // 0 for n in numbers]


@batch_app(batch_size=1)
def slow(numbers):
    import time

    time.sleep(0.2)
    return list(numbers)


@batch_app(batch_size=1)
def held(gates):
    import os
    import time

    while not all(map(os.path.exists, gates)):
        time.sleep(0.01)
    return list(gates)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=2, log_events=False)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


@pytest.fixture(autouse=True)
def running(executor):
    return executor


def test_a_future_is_awaited():
    async def main():
        assert await double(4) == 8
        assert await asyncio.gather(*(double(n) for n in range(10))) == [2 * n for n in range(10)]
        with pytest.raises(ZeroDivisionError):
            await double(13)
        done = double(1)
        done.result()
        assert await done == 2

    asyncio.run(main())


def test_others_go_on_while_a_call_is_awaited(tmp_path):
    """Else nothing would open the gate that the call waits for."""

    async def opening(gate):
        for _ in range(20):
            await asyncio.sleep(0.001)
        gate.touch()

    async def main():
        opener = asyncio.ensure_future(opening(tmp_path / "call"))
        assert await held(tmp_path / "call") == tmp_path / "call"
        await opener
        gates = [tmp_path / str(n) for n in range(4)]
        openers = [asyncio.ensure_future(opening(gate)) for gate in gates]
        assert [gate async for gate in held.map(gates)] == gates
        await asyncio.gather(*openers)

    asyncio.run(main())


def test_a_coroutine_that_is_cancelled_cancels_its_call(tmp_path):
    async def main():
        gates = [tmp_path / str(n) for n in range(4)]
        futures = [held(gate) for gate in gates]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(futures[3], 0.05)
        assert futures[3].cancelled()
        for gate in gates[:3]:
            gate.touch()
        assert await asyncio.gather(*futures[:3]) == gates[:3]

    asyncio.run(main())


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_map_is_iterated(tmp_path, order):
    async def main(numbers):
        return [result async for result in double.map(numbers, order=order, resume=tmp_path / "r.jsonl")]

    numbers = [n for n in range(3000) if n != 13]
    for _ in range(2):
        results = asyncio.run(main(numbers))
        if order == "completed":
            assert sorted(results) == [(index, 2 * n) for index, n in enumerate(numbers)]
        else:
            assert results == [2 * n for n in numbers]
    assert asyncio.run(main([])) == []


def test_errors_come_in_their_places():
    async def main():
        results = double.map(range(20))
        assert [await anext(results) for _ in range(13)] == [2 * n for n in range(13)]
        with pytest.raises(ZeroDivisionError):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)

    asyncio.run(main())


def test_no_thread_waits_for_results():
    async def main():
        before = set(threading.enumerate())
        maps = [slow.map(range(2)) for _ in range(10)]
        tasks = [asyncio.ensure_future(collected(each)) for each in maps]
        await asyncio.sleep(0)  # All tasks run until they wait.
        new = set(threading.enumerate()) - before
        assert len(new) < len(maps), new  # An engine may start one of its own meanwhile.
        return await asyncio.gather(*tasks)

    async def collected(results):
        return [result async for result in results]

    assert asyncio.run(main()) == [[0, 1]] * 10


@pytest.mark.parametrize("way", ["cancel", "timeout", "break", "aclosing", "error"])
def test_a_map_that_is_left_is_closed(executor, way):
    gc.disable()  # What ends a map must not be the garbage collector.
    taken = []

    async def read(results):
        async for result in results:
            taken.append(result)
            if way == "error":
                raise LookupError

    async def main():
        if way == "cancel":
            task = asyncio.ensure_future(read(slow.map(range(100_000))))
            await eventually_async(lambda: taken)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(slow.map(range(100_000))), 0.5)
        elif way == "break":
            async for _ in slow.map(range(100_000)):
                break
        elif way == "aclosing":
            async with contextlib.aclosing(slow.map(range(100_000))) as results:
                await anext(results)
        else:
            with contextlib.suppress(LookupError):
                await read(slow.map(range(100_000)))
        eventually(lambda: executor.outstanding <= 2)

    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert finished(double(3)).result() == 6


def test_others_go_on_while_many_results_are_there():
    async def main():
        results = double.map([1] * 5000)
        await anext(results)
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        turning = asyncio.ensure_future(turn())
        async for _ in results:
            pass
        turning.cancel()
        return turns

    assert asyncio.run(main()) > 50


def test_inputs_that_come_slowly(executor):
    def inputs():
        for n in range(5):
            time.sleep(0.06)
            yield n

    async def main():
        return [result async for result in double.map(inputs())]

    assert asyncio.run(main()) == [0, 2, 4, 6, 8]


def test_a_run_that_ends_meanwhile_is_told(tmp_path):
    async def main():
        executor = ContextExecutor(workers=1, log_events=False, label="other")
        executor.run_dir = str(tmp_path)
        executor.__enter__()
        results = slow.using(executor="other").map(range(500))
        assert await anext(results) == 0
        await asyncio.get_running_loop().run_in_executor(None, executor.shutdown)
        with pytest.raises(RunEnded):
            async for _ in results:
                pass

    asyncio.run(main())


def test_a_map_has_the_length_of_its_inputs():
    assert len(double.map(range(5))) == 5
    results = double.map([1, 2, 3])
    assert next(results) == 2 and len(results) == 3
    assert list(results) == [4, 6]
    assert len(double.map([])) == 0
    results = double.map(iter([1, 2]))
    with pytest.raises(TypeError, match="this map has no length, for its inputs do not tell theirs"):
        len(results)
    assert list(results) == [2, 4]
