"""Acquiring workers the way a cluster's people would: squeezed, refused, in trouble, and given back.

factory_inside.py is the program whose workers these are, on the testbed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from driver import HOSTS, INSIDE, TESTBED, WORKERS, Driver, left, processes_left

from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

SITE = """
engine = "taskvine"
python_environment = "/opt/ctxflow"
"""
TIER = """
[[tiers]]
name = "{name}"
workers = {workers}
cores = 1
memory_gb = 2
disk_gb = 2
gpus = {gpus}
{more}
"""


def site(*tiers: str, start: str = SITE) -> str:
    """A site file."""
    return start + "".join(tiers)


def tier(name: str = "any", workers: int = 2, gpus: int = 1, more: str = "") -> str:
    """A tier of it."""
    return TIER.format(name=name, workers=workers, gpus=gpus, more=more)


TOLD_LATE = ("--explained-within", str(patience()))
"""Options of a run whose evictions are counted: the testbed's HTCondor may be slow to report one."""


class Bench:
    """Starts the program, in a folder that all hosts see."""

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        self.testbed, self.folder = testbed, folder
        self.drivers: list[Driver] = []
        self.inside = f"/shared/{folder.name}"
        folder.mkdir(mode=0o777, parents=True, exist_ok=True)
        folder.chmod(0o777)

    def run(self, text: str | None, *options: str, path: str = "") -> tuple[Driver, dict[str, Any]]:
        """Start it with a site file, and wait until it tells where it is."""
        if text is not None:
            path = f"{self.inside}/site.toml"
            (self.folder / "site.toml").write_text(text)
        command = ["python", "-u", str(INSIDE / "factory_inside.py"), "--site", path, "--folder", self.inside, *options]
        driver = Driver(TESTBED / "run", command)
        self.drivers.append(driver)
        about = driver.line()
        assert about is not None, driver.said()
        return driver, about

    def enough(self) -> None:
        """The program may end."""
        (self.folder / "enough").touch()

    @property
    def until(self) -> tuple[str, str]:
        """The options that make it go on until `enough`."""
        return "--until", f"{self.inside}/enough"


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[Testbed], Bench]]:
    made: list[Bench] = []

    def bench(testbed: Testbed) -> Bench:
        made.append(Bench(testbed, testbed.shared / f"factory-{time.time_ns()}"))
        return made[-1]

    yield bench
    for each in made:
        for driver in each.drivers:
            driver.close()


def all_right(result: dict[str, Any]) -> None:
    """See that every item has its result."""
    assert result["items"] and not result["wrong"] and not result["missing"], result


def answers(driver: Driver) -> None:
    """Wait until the run gets on."""
    assert driver.line()
    done = driver.last["done"]
    driver.until(lambda line: line["done"] > done + 10)


def kill_workers(testbed: Testbed, port: int) -> int:
    """End all processes of a run's workers, and count them; of a job that is to be removed there may be one besides."""
    killed = 0
    for host in HOSTS:
        words = ["python", "-c", WORKERS, "tree", str(port), "0"]
        while json.loads(testbed.run(*words, user="root", host=host))[1]:
            killed += 1
    return killed


