"""The testbed keeps its promises: hosts, GPUs, jobs, evictions, links, TaskVine, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waiting import exited, patience

if TYPE_CHECKING:
    from conftest import Testbed

from pool import tools
from pool.gpus import MODELS, apportion, cards, gpus_of, inventory, topology
from pool.nvidia_smi import answer
from pool.settings import NAME, STATE, CannotBuild, Settings, TestbedError

TESTBED = Path(__file__).resolve().parents[2] / "testbed"

cluster = [pytest.mark.cluster, pytest.mark.timeout(600)]
EXECUTE_HOSTS = [f"host{number}" for number in range(1, 5)]


def on_cluster(test):
    """Mark a test that needs the testbed: the first such test may have to build it."""
    for mark in cluster:
        test = mark(test)
    return test


# What hosts advertise: no testbed needed


@given(st.integers(0, 500))
def test_models_are_dealt_in_the_campus_proportions(seats: int) -> None:
    dealt = apportion(seats)
    counts = [dealt.count(model) for model in MODELS]
    assert sum(counts) == seats
    assert all(count >= (seats >= len(MODELS)) for count in counts)
    whole = sum(model.campus for model in MODELS)
    if seats >= 40:
        shares = [seats * model.campus / whole for model in MODELS]
        assert all(abs(count - share) < 1.5 for count, share in zip(counts, shares, strict=True))


@given(st.integers(1, 40), st.integers(0, 16), st.booleans())
def test_every_gpu_is_advertised_once(hosts: int, gpus: int, numa: bool) -> None:
    settings = Settings(hosts=hosts, gpus=gpus, numa=numa)
    found = gpus_of(settings)
    everything = [gpu for mine in found.values() for gpu in mine]
    assert len({gpu.uuid for gpu in everything}) == len({gpu.short for gpu in everything}) == hosts * settings.gpus
    for mine in found.values():
        detected = re.findall(r'DetectedGPUs="(.*)"', inventory(mine))[0]
        assert detected == (", ".join(gpu.short for gpu in mine) or "0")
        assert not numa or len({gpu.model for gpu in mine}) == 1


def test_a_numa_host_has_two_sockets_and_a_gpu_on_every_node() -> None:
    mine = gpus_of(Settings(hosts=1, numa=True))["host1"]
    assert [(gpu.numa, gpu.socket) for gpu in mine] == [(node, node // 4) for node in range(8)]
    files = topology(mine)
    assert files["sys/devices/system/node/node7/cpulist"] == "56-63\n"
    assert files["sys/devices/system/cpu/cpu33/topology/physical_package_id"] == "1\n"
    assert files["sys/devices/system/cpu/cpu33/topology/core_siblings"] == "ffffffff,00000000\n"
    assert files[f"sys/bus/pci/devices/{mine[5].bus}/local_cpulist"] == "40-47\n"


ALL = "--query-gpu=index,uuid,name,memory.total,pci.bus_id"
PLAIN = "--format=csv,noheader,nounits"


def test_nvidia_smi_tells_what_the_host_advertises() -> None:
    mine = gpus_of(Settings())["host4"]
    text, status = answer([ALL, PLAIN], cards(mine))
    wanted = [
        f"{number}, {gpu.uuid}, {gpu.model.name}, {gpu.model.memory_mb}, 0000{gpu.bus}"
        for number, gpu in enumerate(mine)
    ]
    assert (text.splitlines(), status) == (wanted, 0)
    for name in ("1", mine[1].uuid, f"0000{mine[1].bus}"):
        assert answer(["--query-gpu=name", PLAIN, f"--id={name}"], cards(mine)) == ("NVIDIA A40\n", 0)
    names = ["--query-gpu=name,memory.total", "--format=csv", "-i", "2"]
    assert answer(names, cards(mine)) == ("name, memory.total [MiB]\nNVIDIA H100 80GB HBM3, 81920 MiB\n", 0)


@pytest.mark.parametrize(
    ("words", "says", "status"),
    [
        ([], "Invalid combination of input arguments.", 2),
        (["-L"], "ERROR: Option -L is not recognized.", 2),
        (["--query-gpu=", PLAIN], "ERROR: Option --query-gpu= is missing its value.", 2),
        (["--query-gpu=name"], '"--format=" switch is missing.', 2),
        (["--query-gpu=name", "--format=xml"], "Invalid combination of input arguments.", 2),
        (["--query-gpu=name,colour", PLAIN], 'Field "colour" is not a valid field to query.', 2),
        (["--query-gpu=name", PLAIN, "-i", "3"], "No devices were found", 6),
        (["--query-gpu=name", PLAIN, "-i"], "ERROR: Option -i is missing its value.", 2),
    ],
)
def test_nvidia_smi_refuses_what_it_does_not_know(words: list[str], says: str, status: int) -> None:
    text, ended = answer(words, cards(gpus_of(Settings())["host4"]))
    assert text.startswith(says) and ended == status


@pytest.mark.parametrize(
    "wrong", [{"hosts": 0}, {"hosts": 99}, {"gpus": -1}, {"link_mbit": 0}, {"far": 4}, {"far_mbit": 0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(TestbedError, match=r"must lie between|cannot be made"):
        Settings(**wrong)


@pytest.mark.parametrize("command", ["up", "down", "run", "host", "status", "boot", "provision"])
def test_every_command_explains_itself(command: str) -> None:
    done = subprocess.run(
        [TESTBED / command, "--help"], capture_output=True, check=False, text=True, timeout=patience()
    )
    assert command in done.stdout


APT_GET = """#!/bin/sh
case "$*" in
*update*) [ -e {here}/offline ] || touch {here}/lists ;;
*install*iproute2)
    [ -e {here}/lists ] || {{ echo "E: no iproute2"; exit 100; }}
    touch {here}/ip && chmod +x {here}/ip ;;
