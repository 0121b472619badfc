#!/usr/bin/env python3
"""What `ctxflow batch` itself costs: a million short rows of JSON Lines with ids, through a no-op on 2 workers.

    benchmarks/batch.py --json
    benchmarks/batch.py --quick --json

Backs the README's and docs/batch.md's figures on batches. Each round writes its input (not timed), and runs the
command's own code in processes of their own:

- `rows_per_s`: rows over the time of the whole run, from the opened input to the finished journal;
- `driver_memory_mb`: the highest resident memory of the driver over that before the run, all imported;
- `resume_s`: a driver is killed (SIGKILL) when half of the results are there; from the start of the next driver,
  Python's own start and imports included, to its first new result;
- `finished_restart_s`: the same command once more, from the start of its process to its end: nothing is to be done.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import psutil

WORKERS = 2
PATIENCE = 600.0


def write_input(path: Path, rows: int) -> None:
    """Short rows with ids."""
    with open(path, "w") as file:
        for n in range(rows):
            file.write(f'{{"custom_id": "request-{n}", "prompt": "Is it true that claim number {n} holds?"}}\n')


def peak_memory() -> int:
    """The highest resident memory of this process, in bytes; ru_maxrss is that of its parent, if that has more."""
    [kilobytes] = re.findall(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def driver(source: Path, output: Path) -> None:
    """One driver, in a process of its own; prints what it measured of itself."""
    from ctxflow.batch import Job
    from ctxflow.batch.driver import run_job

    job = Job(
        input=source, output=output, function="copy:copy", column=("prompt",), id_column="custom_id", workers=WORKERS
    )
    before = psutil.Process().memory_info().rss
    outcome = run_job(job)
    highest = peak_memory()
    figures = {"seconds": outcome.seconds, "megabytes": (highest - before) / 1e6, "done": outcome.done}
    print(json.dumps(figures))


def command(source: Path, output: Path) -> list[str]:
    """The command line of a driver."""
    return [sys.executable, str(Path(__file__).resolve()), "--driver", str(source), str(output)]


def run_whole(source: Path, output: Path, rows: int) -> dict[str, float]:
    """What a driver measured that ran to its end."""
    ended = subprocess.run(command(source, output), check=True, stdout=subprocess.PIPE, cwd=output.parent)
    found: dict[str, float] = json.loads(ended.stdout)
    assert found["done"] == rows, f"{found['done']} of {rows} rows are done"
    return found


def await_size(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has grown to a size."""
    until = time.monotonic() + PATIENCE
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None, "the driver ended too early"
        assert time.monotonic() < until, "the driver is too slow"
        time.sleep(0.002)


def resume_seconds(source: Path, output: Path, size: int, rows: int) -> float:
    """From the start of a driver to its first new result, when half was done before."""
    with subprocess.Popen(command(source, output), stdout=subprocess.DEVNULL, cwd=output.parent) as killed:
        await_size(output, size // 2, killed)
        killed.kill()
    # What a killed driver left half written is cut off before anything is added.
    kept = output.stat().st_size
    began = time.perf_counter()
    with subprocess.Popen(command(source, output), stdout=subprocess.PIPE, cwd=output.parent) as process:
        await_size(output, kept + 1, process)
        elapsed = time.perf_counter() - began
        answer, _ = process.communicate()
    assert json.loads(answer)["done"] == rows
    with open(output) as file:
        assert len({json.loads(line)["custom_id"] for line in file}) == rows, "a row is missing or there twice"
    return elapsed


def measure(rounds: int, rows: int) -> dict[str, common.Figure]:
    """All figures."""
    rates, memory, resumed, finished = [], [], [], []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ctxflow-benchmark-") as folder:
            source, output, other = (Path(folder) / name for name in ("in.jsonl", "out.jsonl", "other.jsonl"))
            common.progress(f"round {number + 1} of {rounds}: writing {rows:,} rows")
            write_input(source, rows)
            common.progress(f"round {number + 1} of {rounds}: the whole")
            found = run_whole(source, output, rows)
            rates.append(rows / found["seconds"])
            memory.append(found["megabytes"])
            common.progress(f"round {number + 1} of {rounds}: {rates[-1]:,.0f} rows/s; once more")
            began = time.perf_counter()
            run_whole(source, output, rows)
            finished.append(time.perf_counter() - began)
            common.progress(f"round {number + 1} of {rounds}: killed at half, and resumed")
            resumed.append(resume_seconds(source, other, output.stat().st_size, rows))
    return {
        "rows_per_s": common.figure(rates, "rows/s"),
        "driver_memory_mb": common.figure(memory, "MB", "lower"),
        "resume_s": common.figure(resumed, "s", "lower"),
        "finished_restart_s": common.figure(finished, "s", "lower"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What `ctxflow batch` itself costs.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rows: to see that it runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--driver", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        driver(*given.driver)
        return
    rounds, rows = (1, 50_000) if given.quick else (given.rounds, given.rows)
    common.report("batch", measure(rounds, rows), common.versions(("parsl", "numpy")), given.json)


if __name__ == "__main__":
    main()
