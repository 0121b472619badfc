"""What a run tells of each of its workers."""

from __future__ import annotations

import time
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors.kept_files import read_workers
from waiting import eventually


@context()
def place():
    return "there"


@batch_app(place(), batch_size=1)
def picky(_, items):
    print("row", *items)
    if items[0] == 3:
        raise ValueError("three is no number")
    return items


def test_each_worker_is_told_with_what_it_did_and_one_that_is_lost_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.time()
    with ContextExecutor(workers=1) as executor:
        run = executor.calls.run.directory
        assert sum(isinstance(each, Exception) for each in picky.map(range(5), on_error="return")) == 1
        [told] = eventually(
            lambda: [each for each in read_workers(run) if each["done"] == 4 and each["state"] == "idle"]
        )
        assert (told["worker"], told["tier"], told["job"], told["state"]) == ("local-1", "local", None, "idle")
        assert told["failed"] >= 1 and told["error"] == "ValueError: three is no number"
        assert round(begun, 1) <= told["joined"] <= round(time.time(), 1) and told["ended"] is None
        assert any("row 4" in path.read_text() for path in Path(told["log"]).iterdir())
        executor.engine.evict("local-1")
        gone, new = eventually(lambda: sorted(found, key=str) if len(found := read_workers(run)) == 2 else None)[::-1]
        gone, new = (gone, new) if gone["worker"] == "local-1" else (new, gone)
        assert (gone["state"], gone["done"]) == ("evicted", 4) and gone["ended"] >= gone["joined"]
        assert (new["worker"], new["done"], new["error"]) == ("local-2", 0, "")
    assert {each["state"] for each in read_workers(run)} == {"evicted", "ended"}
    assert (Path(run) / "workers.json").stat().st_mode & 0o777 == 0o600