esac
"""


def test_what_is_missing_is_installed_or_the_sentence_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in {*tools.PACKAGES, "sh", "nice", "touch", "chmod"} - {"ip"}:
        (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.missing(to_build=False) == {"ip": "iproute2"}
    assert tools.missing(to_build=True).keys() == {"ip", "debootstrap"}
    with pytest.raises(CannotBuild, match="needs the program ip: install the package iproute2"):
        tools.install(tools.missing(to_build=False), tmp_path / "log")
    (tmp_path / "apt-get").write_text(APT_GET.format(here=tmp_path))
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "offline").touch()
    with pytest.raises(CannotBuild, match=r"Installing iproute2 with apt-get failed .*no iproute2"):
        tools.install(tools.missing(to_build=False), tmp_path / "log")
    (tmp_path / "offline").unlink()
    tools.install(tools.missing(to_build=False), tmp_path / "log")
    assert tools.missing(to_build=False) == {}


# The pool


@on_cluster
def test_the_hosts_advertise_slots_and_gpus(testbed: Testbed) -> None:
    whole = ("-constraint", "PartitionableSlot", "-af", "Name", "TotalSlotGPUs", "TotalSlotCpus", "TotalSlotMemory")
    lines = testbed.run("condor_status", *whole).splitlines()  # What an earlier job still holds counts too.
    assert sorted(lines) == [f"slot1@{host}.testbed 3 6 30720" for host in EXECUTE_HOSTS]
    models = [model for host in EXECUTE_HOSTS for model in testbed.status()["hosts"][host]["gpus"]]
    assert models == [model.name for model in apportion(12)]
    holds = 'countMatches(MY.DeviceName == "NVIDIA H100 80GB HBM3", AvailableGPUs) > 0'
    testbed.eventually(lambda: testbed.run("condor_status", "-const", holds, "-af", "Machine") == "host4.testbed")


@on_cluster
def test_jobs_run_on_every_host_as_an_ordinary_user(testbed: Testbed) -> None:
    there = testbed.shared / f"there-{time.time_ns()}"
    there.mkdir()
    there.chmod(0o777)
    script = (
        "echo `id -un` `hostname` $CUDA_VISIBLE_DEVICES $CTXFLOW_TESTBED_SPEED"
        " `nvidia-smi --query-gpu=name --format=csv,noheader --id=$CUDA_VISIBLE_DEVICES`;"
        " python -c 'import cloudpickle, ctxflow.installing';"
        f" cd /shared/{there.name}; touch $CUDA_VISIBLE_DEVICES; until [ `ls | wc -l` = 12 ]; do sleep 0.2; done"
    )
    job = {"executable": "/bin/sh", "arguments": f"\"-c '{script.replace(chr(39), chr(39) * 2)}'\""}
    need = {"request_gpus": 1, "request_cpus": 2, "request_memory": "10GB", "request_disk": "70GB"}
    where = testbed.submit({**job, **need, "output": "out.$(Process)", "error": "err.$(Process)"}, count=12)
    testbed.run("condor_wait", "-wait", f"{patience(100):.0f}", f"{where}/log")
    assert testbed.run("bash", "-c", f"cat {where}/err.*") == ""
    lines = [line.split(maxsplit=4) for line in testbed.run("bash", "-c", f"cat {where}/out.*").splitlines()]
    assert {line[0] for line in lines} == {"alice"}
    assert sorted(line[1] for line in lines) == sorted(EXECUTE_HOSTS * 3)
    gpus = {gpu.uuid: gpu for mine in gpus_of(Settings()).values() for gpu in mine}
    assert {line[2] for line in lines} == set(gpus)
    for _, _, device, speed, model in lines:
        assert (float(speed), model) == (gpus[device].model.speed, gpus[device].model.name)


@on_cluster
def test_a_vacated_job_is_evicted_and_runs_again(testbed: Testbed) -> None:
    where = testbed.submit({"executable": "/bin/sleep", "arguments": "600"})
    read = ("cat", f"{where}/log")
    testbed.eventually(lambda: "Job executing on host" in testbed.run(*read))
    testbed.run("condor_vacate_job", "-fast", testbed.run("condor_q", "-af:j", "Owner").split()[0])
    testbed.eventually(lambda: "Job was evicted" in testbed.run(*read))
    testbed.eventually(lambda: testbed.run(*read).count("Job executing on host") == 2)


SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9999), timeout=30) as there:
    began = time.monotonic()
    there.sendall(bytes(int(sys.argv[2])))
    there.shutdown(socket.SHUT_WR)
    there.recv(1)
print(int(sys.argv[2]) / (time.monotonic() - began))
"""

