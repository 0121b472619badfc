"""Functions that Parsl wraps: what they raise comes as from Parsl's own executors; workers need not import Parsl."""

import sys
import traceback

import parsl
import pytest
from parsl import bash_app, python_app
from parsl.app.errors import AppTimeout, BashExitFailure, RemoteExceptionWrapper, wrap_error

from ctxflow import ContextExecutor
from ctxflow.errors import name_of
from ctxflow.pickling import without_parsl
from waiting import FOREVER


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    config = ContextExecutor.config(workers=1, run_dir=str(tmp_path_factory.mktemp("run")))
    with parsl.load(config) as kernel:
        yield kernel


def test_a_worker_that_runs_an_app_does_not_import_parsl(tmp_path):
    def imported():
        return [name for name in sys.modules if name.partition(".")[0] == "parsl"]

    app = wrap_error(imported)  # What Parsl submits.
    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        found = [executor.submit(app, {}).result() for _ in range(3)]
    assert found == [[]] * 3  # It travels with the first call, and is known then.


def test_an_error_is_the_one_that_was_raised_and_shows_where(kernel):
    @python_app
    def divide(a, b):
        try:
            return a / b
        except ZeroDivisionError as error:
            raise LookupError(f"no {a} / {b}") from error

    for _ in range(3):
        with pytest.raises(LookupError, match=r"^no 1 / 0$") as caught:
            divide(1, 0).result()
        assert type(caught.value.__cause__) is ZeroDivisionError
        assert "divide" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_bash_app_fails_as_it_does_with_parsl(kernel):
    @bash_app
    def fails():
        return "exit 3"

    with pytest.raises(BashExitFailure) as caught:
        fails().result()
    assert caught.value.exitcode == 3


def test_a_bash_app_ends_at_its_walltime(kernel, tmp_path):
    @bash_app
    def waits(gate, walltime=0.2):
        return f"until [ -e {gate} ]; do sleep 0.05; done"

    gate = tmp_path / "gate"
    with pytest.raises(AppTimeout):
        waits(gate).result()
    gate.touch()
    assert waits(gate, walltime=FOREVER).result() == 0


def test_what_parsl_does_not_wrap_stays_as_it_is():
    def plain(n):
        return 1 / n

    ours = without_parsl(wrap_error(plain))
    assert without_parsl(plain) is plain and without_parsl(print) is print
    assert (ours(2), name_of(ours)) == (0.5, "plain")
    assert isinstance(ours(0), RemoteExceptionWrapper)
