"""A context that needs four GPUs of one socket, on a host that low-priority workers fill: who gives way, and for whom.

preemption_inside.py is the program, on a testbed of one host with 8 GPUs, 2 sockets and 8 NUMA nodes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from driver import INSIDE, ROOT, TESTBED, Driver, left

if TYPE_CHECKING:
    from conftest import Testbed

SITE = """
engine = "taskvine"
python_environment = "/opt/ctxflow"
preemption = {{policy = "{policy}", patience = {patience}, grace = {grace}, idle = 2}}

[[tiers]]
name = "any"
workers = 8
cores = 1
memory_gb = 2
disk_gb = 2
gpus = 1
machine_gpus = 8
"""
MIDDLE = "NumaNode >= 2 && NumaNode <= 5"  # Two of each socket.

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.xdist_group("numa")]


@pytest.fixture
def host(any_testbed: Testbed) -> Iterator[Testbed]:
    """A testbed of one such host, without jobs."""
    any_testbed.command("up", "--numa", "--hosts", "1", limit=600)
    yield any_testbed
    any_testbed.clear()


class Bench:
    """The program, in a folder that the host sees."""

    def __init__(self, testbed: Testbed, policy: str, patience: int, *options: str, grace: int = 20) -> None:
        self.testbed = testbed
        self.folder = testbed.shared / f"preemption-{time.time_ns()}"
        self.folder.mkdir(mode=0o777, parents=True)
        self.folder.chmod(0o777)
        (self.folder / "site.toml").write_text(SITE.format(policy=policy, patience=patience, grace=grace))
        program = ["python", "-u", str(INSIDE / "preemption_inside.py"), "--folder", f"/shared/{self.folder.name}"]
        self.driver = Driver(TESTBED / "run", [*program, *options])

    def go(self) -> None:
        """Urgent work comes."""
        (self.folder / "go").touch()

    def noted(self, text: str, times: int = 1) -> str:
        """The note that has a text, once it was told so often."""
        found = self.driver.until(lambda line: sum(text in note for note in line.get("notes", ())) >= times)
        return [note for note in found["notes"] if text in note][times - 1]

    def got(self) -> list[Any]:
        """The host of the urgent work, and its GPUs with their sockets and NUMA nodes."""
        got = self.driver.until(lambda line: "got" in line)["got"]
        assert got[0] == got[1] == got[2]
        return list(got[0])

    def result(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What came of everything, once all GPUs are those of one-GPU workers again; and the events."""
        self.driver.until(lambda line: line.get("there") == 8)
        (self.folder / "enough").touch()
        result = self.driver.result()
        with open(self.folder / "run" / "events.jsonl") as file:
            return result, [json.loads(line) for line in file][1:]

    def close(self) -> None:
        """End it."""
        self.driver.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def start(host: Testbed) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(policy: str, patience: int, *options: str, grace: int = 20) -> Bench:
        made.append(Bench(host, policy, patience, *options, grace=grace))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def commands(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """All commands of a kind."""
    return [command for record in records for command in record["commands"] if command["is"] == kind]


def gave_way(records: list[dict[str, Any]], note: str) -> set[str]:
    """The GPUs of the workers that a note names: these went, and nobody else, until the next worker was asked for."""
    named = set(note.partition("the workers ")[2].removesuffix(" give way").split(", "))
    texts = [[each.get("text") for each in record["commands"]] for record in records]
    decided = next(number for number, told in enumerate(texts) if note in told)
    asked = next(n for n, record in enumerate(records) if n >= decided and commands([record], "AcquireAt"))
    lost = {each["event"]["worker"] for each in records[decided : asked + 1] if each["event"]["is"] == "WorkerLost"}
    assert len(named) == 4 and lost == named, note
    joined = [record["event"]["worker"] for record in records if record["event"]["is"] == "WorkerJoined"]
    return {device for worker in joined if worker["id"] in named for device in worker["devices"]}


def nothing_lost(result: dict[str, Any]) -> None:
    """See that every item of low priority was answered, and none computed twice."""
    assert result["items"] and not result["wrong"] and not result["missing"], result
    assert (result["dead"], result["evicted"]) == (0, 0), result


def test_machine_ads_have_the_topology(host: Testbed) -> None:
    """As site-configs/htcondor-topology.conf publishes it."""
    place = host.state / "hosts" / "host1" / "config.d" / "topology"
    shutil.copy(ROOT / "site-configs" / "htcondor-topology.conf", place)
    try:
        host.run("condor_reconfig", user="root", host="host1")
        told = ["size(CtxflowSockets)", "size(CtxflowNumaNodes)", "size(CtxflowGpus)", "CtxflowGpus[5].Numa"]
        host.eventually(lambda: host.run("condor_status", "-af", *told).split() == ["2", "8", "8", "5"])
    finally:
        place.unlink()
        host.run("condor_reconfig", user="root", host="host1")


def test_it_gets_four_gpus_of_one_socket_and_the_others_lose_nothing(
    host: Testbed, start: Callable[..., Bench]
) -> None:
    bench = start("exact", 60)
    bench.driver.until(lambda line: line["there"] == 8 and line["done"] > 40)
    bench.go()
    note = bench.noted("give way")
    machine, gpus = bench.got()
    result, records = bench.result()
    assert machine == "host1" and len({socket for _, socket, _ in gpus}) == 1, gpus
    assert [numa for *_, numa in gpus] == sorted(numa for *_, numa in gpus), "neighbours beside each other"
    assert {name for name, *_ in gpus} == gave_way(records, note), "what those had that gave way"
    assert len(commands(records, "AcquireAt")) == 1
    nothing_lost(result)
    assert result["again"] == 0, "what was answered was not computed again"
    host.eventually(lambda: not left(host, ["host1"]))


@pytest.mark.release
def test_the_standard_selection_takes_whose_calls_began_last_though_they_are_on_two_sockets(
    host: Testbed, start: Callable[..., Bench]
) -> None:
    middle = {"executable": "/bin/sleep", "arguments": "600", "request_gpus": 4, "require_gpus": MIDDLE}
    host.submit(middle, user="bob")
    host.eventually(lambda: host.running("bob") == 1)
    # Calls of half a minute: those of the first four are still running when the others begin.
    bench = start("standard", 60, "--whole", "--seconds", "7.5", "--window", "40", grace=45)
    bench.driver.until(lambda line: line["there"] == 4)
    host.run("condor_rm", "bob", user="root")
    bench.driver.until(lambda line: line["there"] == 8)
    bench.go()
    note = bench.noted("give way")
    _, gpus = bench.got()
    result, records = bench.result()
    assert {name for name, *_ in gpus} == gave_way(records, note)
    assert [(socket, numa) for _, socket, numa in gpus] == [(0, 2), (0, 3), (1, 4), (1, 5)], "across the sockets"
    nothing_lost(result)


@pytest.mark.release
def test_somebody_else_takes_the_gpus_first_and_it_is_tried_again(host: Testbed, start: Callable[..., Bench]) -> None:
    bench = start("exact", 20, "--whole", "--seconds", "1")
    bench.driver.until(lambda line: line["there"] == 8 and line["done"] > 8)
    bench.go()
    first = bench.noted("give way")
    gpu = first.partition("the GPUs GPU-")[2].partition(",")[0]
    theirs = {"executable": "/bin/sleep", "arguments": "600", "request_gpus": 1}
    one = {"require_gpus": f'regexp("^{gpu}", DeviceUuid)'}
    host.submit({**theirs, **one}, user="bob")  # He goes before alice, whatever she waits for.
    host.eventually(lambda: host.running("bob") == 1)
    assert "somebody else has taken them" in bench.noted("no worker came to the GPUs")
    second = bench.noted("give way", times=2)
    _, gpus = bench.got()
    host.run("condor_rm", "bob", user="root")
    result, records = bench.result()
    before, after = gave_way(records, first), gave_way(records, second)
    assert not before & after and {name for name, *_ in gpus} == after
    assert len({socket for _, socket, _ in gpus}) == 1
    assert len(commands(records, "AcquireAt")) == 2 and len(commands(records, "Forgo")) == 2
    nothing_lost(result)
