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
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

BAD = "host2"
"""Which host is bad, but for slow_without_peers."""
FAULTS = {
    "good": "", "absent": "", "absent_at_first": "", "alarms": "", "black_hole": "raise", "black_hole_midway": "raise",
    "black_hole_at_first": "ordinary", "slow": "slow", "slow_without_peers": "slow", "flaky": "flaky",
    "contexts": "build", "jobs": "jobs",
}  # fmt: skip
"""Scenario -> what is wrong with the bad host; `jobs` die there, which is arranged outside."""
BUSY_SECONDS = 40
"""For how long other jobs have the good hosts in scenarios that end in at_first."""
_BUSY = """
executable = /bin/sleep
arguments = {seconds}
request_cpus = 6
request_memory = 100
request_disk = 100
requirements = Machine != "{bad}.testbed"
log = busy.log
queue 3
"""
_LOGS = "runs/**/ctxflow/events.jsonl"
"""The event logs of a run."""
POISONED = 97
"""Where rows are poisoned, one of so many is: it raises wherever it runs."""
FUNCTIONS = """
import random, socket, time
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
    if fault() == "ordinary" or (fault() == "flaky" and random.random() < 0.3):
        raise ValueError("shapes (3,4) and (5,6) not aligned")
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


def bad_host(scenario: str) -> str:
    """Which host is bad in a scenario: the testbed's GPU models of host4 are on no other host."""
    return "host4" if scenario == "slow_without_peers" else BAD


class Watched:
    """Asks `ctxflow status` now and then whether it names a host as one that gets no work, or is slow."""

    def __init__(self, host: str) -> None:
        self.named: float | None = None  # When it did.
        self._host, self._over = host, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while self.named is None and not self._over.wait(2.0):
            if _says(rf"\b{self._host}\b.* (gets no|keeps its)( new)? work", "status", "out.jsonl"):
                self.named = time.time()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join(60)


def _says(pattern: str, *words: str) -> bool:
    """Whether what a command of ctxflow's prints has a place like that."""
    asked = subprocess.run([sys.executable, "-m", "ctxflow", *words], capture_output=True, text=True, check=False)
    return bool(re.search(pattern, asked.stdout, re.MULTILINE | re.DOTALL if words[0] == "report" else 0))


def prepare(given: argparse.Namespace, faults: Path) -> list[str]:
    """Write what the job needs into the present folder; gives the words of its command."""
    poisoned = POISONED if given.scenario == "alarms" else 0
    text = FUNCTIONS.format(faults=faults, build=given.build, seconds=given.seconds, poisoned=poisoned)
    Path("bad_hosts_functions.py").write_text(text)
    with open("in.jsonl", "w") as file:
        for n in range(given.rows):
            file.write(json.dumps({"custom_id": f"row {n}", "n": n}) + "\n")
    absent = given.scenario.startswith("absent")
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


def keep_busy() -> None:
    """Have other jobs run on all good hosts for a while."""
    Path("busy.sub").write_text(_BUSY.format(seconds=BUSY_SECONDS, bad=BAD))
    subprocess.run(["condor_submit", "busy.sub"], stdout=subprocess.DEVNULL, check=True)
    asked = ["condor_q", "-constraint", "JobStatus == 2", "-af", "ClusterId"]
    until = time.time() + 120
    while len(subprocess.run(asked, capture_output=True, check=True).stdout.splitlines()) < 3:
        if time.time() > until:
            raise TimeoutError("the jobs that are to keep the good hosts busy do not run")
        time.sleep(0.5)


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
    words, bad = prepare(given, faults), bad_host(given.scenario)
    if fault and not midway:
        (faults / bad).write_text(fault)
    if given.scenario.endswith("_at_first"):
        keep_busy()
    began = time.time()
    factory = served(given)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    told = Told(process.stderr)
    status = Watched(bad) if fault else None
    evict_at = 0.0
    log_began = None  # When its event log was there, whose times count from then on.
    try:
        while process.poll() is None:
            if log_began is None and any(Path().glob(_LOGS)):
                log_began = time.time()
            done = lines_of("out.jsonl")
            if midway and done >= given.rows / 2:
                (faults / bad).write_text(fault)
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
        if status is not None:
            status.close()
    ended = time.time()
    told.close()
    found = quarantines(Path(), bad, fault == "slow")
    return {
        "scenario": given.scenario,
        "status": process.returncode,
        "seconds": ended - began,
        "evictions": evictions,
        **rows_of(given),
        **found,
        "bad": [bad] if fault else [],
        # From the same moment on as the others.
        "status_s": status and status.named and max(0.0, status.named - (log_began or began) - found["begun_s"]),
        "reported": bool(fault) and _says(rf"^\s*Quarantine.*\b{bad}\b", "report", "--no-pictures"),
        "told": [line for _, line in told.lines if re.search(r"(gets no( new)?|keeps its) work", line)],
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


def quarantines(folder: Path, bad: str, slow: bool) -> dict[str, Any]:
    """Which hosts the run put in quarantine, and how long after the bad one had failed and a good one had worked."""
    named: dict[str, float] = {}
    excluded: set[str] = set()
    hosts: dict[str, str] = {}  # By worker.
    sign = peer = None
    for path in folder.glob(_LOGS):
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith('{"event":'):
                continue
            found = json.loads(line)
            event, time_ = found["event"], found["event"]["time"]
            kind = event["is"]
            if kind == "WorkerJoined":
                hosts[event["worker"]["id"]] = short(event["worker"]["machine"] or event["worker"]["host"])
            failed = kind in ("BatchFailed", "ContextFailed") and hosts.get(event["worker"]) == bad
            failed = failed or (kind == "JobFailed" and short(event["host"]) == bad)
            if peer is None and kind in ("BatchFinished", "ItemsFinished") and hosts.get(event["worker"]) != bad:
                peer = time_
            for command in found["commands"]:
                # A slow host is none before it has something to do.
                failed = failed or (command["is"] == "Run" and hosts.get(command["worker"]) == bad and slow)
                if command["is"] == "Quarantine":
                    named.setdefault(short(command["host"]), time_)
                excluded.update(map(short, command["hosts"] if command["is"] == "Exclude" else ()))
            sign = time_ if failed and sign is None else sign
    begun = max(sign or 0.0, peer or 0.0)
    quarantined = {host: max(0.0, when - begun) for host, when in named.items()}
    return {"quarantined": quarantined, "excluded": sorted(excluded), "begun_s": begun}


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
        for path in Path().glob(_LOGS) if given.keep else ():
            shutil.copy(path, given.keep)
    finally:
        os.chdir("/")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
