#!/usr/bin/env python3
"""What ctxflow itself costs: no-op calls on 2 workers, beside other ways to send them there.

    benchmarks/dispatch.py --engine embedded --json
    benchmarks/dispatch.py --engine taskvine --json     (in the testbed; started outside, it goes there by itself)

Backs the README's lines on speed: calls one by one ("as fast as a process pool, several times Parsl's
HighThroughputExecutor"), bursts through a Parsl app, items through `map`, memory over a million items, the time
to the first result, and "built once per worker". The TaskVine engine's figures are told in dispatch_taskvine.py.

Peers run beside ctxflow in one process tree, in rounds that take turns: concurrent.futures'
ProcessPoolExecutor(2); Parsl's HighThroughputExecutor with 2 workers, in the same Parsl kernel as ctxflow; then,
where they are installed, Ray and Dask. Figures named X_vs_PEER are ratios of the same measurement, round by round:

- `calls`: two calls in flight on two workers, the next one submitted when one ends, to the executors themselves.
- `burst`: many calls of one Parsl `python_app` at once, until the last result is there.
- `map`: items through `batch_app.map`; beside it one HTEX task per item (`htex`), and HTEX fed by hand with
  chunks of the size of ctxflow's batches (`htex_chunked`), all submitted at once to the executor itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import common
import inside
import parsl
import psutil
from calls import WORKERS, calls_per_second
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

from ctxflow import ContextExecutor, batch_app, context

CHUNK = 100  # The batching policy's default size.
PEER_PACKAGES = ("parsl", "ray", "distributed")

Submit = Callable[..., "Future[Any]"]
"""Submits a function with one value."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured.

    :ivar seconds: how long each measurement of single calls runs.
    :ivar burst: calls in a burst.
    :ivar items: items through a map; `single_items` where each is a task of its own.
    :ivar long_items: items of the map whose memory is watched.
    """

    seconds: float = 1.5
    burst: int = 2000
    items: int = 100_000
    single_items: int = 2000
    long_items: int = 1_000_000


QUICK = Scale(seconds=0.4, burst=400, items=20_000, single_items=400, long_items=200_000)


def echo(value: Any) -> Any:
    """The no-op."""
    return value


@batch_app
def echo_batch(values: list[Any]) -> list[Any]:
    """The no-op on a batch."""
    return values


# --- the peers


@contextlib.contextmanager
def process_pool() -> Iterator[Submit]:
    """concurrent.futures' pool."""
    with ProcessPoolExecutor(WORKERS) as pool:
        yield pool.submit


@contextlib.contextmanager
def ray_tasks() -> Iterator[Submit]:
    """Ray's tasks."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="error")
    try:
        remote = ray.remote(echo)
        yield lambda function, value: remote.remote(value).future()
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask_tasks() -> Iterator[Submit]:
    """Dask's tasks."""
    distributed: Any = importlib.import_module("distributed")
    with distributed.Client(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as client:
        yield lambda function, value: client.submit(function, value, pure=False)


OPTIONAL = {"ray": ("ray", ray_tasks), "dask": ("distributed", dask_tasks)}


@contextlib.contextmanager
def parsl_kernel(folder: str) -> Iterator[Any]:
    """One Parsl kernel with both executors, neither of them logging every state of every task."""
    htex = HighThroughputExecutor(
        label="htex",
        address="127.0.0.1",
        max_workers_per_node=WORKERS,
        cores_per_worker=1e-6,
        provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),
    )
    executors = [htex, ContextExecutor(label="ctxflow", workers=WORKERS)]
    config = Config(executors=executors, initialize_logging=False, strategy="none", usage_tracking=0, run_dir=folder)
    with parsl.load(config) as kernel:
        yield kernel


# --- the measurements


def burst_per_second(submit: Submit, count: int) -> float:
    """Many calls at once."""
    started = time.perf_counter()
    futures = [submit(echo, number) for number in range(count)]
    answers = [future.result() for future in futures]
    elapsed = time.perf_counter() - started
    assert answers == list(range(count))
    return count / elapsed


