"""Functions and constants that no call needs are forgotten by TaskVine's workers too, whose calls may overtake."""

from played_engine import PlayedExecutor

from ctxflow import batch_app
from ctxflow.executors import declarations


@batch_app
def longer(numbers, *, by=b""):
    return [number + len(by) for number in numbers]


@batch_app
def kept(numbers):
    import gc

    [library] = [each for each in gc.get_objects() if type(each).__qualname__ == "LibraryCalls"]
    return [len(library._functions) for _ in numbers]


def test_a_worker_keeps_the_constants_of_the_last_maps(tmp_path, monkeypatch):
    monkeypatch.setattr(declarations, "MOST_IDLE", 4)
    executor = PlayedExecutor(tmp_path / "worker")
    executor.run_dir = str(tmp_path)
    with executor:
        for size in [*range(40), *range(40)]:
            assert list(longer.map([1], by=bytes(size))) == [1 + size]
        run, worker = executor.calls.run, executor.engine.worker
        run._each_second(run.clock())
        assert len(worker.functions) < 20
        named = set(worker.unneeded)
        assert list(longer.map([1], by=bytes(50))) == [51]
        assert not named & {*worker.unneeded}, "it was told with the last call"
        [count] = kept.map([0])
        assert count < 25
