"""ParslProvider on a real Slurm. test_slurm.py runs this in the testbed, in a directory that all hosts see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from parsl.providers import SlurmProvider

from ctxflow.factory import JobChange, ProviderError, WorkerJob
from ctxflow.factory.parsl_provider import ParslProvider
from ctxflow.factory.parsl_systems import parsl_provider
from ctxflow.sites.site_model import Tier
from ctxflow.testing.evictions import JobWatch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, nothing_left

SMALL = {"cores": 1, "memory_gb": 1, "gpus": 0}


def sh(script: str, *words: str, **more) -> WorkerJob:
    """A worker that is a shell script."""
    return WorkerJob("any", ["sh", "-c", script, "sh", *words], **more)


def call(*words: str) -> str:
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout


def make(run: str, directory: str, **tier) -> ParslProvider:
    provider = ParslProvider(parsl_provider(Tier(provider="slurm", **{**SMALL, **tier})), run)
    provider.start(directory)
    return provider


def in_queue(run: str) -> list[str]:
    """The names of a run's jobs that have not ended."""
    return [name for name in call("squeue", "--me", "--noheader", "--format=%j").split() if f".{run}." in name]


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as path:
        yield path


@pytest.fixture
def slurm(directory):
    provider = make(f"test{os.getpid()}", directory)
    yield provider
    provider.stop()
    assert in_queue(provider.run) == []


@pytest.fixture
def watch(slurm):
    return JobWatch(slurm)


def test_workers_run_with_their_files_and_know_their_jobs(slurm, watch, directory, tmp_path_factory):
    files = Path(tempfile.mkdtemp(dir=os.getcwd()))
    password = files / "password"
    password.write_text("secret")
    password.chmod(0o600)
    worker = files / "a worker"
    worker.write_text(
        '#!/bin/sh\necho "$CTXFLOW_JOB $(cat password) $(stat -c %a password .) $1"; pwd; sleep 1; exit 3\n'
    )
    worker.chmod(0o700)
    begun = time.monotonic()
    jobs = slurm.submit(WorkerJob("any", ["a worker", "now"], [str(worker), str(password)]), 3)
    assert len(set(jobs)) == 3
    hosts = [watch.until(job, "running").host for job in jobs]
    for job, host in zip(jobs, hosts, strict=True):
        ended = watch.until(job, "ended")
        assert ended == JobChange(job, "ended", "it ended with status 3", ended.host)
        assert ended.host in (host, None), "Slurm may have forgotten it"
        *words, scratch = slurm.last_words(job).split()
        assert words == [job, "secret", "600", "700", "now"]
        look = f"test -e {scratch} || echo gone"
        assert call("srun", "--quiet", "--nodelist", host, "--mem=100m", "sh", "-c", look) == "gone\n"
    assert slurm.queries <= 1 + time.monotonic() - begun, "one a second at most"


def test_arguments_and_environment_arrive_as_they_are(slurm, watch):
    nasty = ["", " ", "'", '"', "it's", "$", "$$", "$(id)", "${HOME}", "a\tb", "\\", "\\n", "ends in \\", "`id`", "*"]
    nasty += [";", "ü ☃", "a=b", "#", "%s", "{x}", "two\nlines", "!"]
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], [os.environ[f'N{i}'] for i in range(%d)]]))"
    environment = {f"N{number}": word for number, word in enumerate(nasty)}
    [job] = slurm.submit(WorkerJob("any", ["python3", "-c", script % len(nasty), *nasty], environment=environment), 1)
    assert watch.until(job, "ended").reason == "it ended with status 0"
    assert json.loads(slurm.last_words(job)) == [nasty, nasty]


def test_what_a_tier_asks_for_reaches_the_job(directory):
    tier = {
        "cores": 2,
        "memory_gb": 3,
        "gpus": 1,
        "options": {"gres": "gpu:a40:1", "worker_init": "export COLOUR=blue"},
    }
    model = "nvidia-smi --query-gpu=name --format=csv,noheader --id=$CUDA_VISIBLE_DEVICES"
    slurm = make("asks", directory, **tier)
    try:
        [job] = slurm.submit(sh(f"echo $COLOUR $CUDA_VISIBLE_DEVICES `{model}`; sleep 3"), 1)
        watch = JobWatch(slurm)
        assert watch.until(job, "running").host == "host4"
        assert "cpu=2,mem=3G,node=1" in call("scontrol", "show", "job", job)
        watch.until(job, "ended")
        assert slurm.last_words(job) == "blue 1 NVIDIA A40"
    finally:
        slurm.stop()


def test_workers_are_kept_from_nodes_from_the_first_and_while_they_wait(directory):
    slurm = make(f"test{os.getpid()}whole", directory, cores=6)  # A host's all.
    watch = JobWatch(slurm)
    try:
        job, waiting = slurm.submit(sh("echo $SLURMD_NODENAME; sleep 600", excluded=("host1", "host2", "host3")), 2)
        assert watch.until(job, "running").host == "host4"
        assert slurm.exclude([job, waiting], ["host1", "host4"]) == []
        assert watch.until(waiting, "running").host in ("host2", "host3")
        assert slurm.last_words(job) == "host4"
        assert slurm.exclude([job, waiting], []) == [], "none waits"
    finally:
        slurm.stop()


