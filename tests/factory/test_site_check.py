"""A job that connects back, and what can be told of a site's network without one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from ctxflow.factory import LocalProvider
from ctxflow.factory.provider import explaining_line
from ctxflow.factory.site_check import network_advice, network_problems, port_problem, probe_tiers
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vine_worker").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    yield
    assert os.listdir() == [], "nothing is left"


def site(address: str | None = "127.0.0.1", port=0, **tier) -> Site:
    there = Tier(name="here", gpus=0, **{"provider": "local", **tier})
    return Site(engine="taskvine", taskvine={"address": address, "port": port}, tiers=(there,))


def probed(asked: Site, limit: float = 30.0, **more):
    [answer] = probe_tiers(asked, asked.tiers, limit, **more)
    return answer


def test_a_probe_connects_and_says_what_it_found():
    answer = probed(site())
    assert answer.problems == answer.advice == ()
    assert answer.found.startswith(f"a probe on {socket.gethostname()} connected to this machine after ")


def test_a_disk_that_is_too_small_and_a_missing_vine_worker_are_found_there(monkeypatch, tmp_path):
    os.unlink(tmp_path / "bin" / "vine_worker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    disk, vine = sorted(probed(site(disk_gb=10**6)).problems)
    assert "and disk_gb promises 1e+06: write less" in disk and "vine_worker is not on the PATH of" in vine


def test_what_keeps_it_from_connecting_is_explained():
    unresolved = probed(site(address="no-such-host.invalid")).problems
    assert len(unresolved) == 1
    assert "did not connect: it cannot resolve the run's address no-such-host.invalid: write an IP" in unresolved[0]
    refused = probed(site(address="127.0.0.2")).problems  # It listens at all addresses: only another port refuses.
    assert refused == ()


class Cluster(LocalProvider):
    """Two machines of two names, one of which may be closed to the other."""

    def __init__(self, closed: str = "", jobs: int = 2, later: float = 0.0) -> None:
        super().__init__()
        self._closed, self._most, self._later = closed, jobs, later

    def submit(self, job, count):
        began = []
        for number in range(1, min(count, self._most) + 1):
            words = [job.command[0], "-c", self._played(number)]
            began += super().submit(dataclasses.replace(job, command=[*words, *job.command[1:]]), 1)
        return began

    def _played(self, number):
        return PLAYED.format(number=number, closed=f"n{number}" == self._closed, later=self._later)


PLAYED = """
import socket, sys, runpy, time
time.sleep({later})
socket.gethostname = lambda: "n{number}"
if {closed}:
    import errno
    def refused(place, *given, **named):
        if place[1] == int(sys.argv[3]):
            return connect(place, *given, **named)
        raise OSError(errno.EHOSTUNREACH, "No route to host")
    connect, socket.create_connection = socket.create_connection, refused
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("closed", ["", "n1", "n2"])
def test_two_workers_try_each_other_in_both_directions(closed):
    answer = probed(site(workers=2, provider="condor"), provider=lambda tier, run: Cluster(closed))
    assert answer.problems == ()
    if not closed:
        assert answer.advice == () and re.search(r"; it and one on n[12] reach each other$", answer.found)
        return
    other = {"n1": "n2", "n2": "n1"}[closed]
    [advice] = answer.advice
    assert f"workers do not reach each other, so that each gets its files from this machine ({closed} cannot" in advice
    assert f"{closed} cannot reach {other}: [Errno 113] No route to host): have transfer_port name ports" in advice


def test_whether_workers_reach_each_other_is_not_asked_where_a_site_turns_that_off_and_unknown_where_one_comes():
    answer = probed(site(workers=2, provider="condor"), provider=lambda tier, run: Cluster(jobs=1), second=0.5)
    assert answer.problems == () and answer.found
    assert answer.advice == (
        "a second probe did not connect within 0.5 s, so it is not known whether workers reach each other",
    )
    off = site(workers=2, provider="condor")
    off = off.model_copy(update={"taskvine": off.taskvine.model_copy(update={"worker_transfers": False})})
    assert probed(off, provider=lambda tier, run: Cluster()).advice == ()


def test_a_probe_that_ends_at_once_hides_no_other_that_connects():
    class Halved(Cluster):
        def submit(self, job, count):
            broken = dataclasses.replace(job, command=["/bin/sh", "-c", "echo no such disk >&2; exit 3"])
            return LocalProvider.submit(self, broken, 1) + super().submit(job, count - 1)

    answer = probed(site(workers=2, provider="condor"), provider=lambda tier, run: Halved(later=3.0), second=0.5)
    assert answer.problems == () and answer.found.startswith("a probe on n1 connected")
    both = probed(site(workers=2, provider="condor"), provider=lambda tier, run: Halved(jobs=0))
    assert both.problems == (f"a probe on {socket.gethostname()} ended and did not connect: no such disk",)


def test_one_whose_job_does_not_begin_is_no_problem_and_none_is_left():
    class Busy(LocalProvider):
        def __init__(self) -> None:
            super().__init__()
            self.removed = False

        def submit(self, job, count):
            return ["9.0"]

        def stop(self):
            self.removed = True

    busy = Busy()
    answer = probed(site(), limit=0.5, provider=lambda tier, run: busy)
    assert answer.problems == () and busy.removed
    assert answer.advice[0].startswith("a probe did not begin within 0 s, so that nobody knows")


