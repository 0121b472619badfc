"""A run goes on, and its rows are whole, when something around it is wrong: clocks, disks, limits, the submit host.

The run is chaos_inside.py's. What is wrong comes while it goes on, but for clocks that were wrong before, and is told
in a line where it costs workers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driver import HOSTS, INSIDE, ROOT, TESTBED, WORKERS, Driver

from waiting import eventually

if TYPE_CHECKING:
    from conftest import Testbed

SITE = "/checkout/site-configs/testbed.toml"
ITEMS = 3000


@pytest.fixture
def clocks(any_testbed: Testbed) -> Iterator[Testbed]:
    """A pool whose hosts have clocks of their own; ended afterwards, since HTCondor waits where a clock went back."""
    any_testbed.command("up", "--clocks", limit=600)
    yield any_testbed
    any_testbed.command("down")


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    """Start a run of so many workers, each item of which takes so many seconds.

    Its last items wait for the loss of all but one of `losses` workers.
    """
    drivers = []

    def started(workers: int = 6, seconds: float = 0.04, losses: int = 0, site: str = SITE) -> Driver:
        words = ["--site", site, "--workers", str(workers), "--items", str(ITEMS), "--losses", str(losses)]
        words += ["--seconds", str(seconds)]
        drivers.append(Driver(TESTBED / "run", ["python", f"{INSIDE}/chaos_inside.py", *words]))
        return drivers[-1]

    yield started
    for driver in drivers:
        driver.close()


def check_rows(result: dict[str, Any]) -> dict[str, Any]:
    """See that each item was answered once and rightly; gives the run's counts."""
    assert not result["missing"], f"items without an answer: {result['missing']}"
    assert not result["repeated"], f"items with several answers: {result['repeated']}"
    assert not result["wrong"], f"items with a wrong answer: {result['wrong']}"
    status: dict[str, Any] = result["status"]
    assert (status["submitted"], status["done"], status["dead"]) == (ITEMS, ITEMS, 0), status
    return status


def set_clocks(testbed: Testbed, **seconds: float) -> None:
    """Have hosts' clocks be off from the start: HTCondor's daemons begin anew with them."""
    for host, off in seconds.items():
        testbed.command("host", "clock", host, "--", str(off))
    time.sleep(2)  # Programs look once a second.
    for host in seconds:
        testbed.run("condor_restart", user="root", host=host)
    testbed.eventually(lambda: len(testbed.run("condor_status", "-af", "Name").split()) == len(HOSTS))


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("clocks")
def test_clocks_that_are_minutes_apart_cost_nothing(clocks: Testbed, start: Callable[..., Driver]) -> None:
    set_clocks(clocks, host1=420, host2=-300, submit=120)  # Before and behind the driver's, which is the submit host's.
    driver = start()
    result = driver.result()
    status = check_rows(result)
    assert (status["joined"], status["lost"], status["crashes"]) == (6, 0, 0), driver.said()
    hosts = {each["host"] for each in result["workers"]}
    assert {"host1", "host2"} & hosts, "those whose clocks are off took part"