def test_a_job_that_others_cancel_was_evicted(slurm, watch):
    one, two = slurm.submit(sh("sleep 600"), 2)
    for job in (one, two):
        watch.until(job, "running")
    call("scancel", one)
    watch.until(one, "evicted")
    assert "CANCELLED" in watch.until(one, "ended").reason
    slurm.remove([two, "999999"])
    assert watch.until(two, "ended").reason == "ctxflow gave the worker back"
    assert watch.changes == []  # No eviction beside it.


def test_a_requeued_job_was_evicted_and_runs_again_under_its_id(slurm, watch):
    [job] = slurm.submit(sh("sleep 600"), 1)
    watch.until(job, "running")
    call("scontrol", "requeue", job)
    watch.until(job, "evicted")
    watch.until(job, "running")
    assert watch.changes == []


def test_notice_lets_a_worker_finish(slurm, watch):
    [job] = slurm.submit(
        sh("trap 'echo notice; n=1' TERM; echo up; until [ $n ]; do sleep 0.1; done; sleep 1; echo done; exit 5"), 1
    )
    watch.until(job, "running")
    eventually(lambda: slurm.last_words(job) == "up")
    call("scancel", "--signal=USR1", "--batch", job)
    assert watch.until(job, "evicted").reason == "the batch system gave notice (SIGUSR1)"
    watch.until(job, "ended")
    assert slurm.last_words(job).split() == ["up", "notice", "done"]


def test_held_jobs_say_why_and_can_be_released(slurm, watch):
    [busy] = slurm.submit(sh("sleep 600"), 1)
    watch.until(busy, "running")
    call("scontrol", "requeuehold", busy)
    watch.until(busy, "evicted")
    assert "held" in watch.until(busy, "held").reason
    call("scontrol", "release", busy)
    watch.until(busy, "queued", "running")  # It may run before Slurm is asked again.


def test_a_survey_counts_nodes_and_says_what_excludes_them(directory):
    def survey(**tier):
        asked = Tier(provider="slurm", **{**SMALL, **tier})
        provider = ParslProvider(parsl_provider(asked), "survey")
        job = WorkerJob("any", ["true"], cores=asked.cores, memory=asked.memory, gpus=asked.gpus)
        return provider.survey(job)

    found = survey(gpus=1)
    assert (found.machines, found.may_submit, found.advice) == (4, True, ())
    assert found.gpu_models["quadro_rtx_6000"] == 2 and sum(found.gpu_models.values()) == 12
    one_model = survey(gpus=1, options={"gres": "gpu:a10:1"})
    assert (one_model.machines, one_model.may_submit) == (2, True)
    too_many = survey(gpus=9)
    assert too_many.machines == 0 and too_many.may_submit
    assert "no node of the default partition has 9 GPUs: the most are 6 cores" in too_many.advice[0]
    owners = survey(options={"partition": "owners"})
    assert not owners.may_submit and "group" in owners.advice[0]
    nowhere = survey(options={"partition": "nowhere"})
    assert nowhere.machines == 0 and not nowhere.may_submit and "sinfo" in nowhere.advice[0]


def test_what_slurm_does_not_take_is_one_sentence(directory):
    provider = make("refused", directory, options={"partition": "nowhere"})
    with pytest.raises(ProviderError, match=r"slurm did not take a worker: .*invalid partition specified: nowhere"):
        provider.submit(sh("true"), 2)
    provider.stop()


def test_stop_leaves_nothing_even_of_jobs_it_was_never_told_of(directory):
    provider = make("stopped", directory)
    watch = JobWatch(provider)
    for job in provider.submit(sh("sleep 600"), 2):
        watch.until(job, "running")
    provider.submit(sh("sleep 600", cores=1), 1)
    provider._jobs.popitem()  # As if it had been interrupted before it knew.
    assert len(in_queue("stopped")) == 3
    provider.stop()
    assert in_queue("stopped") == []


DRIVER = """
import sys, time
from parsl.providers import SlurmProvider
from ctxflow.factory.parsl_provider import ParslProvider
from ctxflow.factory.provider import WorkerJob
provider = ParslProvider(SlurmProvider(exclusive=False, mem_per_node=1), "killed", lease=10)
provider.start(sys.argv[1])
[job] = provider.submit(WorkerJob("any", ["sleep", "600"]), 1)
while not any(change.state == "running" for change in provider.changes()):
    time.sleep(0.1)
print(job, flush=True)
time.sleep(600)
"""


def test_jobs_of_a_killed_driver_are_found_and_do_not_begin_again(directory):
    with subprocess.Popen([sys.executable, "-c", DRIVER, directory], stdout=subprocess.PIPE, text=True) as driver:
        job = driver.stdout.readline().strip()
        driver.kill()
    # A site's own provider is used as it is.
    other = ParslProvider(SlurmProvider(exclusive=False))
    [found] = [each for each in other.find() if each.run == "killed"]
    assert (found.job, found.state, found.host) == (job, "running", "host1")
    Path(directory, "seen").write_text("0\n")  # As if it had waited until now.
    call("scontrol", "requeue", job)
    nothing_left(lambda: [each for each in other.find() if each.run == "killed"])
    [output] = Path(directory).glob("job-*.out")
    assert output.read_text() == "the run is over: nobody has looked after its workers for 10 s\n"
    other.discard([job, "999999"])
