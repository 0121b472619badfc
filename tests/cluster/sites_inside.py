"""What `site check --live` says of a real pool. Run by test_sites.py inside the testbed, where the bindings are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxflow.factory import CondorProvider, ProviderError, WorkerJob
from ctxflow.factory.provider import Survey
from ctxflow.factory.providers import provider_of
from ctxflow.factory.worker_job import Lead, worker_job
from ctxflow.sites.tier import Tier

SITES = Path(__file__).resolve().parents[2] / "site-configs"
SMALL = {"cores": 1, "memory_gb": 4, "disk_gb": 10}
# What a job of 1 core, 4 GB and 10 GB asks of a machine, as condor_status is asked.
WHOLE = "DynamicSlot =!= true && TotalSlotCpus >= 1 && TotalSlotMemory >= 3815 && TotalSlotDisk >= 9765625"


def survey(**keys) -> Survey:
    tier = Tier(**{**SMALL, **keys})
    return provider_of(tier, "check").survey(worker_job(tier, Lead("submit", 9123, "ctxflow.pyz", "password")))


def condor_status(constraint: str) -> int:
    words = ["condor_status", "-constraint", constraint, "-af", "Name"]
    return len(subprocess.run(words, capture_output=True, check=True, text=True).stdout.split())


def gpus_like(condition: str, number: int) -> str:
    """HTCondor's own way to count GPUs in the negotiation; it sees those that nobody uses."""
    return f"countMatches({condition}, AvailableGPUs) >= {number}"


@pytest.mark.parametrize(
    ("keys", "constraint"),
    [
        ({"gpus": 0}, WHOLE),
        ({}, f"{WHOLE} && TotalSlotGPUs >= 1"),
        ({"gpus": 2}, f"{WHOLE} && TotalSlotGPUs >= 2"),
        ({"gpus": 4}, f"{WHOLE} && TotalSlotGPUs >= 4"),
        ({"cores": 6}, f"{WHOLE} && TotalSlotGPUs >= 1 && TotalSlotCpus >= 6"),
        ({"cores": 7}, f"{WHOLE} && TotalSlotGPUs >= 1 && TotalSlotCpus >= 7"),
        ({"memory_gb": 40}, f"{WHOLE} && TotalSlotMemory >= 38147"),
        ({"requirements": 'Machine == "host2.testbed"'}, f'{WHOLE} && Machine == "host2.testbed"'),
        ({"requirements": 'regexp("host[13]", Machine)'}, f'{WHOLE} && regexp("host[13]", Machine)'),
        ({"requirements": "NoSuchAttribute > 3"}, f"{WHOLE} && NoSuchAttribute > 3"),
        ({"requirements": "TARGET.Memory >= MY.RequestMemory"}, f"{WHOLE} && TotalSlotGPUs >= 1"),
        ({"require_gpus": 'DeviceName == "NVIDIA A10"'}, gpus_like('DeviceName == "NVIDIA A10"', 1)),
        ({"require_gpus": "Capability >= 7"}, gpus_like("Capability >= 7", 1)),
        ({"require_gpus": "Capability >= 7", "gpus": 2}, gpus_like("Capability >= 7", 2)),
        ({"require_gpus": "Capability < 7 && GlobalMemoryMb > 12000"},
         gpus_like("Capability < 7 && GlobalMemoryMb > 12000", 1)),
        ({"require_gpus": 'DeviceName == "NVIDIA B200"'}, gpus_like('DeviceName == "NVIDIA B200"', 1)),
    ],
    ids=str,
)  # fmt: skip
def test_the_survey_counts_what_condor_status_counts(keys, constraint):
    found = survey(**keys)
    assert found.machines == found.free == condor_status(constraint)
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
    a10 = 'DeviceName == "NVIDIA A10"'
    before = survey(require_gpus=a10)
    assert (before.machines, before.free, before.workers) == (2, 2, 2)
    provider = CondorProvider(run=f"sites-{os.getpid()}")
    folder = Path.home() / f"sites-{os.getpid()}"
    folder.mkdir()
    provider.start(str(folder))
    try:
        small = {"memory": 10**8, "disk": 10**8, "gpus": 1}
        job = WorkerJob("a10", ["sleep", "600"], options={"requirements": "true", "require_gpus": a10}, **small)
        provider.submit(job, 4)
        deadline = time.monotonic() + 60
        running = 0
        while running < 2 or survey(require_gpus=a10).free:
            assert time.monotonic() < deadline, f"{running} run, {survey(require_gpus=a10)}"
            running += sum(change.state == "running" for change in provider.changes())
            time.sleep(0.5)
        busy = survey(require_gpus=a10)
        assert (running, busy.machines, busy.free, busy.workers) == (2, 2, 0, 2)
        assert busy.gpu_models == {"NVIDIA A10": 2}
        assert busy.advice == ("all 2 machines that will do are busy now: workers wait until others end",)
        assert survey(require_gpus="Capability < 8.6").free == before.machines + 2 - 1
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
    return subprocess.run(program, capture_output=True, check=False, text=True, timeout=60)


def test_the_command_asks_the_pool():
    done = command(str(SITES / "testbed-tiers.toml"), "--live", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [tier["machines"] for tier in told["tiers"].values()] == [1, 2, 1, 1]
    assert told["problems"] == [] and "/opt/ctxflow: Python 3.14" in told["environment"]
    done = command(str(SITES / "condor-campus.toml"), "--live")
    assert done.returncode == 1, "no environment, and no Grid Engine"
    assert "tier a10 (condor): " in done.stdout and "wrong" in done.stdout
