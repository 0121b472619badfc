"""What `site check --live` says of a real pool. Run by test_sites.py inside the testbed, where the bindings are."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxflow.factory import CondorProvider, JobChange, ProviderError, WorkerJob
from ctxflow.factory.provider import PoolSurvey, Provider
from ctxflow.factory.run_files import Lead, worker_job
from ctxflow.factory.tier_providers import provider_of
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, nothing_left, patience

SITES = Path(__file__).resolve().parents[2] / "site-configs"
SMALL = {"cores": 1, "memory_gb": 4, "disk_gb": 10}
# What a job of 1 core, 4 GB and 10 GB asks of a machine, as condor_status is asked: as a whole, and of what is free.
SIZES = "DynamicSlot =!= true && {}Cpus >= 1 && {}Memory >= 3815 && {}Disk >= 9765625"
A10 = 'DeviceName == "NVIDIA A10"'
HOST2 = 'Machine == "host2.testbed"'
# Keys of a tier, what that asks of a machine, and of each of so many of its GPUs.
CASES = [
    ({"gpus": 0}, "true", "true", 0),
    ({}, "true", "true", 1),
    ({"gpus": 2}, "true", "true", 2),
    ({"gpus": 4}, "true", "true", 4),
    ({"cores": 6}, "{}Cpus >= 6", "true", 1),
    ({"cores": 7}, "{}Cpus >= 7", "true", 1),
    ({"memory_gb": 31, "gpus": 0}, "{}Memory >= 29564", "true", 0),
    ({"memory_gb": 40}, "{}Memory >= 38147", "true", 1),
    ({"requirements": HOST2}, HOST2, "true", 1),
    ({"requirements": 'regexp("host[13]", Machine) && HasFileTransfer'}, 'regexp("host[13]", Machine)', "true", 1),
    ({"requirements": "NoSuchAttribute > 3"}, "NoSuchAttribute > 3", "true", 1),
    ({"requirements": "TARGET.Memory >= MY.RequestMemory"}, "true", "true", 1),
    ({"require_gpus": A10}, "true", A10, 1),
    ({"require_gpus": A10, "requirements": HOST2}, HOST2, A10, 1),
    ({"require_gpus": "Capability >= 7"}, "true", "Capability >= 7", 1),
    ({"require_gpus": "Capability >= 7", "gpus": 2}, "true", "Capability >= 7", 2),
    (
        {"require_gpus": "Capability < 7 && GlobalMemoryMb > 12000"},
        "true",
        "Capability < 7 && GlobalMemoryMb > 12000",
        1,
    ),
    ({"require_gpus": 'DeviceName == "NVIDIA B200"'}, "true", 'DeviceName == "NVIDIA B200"', 1),
]


@functools.cache
def asked(source: tuple[tuple[str, str], ...]) -> Provider:
    """Who is asked about a pool: one process, which would cost more than its answers."""
    return provider_of(Tier(**SMALL, **dict(source)), "check")


def survey(**keys) -> PoolSurvey:
    tier = Tier(**{**SMALL, **keys})
    source = tuple((key, keys[key]) for key in ("pool", "schedd") if key in keys)
    return asked(source).survey(worker_job(tier, Lead("submit", 9123, "ctxflow.pyz", "password")))


def condor_status(constraint: str) -> int:
    words = ["condor_status", "-constraint", constraint, "-af", "Name"]
    return len(subprocess.run(words, capture_output=True, check=True, text=True).stdout.split())


@pytest.fixture(scope="module", autouse=True)
def idle_pool() -> None:
    """What the test before claimed is free again."""
    nothing_left(lambda: condor_status("DynamicSlot =?= true"))


def free(machine: str, gpu: str, gpus: int) -> int:
    """How many machines will do now; GPUs are counted as HTCondor's negotiation counts them."""
    return condor_status(f"{SIZES} && {machine} && countMatches({gpu}, AvailableGPUs) >= {gpus}".replace("{}", ""))


def whole(machine: str, gpus: int) -> int:
    """How many machines will do, whoever uses them."""
    return condor_status(f"{SIZES} && {machine} && {{}}GPUs >= {gpus}".replace("{}", "TotalSlot"))


@pytest.mark.parametrize(("keys", "machine", "gpu", "gpus"), CASES, ids=str)
def test_the_survey_counts_what_condor_status_counts(keys, machine, gpu, gpus):
    found = survey(**keys)
    assert found.machines == found.free == free(machine, gpu, gpus)
    if gpu == "true":
        assert found.machines == whole(machine, gpus)
    assert found.may_submit and bool(found.advice) == (found.machines == 0)


