"""llama.cpp's server on each of four workers, which are taken away in all ways while rows are in flight.

What was measured is printed. tests/cluster/test_engines.py does the same on a cluster.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
from engine_belongings import kill

from ctxflow import ContextExecutor
from ctxflow.testing.small_models import make_gguf
from in_flight_log import needlessly_broken, read_log
from llama_driver import WINDOW, asking, long_turns, open_numbers, right, turns_of
from llama_program import WHY_NOT, find_llama_server
from suite.depth import some

KINDS = ("evicted", "noticed", "server", "library", "terminated", "host", "warden")
TIMES = some(len(KINDS), deeply=20)
ROWS = some(40 * (TIMES + 2), deeply=5000)
"""At least: there are more until the log has a loss for each that was taken away."""
GRACE = 5.0


@pytest.fixture
def program(tmp_path):
    found = find_llama_server(tmp_path)
    if found is None:
        pytest.skip(WHY_NOT)
    return found


def parts_of(belongings, host):
    """The processes of a worker, by what they are; none if it has no server now."""
    lines = belongings.processes()
    # The warden first: its command line names the server's program too.
    marks = {"warden": "warden.py", "server": "bin/llama-server", "library": "(ctxflow-library)"}
    kinds = {
        pid: next((name for name, mark in marks.items() if mark in lines.get(pid, "")), "")
        for pid in belongings.tree(host)
    }
    found = {name: pid for pid, name in kinds.items() if name}
    return {"host": host, **found} if found.keys() == marks.keys() else {}


@pytest.mark.timeout(120 + 60 * TIMES)
def test_each_row_is_answered_once_whatever_is_taken_away(program, llama, belongings, tmp_path):
    ask = asking(program, make_gguf(llama, tmp_path / "random.gguf"))
    part, taken, answers = ROWS // (TIMES + 2), [], []

    leaving = set()

    def take_away(kind):
        hosts = sorted(pid for pid in executor.engine.worker_pids().values() if pid not in leaving)
        parts = next((parts for host in hosts if (parts := parts_of(belongings, host))), None)
        if parts is None:
            return
        host = parts["host"]
        if kind in ("evicted", "noticed", "terminated"):
            leaving.add(host)
        if kind == "terminated":  # As an administrator does: it may take as long as it needs.
            os.kill(host, signal.SIGTERM)
        elif kind in ("evicted", "noticed"):
            name = next(name for name, pid in executor.engine.worker_pids().items() if pid == host)
            assert executor.engine.evict(name, notice=GRACE if kind == "noticed" else None) == name
        else:
            tree = belongings.tree(parts[kind])
            kill(parts[kind])
            belongings.gone(tree)
        taken.append(kind)

    executor = ContextExecutor(workers=4)
    executor.run_dir = str(tmp_path / "run")
    enough = tmp_path / "enough"
    with executor:
        [log] = Path(executor.run_dir).rglob("events.jsonl")
        numbers, again = itertools.tee(open_numbers(ROWS, enough, answers))
        turns = (turns_of(number, ROWS) for number in again)
        for number, answer in ask.map(numbers, turns, order="completed"):
            assert right(number, answer, ROWS)
            answers.append(number)
            if len(taken) < TIMES and len(answers) >= part * (len(taken) + 1):
                take_away(KINDS[len(taken) % len(KINDS)])
            elif len(taken) == TIMES and not enough.exists() and len(read_log(log).losses) >= TIMES:
                enough.touch()
    found = read_log(log)
    print(json.dumps({"taken": taken, **found.told()}))
    assert len(answers) >= ROWS and sorted(answers) == list(range(len(answers)))
    assert len(found.losses) >= TIMES == len(taken)
    assert found.again <= found.broken, "no more than was in flight runs again"
    assert all(len(loss.broken) <= WINDOW for loss in found.losses)
    assert needlessly_broken(found, lambda row: long_turns(row, ROWS), GRACE) == []
    belongings.none_left()
