"""Many items on workers that are taken away all the time, in every way there is: nothing is lost, nothing is twice.

chaos_inside.py is the run, on the testbed.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driver import HOSTS, INSIDE, WORKERS, Driver, left

from suite.depth import some
from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

PROGRAM = ["python", "-u", str(INSIDE / "chaos_inside.py")]
COMMAND = [*PROGRAM, "--site", "/checkout/site-configs/testbed.toml"]
POLICIES = [*PROGRAM, "--site", "/checkout/site-configs/testbed-policies.toml", "--workers", "0"]
ONE_WORKER = ["vacate", "vacate -fast", "tree", "pid", "stop"]
WHOLE_HOST = ["cut", "kill"]
WAYS = {*ONE_WORKER, *WHOLE_HOST}
ONE_SECONDS = 1.5  # Between one worker that is taken and the next, on average.
HOST_SECONDS = (4.0, 8.0)
BROKEN_SECONDS = {"cut": (7.0, 12.0), "kill": (1.0, 6.0)}  # A cut that is shorter costs no worker.
LIMIT = 700


def shuffled_again_and_again(ways: list[str], luck: random.Random) -> Iterator[str]:
    """All ways in a random order, then all in another, without end."""
    while True:
        yield from luck.sample(ways, len(ways))


class Chaos:
    """Takes a run's workers away, until it is stopped.

    :ivar acts: what was done: (seconds since 1970, how, names of the workers that it took).
    """

    def __init__(self, testbed: Testbed, port: int, seed: int) -> None:
        self.acts: list[tuple[float, str, list[str]]] = []
        self.errors: list[str] = []
        self._testbed, self._port = testbed, port
        self._stop = threading.Event()
        kinds = [(self._take_worker, ONE_WORKER), (self._break_host, WHOLE_HOST)]
        self._threads = [
            threading.Thread(target=self._guarded, args=(*kind, random.Random(seed + number)), daemon=True)
            for number, kind in enumerate(kinds)
        ]
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """Stop, when what was broken is mended."""
        self._stop.set()
        for each in self._threads:
            each.join()

    def _guarded(self, kind: Any, ways: list[str], luck: random.Random) -> None:
        """Do it in each way once before any comes again, and try again what could not be done."""
        for how in shuffled_again_and_again(ways, luck):
            done = False
            while not done:
                if self._stop.wait(0.2):
                    return
                try:
                    done = kind(how, luck)
                except (
                    AssertionError,
                    subprocess.TimeoutExpired,
                ) as error:  # On a host that is dead, or died meanwhile, nothing can be done.
                    self.errors.append(str(error)[-200:])

    def _take_worker(self, how: str, luck: random.Random) -> bool:
        """Take one worker, some time later; False if there is none, or it is to stop."""
        if self._stop.wait(luck.expovariate(1 / ONE_SECONDS)):
            return False
        return any(self._take_one(host, how, luck.random()) for host in luck.sample(HOSTS, len(HOSTS)))

    def _take_one(self, host: str, how: str, chance: float) -> bool:
        """Take one of a host's workers; False if it has none."""
        if how in ("tree", "pid", "stop"):
            now, taken = self._workers(host, how, chance)
        else:
            _, there = self._workers(host, "list", 0)
            taken = there[int(chance * len(there)) :][:1]
            now = time.time()
            for each in taken:
                self._testbed.run("condor_vacate_job", *how.split()[1:], each["job"])
        if taken:
            self.acts.append((now, how, [each["worker"] for each in taken]))
        return bool(taken)

    def _break_host(self, how: str, luck: random.Random) -> bool:
        """Break one host, some time later, and mend it; False if none has workers, or it is to stop."""
        if self._stop.wait(luck.uniform(*HOST_SECONDS)):
            return False
        for host in luck.sample(HOSTS, len(HOSTS)):
            _, there = self._workers(host, "list", 0)
            if there:
                break
        else:
            return False
        try:
            self._testbed.command("host", how, host)
            self.acts.append((time.time(), how, [each["worker"] for each in there]))
            time.sleep(luck.uniform(*BROKEN_SECONDS[how]))
        finally:
            self._testbed.command("host", "restore", host)
        return True

    def _workers(self, host: str, how: str, chance: float) -> tuple[float, list[dict[str, str]]]:
        words = [how, str(self._port), str(chance)]
        now, told = json.loads(self._testbed.run("python", "-c", WORKERS, *words, user="root", host=host))
        return now, [each for each in told if each["worker"]]


