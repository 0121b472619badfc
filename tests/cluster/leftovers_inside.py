"""Runs inside the testbed: a program whose runs end in all ways, and what they leave.

    python leftovers_inside.py condor|slurm|local --runs N

Waits until nothing that was not there before is in the temporary directory, in shared memory, at home and in the queue,
but what a killed run is documented to leave. Writes as JSON which secrets are among that, and what is left when
`ctxflow clean` has been called.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import exited, line, nothing_left

PROGRAM = """
import os, sys, time
from ctxflow import ContextExecutor, batch_app, context

@context()
def place(fails):
    if fails:
        raise ValueError("it cannot be built")
    return 1

@batch_app(place(sys.argv[2] == "failed"), batch_size=2)
def slow(one, items):
    time.sleep(0.05)
    return items

with ContextExecutor(site=sys.argv[1]) as executor:
    for done, _ in enumerate(slow.map(range(20))):
        if done == 5 and sys.argv[2] in ("interrupted", "killed"):
            while executor.connected_workers < 2:
                time.sleep(0.1)  # A job that waits when its driver is killed stays until its lease is over.
            print("goes on", flush=True)
            while True:
                time.sleep(0.1)  # A signal that comes just before a sleep does not end it.
"""
SITE = """
name = "{kind}"
engine = "taskvine"
python_environment = "/opt/ctxflow"

[[tiers]]
name = "small"
provider = "{kind}"
workers = 2
cores = 1
memory_gb = 1
disk_gb = 1
gpus = 0
"""
ENDINGS = {"done": 0, "failed": 1, "interrupted": -signal.SIGINT, "killed": -signal.SIGKILL}
DOCUMENTED = r"/tmp/ctxflow-\w+|/home/alice/\.ctxflow/runs/\w+\.json"
"""What a killed run leaves: docs/endings.md says so, and none of it is a secret."""
PLACES = ("/tmp", "/dev/shm", str(Path.home()), f"{Path.home()}/.ctxflow/runs")


def there() -> set[str]:
    """All that is in the places where nothing is to be left, and in the queues."""
    # HTCondor's commands make ~/.condor; and Parsl imports Work Queue, which makes an empty folder, and removes it when
    # its program ends but by SIGKILL.
    staging = [path for path in Path("/tmp").glob("wq-py-staging-*") if _mine(path) and not any(path.iterdir())]
    theirs = {f"{Path.home()}/.condor", *map(str, staging)}
    found = {f"{place}/{name}" for place in PLACES if os.path.isdir(place) for name in os.listdir(place)}
    found = {path for path in found if _mine(path)}  # Other users' runs come and go beside this one.
    for command in (["condor_q", "-af:j", "JobStatus"], ["squeue", "--me", "--noheader", "--format=%i %T"]):
        found.update(subprocess.run(command, capture_output=True, check=False, text=True).stdout.splitlines())
    return found - theirs - {f"{Path.home()}/.ctxflow"}


def _mine(path: str | Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except FileNotFoundError:
        return False


def end(kind: str, ending: str) -> None:
    """Have one run end so."""
    words = [sys.executable, "program.py", f"{kind}.toml", ending]
    told = Path(f"{ending}.txt")

    def what() -> str:
        return f"that the program goes on, or ends as it is to ({ending}); it said: {told.read_text()}"

    # As a terminal does, Ctrl-C and a kill reach the program alone: what it started is in sessions of its own.
    with (
        told.open("wb") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, start_new_session=True) as program,
    ):
        try:
            if ending in ("interrupted", "killed"):
                assert line(program.stdout, what=what) == b"goes on\n"
                program.send_signal(signal.SIGINT if ending == "interrupted" else signal.SIGKILL)
            status = exited(program, what=what)
        finally:
            program.kill()
    assert status == ENDINGS[ending], (ending, status, told.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--runs", type=int, default=4)
    asked = parser.parse_args()
    Path("program.py").write_text(PROGRAM)
    Path(f"{asked.kind}.toml").write_text(SITE.format(kind=asked.kind))
    before = there()
    for ending in ENDINGS:
        for _ in range(asked.runs // len(ENDINGS)):
            end(asked.kind, ending)
        kept = re.compile(DOCUMENTED if ending == "killed" else "")
        nothing_left(lambda kept=kept: {each for each in there() - before if not kept.fullmatch(each)})
    secrets = [str(path) for path in Path("runs").rglob("*") if path.name == "password"]
    time.sleep(4)  # A driver that wrote just now is not taken for dead.
    subprocess.run(["ctxflow", "clean", "--older-than", "0", "--yes"], check=True, stdout=subprocess.DEVNULL)
    left = sorted(there() - before)
    print(json.dumps({"secrets": secrets, "cleaned": left, "runs": os.listdir("runs")}))


if __name__ == "__main__":
    main()