def test_gpu_models_are_those_that_the_machines_advertise():
    words = ["condor_status", "-constraint", "PartitionableSlot", "-long"]
    ads = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    for model, count in (models := survey().gpu_models).items():
        assert ads.count(f'DeviceName = "{model}"') == count
    assert sum(models.values()) == 12 and len(models) == 8
    assert survey(require_gpus="Capability > 8.8").gpu_models == {
        "NVIDIA RTX 6000 Ada Generation": 1, "NVIDIA H100 80GB HBM3": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({"gpus": 4}, "no machine has 4 GPUs: the most is 3; write gpus = 3 or less"),
        ({"cores": 64}, "no machine has 64 cores: the most is 6; write cores = 6 or less"),
        ({"memory_gb": 100}, "no machine has 100 GB of memory: the most is "),
        ({"require_gpus": 'DeviceName == "NVIDIA A11"'}, "no GPU is an 'NVIDIA A11': the pool has 2 NVIDIA "),
        ({"require_gpus": 'DeviceName == "NVIDIA A11"'}, "did you mean 'NVIDIA A10'?"),
        ({"require_gpus": "Capability > 10"}, "Capability is from 5.2 to 9"),
        ({"require_gpus": "DevName == 3"}, "nothing is said of DevName: did you mean 'DeviceName'?"),
        ({"requirements": 'Machine == "host9"'}, "Machine is host1.testbed, host2.testbed"),
        ({"requirements": 'Machine == "host2.testbed"', "require_gpus": 'DeviceName == "NVIDIA A40"'},
         'of 4, Machine == "host2.testbed" by 1, 1 GPU with DeviceName == "NVIDIA A40" by 1'),
        ({"image": "docker://debian"}, "no machine runs such containers (HasContainer): leave image out"),
    ],
    ids=str,
)  # fmt: skip
def test_what_excludes_all_machines_is_named(keys, advice):
    assert advice in " ".join(survey(**keys).advice)


def test_a_busy_machine_counts_and_is_not_free(tmp_path):
    """And as many workers run as the survey says that the machines hold."""
    before = survey(require_gpus=A10)
    idle = [survey(**keys) for keys, *_ in CASES]
    assert (before.machines, before.free, before.workers) == (2, 2, 2)
    provider = CondorProvider(run=f"sites-{os.getpid()}")
    folder = Path.home() / f"sites-{os.getpid()}"
    folder.mkdir()
    provider.start(str(folder))
    try:
        small = {"memory": 10**8, "disk": 10**8, "gpus": 1}
        job = WorkerJob("a10", ["sleep", "600"], options={"requirements": "true", "require_gpus": A10}, **small)
        provider.submit(job, 4)
        changes: list[JobChange] = []

        def count() -> int:
            changes.extend(provider.changes())
            return sum(change.state == "running" for change in changes)

        def all_are_busy() -> bool:
            return count() >= 2 and not survey(require_gpus=A10).free

        eventually(all_are_busy, what=lambda: f"two run: {changes}, {survey(require_gpus=A10)}")
        running = count()
        busy = survey(require_gpus=A10)
        assert (running, busy.machines, busy.free, busy.workers) == (2, 2, 0, 2)
        assert busy.gpu_models == {"NVIDIA A10": 2}
        assert busy.advice == ("all 2 machines that will do are busy now: workers wait until others end",)
        for (keys, machine, gpu, gpus), then in zip(CASES, idle, strict=True):
            now = survey(**keys)
            assert now.free == free(machine, gpu, gpus), keys
            assert (now.machines, now.workers, now.gpu_models) == (then.machines, then.workers, then.gpu_models), keys
    finally:
        provider.stop()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_who_may_not_submit_is_told():
    found = survey(schedd="nobody@nowhere")
    assert not found.may_submit and found.machines == 4
    assert "there is no schedd 'nobody@nowhere' in the pool: condor_status -schedd lists their names" in found.advice[0]
    with pytest.raises(ProviderError, match=r"HTCondor's pool cannot be asked: .*condor_q works"):
        survey(pool="127.0.0.1:1", schedd="any")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "ctxflow", "site", "check", *words]
    return subprocess.run(program, capture_output=True, check=False, text=True, timeout=patience())


def test_the_command_asks_the_pool():
    done = command(str(SITES / "testbed-tiers.toml"), "--live", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [tier["machines"] for tier in told["tiers"].values()] == [1, 2, 1, 1]
    assert told["problems"] == [] and "/opt/ctxflow: Python 3.14" in told["environment"]
    done = command(str(SITES / "condor-campus.toml"), "--live")
    assert done.returncode == 1, "no environment, and no Grid Engine"
    assert "tier a10 (condor): " in done.stdout and "wrong" in done.stdout