RECEIVE = """
import socket
with socket.create_server(("", 9999)) as server:
    while True:
        there = server.accept()[0]
        while there.recv(1 << 20):
            pass
        there.close()
"""


def bytes_per_second(testbed: Testbed, sender: str, receiver: str, amount: int) -> float:
    """Send bytes from one host to another and return the speed."""
    command = [sys.executable, str(TESTBED / "run"), "--host", receiver, "python3", "-c", RECEIVE]
    with subprocess.Popen(command, cwd="/") as server:
        try:
            ready = "until ss -ltn | grep -q :9999; do sleep 0.05; done"
            testbed.run("timeout", "20", "bash", "-c", ready, host=receiver)
            return float(testbed.run("python3", "-", receiver, str(amount), host=sender, text=SEND))
        finally:
            server.send_signal(signal.SIGTERM)
            exited(server)


def sleeps(testbed: Testbed) -> bool:
    """Whether there is a process `sleep 4321`."""
    return testbed.command("run", "pgrep", "-fx", "sleep 4321", check=False).returncode == 0


def reaches(testbed: Testbed, sender: str, receiver: str) -> bool:
    """Whether one packet comes back."""
    words = ["--user", "root", "--host", sender, "ping", "-c1", "-W1", receiver]
    return testbed.command("run", *words, check=False).returncode == 0


@on_cluster
def test_links_are_slowed_cut_and_restored(testbed: Testbed) -> None:
    testbed.command("host", "slow", "host1", "40")
    before = testbed.status()["hosts"]["host1"]
    assert before["state"] == "slow"
    for sender, receiver in (("host1", "host2"), ("host2", "host1")):
        assert 0.02 * 5e6 < bytes_per_second(testbed, sender, receiver, 4_000_000) < 1.2 * 5e6
    after = testbed.status()["hosts"]["host1"]
    assert after["bytes_sent"] - before["bytes_sent"] >= 4_000_000
    assert after["bytes_received"] - before["bytes_received"] >= 4_000_000
    testbed.command("host", "cut", "host1")
    assert testbed.status()["hosts"]["host1"]["state"] == "cut"
    assert not reaches(testbed, "host1", "host2") and not reaches(testbed, "host2", "host1")
    assert reaches(testbed, "host2", "host3")
    testbed.command("host", "restore", "host1")
    assert testbed.status()["hosts"]["host1"]["state"] == "up"
    testbed.eventually(lambda: reaches(testbed, "host1", "host2"))
    testbed.eventually(lambda: bytes_per_second(testbed, "host1", "host2", 20_000_000) > 4 * 5e6)


