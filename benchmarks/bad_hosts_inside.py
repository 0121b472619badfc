"""One batch job in the testbed with a bad host, as a user would run it; bad_hosts.py starts it there.

`python bad_hosts_inside.py SCENARIO --rows N` writes a function over rows, its site and its input into a fresh folder,
and runs `ctxflow batch` on them. The function looks at each call, and its context at each build, whether a file of the
name of its host says that something is wrong there: so a host breaks and mends while the run goes on. The last line
is one JSON object: what became of the rows, how long it took, and when which host was named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

BAD = "host2"
"""Which host is bad."""
FAULTS = {
    "good": "", "absent": "", "alarms": "", "black_hole": "raise", "black_hole_midway": "raise", "slow": "slow",
    "contexts": "build",
}  # fmt: skip
"""Scenario -> what is wrong with the bad host."""
POISONED = 97
"""Where rows are poisoned, one of so many is: it raises wherever it runs."""
FUNCTIONS = """
import socket, time
from ctxflow import batch_app, context

def fault():
    try:
        with open("{faults}/" + socket.gethostname()) as file:
            return file.read()
    except FileNotFoundError:
        return ""

@context
def model():
    if fault() == "build":
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    time.sleep({build})
    return 2

@batch_app(model())
def double(model, numbers):
    if fault() == "raise":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    results = []
    for number in numbers:
        if {poisoned} and number % {poisoned} == {poisoned} - 1:
            raise ValueError(f"row {{number}} cannot be doubled")
        time.sleep({seconds} * (10 if fault() == "slow" else 1))
        results.append(model * number)
    return results
"""
SITE = """
name = "bad-hosts"
engine = "taskvine"
python_environment = "/opt/ctxflow"
{more}

[taskvine]
keepalive_interval = 1
keepalive_timeout = 5

[[tiers]]
name = "gpu"
provider = "{provider}"
workers = {workers}
cores = 1
memory_gb = 4
gpus = 1
{tier}
"""


class Told:
    """The lines that a program writes, each with when it came."""

    def __init__(self, pipe: IO[str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            self.lines.append((time.time(), line.rstrip()))

    def close(self) -> None:
        """Read to the end."""
        self._thread.join(30)


def prepare(given: argparse.Namespace, faults: Path) -> list[str]:
    """Write what the job needs into the present folder; gives the words of its command."""
    poisoned = POISONED if given.scenario == "alarms" else 0
    text = FUNCTIONS.format(faults=faults, build=given.build, seconds=given.seconds, poisoned=poisoned)
    Path("bad_hosts_functions.py").write_text(text)
    with open("in.jsonl", "w") as file:
        for n in range(given.rows):
            file.write(json.dumps({"custom_id": f"row {n}", "n": n}) + "\n")
    absent = given.scenario == "absent"
    workers = given.workers * 3 // 4 if absent else given.workers
    tier = "disk_gb = 10" if given.provider == "condor" else "options = {grace = 30}"
    tier += f"""\nrequirements = 'Machine != "{BAD}.testbed"'""" if absent else ""
    more = f'acquire = "{given.acquire}"' + (f'\nhealth = "{given.health}"' if given.health else "")
    Path("site.toml").write_text(SITE.format(workers=workers, tier=tier, provider=given.provider, more=more))
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", "out.jsonl", "--site", "site.toml"]
    words += ["--function", "bad_hosts_functions:double", "--column", "n", "--input-format", "jsonl"]
    words += ["--id-column", "custom_id", "--batch-size", str(given.batch_size), "--max-errors", "100%"]
    return words + (["--retries", str(given.retries)] if given.retries is not None else [])


def served(given: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    """The factory that the run has its workers from, if it has."""
    if given.acquire == "run":
        return None
    words = [sys.executable, "-m", "ctxflow", "factory", "site.toml"]
    with open("factory.log", "w") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def lines_of(path: str) -> int:
    """How many lines a file has."""
    return Path(path).read_bytes().count(b"\n") if os.path.exists(path) else 0


def lines_in(path: str) -> list[str]:
    """The lines of a file, none if it is not there."""
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def evict(chance: random.Random) -> int:
    """Take the machine of one of this user's workers away; gives how many were."""
    running = subprocess.run(
        ["condor_q", "-constraint", "JobStatus == 2", "-af:j", "JobStatus"], capture_output=True, text=True, check=False
    )
    jobs = [line.split()[0] for line in running.stdout.splitlines()]
    if not jobs:
        return 0
    done = subprocess.run(["condor_vacate_job", "-fast", chance.choice(jobs)], capture_output=True, check=False)
    return int(done.returncode == 0)


