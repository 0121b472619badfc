#!/usr/bin/env python3
"""How close simulated runs come to real ones: recorded on the embedded engine and on the testbed, simulated, compared.

    benchmarks/sim_vs_real.py [--json] [--quick] [--engine embedded|testbed]

Backs the figures of docs/simulator.md. Each configuration is run for real, with functions that sleep; from its log
the parameters are measured as `ctxflow simulate RUN` does (seconds of items, of calls beside their items, of loads and
staging; which workers were there when), never the makespan; and the run is simulated with five seeds. Configurations
differ in workers, batch sizes and policies, loads, evictions and how items vary. Makespans are counted from the first
worker's joining on: what happens before is read from the log, and would flatter. Figures:

- `sim_error_mean`, `sim_error_max`: |simulated / recorded - 1|, the mean and the worst of all configurations;
- `error_NAME`: of each; `ratio_NAME`: simulated over recorded, the median of the seeds and their spread;
- `whatif_error_NAME`: the same for a what-if that is then tried: the parameters are those of the run before, with other
  workers or batches, and the makespan that of a run which nothing was measured of. (Not in the mean and the worst.)

Where the testbed is up and this runs as root, configurations on real TaskVine workers are among them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import inside
from common import figure, progress, report, versions

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.simulator.experiments import Figure, rounded
from ctxflow.simulator.recorded_run import Recorded
from ctxflow.simulator.scenario import parse_change, read_recorded, recorded_scenario
from ctxflow.simulator.studies import play
from ctxflow.sites import load_site
from ctxflow.testing import Evictions

SITE = Path(__file__).resolve().parents[1] / "site-configs" / "testbed.toml"
SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One real run. Times in seconds.

    :ivar apps: (seconds of loading, items, mean seconds of an item, their deviation over their mean) of each app.
    :ivar call_seconds: of a call beside its items.
    :ivar slowdowns: of the first workers, embedded only.
    """

    name: str
    workers: int
    batching: Any
    apps: tuple[tuple[float, int, float, float], ...]
    call_seconds: float = 0.02
    evictions_per_minute: float = 0.0
    rejoin_seconds: float = 1.0
    slowdowns: tuple[float, ...] = ()
    file_bytes: int = 0


def fixed(size: int) -> dict[str, Any]:
    """A batching policy."""
    return {"policy": "fixed", "size": size}


EMBEDDED = (
    Configuration("even", 2, fixed(10), ((0.5, 700, 0.03, 0.0),)),
    Configuration("single_items", 4, fixed(1), ((0.5, 700, 0.05, 0.3),)),
    Configuration("long_loads", 6, fixed(50), ((4.0, 3000, 0.02, 0.5),)),
    Configuration("evictions", 4, fixed(20), ((1.0, 1500, 0.03, 0.3),), 0.05, evictions_per_minute=30.0),
    Configuration("uneven", 4, "opportunistic", ((1.0, 1500, 0.03, 1.5),), 0.1, slowdowns=(1, 1, 2, 3)),
    Configuration(
        "two_apps", 4, "opportunistic", ((0.5, 800, 0.02, 0.3), (1.5, 400, 0.06, 0.8)), 0.05, 20.0, slowdowns=(1, 2)
    ),
)
WHATIF = Configuration("whatif", 4, "opportunistic", ((1.0, 1200, 0.03, 0.5),), 0.1)
WHATIFS = (
    ("workers", "workers=2", dataclasses.replace(WHATIF, workers=2)),
    ("batching", "batching={policy = 'fixed', size = 4}", dataclasses.replace(WHATIF, batching=fixed(4))),
)
TESTBED = (
    Configuration("testbed", 8, fixed(20), ((2.0, 4000, 0.05, 0.5),), 0.05, file_bytes=50_000_000),
    Configuration("testbed_evictions", 8, "opportunistic", ((2.0, 4000, 0.05, 0.5),), 0.05, 8.0, file_bytes=20_000_000),
)


@context
def model(seconds: float, data: str | None = None) -> float:
    """Take a while to be built."""
    time.sleep(seconds)
    return seconds


def answer(built: float, items: list[float], *, call_seconds: float) -> list[float]:
    """Take as long as the items say."""
    time.sleep(call_seconds + sum(items))
    return items


def draw(count: int, mean: float, deviation: float, generator: random.Random) -> list[float]:
    """Seconds of items: gamma-distributed."""
    if not deviation:
        return [mean] * count
    shape = deviation**-2
    return [generator.gammavariate(shape, mean / shape) for _ in range(count)]


def executor_for(configuration: Configuration, folder: Path, testbed: bool) -> ContextExecutor:
    """Of the embedded engine, or of the testbed."""
    if testbed:
        executor = ContextExecutor(load_site(SITE, workers=configuration.workers), batching=configuration.batching)
    else:
        site = load_site("local", workers=configuration.workers, slowdowns=configuration.slowdowns)
        executor = ContextExecutor(site, batching=configuration.batching)
    executor.run_dir = str(folder)
    return executor


