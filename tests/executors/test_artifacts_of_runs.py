"""What builds made is there for the next worker and run of the embedded engine, and never in a result's way."""

import glob
import logging
import os
from pathlib import Path

import pytest

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.host.artifacts import user_store
from ctxflow.testing.evictions import Evictions
from waiting import eventually


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder in which artifacts are kept."""
    monkeypatch.setenv("CTXFLOW_ARTIFACTS", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "kept"


def files(kept):
    # As a shell does: what goes meanwhile is no error, as it is one to Path.glob.
    found = glob.glob(f"{kept}/*/kept/*/content/files/**/*", recursive=True)
    return [Path(path) for path in found if os.path.isfile(path)]


def evict(executor):
    with Evictions(executor, per_minute=60_000, at_most=1) as evictions:
        eventually(lambda: evictions.count)


def recipe(how="", **options):
    @context(artifacts={"made": "MADE"}, **options)
    def made(how):
        import signal
        from pathlib import Path

        place = Path(os.environ["MADE"], "whole")
        if place.exists():
            if how == "raises":
                raise ValueError("bad cache")
            if how == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            return "an earlier one's"
        place.write_text("made")
        return "its own"

    return made(how)


def ask(recipe, level=None):
    @batch_app(recipe, level=level)
    def of(value, items):
        return [value for _ in items]

    return lambda: next(iter(of.map([1])))


def test_the_next_worker_and_the_next_run_begin_with_it(kept):
    with ContextExecutor(workers=1) as executor:
        asked = ask(recipe())
        assert asked() == "its own"
        eventually(lambda: files(kept))
        evict(executor)
        eventually(lambda: asked() == "an earlier one's")
    with ContextExecutor(workers=1):
        assert ask(recipe())() == "an earlier one's"


@pytest.mark.parametrize("level", ["partial", "none"])
def test_levels_that_build_again_keep_nothing(kept, level):
    with ContextExecutor(workers=1):

        @context(artifacts={"made": "MADE"})
        def variable():
            import os

            return [os.environ.get("MADE"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")]

        asked = ask(variable(), level)
        assert asked() == asked() == [None, None]
    assert not kept.exists()


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_build_that_fails_with_it_is_done_without(kept, caplog, how):
    with ContextExecutor(workers=1):
        assert ask(recipe(how))() == "its own"
        eventually(lambda: files(kept))
    with ContextExecutor(workers=1), caplog.at_level(logging.WARNING, "ctxflow"):
        assert ask(recipe(how))() == "its own"
    [told] = [record.getMessage() for record in caplog.records if "artifacts" in record.getMessage()]
    assert "is not used any more" in told


def test_a_first_call_that_dies_with_it_is_done_without(kept):
    @batch_app(recipe())
    def of(value, items):

        if value != "its own":
            os._exit(7)
        return [value for _ in items]

    for _ in range(2):
        with ContextExecutor(workers=1):
            assert next(iter(of.map([1]))) == "its own"
            eventually(lambda: files(kept))
        assert files(kept)


def test_what_a_short_run_compiles_at_its_first_call_is_kept(kept):
    @context(artifacts={"late": "LATE"})
    def nothing():
        return None

    @batch_app(nothing())
    def of(value, items):
        from pathlib import Path

        place = Path(os.environ["LATE"], "compiled")
        there = place.exists()
        place.write_text("by a call")
        return [there for _ in items]

    for there in (False, True):
        with ContextExecutor(workers=1):
            assert next(iter(of.map([1]))) is there
        assert [Path(path).name for path in files(kept)] == ["compiled"]


def test_where_it_is_kept(monkeypatch):
    monkeypatch.delenv("CTXFLOW_ARTIFACTS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/ann/cache")
    assert user_store().folder == "/home/ann/cache/ctxflow/artifacts"
    monkeypatch.setenv("CTXFLOW_ARTIFACTS", "")
    assert user_store() is None
    monkeypatch.setenv("CTXFLOW_ARTIFACTS", "/elsewhere")
    monkeypatch.setattr("ctxflow.host.cache_folder.is_shared_account", lambda: True)
    assert user_store() is None