@contextlib.contextmanager
def strangers(count, talk):
    """A port at which so many connect again and again; each is given its connection, and whether all is over."""
    # It stays bound, so that no other process gets its port; with SO_REUSEADDR another socket may listen there.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    port = kept.getsockname()[1]
    over = threading.Event()

    def stranger() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as line:
                    talk(line, over)
            except OSError:
                time.sleep(0.01)

    threads = [threading.Thread(target=stranger, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield port
    finally:
        over.set()
        for thread in threads:
            thread.join()
        kept.close()


def test_who_has_not_the_key_is_not_believed_and_holds_nothing_up():
    with strangers(1, lambda line, over: line.sendall(b"0" * 64 + b' {"host": "evil"}\n')) as port:
        assert "evil" not in (found := probed(site(port=port)).found) and "connected" in found


def test_who_says_little_and_slowly_holds_nothing_up():
    def slowly(line, over):
        while not over.wait(0.2):
            line.sendall(b"0")

    with strangers(12, slowly) as port:
        assert "connected to this machine" in probed(site(port=port), limit=100.0).found


def test_a_port_for_root_alone_and_one_that_is_taken_are_told():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [problem] = network_problems(site(port=port))
        assert problem.startswith(f"port = {port} is taken on this machine: write another")
        assert list(network_problems(site(port=(port, port + 40)))) == [], "another of the range will do"
        with socket.create_server(("", 0)) as other:
            low, high = sorted((port, other.getsockname()[1]))
            assert port_problem([low, high]).startswith(f"no port of [{low}, {high}] will do: port = {low} is taken")
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        os.write(theirs, pickle.dumps(list(network_problems(site(port=80)))))
        os._exit(0)
    os.waitpid(child, 0)
    lowest = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    told = ["port = 80 is for root alone on this machine: write one from 1024 on, or 0 for any"]
    assert pickle.loads(os.read(ours, 4096)) == (told if lowest > 80 else [])
    os.close(ours)
    os.close(theirs)


def test_an_address_that_is_not_known_not_ours_or_for_this_machine_alone_is_told():
    remote = Tier(name="far", provider="slurm", gpus=0)
    [problem] = network_problems(site(address="no-such-host.invalid"))
    assert "cannot be resolved" in problem and "write an IP address of this machine" in problem
    [problem] = network_problems(Site(engine="taskvine", taskvine={"address": "localhost"}, tiers=(remote,)))
    assert problem.startswith("address localhost is this machine to itself alone, and tier far is on others")
    assert list(network_problems(site(address="localhost"))) == []
    [advice] = network_advice(site(address="192.0.2.1"))
    assert advice.startswith("address 192.0.2.1 is none of this machine's")
    assert list(network_advice(site())) == []


def test_a_folder_that_nodes_do_not_share_and_a_disk_that_nobody_deals_out_are_mentioned(tmp_path, monkeypatch):
    monkeypatch.chdir("/dev/shm")
    near, far = Tier(name="near", provider="local"), Tier(name="far", provider="slurm", disk_gb=70)
    told = list(network_advice(Site(engine="taskvine", tiers=(near, far))))
    monkeypatch.chdir(tmp_path / "start")
    assert told[0].startswith("/dev/shm is seldom seen by other machines, and jobs of tier far find their files where")
    assert told[1].startswith("disk_gb = 70 of tier far is asked of nobody")


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (
            "couldn't connect to 10.0.0.9:9123: Network is unreachable\n" * 3
            + "2026/11/23 02:07:34.00 vine_worker[94]notice: stopping: could not connect after 20 seconds.\n"
            + "vine_worker: creating workspace /tmp/x\nvine_worker: deleting workspace /tmp/x\n",
            "it cannot reach the run at 10.0.0.9:9123 (Network is unreachable): have address of the site name",
        ),
        (
            "couldn't resolve hostname login.campuscouldn't resolve hostname login.campus2026/11/23 02:07:56.24 "
            "vine_worker[100]notice: stopping: could not connect after 20 seconds.\n"
            "vine_worker: deleting workspace /tmp/y\n",
            "it cannot resolve the run's address login.campus: write an IP address",
        ),
        (
            "vine_worker: has less than the promised disk space (--disk > disk total) 70000 < 3072 MB\n"
            "vine_worker: deleting workspace /tmp/z\n",
            "its scratch directory has 3.1 GB free, and disk_gb promises 70",
        ),
        ("vine_worker: creating workspace /tmp/x\nvine_worker: deleting workspace /tmp/x\n", "no output"),
        ("Traceback\nImportError: no module", "ImportError: no module"),
    ],
)
def test_the_line_that_explains_is_chosen_not_the_last(words, explained):
    assert explaining_line(words).startswith(explained)


def test_it_says_what_the_hosts_cache_holds_and_what_is_wrong_with_it(tmp_path):
    from ctxflow.host.host_cache import HostCache

    folder = str(tmp_path / "cache")
    answer = probed(site(cache=folder))
    assert f"; its cache {folder}/{os.geteuid()} has 0 entries, 0.0 GB, and its disk " in answer.found
    assert not answer.problems and not os.path.exists(folder)
    cache = HostCache(folder)
    cache.put("a", lambda path: Path(path).write_bytes(b"x" * 200_000_000))
    cache.close()
    assert "has 1 entry, 0.2 GB" in probed(site(cache=folder)).found
    os.chmod(cache.path, 0o755)
    [problem] = probed(site(cache=folder)).problems
    assert problem.startswith(f"the cache {cache.path} on ") and "is not a folder of this user alone: write" in problem
