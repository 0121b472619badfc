"""Real engines on real TaskVine workers: llama.cpp's server, with its workers, or what they consist of, taken away.

What was measured is printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driver import HOSTS, INSIDE, TESTBED, Driver, left

from ctxflow.executors.protocol import Patience
from in_flight_log import InFlight, needlessly_broken, read_log
from llama_driver import WINDOW, long_turns
from suite.depth import some
from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

pytest.importorskip("gguf")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PROGRAM = INSIDE.parent / "llama_driver.py"
SITE = "/checkout/site-configs/testbed.toml"
WAYS = ("vacate", "server", "vine_worker", "vacate", "library", "stop", "fast", "host", "tree", "cut", "warden", "kill")
"""In this order, again and again: notice, at once without notice, suddenly in all ways; a host's network and power."""
EVICTIONS = some(5, deeply=20)
PARTS = EVICTIONS + 2
ROWS = some(80 * PARTS, deeply=5000)
"""At least: there are more until the last eviction, however long a busy machine takes for it."""
GRACE = 10.0  # MachineMaxVacateTime of the testbed's pool.
SILENT_SECONDS = Patience().ask + Patience().answer


class EngineRun:
    """A run of llama_driver.py in the testbed, in a folder that all hosts see."""

    def __init__(self, testbed: Testbed, model: Path) -> None:
        self._testbed = testbed
        self.gone: set[str] = set()  # Workers that were taken, and may not have noticed yet.
        self.folder = testbed.run("mktemp", "--directory", "/shared/engines.XXXXXX")
        self.outside = testbed.shared / Path(self.folder).name
        (self.outside / "model.gguf").write_bytes(model.read_bytes())

    def start(self, rows: int, *more: str) -> Driver:
        words = ["--directory", self.folder, "python", str(PROGRAM), f"{self.folder}/model.gguf", str(rows)]
        self.driver = Driver(TESTBED / "run", [*words, f"{self.folder}/answers.jsonl", "--site", SITE, *more])
        line = self.driver.line()
        assert line is not None, self.driver.said()
        self.directory, self.pid = self.outside / Path(line["directory"]).relative_to(self.folder), line["pid"]
        return self.driver

    def log(self) -> InFlight:
        return read_log(self.directory / "events.jsonl")

    def origin(self) -> float:
        """When the run's clock began, in seconds since 1970."""
        lines = (self.directory / "taskvine" / "staging.jsonl").read_text().splitlines()
        return next(float(line["unix"]) for line in map(json.loads, lines) if line["is"] == "origin")

    def look(self, host: str, names: set[str], *words: str) -> Any:
        """What victims_inside.py says on a host, of jobs or but for workers of these names."""
        command = ["python", str(INSIDE / "victims_inside.py"), ",".join(names), *words]
        return json.loads(self._testbed.run(*command, user="root", host=host))

    def kill(self) -> dict[str, Any]:
        """Kill the driver: after how long it and the jobs that had an engine are gone, and what is left then."""
        jobs = {job for host in HOSTS for _, job in self.look(host, set(), "list")}
        hosts, killed = ["submit", *HOSTS], time.time()
        self._testbed.run("kill", "-KILL", str(self.pid), user="root")
        with ThreadPoolExecutor() as several:
            looks = list(several.map(lambda host: self.look(host, jobs, "left", str(patience())), hosts))
        left = {host: look["left"] for host, look in zip(hosts, looks, strict=True) if look["left"]}
        return {"gone": max(look["time"] for look in looks) - killed, "left": left}

    def victim(self, *words: str) -> tuple[str, Any] | None:
        """Take the first host's victim that has one; the host, and what was told."""
        for host in HOSTS:
            if told := self.look(host, self.gone | self.log().idle, *words):
                return host, told
        return None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights, as llama.cpp reads it."""
    from ctxflow.testing.small_models import make_causal_lm, make_gguf

    folder = tmp_path_factory.mktemp("gguf")
    return make_gguf(make_causal_lm(folder / "model"), folder / "random.gguf")


@pytest.fixture
def run(testbed: Testbed, model: Path) -> Iterator[EngineRun]:
    started = EngineRun(testbed, model)
    yield started
    started.driver.close()
    testbed.run("rm", "-r", started.folder)


def whole(result: dict[str, Any], rows: int) -> None:
    """See that each row was answered once, and as a whole."""
    assert (result["done"], result["missing"], result["repeated"], result["wrong"]) == (rows, [], [], []), result


def seldom_again(found: InFlight, rows: int) -> None:
    """See that no more ran again than was in flight at the losses, and of what had notice nothing that could end."""
    assert found.again <= found.broken, found.told()
    assert all(len(loss.broken) <= WINDOW for loss in found.losses), found.told()
    assert needlessly_broken(found, lambda row: long_turns(row, rows), GRACE) == []


def take_away(testbed: Testbed, run: EngineRun, how: str) -> bool:
    """Take a worker, or a part of one, away; False if there is none with an engine."""
    found = run.victim("list")
    if found is None:
        return False
    host, workers = found
    name, job = workers[0]
    if how in ("cut", "kill"):
        testbed.command("host", how, host)
        time.sleep(8 if how == "cut" else 1)  # A shorter cut costs no worker.
        testbed.command("host", "restore", host)
        run.gone.update(name for name, _ in workers)
    elif how in ("vacate", "fast"):
        testbed.run("condor_vacate_job", *(["-fast"] if how == "fast" else []), job)
        run.gone.add(name)
    else:
        taken = run.victim(*(("tree", "0", "SIGSTOP") if how == "stop" else (how, "0")))
        if taken is not None and how not in ("server", "warden", "library"):
            run.gone.add(taken[1]["worker"])
        return taken is not None
    return True


@pytest.mark.release
def test_each_row_is_answered_once_whatever_is_taken_away(testbed: Testbed, run: EngineRun) -> None:
    driver = run.start(ROWS, "--until", f"{run.folder}/enough")
    part, taken = ROWS // PARTS, []
    while (line := driver.line()) is not None:
        if len(taken) < EVICTIONS and line.get("there") and line["done"] >= part * (len(taken) + 1):
            how = WAYS[len(taken) % len(WAYS)]
            if take_away(testbed, run, how):
                taken.append(how)
            if len(taken) == EVICTIONS:
                (run.outside / "enough").touch()
    assert driver.status() == 0, driver.said()
    found = run.log()
    print(json.dumps({"taken": taken, **found.told()}))
    rows = driver.last["done"]
    whole(driver.last, rows)
    assert rows >= ROWS and set(found.given) == set(range(rows))
    assert len(taken) == EVICTIONS and len(found.losses) >= EVICTIONS
    seldom_again(found, ROWS)
    testbed.eventually(lambda: not left(testbed))


@pytest.mark.release
def test_rows_are_whole_and_nothing_is_left_whoever_is_killed(testbed: Testbed, run: EngineRun) -> None:
    rows = 2000
    driver = run.start(rows)
    told: dict[str, Any] = {}

    def at_work(done: int) -> bool:
        # Not all four, which come back slowly on a busy machine: the rows would be done before.
        line = driver.newest()
        assert line.get("there", 0) >= 2 and done <= line["done"] < rows, (line, told)
        return True

    for kind in ("server", "warden", "library", "host", "vine_worker", "wrapper"):
        testbed.eventually(lambda: at_work(40 * (len(told) + 1)))
        before = len(run.log().losses)
        found = run.victim(kind, str(patience()))
        assert found is not None
        told[kind] = found[1]
        assert found[1]["gone"] is not None, found
        testbed.eventually(lambda before=before: len(run.log().losses) > before)
        loss = run.log().losses[before]
        told[kind]["noticed"] = round(run.origin() + loss.time - found[1]["time"], 2)
        told[kind]["broken"] = len(loss.broken)
    testbed.eventually(lambda: at_work(0))
    told["driver"] = run.kill()
    assert told["driver"]["left"] == {}
    seldom_again(run.log(), rows)
    print(json.dumps(told))
    driver.close()
    # Jobs that waited for a host when their driver was killed stay in the queue, as test_factory.py has it.
    testbed.clear()
    whole(run.start(rows).result(), rows)
    testbed.eventually(lambda: not left(testbed))
    # It is told: by its silence a death would be noticed no sooner.
    assert all(each["noticed"] < SILENT_SECONDS for kind, each in told.items() if kind != "driver")
