"""Single calls: names of functions, several threads, what cannot run here, and a policy that raises."""

import functools
import threading
import time

import pytest

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors.contract import EngineFailed
from ctxflow.policies.simple import ContextAffinity
from waiting import eventually, finished, patience


def power(base, exponent):
    return base**exponent


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    executor = ContextExecutor(workers=2)
    executor.run_dir = str(tmp_path_factory.mktemp("run"))
    with executor:
        yield executor


def test_functions_that_take_turns_at_one_address_are_not_mixed_up(executor):
    for n in range(40):

        def tagged(x, n=n):
            return (n, x)

        assert [finished(executor.submit(tagged, {}, x)).result() for x in range(3)] == [(n, 0), (n, 1), (n, 2)]
        del tagged


def test_a_partial_may_be_called_again_and_again(executor):
    square = functools.partial(power, exponent=2)
    assert [finished(executor.submit(square, {}, n)).result() for n in range(4)] == [0, 1, 4, 9]


def test_threads_with_priorities_of_their_own_do_not_share_an_app(executor):
    ready, answers = threading.Barrier(8), {}

    def submit(n):
        def build():
            return {"n": n}

        def read(number):
            from ctxflow import load_variable_from_context

            return load_variable_from_context("n"), number

        ready.wait()
        answers[n] = finished(executor.submit(read, {"context": [build, [], {}]}, n)).result()

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: (n, n) for n in range(8)}


def test_a_context_that_needs_more_gpus_than_there_are_is_refused_at_once(executor):
    @context(gpus=99)
    def large():
        return None

    @batch_app(large())
    def use(state, items):
        return items

    with pytest.raises(ValueError, match=r"the context large needs 99 GPUs, but a worker here has \d+: use a site"):
        use(1)


def test_each_future_has_an_exception_of_its_own(executor):
    @context
    def broken():
        raise RuntimeError("no weights")

    @batch_app(broken())
    def use(state, items):
        return items

    errors = [finished(future).exception() for future in [use(n) for n in range(5)]]
    assert len({id(error) for error in errors}) == 5
    assert all("no weights" in str(error) for error in errors)


class Stumbling(ContextAffinity):
    """Raises at its twelfth decision."""

    def __init__(self):
        self.decisions = 0

    def assign(self, view, ready):
        self.decisions += 1
        if self.decisions == 12:
            raise ZeroDivisionError("a policy's own mistake")
        return super().assign(view, ready)


def test_a_policy_that_raises_ends_the_run_with_its_name(tmp_path):
    @batch_app
    def same(items):
        return items

    executor = ContextExecutor(workers=2, routing=Stumbling())
    executor.run_dir = str(tmp_path)
    with executor, pytest.raises(EngineFailed, match="a policy raised ZeroDivisionError: a policy's own mistake"):
        for _ in same.map(range(100_000)):
            pass


def held(gate):
    while not gate.exists():
        time.sleep(0.01)


def test_a_run_can_be_waited_for_until_it_is_idle(tmp_path):
    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        assert executor.run.wait_idle(patience())
        future = executor.submit(held, {}, tmp_path / "gate")
        assert not executor.run.wait_idle(0)
        (tmp_path / "gate").touch()
        assert executor.run.wait_idle(patience())
        eventually(future.done)
