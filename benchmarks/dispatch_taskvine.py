"""What a call costs through TaskVine: ctxflow beside a plain ndcctools loop and Parsl's TaskVineExecutor.

All three run on this machine with 2 vine_workers of one core each, started by hand alike, in rounds that take turns;
whoever's turn it is starts its manager and workers, warms up, is measured and ends them, so that nobody else is at
work meanwhile. It runs in the testbed, where ndcctools is. Figures:

- `calls_per_s`: calls one by one through `ContextExecutor.submit`, one in flight per worker;
- `calls_vs_ndcctools`: beside a loop that pins one FunctionCall to each worker, and when `wait` gives one back
  submits the next to that worker. Its library runs calls in its own process (exec_mode "direct"), which is several
  times as fast as "fork", the default: it is the most that a plain loop does;
- `calls_vs_parsl_taskvine`: beside Parsl's executor in serverless mode, with a shared file system, so that it sends
  no environment;
- `call_p50`, `call_p99`, `call_p999`, `call_max`: how long ctxflow's calls take;
- `strangers_vs_alone`: calls one by one while twelve connections to the run's port say three bytes each, and come again
  when they are ended, beside the same executor without them.

What does not live here: the loops (calls.py), and the command line (dispatch.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import parsl
from calls import WORKERS, Submit, calls_per_second, latencies, percentile
from parsl.config import Config

from ctxflow import ContextExecutor
from ctxflow.factory.run_files import live_runs
from ctxflow.sites import load_site

SITE = Path(__file__).resolve().parents[1] / "site-configs" / "testbed.toml"
NEEDED = {
    "ndcctools": "coop-computing-tools and python3-workqueue",
    "conda_pack": "conda-pack",  # ndcctools cannot make a library without these two.
    "threadpoolctl": "threadpoolctl",
}
_WARM_UP_SECONDS = 3.0  # The second library starts when the first is at work.
_STRANGERS = 12
_PATIENCE = 60  # Seconds for workers to come up.
_WORKER_OPTIONS = "--cores 1 --memory 1000 --disk 1000 --gpus 0 --single-shot --parent-death --idle-timeout 600"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured.

    :ivar seconds: how long each measurement of calls a second runs.
    :ivar calls: how many calls' times are taken.
    """

    seconds: float = 5.0
    calls: int = 20_000


QUICK = Scale(seconds=1.0, calls=2000)


def missing() -> str | None:
    """What is not installed here, as a sentence; None if all is."""
    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            return f"this Python has no {module}: install {package}"
    return None if shutil.which("vine_worker") else "there is no vine_worker here: install coop-computing-tools"


def no_op() -> Callable[[Any], Any]:
    """The no-op; one that is made in a function is pickled with its code, by whoever pickles it."""

    def echo(value: Any) -> Any:
        return value

    return echo


# --- who sends calls


@contextlib.contextmanager
def ctxflow_calls(site: str | Path, folder: str) -> Iterator[Submit]:
    """A ContextExecutor whose two workers are vine_workers of this machine."""
    tier = {"name": "local", "provider": "local", "workers": WORKERS, "cores": 1, "memory_gb": 1, "disk_gb": 1}
    with pointed_at(folder):
        resolved = load_site(site, tiers=[{**tier, "gpus": 0}], address="127.0.0.1", environment=_environment())
        executor = ContextExecutor(site=resolved)
        executor.run_dir = os.path.join(folder, f"ctxflow-{next(_numbers)}")
        echo = no_op()
        with executor:
            wait_until(lambda: executor.connected_workers == WORKERS, "ctxflow's workers")
            yield lambda value: executor.submit(echo, {}, value)


def _environment() -> str:
    return os.path.dirname(os.path.dirname(shutil.which("python") or "/usr/bin/python3"))


@contextlib.contextmanager
def parsl_calls(folder: str) -> Iterator[Submit]:
    """Parsl's TaskVineExecutor, serverless."""
    from parsl.executors.taskvine import TaskVineExecutor, TaskVineManagerConfig

    place = os.path.join(folder, f"parsl-{next(_numbers)}")
    port = free_port()
    settings = TaskVineManagerConfig(
        port=port,
        address="127.0.0.1",
        shared_fs=True,
        library_config={"num_slots": 1, "cores": 1, "memory": 1000, "disk": 1000},
        vine_log_dir=os.path.join(place, "vine"),
    )
    executor = TaskVineExecutor(
        label="taskvine", worker_launch_method="manual", function_exec_mode="serverless", manager_config=settings
    )
    config = Config(executors=[executor], initialize_logging=False, strategy="none", usage_tracking=0, run_dir=place)
    echo = no_op()
    with pointed_at(folder), parsl.load(config), vine_workers(port, place):
        yield lambda value: executor.submit(echo, {}, value)


def ndcctools_calls_per_second(folder: str, seconds: float) -> float:
    """The plain loop: a manager in this process."""
    import ndcctools.taskvine as vine

    place = os.path.join(folder, f"ndcctools-{next(_numbers)}")
    with vine.Manager(port=0, run_info_path=place) as manager:
        library = manager.create_library_from_functions("library", no_op(), add_env=False, exec_mode="direct")
        library.set_cores(1)
        library.set_function_slots(1)
        manager.install_library(library)
        with vine_workers(manager.port, place):
            _loop(vine, manager, _WARM_UP_SECONDS)
            return _loop(vine, manager, seconds)


