"""The factory as people meet it: a process with real signals, runs that speak to it, and real worker processes.

The runs are this test's: they have all that a run shows to a factory, and a program for workers that sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import forked
from ctxflow.errors import CtxflowError
from ctxflow.factory.exchange import FactoryClient, RunFiles, news_file, wanted_file
from ctxflow.factory.run_files import Connection, PublishedRun, live_runs, only_factory, write_private
from ctxflow.factory.served_run import ServedRun
from ctxflow.factory.service import Service
from ctxflow.factory.tier_providers import check_site
from ctxflow.ownership import birth_of
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from waiting import eventually, exited, patience

SITE = """
name = "lab"
engine = "taskvine"
acquire = "factory"
"""
TIER = """
[[tiers]]
name = "{name}"
provider = "local"
workers = {workers}
"""


class Live:
    """A run that has its workers from a factory.

    :param pid: its driver's process.
    """

    def __init__(
        self, directory: Path, name: str, tiers=("a10",), site="lab", pid=None, worker="exec sleep 600"
    ) -> None:
        directory = directory / name
        directory.mkdir()
        self.directory = directory
        program, password = str(directory / "ctxflow.pyz"), str(directory / "password")
        write_private(program, worker)
        write_private(password, "secret")
        commands, variables = {tier: ["sh", program] for tier in tiers}, {tier: [] for tier in tiers}
        pid = os.getpid() if pid is None else pid
        where = (name, socket.gethostname(), pid, str(directory), "127.0.0.1", 1, password, program)
        born = birth_of(pid) or ""
        self.connection = Connection(PublishedRun(*where, commands, variables, "sh", False, "factory", born))
        self.client = FactoryClient(name, site, lambda: None)
        self.client.start()
        self.news = []
        self.joined = set()  # Tier and job of those whose workers live, as far as was looked.

    def jobs(self, tier="a10"):
        """The jobs whose processes live, by their scratch directories."""
        place = f"{self.directory}/taskvine/jobs/{tier}/"
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (cwd := process.cwd()).startswith(place):
                    found[cwd.removeprefix(place)] = process
        for name, job in list(self.joined):
            if name == tier and job not in found:
                self.joined.remove((name, job))
                self.client.disconnected(name, job)
        return found

    def has(self, count, tier="a10"):
        """Wait until it has so many workers, and have them join."""
        jobs = eventually(
            lambda: (len(found := self.jobs(tier)) == count and found) or count == 0, what=f"{count} workers"
        )
        for job in jobs if count else ():
            self.joined.add((tier, job))
            self.client.joined(tier, job)
        return set(jobs) if count else set()

    def heard(self, state):
        """News of that state so far."""
        self.news += self.client.take()
        return [change for _, change in self.news if change.state == state]

    def end(self):
        self.client.stop()
        self.connection.close()


class Factory:
    """A `ctxflow factory`, and its lines."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "ctxflow", "factory", *words]
        self.process = forked.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def says(self, text: str, count: int = 1) -> str:
        """The last line with a text, once there are so many."""
        return eventually(
            lambda: len(found := [line for line in list(self.lines) if text in line]) >= count and found[-1],
            what=lambda: f"{text!r} among {self.lines}",
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = exited(self.process)
        self._reader.join()
        if not self.process.stderr.closed:
            self.process.stderr.close()
        return status


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    place = tmp_path / "runtime"
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("HOME", str(place / "home"))
    return place / "ctxflow"


@pytest.fixture
def site(tmp_path):
    def write(*tiers: tuple[str, int], more: str = "") -> str:
        path = tmp_path / "lab.toml"
        text = SITE + more + "".join(TIER.format(name=name, workers=workers) for name, workers in tiers)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        return str(path)

    return write


@pytest.fixture
def start():
    """Starts factories, and ends those that are left."""
    with contextlib.ExitStack() as last:

        def start(*words: str) -> Factory:
            factory = Factory(*words)
            last.callback(factory.end)
            return factory

        yield start


@pytest.fixture
def live(tmp_path):
    """Begins runs, and ends those that are left, with what is left of their workers."""
    with contextlib.ExitStack() as last:

        def begin(name: str, **options) -> Live:
            run = Live(tmp_path, name, **options)
            last.callback(lambda: [process.kill() for process in run.jobs().values()])
            last.callback(run.end)
            return run

        yield begin


def test_runs_share_and_nothing_is_left(site, start, live):
    one = live("one")
    one.client.hold("a10", 4)
    factory = start(site(("a10", 4)))
    first = one.has(4)
    factory.says("a10, run one: asked for 4 workers")
    two = live("two")
    two.client.hold("a10", 3)
    both = two.has(2)
    assert len(eventually(lambda: len(jobs := one.jobs()) == 2 and set(jobs)) - first) == 0
    # To the run they were evicted, which nobody in it is to blame for.
    eventually(lambda: len(one.heard("evicted")) == 2)
    assert {change.job for change in one.heard("evicted")} < first
    factory.says("run one: wants 4, and gets 2: 2 runs share 4")
    factory.says("run two: wants 3, and gets 2: 2 runs share 4")
    factory.says("run one: gives 2 running workers")
    one.end()
    assert two.has(3) > both
    factory.says("run one: nothing of it is left")
    assert one.jobs() == {}
    left = set(two.jobs())
    assert factory.end() == 0
    assert two.jobs() == {}
    assert "nothing is left" in factory.lines[-1]
    eventually(lambda: {change.job for change in two.heard("evicted")} == left)


def test_a_run_is_obeyed(site, start, live):
    run = live("one")
    factory = start(site(("a10", 9)))
    run.client.hold("a10", 2)
    jobs = sorted(run.has(2))
    run.client.hold("a10", 1)
    run.client.remove("a10", jobs[0])
    assert eventually(lambda: len(left := run.jobs()) == 1 and set(left)) == {jobs[1]}
    assert eventually(lambda: run.heard("ended"))[0].job == jobs[0]
    run.jobs()[jobs[1]].kill()  # A worker that ends is replaced.
    [another] = eventually(lambda: (found := set(run.jobs())) - {jobs[1]} and found)
    assert another not in jobs
    run.client.hold_none()
    assert factory.end(signal.SIGINT) == 130


def test_workers_are_asked_for_where_a_run_wants_them(live):
    """Also by a factory that begins later, and when the run thinks otherwise."""
    run = live("one")
    run.client.exclude("a10", ["n1", "n2"])
    files = RunFiles("one")
    wishes = eventually(lambda: (found := files.read()) and found.excluded and found)
    [found] = live_runs()
    served = ServedRun(found, wishes, files, threading.Lock(), lambda *said: None, lambda: None)
    served.lend(Tier(name="a10", provider="local"), 60)
    asks_for = served._tiers["a10"].acquirer._tiers["a10"]
    assert asks_for.job.excluded == ("n1", "n2")
    served.lend(Tier(name="a10", provider="local", cores=7), 60)  # As the site file says from now on.
    assert (asks_for.job.cores, asks_for.job.excluded) == (7, ("n1", "n2"))
    run.client.exclude("a10", [])
    eventually(lambda: served.poll() or asks_for.job.excluded == ())
    served.end()


def test_a_tier_that_a_run_does_not_know_keeps_no_other_from_it(live):
    run = live("one", tiers=("a10",))
    run.client.hold("a10", 1)
    tiers = [Tier(name=name, provider="local") for name in ("new", "a10")]
    service = Service(lambda: Site(name="lab", engine="taskvine", acquire="factory", tiers=tiers), lambda *said: None)
    serving = threading.Thread(target=service.run)
    serving.start()
    try:
        run.has(1)
        assert service.runs() == 1 and not run.jobs("new")
    finally:
        service.stop()
        serving.join()


def test_a_provider_that_changes_is_told_once(live):
    run = live("one")
    run.client.hold("a10", 1)
    files = RunFiles("one")
    wishes = eventually(lambda: (found := files.read()) and found.wanted and found)
    [found] = live_runs()
    said = []
    served = ServedRun(found, wishes, files, threading.Lock(), lambda *told: said.append(told), lambda: None)
    for provider in ("local", "condor", "condor", "local", "condor"):
        served.lend(Tier(name="a10", provider=provider), 60)
    served.end()
    assert [sentence for _, _, sentence in said if "its provider has changed" in sentence] == [
        "its provider has changed, which holds for runs that start from now on"
    ] * 2


def test_workers_that_cannot_be_used_end_the_run_with_the_reason(site, start, live):
    run = live("one")
    start(site(("a10", 5)))
    run.client.hold("a10", 5)
    for job in eventually(lambda: len(found := run.jobs()) == 5 and found):
        run.client.refused("a10", job, "no libcuda")
    eventually(lambda: run.client.failure is not None)
    assert "no libcuda" in run.client.failure


def test_a_site_file_is_read_again(site, start, live):
    run = live("one", tiers=("a10", "h100"))
    path = site(("a10", 2), ("h100", 1))
    factory = start(path)
    run.client.hold("a10", 8)
    run.client.hold("h100", 1)
    first, h100 = run.has(2), run.has(1, "h100")

    def again(*tiers, more=""):
        site(*tiers, more=more)
        factory.process.send_signal(signal.SIGHUP)

    again(("a10", 3), ("h100", 1))
    factory.says("tier a10 has at most 3 workers now, not 2")
    second = run.has(3)
    assert second > first
    again(("a10", 1))
    factory.says("tier h100 is gone: its workers may finish")
    factory.says("wants 8, and gets 1")
    again(("a10", 0), more="colour = 'blue'\n")
    factory.says("the site file is refused, and what it said before stays in force: ")
    assert "colour" in factory.says("is refused")
    again(("a10", 1), more="environment = '/nowhere'\n")
    factory.says("was read again", 3)
    assert (set(run.jobs()), set(run.jobs("h100"))) == (second, h100)  # Nobody was lost.
    run.jobs()[min(second)].kill()
    run.client.remove("a10", max(second))
    assert len(eventually(lambda: len(left := run.jobs()) == 1 and set(left)) - second) == 0
    assert factory.end() == 0


def test_runs_hear_of_a_lowered_maximum_and_have_workers_leave(site, start, live):
    one, two = live("one"), live("two")
    path = site(("a10", 8))
    factory = start(path)
    one.client.hold("a10", 5)
    two.client.hold("a10", 3)
    jobs, others = one.has(5), two.has(3)
    eventually(lambda: one.client.maxima() == two.client.maxima() == {"a10": 8})
    site(("a10", 4))
    factory.process.send_signal(signal.SIGHUP)
    # Who has more than its share has some leave; none is killed.
    eventually(lambda: one.client.maxima() == two.client.maxima() == {"a10": 2})
    assert (set(one.jobs()), set(two.jobs())) == (jobs, others)
    for run, its in ((one, jobs), (two, others)):
        run.client.hold("a10", 2)
        for job in sorted(its)[2:]:
            run.client.remove("a10", job)
    # As soon as there are no more than there may be, each may have what others leave.
    eventually(lambda: one.client.maxima() == two.client.maxima() == {"a10": 4})
    one.client.hold("a10", 4)
    two.client.hold("a10", 0)
    for job in two.has(2):
        two.client.remove("a10", job)
    one.has(4)
    assert factory.end() == 0


def test_a_limit_of_a_user_holds_over_factories(site, start, live):
    run = live("one")
    limit = "gpu_hours_per_user = 0.002\n"  # 7.2 s
    factory = start(site(("a10", 3), more=limit))
    run.client.hold("a10", 3)
    jobs = run.has(3)
    told = factory.says("gpu_hours_per_user = 0.002, is reached")
    assert "of this user over all runs" in told and "GPU-hours are used" in told
    eventually(lambda: run.client.maxima() == {"a10": 0})
    [standing] = eventually(run.client.limits_beyond)
    assert (standing["scope"], standing["limit"]) == ("user", 0.002)
    assert standing["used"] >= 0.002
    assert set(run.jobs()) == jobs  # They may finish.
    for job in jobs:
        run.client.remove("a10", job)
    run.has(0)
    assert factory.end() == 0
    [record] = (Path.home() / ".ctxflow").glob("spent-lab@*.json")
    assert record.stat().st_mode & 0o777 == 0o600
    again = start(site(("a10", 3), more=limit))
    again.says("is reached")
    site(("a10", 3), more="gpu_hours_per_user = 100\n")
    again.process.send_signal(signal.SIGHUP)
    again.says("workers are asked for again")
    run.has(3)
    assert again.end() == 0


def test_a_changed_tier_holds_for_new_jobs(site, start, live):
    run = live("one")
    path = site(("a10", 2))
    factory = start(path)
    run.client.hold("a10", 2)
    first = run.has(2)
    Path(path).write_text(Path(path).read_text() + 'cores = 1\nenv = {COLOUR = "blue"}\n')
    factory.process.send_signal(signal.SIGHUP)
    factory.says("tier a10 has another cores, env")
    run.jobs()[min(first)].kill()
    [new] = eventually(lambda: set(run.jobs()) - first)
    # A process that was forked has its parent's environment until it executes its program.
    eventually(lambda: run.jobs()[new].environ().get("COLOUR") == "blue")
    assert "COLOUR" not in run.jobs()[max(first)].environ()


def test_a_driver_that_is_killed_leaves_no_worker(site, start, live):
    with subprocess.Popen(["sleep", "600"]) as driver:
        run = live("one", pid=driver.pid)
        factory = start(site(("a10", 2)))
        run.client.hold("a10", 2)
        run.has(2)
        run.client._stopped = True  # It is silent from here on.
        run.client._thread.join()
        driver.kill()  # It is not buried yet: a zombie is dead.
        factory.says("run one: nothing of it is left")
    assert run.jobs() == {}
    assert not os.path.exists(wanted_file("one")) and not os.path.exists(news_file("one"))
    assert factory.end() == 0


def test_no_clock_ends_the_jobs_of_a_run_that_lives(site, start, live, runtime):
    """Neither a file server's, which dates the run's files, nor the machine's own."""
    run = live("one")
    factory = start(site(("a10", 4)))
    run.client.hold("a10", 2)
    jobs = run.has(2)
    for seconds in (-3600, 3600):
        moment = time.time() + seconds
        os.utime(runtime / "one.json", times=(moment, moment))
        other = live("ahead" if seconds > 0 else "behind")  # When that is served, the first was looked at.
        other.client.hold("a10", 1)
        other.has(1)
        other.end()
    assert set(run.jobs()) == jobs and not any("run one: it is over" in line for line in factory.lines)
    assert factory.end() == 0


def test_the_next_factory_takes_over(site, start, live):
    run = live("one")
    path = site(("a10", 3))
    killed = start(path)
    run.client.hold("a10", 3)
    jobs = run.has(3)
    eventually(lambda: all(job in Path(wanted_file("one")).read_text() for job in jobs))
    killed.end(signal.SIGKILL)
    assert set(run.jobs()) == jobs  # They stay with their run.
    factory = start(path)
    factory.says("run one: took over 3 running jobs of an earlier factory")
    run.client.remove("a10", min(jobs))
    eventually(lambda: run.heard("ended"))
    # One is gone from the books, so that one is asked for; the others are not doubled.
    factory.says("asked for 1 worker:")
    assert not any("asked for 3 workers" in line for line in factory.lines), "they were there"
    assert len(set(run.jobs()) - jobs) == 1
    assert factory.end() == 0
    assert set(run.jobs()) <= jobs


def test_one_factory_for_a_site(site, start, live):
    path = site(("a10", 1))
    first = start(path)
    first.says("serves the site")
    second = start(path)
    assert exited(second.process) == 1
    [line] = eventually(lambda: second.lines)
    assert line[9:].startswith(f'ctxflow: a factory serves the site "lab" already, process {first.process.pid}: ')
    stranger = live("other", site="elsewhere")
    stranger.client.hold("a10", 1)
    first.says('run other: it wants workers of the site "elsewhere": another factory is to serve it')
    assert stranger.jobs() == {}
    assert first.end() == 0
    with only_factory("lab"):
        pass


def test_lines_as_json_and_metrics(site, start, live):
    run = live("one")
    run.client.hold("a10", 5)
    limits = "gpu_hours_per_run = 9\ngpu_hours_per_factory = 90\n"
    factory = start(site(("a10", 2), more=limits), "--json", "--metrics", "0")
    run.has(2)
    asked = json.loads(factory.says("asked for 2"))
    assert {"tier": "a10", "run": "one"}.items() <= asked.items()
    place = factory.says("metrics are at").rpartition("http://")[2].rstrip('"}')

    def figures():
        with urllib.request.urlopen(f"http://{place}", timeout=patience()) as answer:
            found = text_string_to_metric_families(answer.read().decode())
        return {(sample.name, *sample.labels.values()): sample.value for each in found for sample in each.samples}

    eventually(lambda: figures().get(("ctxflow_factory_workers_joined", "a10")) == 2)
    # From the look after that on.
    eventually(lambda: figures().get(("ctxflow_factory_gpu_hours_used", "one", "run"), 0) > 0)
    found = figures()
    assert place.startswith("127.0.0.1:")
    assert found["ctxflow_factory_runs",] == 1
    assert found["ctxflow_factory_jobs", "joined", "a10"] == 2
    assert found["ctxflow_factory_jobs", "queued", "a10"] == 0
    assert found["ctxflow_factory_workers_wanted", "a10"] == 5
    assert found["ctxflow_factory_workers_granted", "a10"] == 2
    assert found["ctxflow_factory_workers_maximum", "a10"] == 2
    assert found["ctxflow_factory_jobs_submitted_total", "a10"] == 2
    assert found["ctxflow_factory_submissions_total", "a10"] >= 1
    why = "the factory lends 2 of 5: that is this run's share"
    assert found["ctxflow_factory_workers_lacking", why, "one", "a10"] == 3
    assert found["ctxflow_factory_gpu_hours_limit", "one", "run"] == 9
    assert found["ctxflow_factory_gpu_hours_limit", "", "factory"] == 90
    assert 0 < found["ctxflow_factory_gpu_hours_used", "one", "run"] < 0.1
    assert not any(name.startswith("ctxflow_factory_cost") for name, *_ in found)
    run.end()
    eventually(lambda: figures()["ctxflow_factory_runs",] == 0)
    found = eventually(lambda: "nothing of it is left" in factory.says("") and figures())
    assert found["ctxflow_factory_jobs_submitted_total", "a10"] == 2  # What was counted stays.
    assert factory.end() == 0


def test_metrics_that_cannot_be_served_are_said_so(site, start):
    path = site(("a10", 2))
    assert exited(start(path, "--metrics", "nowhere").process) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        factory = start(path, "--metrics", str(taken.getsockname()[1]))
        assert exited(factory.process) == 2
        factory.says("metrics cannot be served at 127.0.0.1")


SIGNALS = """
import os, signal, sys, time
from ctxflow.cli.factory_commands import _obey_signals
class Slow:
    def stop(self):
        os.write(1, b"stops\\n")  # It may come while `print` prints.
_obey_signals(Slow())
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_a_second_signal_ends_it_at_once():
    with forked.Popen([sys.executable, "-c", SIGNALS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stops\n"
        process.send_signal(signal.SIGINT)
        assert exited(process) == 130


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, 'write engine = "taskvine" and at least one'),
        ({"engine": "taskvine", "tiers": [Tier(provider="local")]}, 'write acquire = "factory"'),
    ],
)
def test_a_site_that_cannot_be_served_is_said_so(keys, sentence):
    with pytest.raises(CtxflowError, match=sentence):
        check_site(Site(name="lab", **keys))
