"""Bad inputs, contexts that cannot be built, workers that die, full disks: one clear error, and the rest goes on."""

import os
import signal
import subprocess
import threading
import time

import pytest

from ctxflow import CallCrashed, ContextError, ContextExecutor, batch_app, context, context_app
from ctxflow.sites import Site
from waiting import FOREVER, finished

pytestmark = pytest.mark.usefixtures("running")

# --- inputs


def test_an_input_that_cannot_be_pickled_is_named(running):
    @batch_app(batch_size=10)
    def app(things):
        return [str(thing)[:3] for thing in things]

    inputs = [*range(100), {"guard": threading.Lock()}, *range(100)]
    answers = list(app.map(inputs, on_error="return"))
    error = answers.pop(100)
    assert isinstance(error, TypeError)
    assert "the input of app cannot be sent: the _thread.lock object at [0][0]['guard']" in str(error)
    assert answers == [str(n) for n in [*range(100), *range(100)]]
    with pytest.raises(TypeError, match="the input of app cannot be sent"):
        finished(app(threading.Lock())).result()
    with pytest.raises(TypeError, match="a call of pow cannot be sent"):
        running.submit(pow, {}, threading.Lock(), 2)
    assert finished(running.submit(pow, {}, 2, 2)).result() == 4


def test_fifty_megabytes_both_ways(running):
    big = os.urandom(50_000_000)
    assert finished(running.submit(bytes.swapcase, {}, big)).result() == big.swapcase()


def test_thousands_of_queued_calls(running):
    futures = [running.submit(pow, {}, n, 2) for n in range(5000)]
    assert [finished(future).result() for future in futures] == [n * n for n in range(5000)]


def test_a_worker_that_is_killed_in_the_middle(running):
    @batch_app(batch_size=5)
    def app(numbers):
        time.sleep(0.01)
        return [n + 1 for n in numbers]

    results = app.map(range(300))
    assert next(results) == 1
    os.kill(next(iter(running.engine.worker_pids().values())), signal.SIGKILL)
    assert list(results) == list(range(2, 301))


# --- contexts


@context
def raising():
    print("reading the weights")
    raise ValueError("the weights are corrupt")


@context
def exiting():
    os._exit(4)


@context
def lacking():
    import surely_not_installed

    return surely_not_installed


@context(load_timeout=3)
def hanging():
    print("waiting for the hub")
    time.sleep(FOREVER)


@context(memory="400 MB")
def hungry():
    return bytearray(600_000_000)


@pytest.mark.parametrize(
    ("recipe", "said", "seen"),
    [
        (raising(), "could not be built: ValueError: the weights are corrupt", "reading the weights"),
        (exiting(), "exit status 4: raise an exception instead of calling os._exit", ""),
        (lacking(), "No module named 'surely_not_installed'; install it where the workers run", "lacking"),
        (hanging(), "took longer than its load_timeout of 3 s: raise that, or see", "in hanging"),
        (hungry(), "more than the 0.40 GB that its context asks for: raise its memory=", ""),
    ],
    ids=["raises", "exits", "lacks", "hangs", "hungry"],
)
def test_a_context_that_cannot_be_built(running, recipe, said, seen):
    @context_app(recipe)
    def app(state):
        return 1

    with pytest.raises(ContextError) as caught:
        finished(app()).result()
    assert str(caught.value).startswith(f"the context {recipe.name} could not be built: ")
    assert said in str(caught.value)
    if seen:
        assert seen in str(caught.value.__cause__)
    with pytest.raises(ContextError):
        finished(app()).result()
    assert finished(running.submit(pow, {}, 2, 2)).result() == 4


@context(memory="500 MB")
def modest():
    return "state"


def test_a_call_that_uses_more_memory_than_its_context_asks_for():
    @context_app(modest())
    def app(state, size):
        block = bytearray(size)
        time.sleep(FOREVER if size else 0)
        return len(block)

    with pytest.raises(CallCrashed, match=r"GB of memory, more than the 0.50 GB that its context asks for"):
        finished(app(700_000_000)).result()
    assert finished(app(0)).result() == 0


# --- full disks


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MB and 200 files."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=200", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk that is full takes the right to mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def own(tmp_path, **site):
    executor = ContextExecutor(Site(workers=1, **site), label="small")
    executor.run_dir = str(tmp_path / "run")
    return executor


def test_a_full_disk_in_the_staging_folder(small_disk, tmp_path):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(os.urandom(20_000_000))

    @context(files={"weights": weights})
    def model(weights):
        return os.path.getsize(weights)

    @context_app(model())
    def app(state):
        return state

    with own(tmp_path, scratch=str(small_disk)) as executor:
        with pytest.raises(ContextError) as caught:
            finished(app()).result()
        assert f"No space left on device while staging {weights} to {small_disk}" in str(caught.value)
        assert "put scratch= of the site on another disk" in str(caught.value)
        assert finished(executor.submit(pow, {}, 2, 2)).result() == 4