def chunks_per_second(submit: Submit, items: int) -> float:
    """Items in chunks made by hand."""
    started = time.perf_counter()
    numbers = iter(range(items))
    chunks = iter(lambda: list(itertools.islice(numbers, CHUNK)), [])
    futures = [submit(echo, chunk) for chunk in chunks]
    answers = [answer for future in futures for answer in future.result()]
    elapsed = time.perf_counter() - started
    assert answers == list(range(items))
    return items / elapsed


def map_per_second(items: int) -> float:
    """Items through `map`, in order."""
    started = time.perf_counter()
    answers = list(echo_batch.map(range(items)))
    elapsed = time.perf_counter() - started
    assert answers == list(range(items))
    return items / elapsed


def map_megabytes(items: int) -> float:
    """The most that the driver's resident memory grows over a map from a generator, after a warm-up."""
    process = psutil.Process()
    map_per_second(30_000)
    before = highest = process.memory_info().rss
    numbers = (number for number in range(items))
    for count, answer in enumerate(echo_batch.map(numbers)):
        assert answer == count
        if count % 10_000 == 0:
            highest = max(highest, process.memory_info().rss)
            if count % 100_000 == 0:
                common.progress(f"memory: {count:,} of {items:,} items, {(highest - before) / 1e6:.0f} MB more")
    return max(highest, process.memory_info().rss) / 1e6 - before / 1e6