@on_cluster
def test_a_killed_host_is_gone_and_comes_back(testbed: Testbed) -> None:
    pinned = {"executable": "/bin/sleep", "arguments": "600", "requirements": 'Machine == "host2.testbed"'}
    testbed.submit(pinned)
    testbed.eventually(lambda: testbed.running("alice") == 1)
    testbed.command("host", "kill", "host2")
    assert testbed.status()["hosts"]["host2"]["state"] == "dead"
    refused = testbed.command("run", "--host", "host2", "true", check=False)
    assert refused.returncode == 1 and "restore host2" in refused.stderr
    testbed.command("host", "restore", "host2")
    where = testbed.submit({**pinned, "arguments": "0"})
    testbed.run("condor_wait", "-wait", f"{patience(60):.0f}", f"{where}/log")


@on_cluster
def test_daemons_that_died_are_started_again_and_the_pool_goes_on(testbed: Testbed) -> None:
    testbed.submit({"executable": "/bin/sleep", "arguments": "600"})
    testbed.eventually(lambda: testbed.running("alice") == 1)
    for host, daemon in (("submit", "slurmctld"), ("host3", "slurmd"), ("host4", "munged")):
        kill = f"pid=$(pidof {daemon}) && kill -9 $pid && while [ -d /proc/$pid ]; do sleep 0.1; done"
        testbed.run("bash", "-c", kill, host=host, user="root")
    testbed.command("up")
    assert testbed.running("alice") == 1
    assert set(testbed.run("sinfo", "--noheader", "--Node", "--format=%t").split()) == {"idle"}
    assert testbed.run("srun", "--nodes=4", "--ntasks=4", "hostname").count("host") == 4


MANAGER = """
import ndcctools.taskvine as vine
manager = vine.Manager(port=[9200, 9300])
print(manager.port, flush=True)
task = vine.Task("echo $(hostname) $CUDA_VISIBLE_DEVICES $CTXFLOW_TESTBED_SPEED")
task.add_feature("worker-7")
manager.submit(task)
while not manager.empty():
    done = manager.wait(1)
    if done:
        print(done.successful(), done.std_output, flush=True)
"""


@on_cluster
def test_a_worker_started_by_htcondor_runs_a_pinned_call(testbed: Testbed) -> None:
    command = [sys.executable, str(TESTBED / "run"), "python", "-u", "-c", MANAGER]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, text=True) as manager:
        try:
            assert manager.stdout
            port = manager.stdout.readline().strip()
            options = "--single-shot --timeout 60 --cores 2 --memory 1000 --disk 1000 --feature worker-7"
            arguments = f"{options} submit {port}"
            job = {"executable": "/usr/bin/vine_worker", "arguments": arguments, "request_gpus": 1}
            testbed.submit({**job, "output": "out", "error": "err"})
            answer = manager.stdout.readline().split()
        finally:
            manager.send_signal(signal.SIGTERM)
            exited(manager)
    gpus = {gpu.uuid: (host, gpu.model.speed) for host, mine in gpus_of(Settings()).items() for gpu in mine}
    assert answer[0] == "True"
    assert (answer[1], float(answer[3])) == gpus[answer[2]]


@on_cluster
def test_the_owner_takes_whole_machines_back(testbed: Testbed) -> None:
    job = {"executable": "/bin/sleep", "arguments": "600", "request_cpus": 2, "request_memory": "10GB"}
    testbed.submit({**job, "request_gpus": 1}, count=12)
    testbed.eventually(lambda: testbed.running("alice") == 12)
    testbed.submit({**job, "request_cpus": 6}, count=2, user="bob")
    testbed.eventually(lambda: (testbed.running("bob"), testbed.running("alice")) == (2, 6))
    testbed.run("condor_rm", "bob", user="root")
    testbed.eventually(lambda: testbed.running("alice") == 12)


@on_cluster
def test_run_passes_input_exit_codes_and_its_own_death_on(testbed: Testbed) -> None:
    assert testbed.run("cat", text="through") == "through"
    assert testbed.command("run", "sh", "-c", "exit 7", check=False).returncode == 7
    assert testbed.run("id", "-un", user="bob") == "bob"
    command = [sys.executable, str(TESTBED / "run"), "sleep", "4321"]
    with subprocess.Popen(command, cwd="/") as client:
        try:
            testbed.eventually(lambda: sleeps(testbed))
        finally:
            client.kill()
    testbed.eventually(lambda: not sleeps(testbed))
    unknown = testbed.command("host", "cut", "host9", check=False)
    assert unknown.returncode == 1 and "host1, host2, host3, host4" in unknown.stderr


# Pools of other kinds, and none: each sets up what it needs