def _loop(vine: Any, manager: Any, seconds: float) -> float:
    """Calls a second, each with its result taken."""

    def send(worker: int, value: int) -> None:
        call = vine.FunctionCall("library", "echo", value)
        call.add_feature(f"worker{worker}")
        pinned[manager.submit(call)] = worker

    def receive() -> int:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            ended = manager.wait(5)
            if ended is not None:
                assert isinstance(ended.output, int), f"a call of the plain loop failed: {ended.output}"
                return pinned.pop(ended.id)
        raise TimeoutError(f"the plain ndcctools loop got no answer for {_PATIENCE} s")

    pinned: dict[int, int] = {}
    for worker in range(WORKERS):
        send(worker, worker)
    send(receive(), 0)  # Both libraries are on their way: the clock starts at an answer.
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        send(receive(), count)
        count += 1
    elapsed = time.perf_counter() - started
    for _ in range(WORKERS):
        receive()
    return count / elapsed


# --- workers and places


@contextlib.contextmanager
def vine_workers(port: int, place: str) -> Iterator[None]:
    """Two vine_workers, each with a feature of its own; nothing is left of them."""
    started = []
    try:
        for number in range(WORKERS):
            workspace = os.path.join(place, f"worker{number}")
            words = ["vine_worker", *_WORKER_OPTIONS.split(), "--feature", f"worker{number}", "--workspace", workspace]
            os.makedirs(place, exist_ok=True)
            command = [*words, "127.0.0.1", str(port)]
            quiet = subprocess.DEVNULL
            worker = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            started.append(worker)
        yield
    finally:
        for worker in started:
            worker.terminate()
        for worker in started:
            _bury(worker)


def _bury(worker: subprocess.Popen[bytes]) -> None:
    """Wait for a worker, and end what it left in its session: its transfer server, and a library."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(5)
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == worker.pid:
                process.kill()
    worker.wait(5)


@contextlib.contextmanager
def pointed_at(folder: str) -> Iterator[None]:
    """Temporary files go to the folder."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[1]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to come up.

    :raises TimeoutError: if it does not.
    """
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come up within {_PATIENCE} s: see whether vine_worker runs here")
        time.sleep(0.05)


_numbers = itertools.count(1)


# --- the whole


def measure(rounds: int, scale: Scale, site: str | Path) -> dict[str, common.Figure]:
    """All figures."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-", dir=memory) as folder:

        def through(calls: Callable[[], contextlib.AbstractContextManager[Submit]]) -> common.Measurement:
            def take() -> float:
                with calls() as submit:
                    submit(0).result(timeout=_PATIENCE)
                    calls_per_second(submit, _WARM_UP_SECONDS)
                    return calls_per_second(submit, scale.seconds)

            return take

        turns: dict[str, common.Measurement] = {
            "ctxflow": through(lambda: ctxflow_calls(site, folder)),
            "ndcctools": lambda: ndcctools_calls_per_second(folder, scale.seconds),
            "parsl_taskvine": through(lambda: parsl_calls(folder)),
        }
        samples = common.interleaved(turns, rounds, "calls")
        figures = {"calls_per_s": common.figure(samples["ctxflow"], "calls/s")}
        for peer in ("ndcctools", "parsl_taskvine"):
            figures[f"calls_per_s_{peer}"] = common.figure(samples[peer], "calls/s")
            figures[f"calls_vs_{peer}"] = common.ratio(samples["ctxflow"], samples[peer])
        figures |= call_times(lambda: ctxflow_calls(site, folder), scale.calls)
        return figures | beside_strangers(lambda: ctxflow_calls(site, folder), 2 * rounds, scale.seconds)


def call_times(calls: Callable[[], contextlib.AbstractContextManager[Submit]], count: int) -> dict[str, common.Figure]:
    """How long calls take, from their submission to their result."""
    with calls() as submit:
        calls_per_second(submit, _WARM_UP_SECONDS)
        taken = latencies(submit, count, lambda done: common.progress(f"call times: {done:,} of {count:,} calls"))
    percents = {"p50": 50.0, "p99": 99.0, "p999": 99.9, "max": 100.0}
    unit = f"ms, over {len(taken):,} calls"
    return {
        f"call_{name}": common.figure([percentile(taken, percent) * 1000], unit, "lower")
        for name, percent in percents.items()
    }


def beside_strangers(
    calls: Callable[[], contextlib.AbstractContextManager[Submit]], rounds: int, seconds: float
) -> dict[str, common.Figure]:
    """What slow strangers at the run's port cost."""

    def disturbed() -> float:
        with strangers(port):
            return calls_per_second(submit, seconds)

    with calls() as submit:
        [run] = live_runs()
        port = run.port
        calls_per_second(submit, _WARM_UP_SECONDS)
        turns: dict[str, common.Measurement] = {
            "alone": lambda: calls_per_second(submit, seconds),
            "strangers": disturbed,
        }
        samples = common.interleaved(turns, rounds, "calls beside strangers")
    return {"strangers_vs_alone": common.ratio(samples["strangers"], samples["alone"])}


@contextlib.contextmanager
def strangers(port: int) -> Iterator[None]:
    """Have connections that begin to speak and do not go on; who is ended comes again."""
    over = threading.Event()

    def come(again: dict[int, socket.socket]) -> None:
        while not over.wait(0.1):
            for number in range(_STRANGERS):
                if number in again and not select.select([again[number]], [], [], 0)[0]:
                    continue  # It is still there.
                if number in again:
                    again.pop(number).close()
                with contextlib.suppress(OSError):
                    again[number] = socket.create_connection(("127.0.0.1", port), 1)
                    again[number].sendall(b"abc")
        for connection in again.values():
            connection.close()

    thread = threading.Thread(target=come, args=({},))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