def nothing_left(testbed: Testbed) -> None:
    """See that no job and no process is there."""

    def nothing() -> bool:
        found = left(testbed)
        assert not found, found
        return True

    testbed.eventually(nothing)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_second_user_squeezes_the_workers_and_gives_them_back(
    testbed: Testbed, make: Callable[[Testbed], Bench], tmp_path: Path
) -> None:
    bench = make(testbed)
    driver, _ = bench.run(None, *bench.until, *TOLD_LATE, "--seconds", "0.05", "--batch", "4", path=FOUR_TIERS)
    driver.until(lambda line: line["there"] == 8)
    # Two of the eight GPUs are on host3, the others on these two.
    whole = {"executable": "/bin/sleep", "arguments": "600", "request_cpus": 6, "request_memory": "1GB"}
    testbed.submit({**whole, "requirements": 'regexp("^host[12]", Machine)'}, count=2, user="bob")
    driver.until(lambda line: line["there"] == 2)
    done = driver.last["done"]
    driver.until(lambda line: line["done"] > done + 100)
    testbed.run("condor_rm", "bob", user="root")
    driver.until(lambda line: line["there"] == 8)
    done = driver.last["done"]
    driver.until(lambda line: line["done"] > done + 500)
    bench.enough()
    result = driver.result()
    all_right(result)
    assert len(result["tiers"]) == 4 and result["evicted"] == 6, result
    assert eight_two_eight(result["report"]["workers"]["workers"]), result["report"]["workers"]
    tiers = result["report"]["tiers"]
    assert sum(tier["evicted"] for tier in tiers.values()) == 6, tiers
    nothing_left(testbed)
    testbed.run("cp", "-r", result["directory"], f"{bench.inside}/run")
    words = [sys.executable, "-m", "ctxflow", "report", str(bench.folder / "run"), "--output", str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert {"workers_and_items.png", "lifetimes.png"} <= drawn, drawn


FOUR_TIERS = "/checkout/site-configs/testbed-tiers.toml"


def eight_two_eight(changes: list[tuple[float, int]]) -> bool:
    """Whether there were eight workers, then two, then eight again."""
    wanted = iter((8, 2, 8))
    target = next(wanted)
    for _, there in changes:
        if there == target:
            target = next(wanted, -1)
    return target == -1


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_two_hundred_workers_asked_of_a_pool_that_has_twelve(
    testbed: Testbed, make: Callable[[Testbed], Bench]
) -> None:
    bench = make(testbed)
    driver, _ = bench.run(site(tier(workers=200)), *bench.until, "--seconds", "0.2")
    driver.until(lambda line: line["there"] == 12)
    begun = driver.last
    driver.until(lambda line: line["time"] > begun["time"] + 12)
    bench.enough()
    result = driver.result()
    all_right(result)
    counts = result["counts"]["any"]
    assert counts["submitted"] <= 12 + 20 + 12, counts
    minutes = result["seconds"] / 60
    assert counts["submissions"] <= 6 and counts["queries"] <= 4 + 4 * minutes, counts
    assert result["joined"] == 12 and set(result["hosts"]) == set(HOSTS), result
    nothing_left(testbed)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_what_a_vacated_worker_has_done_arrives_and_is_not_done_again(
    testbed: Testbed, make: Callable[[Testbed], Bench]
) -> None:
    bench = make(testbed)
    driver, _ = bench.run(site(tier(workers=4)), *bench.until, *TOLD_LATE, "--seconds", "0.2", "--batch", "5")
    driver.until(lambda line: line["there"] == 4)
    for number in range(1, 5):
        job = driver.until(lambda line: line["jobs"])["jobs"][0]
        testbed.run("condor_vacate_job", job)
        driver.until(lambda line, number=number: line["lost"] >= number)
        driver.until(lambda line: line["there"] == 4)
    bench.enough()
    result = driver.result()
    all_right(result)
    assert (result["again"], result["retried"], result["evicted"], result["lost"]) == (0, 0, 4, 4), result
    assert result["report"]["items"]["done"] == result["items"]
    nothing_left(testbed)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_driver_that_is_killed_leaves_no_worker(testbed: Testbed, make: Callable[[Testbed], Bench]) -> None:
    bench = make(testbed)
    driver, about = bench.run(site(tier(workers=20)), *bench.until)
    driver.until(lambda line: line["there"] == 12)
    testbed.run("kill", f"-{signal.SIGKILL.value}", str(about["pid"]))
    # Jobs that waited begin now that there is room, and find nobody.
    waiting = ("condor_q", "-constraint", "JobStartDate =?= undefined", "-af:j", "JobStatus")
    testbed.eventually(lambda: not testbed.run(*waiting) and not processes_left(testbed))
    testbed.run("bash", "-c", f"condor_rm -constraint 'CtxflowRun == \"{about['run']}\"' || true")
    nothing_left(testbed)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_by_hand_it_works_the_same_way(testbed: Testbed, make: Callable[[Testbed], Bench]) -> None:
    bench = make(testbed)
    driver, about = bench.run(site(tier(workers=0)), "--items", "60", "--seconds", "0.05")
    command = json.loads(testbed.run("ctxflow", "worker-command", "--json", about["run"]))["command"]
    worker = Driver(TESTBED / "run", command)
    try:
        result = driver.result()
    finally:
        worker.close()
    all_right(result)
    assert result["joined"] == 1 and result["hosts"] == {"submit": 60}, result
    nothing_left(testbed)


# Fills the disk of the schedd's queue, and at once what HTCondor frees meanwhile: in 50 ms it has put jobs there.
FILLING = """
import os, time
fill = os.open("/var/spool/fill", os.O_WRONLY | os.O_APPEND)
while os.path.exists("/run/filling"):
    try:
        os.write(fill, bytes(4096))
    except OSError:
        time.sleep(0.001)
"""
FILL = (
    "touch /run/filling; mount -o remount,size=$(($(du -sk /var/spool | cut -f1) + 64))k /var/spool;"
    " cat /dev/zero >/var/spool/fill 2>/dev/null;"
    f" python3 -c '{FILLING}' >/dev/null 2>&1 &"
)
FREE = "rm /run/filling; sleep 0.2; rm -f /var/spool/fill; mount -o remount,size=50% /var/spool"


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_trouble_is_told_and_the_run_goes_on_when_it_is_over(
    testbed: Testbed, make: Callable[[Testbed], Bench]
) -> None:
    """Each is told in a sentence within 30 s."""
    bench = make(testbed)
    late = f"{bench.inside}/environment"
    start = SITE.replace("/opt/ctxflow", late)
    picky = tier("picky", workers=1, more="requirements = 'Machine == \"host9.testbed\"'")
    driver, about = bench.run(site(tier("late", workers=1), picky, start=start), *bench.until, "--seconds", "0.03")
    said = driver.until_said("no machine will do")
    assert "tier picky" in said and "host9.testbed" in said
    said = driver.until_said("tier late: workers end before they join")
    assert f"{late}/bin/python" in said
    (bench.folder / "environment").symlink_to("/opt/ctxflow")
    whole_again(driver)
    before = len(driver.errors)
    with trouble(testbed, "condor_off -fast -daemon schedd", "condor_on -daemon schedd"):
        assert kill_workers(testbed, about["port"]), "there was no worker"
        driver.until_said("its schedd does not answer", since=before)
    whole_again(driver)
    bench.enough()
    all_right(driver.result())
    nothing_left(testbed)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_full_disk_of_the_schedd_is_told_and_the_run_goes_on_when_there_is_room(
    testbed: Testbed, make: Callable[[Testbed], Bench]
) -> None:
    """It is told within 30 s. The jobs are long, so that no page that is left in the queue's log has room for them."""
    bench = make(testbed)
    long = f"submit = {{'+Filler' = '\"{'x' * 60_000}\"'}}"
    with trouble(testbed, FILL, FREE):
        driver, _ = bench.run(site(tier(more=long)), "--items", "60", "--seconds", "0.05")
        driver.until_said("its schedd ")  # It cannot keep jobs; or it ended over that, and is away.
        assert not driver.newest().get("there")
    all_right(driver.result())
    nothing_left(testbed)


@contextlib.contextmanager
def trouble(testbed: Testbed, begin: str, end: str) -> Iterator[None]:
    """What a shell command of root's begins, and another ends; if it is not told, HTCondor's own words are."""
    testbed.run("bash", "-c", begin, user="root")
    try:
        yield
    except AssertionError as error:
        words = "df -k /var/spool; cd /var/log/condor; tail -n 40 SchedLog; tail -n 10 MasterLog; tail -n 15 ShadowLog"
        said = testbed.command("run", "--user", "root", "bash", "-c", words, check=False).stdout
        raise AssertionError(f"{error}; {said}") from None
    finally:
        testbed.run("bash", "-c", end, user="root")


def whole_again(driver: Driver) -> None:
    """Wait until the worker that is wanted is there, beside whom there may be one that is to be removed, and works."""
    driver.newest()
    driver.until(lambda line: line["counts"]["late"]["joined"] == 1)
    answers(driver)
