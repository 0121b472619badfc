"""A real vLLM on each of two workers, which are taken away in all ways while rows are in flight.

CTXFLOW_ENGINE_EVICTIONS says how often, by default once in each way: evicted with and without notice, and kill -9 of a
library process and of a host.
"""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

import pytest
from engine_belongings import kill
from vllm_driver import WINDOW, asking, tokens_of

from ctxflow import ContextExecutor

KINDS = ("evicted", "noticed", "library", "host")
TIMES = int(os.environ.get("CTXFLOW_ENGINE_EVICTIONS", len(KINDS)))
GRACE = 30.0


def attempts_of(log):
    """How often each item was given to a worker, by a run's event log."""
    given = collections.Counter()
    for line in log.read_text().splitlines()[1:]:
        for command in json.loads(line)["commands"]:
            if command["is"] == "Run":
                given.update(number for first, end in command["items"] for number in range(first, end))
    return given


@pytest.mark.timeout(300 + 120 * TIMES)
def test_each_row_is_answered_once_whatever_is_taken_away(engine_environment, llama, belongings, tmp_path):
    part = WINDOW * 4
    rows = part * (TIMES + 2)
    ask = asking(llama)
    answers = []

    def take_away(kind):
        if kind in ("evicted", "noticed"):
            assert executor.engine.evict(notice=GRACE if kind == "noticed" else None)
            return
        libraries, hosts = belongings.of("ctxflow.host.library"), executor.engine.worker_pids().values()
        victims = belongings.tree(min(libraries if kind == "library" else hosts))
        kill(victims[0])
        belongings.gone(victims)

    executor = ContextExecutor(workers=2)
    executor.run_dir = str(tmp_path / "run")
    with executor:
        found = ask.map(range(rows), [tokens_of(number) for number in range(rows)], order="completed")
        for number, answer in found:
            answers.append((number, answer[0], answer[2]))
            times, rest = divmod(len(answers), part)
            if not rest and 1 <= times <= TIMES:
                take_away(KINDS[times % len(KINDS)])
        [log] = Path(executor.run_dir).rglob("events.jsonl")
    assert sorted(answers) == [(number, number, tokens_of(number)) for number in range(rows)]
    again = sum(attempts_of(log).values()) - rows
    assert again <= TIMES * WINDOW, "no more than was in flight runs again"
    belongings.none_left()
