"""Runs inside the testbed: `ctxflow factory` with HTCondor's workers for two programs of one user, and its cleaning.

`python factory_command_inside.py serve|clean` says what it sees; its last line is one JSON object, which
test_factory_command.py looks at.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, exited

SITE = """
name = "pool"
engine = "taskvine"
python_environment = "/opt/ctxflow"
acquire = "{acquire}"

[[tiers]]
name = "gpu"
provider = "condor"
workers = {workers}
cores = 1
memory_gb = 1
disk_gb = 1
gpus = 1
requirements = "{requirements}"
"""
PROGRAM = """
import sys, time
from pathlib import Path
from ctxflow import ContextExecutor

def square(number):
    import time
    time.sleep(0.1)
    return number * number

done = 0
with ContextExecutor(site=sys.argv[1]) as executor:
    while not Path("stop").exists():
        futures = [executor.submit(square, {}, number) for number in range(20)]
        assert [future.result() for future in futures] == [number * number for number in range(20)]
        done += 20
        print(done, flush=True)
"""
FACTORY = [sys.executable, "-m", "ctxflow", "factory"]


RUNS: set[str] = set()  # All that there were here.


def jobs() -> dict[str, tuple[str, str, str]]:
    """Job -> its run, its state, and when it began."""
    RUNS.update(path.stem for path in Path("ctxflow").glob("*.json"))
    words = ["condor_q", "-constraint", "CtxflowRun =!= undefined", "-af:j", "CtxflowRun", "JobStatus", "JobStartDate"]
    lines = subprocess.run(words, capture_output=True, check=True, text=True).stdout.splitlines()
    found = {job: (run, state, began) for job, run, state, began in map(str.split, lines)}
    return {job: its for job, its in found.items() if its[0] in RUNS}


def running() -> dict[str, str]:
    """The jobs that run, and when each began: one that was lost and began again is another."""
    return {job: began for job, (_, state, began) in jobs().items() if state == "2"}


def by_run() -> list[int]:
    """How many jobs run of each run, the fewest first."""
    return sorted(Counter(run for run, state, _ in jobs().values() if state == "2").values())


def joined() -> int:
    """How many workers have joined their runs so far."""
    return sum(path.read_text().count('"WorkerJoined"') for path in Path().glob("*/runs/*/ctxflow/events.jsonl"))


def reach(condition, what: str) -> None:
    eventually(condition, what=lambda: f"{what}; there is {jobs()}", pause=0.2)
    sys.stderr.write(f"{time.monotonic():.1f} {what}\n")


def site(workers: int, acquire: str = "factory", requirements: str = "true") -> None:
    Path("new.toml").write_text(SITE.format(acquire=acquire, workers=workers, requirements=requirements))
    os.replace("new.toml", f"{acquire}.toml")


def program(name: str, acquire: str = "factory") -> subprocess.Popen[str]:
    """A program that is busy until it has a file "stop"."""
    os.mkdir(name)
    words = [sys.executable, "-c", PROGRAM, os.path.abspath(f"{acquire}.toml")]
    with open(f"{name}/out", "w") as out:
        return subprocess.Popen(words, cwd=name, stdout=out, stderr=subprocess.STDOUT, text=True)


def begin() -> subprocess.Popen[bytes]:
    """A factory."""
    with open("factory.log", "a") as log:
        return subprocess.Popen([*FACTORY, "factory.toml"], stderr=log)


def losses() -> list[bool]:
    """Of each worker that the runs lost, whether they know it as evicted."""
    lines = [line for path in Path().glob("*/runs/*/ctxflow/events.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line)["event"]["evicted"] for line in lines if '"WorkerLost"' in line]


def serve_two_runs(last: contextlib.ExitStack) -> dict[str, object]:
    """One factory, two programs, other numbers while they run, and nothing left when they end."""
    site(4)
    factory = begin()
    last.callback(factory.kill)
    programs = []
    for name, share, joins in (("one", [4], 4), ("two", [2, 2], 6)):
        programs.append(program(name))
        last.callback(programs[-1].kill)
        reach(lambda share=share, joins=joins: (by_run(), joined()) == (share, joins), f"workers: {share}")
    before = running()
    site(6)
    factory.send_signal(signal.SIGHUP)
    reach(lambda: by_run() == [3, 3] and joined() == 8, "6 workers are shared")
    raised = running()
    factory.kill()
    factory.wait()
    factory = begin()
    last.callback(factory.kill)
    reach(lambda: Path("factory.log").read_text().count("took over 3 running") == 2, "another factory takes over")
    taken_over, lost = running(), losses()
    site(2)
    factory.send_signal(signal.SIGHUP)
    left = len(lost) + 4  # Of six workers: those that have ended what they ran.
    reach(lambda: (by_run(), len(losses())) == ([1, 1], left), "a lowered maximum has workers leave")
    lowered = running()
    for name in ("one", "two"):
        done = len(Path(name, "out").read_text())
        reach(lambda name=name, done=done: len(Path(name, "out").read_text()) > done, f"{name} goes on")
    for name in ("one", "two"):
        Path(name, "stop").touch()
    statuses = [exited(each) for each in programs]
    reach(lambda: not jobs(), "no job is left")
    factory.terminate()
    return {
        "kept": before.items() <= raised.items(),
        "taken over": taken_over == raised,
        "lowered": lowered.items() <= raised.items(),
        "losses": lost,
        "statuses": [*statuses, exited(factory)],
        "outputs": [Path(name, "out").read_text().splitlines()[-1].isdigit() for name in ("one", "two")],
        "log": Path("factory.log").read_text(),
    }


def clean_up_after_a_killed_program(last: contextlib.ExitStack) -> dict[str, object]:
    """Waiting jobs whose program is dead are found, and removed."""
    site(3, "run", "false")
    killed = program("killed", "run")
    last.callback(killed.kill)
    reach(lambda: len(jobs()) == 3, "3 jobs wait")
    alive = json.loads(
        subprocess.run([*FACTORY, "run.toml", "--clean", "--json"], capture_output=True, check=False).stdout
    )
    killed.kill()
    killed.wait()
    told = subprocess.run([*FACTORY, "run.toml", "--clean", "--yes", "--json"], capture_output=True, check=False)
    reach(lambda: not jobs(), "they are gone")
    return {"while it lived": alive["jobs"], "status": told.returncode, "clean": json.loads(told.stdout)}


def main() -> None:
    # Under the home directory, which the schedd sees as well.
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory, contextlib.ExitStack() as last:
        os.chdir(directory)
        last.callback(os.chdir, "/")
        os.environ["XDG_RUNTIME_DIR"] = directory
        steps = {"serve": serve_two_runs, "clean": clean_up_after_a_killed_program}
        print(json.dumps(steps[sys.argv[1]](last)))


if __name__ == "__main__":
    main()