@on_cluster
@pytest.mark.xdist_group("kinds")
def test_the_owner_takes_single_gpus_back_from_static_slots(any_testbed: Testbed) -> None:
    any_testbed.command("up", "--static", "--hosts", "2", "--gpus", "2")
    assert len(any_testbed.run("condor_status", "-af", "Name").splitlines()) == 4
    job = {"executable": "/bin/sleep", "arguments": "600", "request_gpus": 1}
    any_testbed.submit(job, count=4)
    any_testbed.eventually(lambda: any_testbed.running("alice") == 4)
    any_testbed.submit(job, count=3, user="bob")
    any_testbed.eventually(lambda: (any_testbed.running("bob"), any_testbed.running("alice")) == (3, 1))


@on_cluster
@pytest.mark.xdist_group("numa")
def test_numa_hosts_show_their_topology_to_htcondor_and_in_sys(any_testbed: Testbed) -> None:
    any_testbed.command("up", "--numa", "--hosts", "1")
    machines = ("condor_status", "-constraint", "PartitionableSlot")
    assert any_testbed.run(*machines, "-af", "TotalSlotCpus", "TotalSlotGPUs") == "64 8"
    advert = any_testbed.run(*machines, "-long")
    places = re.findall(r"^GPUs_GPU_\w+ = \[.* Socket = (\d); NumaNode = (\d);", advert, re.MULTILINE)
    assert sorted(places) == [(str(node // 4), str(node)) for node in range(8)], advert
    lists = any_testbed.run("bash", "-c", "cat /sys/devices/system/node/node*/cpulist", host="host1").split()
    assert lists == [f"{start}-{start + 7}" for start in range(0, 64, 8)]
    information = any_testbed.run("bash", "-c", "cat /proc/driver/nvidia/gpus/*/information", host="host1")
    uuids = [gpu.uuid for gpu in gpus_of(Settings(hosts=1, numa=True))["host1"]]
    assert re.findall(r"GPU UUID:\s+(\S+)", information) == uuids
    assert re.findall(r"Device Minor:\s+(\d)", information) == [str(number) for number in range(8)]
    told = any_testbed.run("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader", host="host1")
    assert told.splitlines() == [f"{number}, {uuid}" for number, uuid in enumerate(uuids)]


def leftovers() -> list[str]:
    """Whatever of our testbed is still to be seen on this machine; of others, nothing but their state is."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{STATE}/" in line]
    links = [name for name in os.listdir("/sys/class/net") if name.startswith("ctxflow")]
    named = [str(path) for path in Path("/run/netns").glob("ctxflow*")]
    state = [str(path) for path in [STATE] if path.exists()]
    return [*mounts, *links, *named, *state, *processes()]


def processes() -> list[str]:
    """The command lines of our testbed's processes: the first of each host, and HTCondor's daemons."""
    ours = f"CTXFLOW_TESTBED={os.environ.get('CTXFLOW_TESTBED', '')}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            inherited = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        of_a_host = line.startswith("condor_") and (ours in inherited or ours.endswith(b"="))
        if of_a_host or line.startswith(f"{NAME}:"):
            found.append(line)
    return found


@on_cluster
@pytest.mark.xdist_group("kinds")
def test_down_leaves_nothing_and_up_cleans_what_a_crash_left(any_testbed: Testbed) -> None:
    any_testbed.command("up", "--hosts", "2")
    assert {"condor_master", f"{NAME}:submit"} <= {line.split()[0] for line in processes()}
    any_testbed.command("down")
    assert leftovers() == []
    any_testbed.command("down")
    assert "No testbed is up" in any_testbed.command("run", "true", check=False).stderr
    any_testbed.command("up", "--hosts", "1")
    shutil.rmtree(STATE / "hosts")
    (STATE / "settings.json").unlink()
    any_testbed.command("up", "--hosts", "2")
    first = sorted(line.split()[0] for line in processes() if line.startswith(f"{NAME}:"))
    assert first == [f"{NAME}:{name}" for name in ("host1", "host2", "submit", "switch")]
    any_testbed.command("down")
    assert leftovers() == []


@on_cluster
@pytest.mark.xdist_group("kinds")
def test_an_interrupted_up_leaves_nothing(any_testbed: Testbed) -> None:
    any_testbed.command("down")
    command = [sys.executable, str(TESTBED / "up")]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.DEVNULL) as starting:
        try:
            any_testbed.eventually(lambda: any(f"{NAME}:host1" in line for line in processes()))
        finally:
            starting.send_signal(signal.SIGINT)
        assert exited(starting) == 130
    assert leftovers() == []