def real_run(configuration: Configuration, folder: Path, testbed: bool) -> None:
    """Run it; what is left of it is its event log."""
    generator = random.Random(configuration.name)
    files = {}
    if configuration.file_bytes:
        (folder / "data.bin").write_bytes(os.urandom(configuration.file_bytes))
        files = {"data": str(folder / "data.bin")}
    executor = executor_for(configuration, folder, testbed)
    if testbed:
        evicting: Any = vacating(folder / "ctxflow" / "events.jsonl", configuration.evictions_per_minute)
    else:
        evicting = Evictions(
            executor, configuration.evictions_per_minute, seed=7, rejoin_seconds=configuration.rejoin_seconds
        )
    with executor, evicting:
        maps = [
            batch_app(model.options(files=files)(load))(answer).map(
                draw(count, mean, deviation, generator), call_seconds=configuration.call_seconds
            )
            for load, count, mean, deviation in configuration.apps
        ]
        done = sum(len(list(each)) for each in maps)
    assert done == sum(count for _, count, _, _ in configuration.apps)


@contextlib.contextmanager
def vacating(log: Path, per_minute: float) -> Iterator[None]:
    """Has HTCondor take jobs of this run back at random, as an owner of machines would."""
    stop, generator = threading.Event(), random.Random(7)

    def vacate() -> None:
        while per_minute and not stop.wait(generator.expovariate(per_minute / 60)):
            jobs = sorted({event["job"] for event in _events(log) if event.get("is") == "JobStarted"})
            if jobs:
                words = ["condor_vacate_job", "-fast", generator.choice(jobs)]
                subprocess.run(words, capture_output=True, check=False)

    thread = threading.Thread(target=vacate, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def _events(log: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        for text in log.read_text().splitlines()[1:]:
            yield json.loads(text)["event"]


def recorded_run(configuration: Configuration, testbed: bool = False) -> Recorded:
    """Run it for real, and measure its parameters."""
    with tempfile.TemporaryDirectory(dir="/shared" if testbed and os.path.isdir("/shared") else None) as folder:
        real_run(configuration, Path(folder), testbed)
        return read_recorded(Path(folder))


def working_seconds(recorded: Recorded, seconds: float) -> float:
    """Seconds on a run's clock, from its first worker's joining on."""
    return seconds - min(stay.joined for place in recorded.places for stay in place.stays)


def compared(name: str, known: Recorded, real: Recorded, changes: Sequence[str] = ()) -> dict[str, Any]:
    """How far a simulation by one run's parameters, with changes, is from a real run."""
    scenario = recorded_scenario(known, [parse_change(change) for change in changes])
    took = working_seconds(real, real.seconds)
    ratios = [working_seconds(known, play(scenario, seed).seconds) / took for seed in range(SEEDS)]
    error = abs(statistics.median(ratios) - 1)
    progress(
        f"{name}: {took:.1f} s, {real.evicted} evictions, {real.loads} loads; simulated "
        f"{statistics.median(ratios) * took:.1f} s: error {error:.1%}"
    )
    return {"name": name, "ratios": ratios, "error": error}


def rows_of(configurations: Iterable[Configuration], testbed: bool) -> list[dict[str, Any]]:
    """Each run for real and simulated."""
    rows = []
    for each in configurations:
        real = recorded_run(each, testbed)
        rows.append(compared(each.name, real, real))
    return rows


def what_ifs() -> dict[str, Figure]:
    """What-ifs, told beforehand from one run and then tried."""
    known = recorded_run(WHATIF)
    found = {}
    for name, change, configuration in WHATIFS:
        row = compared(f"what if {change}", known, recorded_run(configuration), [change])
        found[f"whatif_error_{name}"] = figure([row["error"]], "share", "lower")
    return found


def on_the_testbed(quick: bool) -> list[dict[str, Any]]:
    """The same from within the testbed; nothing where there is none."""
    reason = inside.why_not()
    if reason:
        progress(f"without real TaskVine workers: {reason}")
        return []
    words = ["python", f"{inside.CHECKOUT}/benchmarks/sim_vs_real.py", "--rows", *(["--quick"] if quick else [])]
    ended = subprocess.run(inside.command(*words), stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """The figures, from what each configuration came to."""
    errors = [row["error"] for row in rows]
    whole = figure(errors, "share", "lower")
    found = {
        "sim_error_mean": dataclasses.replace(whole, value=rounded(statistics.fmean(errors))),
        "sim_error_max": dataclasses.replace(whole, value=rounded(max(errors))),
    }
    for row in rows:
        found[f"error_{row['name']}"] = figure([row["error"]], "share", "lower")
        found[f"ratio_{row['name']}"] = figure(row["ratios"], "times", "lower")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Simulated makespans beside recorded ones.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one configuration of each engine: to see that it runs")
    parser.add_argument("--engine", choices=["embedded", "testbed"], help="by default both")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(rows_of(TESTBED[: 1 if given.quick else None], True)))
        return
    rows: list[dict[str, Any]] = []
    if given.engine != "testbed":
        rows += rows_of(EMBEDDED[: 1 if given.quick else None], False)
    if given.engine != "embedded":
        rows += on_the_testbed(given.quick)
    if not rows:
        inside.skip(inside.why_not() or "there is nothing to compare")
    figures = figures_of(rows)
    if given.engine != "testbed" and not given.quick:
        figures |= what_ifs()
    report("sim_vs_real", figures, versions(["numpy"]), given.json)


if __name__ == "__main__":
    sys.exit(main())