def unleash(testbed: Testbed, command: list[str], seed: int, losses: int) -> dict[str, Any]:
    """Have a run go through chaos to its end; gives its last line, with `acts`, `status_code` and `said` added.

    Its last item waits until so many workers are lost and all ways were tried.
    """
    from conftest import TESTBED

    enough = testbed.shared / f"enough-{time.time_ns()}"
    driver = Driver(TESTBED / "run", [*command, "--until", f"/shared/{enough.name}"])
    chaos = None
    try:
        run = driver.line()
        assert run is not None, f"the run did not start: {driver.said()}"
        deadline = time.monotonic() + patience(LIMIT)
        while (line := driver.line()) is not None:
            assert time.monotonic() < deadline, f"the run does not end: {line}; {driver.said()}"
            if chaos is None and line.get("there"):
                chaos = Chaos(testbed, run["port"], seed)
            if chaos is not None and line.get("lost", 0) >= losses and {how for _, how, _ in chaos.acts} == WAYS:
                enough.touch()
        result = {"acts": [], "errors": [], **driver.last, "status_code": driver.status(), "said": driver.said()}
    finally:
        if chaos is not None:
            chaos.stop()
        driver.close()
        enough.unlink(missing_ok=True)
    return {**result, "acts": chaos.acts, "errors": chaos.errors} if chaos else result


def check(result: dict[str, Any], items: int, losses: int) -> None:
    """See that a run answered all and lost enough."""
    assert result["status_code"] == 0, f"the run ended with {result['status_code']}: {result['said']}"
    assert not result["missing"], f"items without an answer: {result['missing']}"
    assert not result["repeated"], f"items with several answers: {result['repeated']}"
    assert not result["wrong"], f"items with a wrong answer: {result['wrong']}"
    status = result["status"]
    assert (status["submitted"], status["done"], status["dead"], status["cancelled"]) == (items, items, 0, 0), status
    assert status["lost"] >= losses, f"only {status['lost']} workers were lost: {summary(result)}"
    ways = {how for _, how, _ in result["acts"]}
    assert ways == WAYS, f"not done: {WAYS - ways}; {result['errors']}"
    for text in (result["said"], result["manager"]):
        assert "Traceback" not in text, text


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Losses by kind, and seconds from the act to the scheduler's knowing: median and longest."""
    lost = {each["worker"]: each for each in result.get("workers", []) if "lost" in each}
    found: dict[str, Any] = {}
    for when, how, names in result["acts"]:
        entry = found.setdefault(how, {"acts": 0, "unknown": 0, "evicted": 0, "seconds": []})
        entry["acts"] += 1
        for name in names:
            each = lost.pop(name, None)
            if each is None:
                entry["unknown"] += 1
            else:
                entry["evicted"] += each["evicted"]
                entry["seconds"].append(round(each["lost"] - when, 2))
    for entry in found.values():
        times = sorted(entry["seconds"])
        entry.update(losses=len(times), median=statistics.median(times) if times else None, longest=times[-1:])
    return {**found, "other": list(lost.values())}


def nothing_left(testbed: Testbed) -> None:
    """Wait until no job and no process of the run is left."""
    remains: list[dict[str, Any]] = []

    def clean() -> bool:
        remains.append(left(testbed))
        return not remains[-1]

    with contextlib.suppress(AssertionError):
        testbed.eventually(clean, within=180)  # HTCondor takes a minute to give up a job on a host that was killed.
    assert clean(), f"left after the run: {remains[-1]}"


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_every_item_is_answered_once_while_workers_are_lost_in_every_way(testbed: Testbed) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    items, losses = some((5_000, 15), deeply=(14_000, 40))
    # The items are spread over some more, so that there is work until the last of them.
    result = unleash(testbed, [*COMMAND, "--items", str(items), "--losses", str(losses + 6)], seed, losses)
    print(json.dumps(summary(result)))
    check(result, items, losses)
    nothing_left(testbed)


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_so_it_is_with_the_policies_of_all_papers_at_once(testbed: Testbed) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    result = unleash(testbed, [*POLICIES, "--items", "8000", "--losses", "26"], seed, losses=24)
    print(json.dumps(summary(result)))
    check(result, 8_000, losses=24)
    nothing_left(testbed)