@pytest.mark.release
@pytest.mark.parametrize("step", [-3600, 3600])
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("clocks")
def test_a_clock_that_is_set_while_a_run_goes_on_costs_no_row(
    clocks: Testbed, start: Callable[..., Driver], step: int
) -> None:
    driver = start()
    driver.until(lambda line: line.get("there") == 6)
    for host in ("submit", "host1"):
        clocks.command("host", "clock", host, "--", str(step))
    result = driver.result()
    status = check_rows(result)
    assert status["crashes"] == 0 and "died" not in driver.said(), driver.said()
    if step < 0:  # Forward, TaskVine and HTCondor, which go by the clock, take it for an hour of silence.
        assert status["lost"] == 0, driver.said()
    else:
        unexplained = [each for each in result["workers"] if "lost" in each and not each["evicted"]]
        assert not unexplained or "is gone" in driver.said(), driver.said()


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_queue_that_takes_few_jobs_lends_few_workers_and_says_why(
    testbed: Testbed, start: Callable[..., Driver]
) -> None:
    testbed.command("host", "limit", "submit", "2")
    try:
        driver = start(seconds=0.02)
        result = driver.result()
    finally:
        testbed.command("host", "restore", "submit")
    status = check_rows(result)
    assert status["joined"] == 2, driver.said()
    assert re.search(r"tier gpu: .*MAX_JOBS_PER_(OWNER|SUBMISSION)", driver.said()), driver.said()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_workers_that_are_suspended_for_a_moment_go_on(testbed: Testbed, start: Callable[..., Driver]) -> None:
    driver = start()
    driver.until(lambda line: line.get("there") == 6)

    def activities() -> set[str]:
        return set(testbed.run("condor_status", "-constraint", 'State == "Claimed"', "-af", "Activity").split())

    testbed.run("condor_suspend", "-all")
    try:
        testbed.eventually(lambda: activities() == {"Suspended"})
        time.sleep(2)  # Longer than any process of a worker waits at once.
    finally:
        testbed.run("condor_continue", "-all")
    status = check_rows(driver.result())
    assert (status["joined"], status["lost"]) == (6, 0), driver.said()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_full_disk_costs_its_host_alone_and_is_told(testbed: Testbed, start: Callable[..., Driver]) -> None:
    driver = start(losses=2)
    words = ["python", "-c", WORKERS, "list", str(driver.line()["port"]), "0"]
    driver.until(lambda line: line.get("there") == 6)
    full = next(host for host in HOSTS if json.loads(testbed.run(*words, user="root", host=host))[1])
    testbed.command("host", "fill", full)
    try:
        result = driver.result()
    finally:
        testbed.command("host", "restore", full)
    status = check_rows(result)
    lost = {each["host"] for each in result["workers"] if "lost" in each}
    assert (lost, status["crashes"]) == ({full}, 0)
    told = rf"worker on {full} \(tier gpu, job \S+ is gone: its scratch directory has 0\.0 GB free"
    assert re.search(told, driver.said()), driver.said()


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_submit_host_that_is_cut_off_for_a_minute_goes_on(testbed: Testbed, start: Callable[..., Driver]) -> None:
    driver = start()
    driver.until(lambda line: line.get("there") == 6)
    testbed.command("host", "cut", "submit")
    try:
        time.sleep(60)
    finally:
        testbed.command("host", "restore", "submit")
    status = check_rows(driver.result())
    assert status["lost"] >= 6, "TaskVine lost them all"
    assert len(re.findall(r"the worker on host\d \(tier gpu, job \d+\.\d+\) is gone", driver.said())) >= 6


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_schedd_that_hangs_stops_nobody_else(testbed: Testbed, start: Callable[..., Driver]) -> None:
    driver = start(seconds=0.12)
    port = str(driver.line()["port"])
    driver.until(lambda line: line.get("there") == 6)
    [schedd] = testbed.run("pgrep", "-x", "condor_schedd", user="root").split()
    done = set()

    def given_up() -> bool:
        done.add(driver.newest()["done"])
        return "its schedd does not answer" in driver.said()

    testbed.run("kill", "-STOP", schedd, user="root")
    try:
        for host in HOSTS:  # So that others are asked for.
            testbed.run("python", "-c", WORKERS, "tree", port, "0", user="root", host=host)
        eventually(given_up, what=driver.said)
    finally:
        testbed.run("kill", "-CONT", schedd, user="root")
    check_rows(driver.result())
    # Batches of 50 end every few seconds, 11 as a rule before the request is given up, and one or two before it begins.
    assert len(done) > 5, f"answers are handled while it is asked: {sorted(done)} were done"
    assert driver.said().count("its schedd does not answer") == 1, driver.said()


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_schedd_that_restarts_costs_no_worker(testbed: Testbed, start: Callable[..., Driver]) -> None:
    """Jobs survive that; so do their workers, also when they would have had to join long ago."""
    join_seconds = 30
    text = (ROOT / "site-configs" / "testbed.toml").read_text()
    site = testbed.shared / "schedd-restarts.toml"
    site.write_text(text.replace("[taskvine]", f"join_timeout = {join_seconds}\n\n[taskvine]", 1))
    driver = start(seconds=0.2, site=f"/shared/{site.name}")
    driver.until(lambda line: line.get("there") == 6)
    for _ in range(3):
        testbed.run("condor_restart", "-fast", "-daemon", "schedd", user="root")
        testbed.eventually(lambda: testbed.running("alice") == 6)
    restarted = time.monotonic()
    status = check_rows(driver.result())
    assert time.monotonic() > restarted + join_seconds, "it ended too soon to tell"
    assert (status["joined"], status["lost"]) == (6, 0), driver.said()
    assert "given up" not in driver.said(), driver.said()
    site.unlink()


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [("dev", "lo"), ("unreachable",)], ids=["dropped", "refused"])
def test_workers_that_cannot_reach_one_another_get_files_from_the_driver(
    testbed: Testbed, start: Callable[..., Driver], how: tuple[str, ...]
) -> None:
    """Whether a firewall drops what goes between them, or refuses it."""

    def closed(verb: str) -> None:
        for host in HOSTS:
            for number, other in enumerate(HOSTS, 1):
                if other != host:
                    where = [f"10.77.0.1{number}/32"]
                    words = [*where, *how] if how[0] == "dev" else [*how, *where]
                    testbed.run("ip", "route", verb, *words, user="root", host=host)

    closed("add")
    try:
        driver = start()
        result = driver.result()
    finally:
        closed("del")
    status = check_rows(result)
    assert (status["joined"], status["lost"]) == (6, 0), driver.said()
    hosts = {each["host"] for each in result["workers"]}
    told = re.findall(r"workers on (\S+) and (\S+) cannot send each other files", driver.said())
    assert len(hosts) > 1 and told and len(set(map(frozenset, told))) == len(told), driver.said()
