"""How much of a context is built and brought again for each call, at each level: counted on real workers."""

import glob
import json
import os

import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app
from waiting import finished, nothing_left

LEVELS = ("none", "partial", "pervasive")
BATCHES = 3


def mark(path, text):
    """Add a line to a file, whichever process writes."""
    with open(path, "a") as file:
        file.write(f"{text}\n")


@pytest.fixture
def recipe(tmp_path):
    """A context with a file that notes each time it is built: where, and in which process."""
    weights = tmp_path / "weights.bin"
    weights.write_text("7".ljust(5 << 20))  # Smaller files are copied.

    @context(files={"weights": str(weights)})
    def model(marks, weights):
        with open(weights) as file:
            value = int(file.read())
        mark(marks, f"{os.getpid()} {os.stat(weights).st_ino} {weights}")
        return {"value": value, "calls": 0}

    return model(str(tmp_path / "marks"))


@pytest.fixture
def builds(tmp_path):
    """Read the marks: (process, inode, path) of each build."""

    def read():
        with open(tmp_path / "marks") as file:
            return [tuple(line.split()) for line in file]

    return read


def scale(model, numbers):
    model["calls"] += 1
    return [(model["value"] * number, model["calls"], os.getpid()) for number in numbers]


def stagings(tmp_path):
    """How often the files were brought, as the run's event log has it."""
    with open(tmp_path / "run" / "ctxflow" / "events.jsonl") as lines:
        next(lines)  # Which says how the run decides.
        return sum(json.loads(line)["event"]["is"] == "ContextStaged" for line in lines)


def started(tmp_path, **options):
    executor = ContextExecutor(workers=1, **options)
    executor.run_dir = str(tmp_path / "run")
    return executor


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_built_and_brought_for_a_call(level, recipe, builds, tmp_path):
    app = batch_app(recipe, level=level, batch_size=1)(scale)
    with started(tmp_path) as executor:
        results = list(app.map(range(BATCHES)))
        status = executor.status()
        paths = {path for _, _, path in builds()}
        kept = level != "none" and all(map(os.path.exists, paths))
        if level == "none":  # A worker empties a context after the call was answered.
            nothing_left(lambda: [path for path in paths if os.path.exists(path)])
        shared = glob.glob(os.path.join(executor.engine._scratch, "cache", "*", "weights.bin"))
    assert [value for value, _, _ in results] == [7 * number for number in range(BATCHES)]
    assert kept == (level != "none")
    assert stagings(tmp_path) == (BATCHES if level == "none" else 1)
    processes = [process for process, _, _ in builds()]
    calls = [times for _, times, _ in results]
    if level == "pervasive":
        assert len(processes) == 1 and calls == list(range(1, BATCHES + 1))
        assert status.contexts == {"model": {"ready": 1}}
        return
    assert len(set(processes)) == len(processes) == status.loads == BATCHES
    assert calls == [1] * BATCHES, "each call had a state of its own"
    assert len({process for _, _, process in results}) == BATCHES
    assert status.contexts == {}, "nothing is left built"
    inodes = {inode for _, inode, _ in builds()}
    original = str(os.stat(tmp_path / "weights.bin").st_ino)
    if level == "partial":
        assert inodes == {original} and shared, "one file, linked into the cache of all"
    else:
        assert original not in inodes and not shared, "copies of the worker's own"


@pytest.mark.parametrize("level", LEVELS)
def test_calls_of_a_context_app(level, recipe, builds, tmp_path):
    @context_app(recipe, level=level)
    def add(model, number):
        model["calls"] += 1
        return model["value"] + number, model["calls"]

    with started(tmp_path):
        futures = [add(number) for number in range(3)]
        results = [finished(future).result() for future in futures]
    assert [value for value, _ in results] == [7, 8, 9]
    assert (sorted(calls for _, calls in results), len(builds())) == (
        ([1, 2, 3], 1) if level == "pervasive" else ([1, 1, 1], 3)
    )


def test_one_recipe_at_several_levels_in_one_run(recipe, builds, tmp_path):
    app = batch_app(recipe, batch_size=1)(scale)
    with started(tmp_path) as executor:
        for level, count in [("pervasive", 1), ("partial", 3), (None, 3), ("none", 5), ("pervasive", 5)]:
            assert [result[0] for result in app.using(level=level).map([1, 2])] == [7, 14]
            assert len(builds()) == count, level
        assert executor.status().contexts == {"model": {"ready": 1}}, "the one that is kept"


@pytest.mark.parametrize("said", ["executor", "specification"])
def test_a_level_for_a_whole_executor_or_for_a_call(said, recipe, builds, tmp_path):
    def value(offset):
        from ctxflow.on_worker import load_variable_from_context

        return load_variable_from_context("value") + offset

    specification = {"context": recipe, **({"level": "partial"} if said == "specification" else {})}
    with started(tmp_path, **({"level": "partial"} if said == "executor" else {})) as executor:
        assert [finished(executor.submit(value, specification, n)).result() for n in (1, 2)] == [8, 9]
        assert len(builds()) == 2
        if said == "executor":
            app = batch_app(recipe, batch_size=1)(scale)
            assert len(list(app.map([1, 2]))) == 2 and len(builds()) == 4
            assert len(list(app.using(level="pervasive").map([1, 2]))) == 2 and len(builds()) == 5, (
                "an app overrules it"
            )
        assert finished(executor.submit(abs, {}, -1)).result() == 1, "what has no context is as ever"
        with pytest.raises(ValueError, match="level='all' is not known: write 'none', 'partial' or 'pervasive'"):
            executor.submit(value, {**specification, "level": "all"}, 1)


@pytest.mark.parametrize("level", ["none", "partial"])
def test_failures_and_evictions_between_builds(level, recipe, builds, tmp_path):
    @batch_app(recipe, level=level, batch_size=2)
    def fragile(model, numbers):
        if 3 in numbers:
            raise ValueError("three")
        if 5 in numbers:
            os._exit(1)
        return [model["value"] * number for number in numbers]

    with started(tmp_path) as executor:
        results = fragile.map(range(6), on_error="return")
        found = [next(results)]
        executor.engine.evict()
        found += results
        if level == "none":
            nothing_left(lambda: [path for _, _, path in builds() if os.path.exists(path)])
    assert [n for n, result in enumerate(found) if result != 7 * n] == [3, 5]
    assert "three" in str(found[3])
    processes = [process for process, _, _ in builds()]
    assert len(set(processes)) == len(processes)


def test_words_that_are_no_level_are_refused(recipe):
    with pytest.raises(ValueError, match='level cannot be "all": write "none" or "partial"'):
        ContextExecutor(level="all")
    for decorate in (batch_app, context_app):
        with pytest.raises(ValueError, match="level= says what workers keep of an app's context: give the app one"):
            decorate(level="partial")(scale)
        with pytest.raises(ValueError, match="level='all' is not known"):
            decorate(recipe)(scale).using(level="all")