def play(given: argparse.Namespace) -> dict[str, Any]:
    """Run the job, and break its host when it is time; gives what came of it."""
    faults = Path(tempfile.mkdtemp(prefix="bad-hosts-", dir="/shared"))
    faults.chmod(0o755)
    chance, fault, evictions = random.Random(given.seed), FAULTS[given.scenario], 0
    midway = given.scenario.endswith("_midway")
    words = prepare(given, faults)
    if fault and not midway:
        (faults / BAD).write_text(fault)
    began = time.time()
    factory = served(given)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    told = Told(process.stderr)
    evict_at = 0.0
    try:
        while process.poll() is None:
            done = lines_of("out.jsonl")
            if midway and done >= given.rows / 2:
                (faults / BAD).write_text(fault)
                midway = False
            if given.scenario == "alarms" and done and time.time() >= evict_at:
                evictions += evict(chance)
                evict_at = time.time() + chance.uniform(2, 6)
            if time.time() > began + given.limit:
                process.terminate()
            time.sleep(0.1)
    finally:
        for each in (process, factory):
            if each is not None and each.poll() is None:
                each.terminate()
                each.wait(60)
        shutil.rmtree(faults)
    ended = time.time()
    told.close()
    return {
        "scenario": given.scenario,
        "status": process.returncode,
        "seconds": ended - began,
        "evictions": evictions,
        **rows_of(given),
        **quarantines(Path(), fault == "slow"),
        "told": [line for _, line in told.lines if "gets no work for" in line],
        "factory": lines_in("factory.log")[-40:],
        "said": [f"{when - began:7.1f} {line}" for when, line in told.lines][-60:],
    }


def rows_of(given: argparse.Namespace) -> dict[str, Any]:
    """What became of the rows."""
    results = [json.loads(line) for line in lines_in("out.jsonl")]
    dead = [json.loads(line) for line in lines_in("out.jsonl.errors.jsonl")]
    poison = range(POISONED - 1, given.rows, POISONED) if given.scenario == "alarms" else ()
    answered = {line["row"] for line in results}
    return {
        "rows": given.rows,
        "answered": len(answered),
        "twice": len(results) - len(answered),
        "wrong": sum(line.get("result") != 2 * line["row"] for line in results),
        "lost": given.rows - len(answered | {line["row"] for line in dead}),
        "dead": len(dead),
        "dead_unearned": sum(line["row"] not in poison for line in dead),
        "example": dead[:1],
    }


def quarantines(folder: Path, slow: bool) -> dict[str, Any]:
    """Which hosts the run put in quarantine, and how long after the first sign of what is wrong."""
    named: dict[str, float] = {}
    excluded: set[str] = set()
    hosts: dict[str, str] = {}  # By worker.
    sign = None
    for path in folder.glob("runs/**/ctxflow/events.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith('{"event":'):
                continue
            found = json.loads(line)
            event, time_ = found["event"], found["event"]["time"]
            if event["is"] == "WorkerJoined":
                hosts[event["worker"]["id"]] = short(event["worker"]["machine"] or event["worker"]["host"])
            failed = event["is"] in ("BatchFailed", "ContextFailed") and hosts.get(event["worker"]) == BAD
            for command in found["commands"]:
                # A slow host is none before it has something to do.
                failed = failed or (command["is"] == "Run" and hosts.get(command["worker"]) == BAD and slow)
                if command["is"] == "Quarantine":
                    named.setdefault(short(command["host"]), time_)
                excluded.update(map(short, command["hosts"] if command["is"] == "Exclude" else ()))
            sign = time_ if failed and sign is None else sign
    quarantined = {host: when - (sign or 0.0) for host, when in named.items()}
    return {"quarantined": quarantined, "excluded": sorted(excluded)}


def short(host: str) -> str:
    """A host's name without its domain."""
    return host.partition(".")[0]


def main() -> None:
    """Play one scenario and print what came of it."""
    parser = argparse.ArgumentParser(description="One batch job with a bad host.")
    parser.add_argument("scenario", choices=FAULTS)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a row")
    parser.add_argument("--build", type=float, default=15.0, help="seconds of building the context")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--retries", type=int)
    parser.add_argument("--health", default="", help="the site's policy of that family")
    parser.add_argument("--acquire", choices=("run", "factory"), default="run")
    parser.add_argument("--provider", choices=("condor", "slurm"), default="condor")
    parser.add_argument("--keep", type=Path, help="where to leave the event log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which it is given up")
    given = parser.parse_args()
    # Slurm's nodes must see it.
    folder = tempfile.mkdtemp(
        prefix="bad-hosts-", dir="/shared" if given.provider == "slurm" else os.path.expanduser("~")
    )
    os.chdir(folder)
    os.environ.update(XDG_STATE_HOME=f"{folder}/state", COLUMNS="200", OMP_NUM_THREADS="1")
    try:
        print(json.dumps(play(given)))
        for path in Path().glob("runs/**/ctxflow/events.jsonl") if given.keep else ():
            shutil.copy(path, given.keep)
    finally:
        os.chdir("/")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
