"""A real vLLM on workers that are taken away while rows are in flight.

One worker is evicted, and then loses its library process by kill -9. In depth there are four, which are also evicted
with notice, and lose vLLM's own process (as in test_engine_kills.py) and their host. What was measured is printed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_belongings import kill
from vllm_driver import WINDOW, asking, tokens_of

from ctxflow import ContextExecutor
from in_flight_log import needlessly_broken, read_log
from suite.depth import some
from waiting import eventually

KINDS = some(("evicted", "library"), deeply=("evicted", "noticed", "library", "engine", "host"))
TIMES = some(len(KINDS), deeply=20)
ROWS = some(WINDOW * 4 * (TIMES + 2), deeply=1000)
WORKERS = some(1, deeply=4)
GRACE = 30.0


@pytest.mark.timeout(300 + 120 * TIMES)
def test_each_row_is_answered_once_whatever_is_taken_away(engine_environment, llama, belongings, tmp_path):
    part = ROWS // (TIMES + 2)
    ask = asking(llama)
    answers = []

    def victims_of(kind):
        if kind == "host":
            return list(executor.engine.worker_pids().values())
        return belongings.of({"library": "(ctxflow-library)", "engine": "EngineCore"}[kind])

    def take_away(kind):
        """Answers of workers that are gone come too: who is to be taken away may only be starting."""
        if kind in ("evicted", "noticed"):
            eventually(lambda: executor.engine.evict(notice=GRACE if kind == "noticed" else None))
            return
        victims = belongings.tree(min(eventually(lambda: victims_of(kind))))
        kill(victims[0])
        belongings.gone(victims)

    executor = ContextExecutor(workers=WORKERS)
    executor.run_dir = str(tmp_path / "run")
    with executor:
        found = ask.map(range(ROWS), [tokens_of(number) for number in range(ROWS)], order="completed")
        for number, answer in found:
            answers.append((number, answer[0], answer[2]))
            times, rest = divmod(len(answers), part)
            if not rest and 1 <= times <= TIMES:
                take_away(KINDS[times % len(KINDS)])
        [log] = Path(executor.run_dir).rglob("events.jsonl")
    assert sorted(answers) == [(number, number, tokens_of(number)) for number in range(ROWS)]
    found = read_log(log)
    print(json.dumps({"times": TIMES, **found.told()}))
    assert found.again <= found.broken, "no more than was in flight runs again"
    assert all(len(loss.broken) <= WINDOW for loss in found.losses)
    assert needlessly_broken(found, lambda row: 0, GRACE) == []
    belongings.none_left()