def builds_per_worker(folder: str) -> float:
    """How often a context is built for 10,000 items over the workers, a worker: counted by its own marks."""
    marks = os.path.join(folder, "builds")

    @context
    def built(path: str) -> int:
        with open(path, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return 1

    def add(one: int, values: list[int]) -> list[int]:
        return [one + value for value in values]

    plus = batch_app(built(marks))(add)
    assert list(plus.map(range(10_000))) == list(range(1, 10_001))
    with open(marks) as file:
        return len(file.readlines()) / WORKERS


_FIRST = {
    "ctxflow": """
from ctxflow import ContextExecutor
with ContextExecutor(workers=2) as executor:
    assert executor.submit(abs, {}, -1).result() == 1
    print(flush=True)
""",
    "htex": """
import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
htex = HighThroughputExecutor(label="htex", address="127.0.0.1", max_workers_per_node=2, cores_per_worker=1e-6)
with parsl.load(Config(executors=[htex], initialize_logging=False, strategy="none", usage_tracking=0)):
    assert htex.submit(abs, {}, -1).result() == 1
    print(flush=True)
""",
}


def first_result_seconds(program: str, folder: str) -> float:
    """From the start of a Python program to its first result, with all that it imports and starts."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=folder) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n", "the program gave no result"
        elapsed = time.perf_counter() - started
        assert process.wait() == 0
    return elapsed


# --- the whole


def measure(rounds: int, scale: Scale) -> dict[str, common.Figure]:
    """All figures."""
    figures: dict[str, common.Figure] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-"))
        firsts = common.interleaved(
            {name: _bound(first_result_seconds, program, folder) for name, program in _FIRST.items()},
            rounds,
            "first result",
        )
        figures["first_result_s"] = common.figure(firsts["ctxflow"], "s", "lower")
        figures["first_result_s_htex"] = common.figure(firsts["htex"], "s", "lower")
        # The pool forks: it comes first, while there are no threads.
        peers = {"processpool": stack.enter_context(process_pool())}
        peers["processpool"](echo, 0).result()
        kernel = stack.enter_context(parsl_kernel(folder))
        for label in ("ctxflow", "htex"):
            peers[label] = _without_resources(kernel.executors[label].submit)
        # Before the others, whose freed memory could be used again unseen.
        memory = common.figure([map_megabytes(scale.long_items)], "MB", "lower")
        for name, submit in peers.items():
            common.progress(f"warm-up: {name}")
            calls_per_second(_no_op(submit), 0.3)
        figures |= _ratios("calls", "calls/s", {
            name: _bound(calls_per_second, _no_op(submit), scale.seconds) for name, submit in peers.items()
        }, rounds)  # fmt: skip
        figures |= _ratios("burst", "calls/s", {
            label: _bound(burst_per_second, _through_app(label), scale.burst)
            for label in ("ctxflow", "htex")
        }, rounds)  # fmt: skip
        figures |= _ratios("map", "items/s", {
            "ctxflow": _bound(map_per_second, scale.items),
            "htex": _bound(burst_per_second, peers["htex"], scale.single_items),
            "htex_chunked": _bound(chunks_per_second, peers["htex"], scale.items),
            "processpool_chunked": _bound(chunks_per_second, peers["processpool"], scale.items),
        }, rounds)  # fmt: skip
        figures["map_memory_mb"] = memory
        for name, (package, peer) in OPTIONAL.items():
            if importlib.util.find_spec(package) is not None:
                for key, figure in _beside(name, peer, peers["ctxflow"], rounds, scale).items():
                    figures.setdefault(key, figure)
        figures["context_builds_per_worker"] = common.figure([builds_per_worker(folder)], "builds", "lower")
    return figures


def _beside(
    name: str, peer: Callable[[], contextlib.AbstractContextManager[Submit]], ours: Submit, rounds: int, scale: Scale
) -> dict[str, common.Figure]:
    """A peer whose processes are busy even when they have no work: it gets rounds of its own with ctxflow."""
    with peer() as submit:
        calls_per_second(_no_op(submit), 0.3)
        turns = {
            "ctxflow": _bound(calls_per_second, _no_op(ours), scale.seconds),
            name: _bound(calls_per_second, _no_op(submit), scale.seconds),
        }
        return _ratios("calls", "calls/s", turns, rounds)


def _bound(function: Callable[..., float], *args: Any) -> common.Measurement:
    return lambda: function(*args)


def _no_op(submit: Submit) -> Callable[[int], Future[Any]]:
    return lambda value: submit(echo, value)


def _without_resources(submit: Callable[..., Future[Any]]) -> Submit:
    return lambda function, value: submit(function, {}, value)


def _through_app(label: str) -> Submit:
    """The no-op as a Parsl app on one of the kernel's executors."""
    app = parsl.python_app(executors=[label])(echo)
    return lambda function, value: app(value)


def _ratios(name: str, unit: str, measurements: dict[str, common.Measurement], rounds: int) -> dict[str, common.Figure]:
    """What ctxflow does, what its peers do, and how many times theirs that is."""
    samples = common.interleaved(measurements, rounds, name)
    singular = unit.replace("/", "_per_")
    stem = f"{name}_{singular}" if name != "calls" else singular
    figures = {stem: common.figure(samples["ctxflow"], unit)}
    for peer in [name for name in samples if name != "ctxflow"]:
        figures[f"{stem}_{peer}"] = common.figure(samples[peer], unit)
        figures[f"{name}_vs_{peer}"] = common.ratio(samples["ctxflow"], samples[peer])
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a call and an item cost, beside other executors.")
    parser.add_argument("--engine", choices=["embedded", "taskvine"], default="embedded", help="what runs the workers")
    parser.add_argument("--site", help="taskvine: the site file whose settings are used (site-configs/testbed.toml)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each measurement is taken (5)")
    parser.add_argument("--quick", action="store_true", help="2 short rounds: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is how often each measurement is taken: give 1 or more")
    if given.site and given.engine != "taskvine":
        parser.error("--site goes with --engine taskvine")
    rounds = 2 if given.quick else given.rounds
    if given.engine == "taskvine":
        figures, packages = _taskvine(rounds, given.quick, given.site)
    else:
        # HTEX starts programs of its own by their names, which lie beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        packages = common.versions(PEER_PACKAGES)
        figures = measure(rounds, QUICK if given.quick else Scale())
    common.report(f"dispatch-{given.engine}", figures, packages, given.json)


def _taskvine(rounds: int, quick: bool, site: str | None) -> tuple[dict[str, common.Figure], dict[str, str]]:
    """The figures of the TaskVine engine, from within the testbed."""
    import dispatch_taskvine

    complaint = dispatch_taskvine.missing()
    if complaint:
        inside.go(__file__, sys.argv[1:], complaint)
    scale = dispatch_taskvine.QUICK if quick else dispatch_taskvine.Scale()
    figures = dispatch_taskvine.measure(rounds, scale, site or dispatch_taskvine.SITE)
    return figures, common.versions(("parsl",)) | {"taskvine": inside.taskvine_version()}


if __name__ == "__main__":
    main()
