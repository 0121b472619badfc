"""The HTCondor provider against a real pool. Run by test_provider.py inside the testbed, where the bindings are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import htcondor2
import pytest

from ctxflow.factory import CondorProvider, ProviderError, WorkerJob
from ctxflow.testing.evictions import JobWatch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, nothing_left

SMALL = {"memory": 100 * 2**20, "disk": 50 * 2**20}


def sh(script: str, *words: str, **more) -> WorkerJob:
    """A worker that is a shell script."""
    return WorkerJob("any", ["sh", "-c", script, "sh", *words], **{**SMALL, **more})


@pytest.fixture
def directory():
    # Under the home directory: /tmp may be a space of the test's own. A name that needs care.
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix="a run, $(Cluster) ") as path:
        yield path


@pytest.fixture
def condor(directory):
    provider = CondorProvider(run=f"test-{os.getpid()}")
    provider.start(directory)
    yield provider
    provider.stop()
    assert in_queue(provider.run) == []


@pytest.fixture
def watch(condor):
    return JobWatch(condor)


def in_queue(run: str) -> list[str]:
    words = ["condor_q", "-constraint", f'CtxflowRun == "{run}"', "-af", "ClusterId"]
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()


def test_workers_run_with_their_files_and_know_their_jobs(condor, watch, directory, tmp_path):
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o600)
    worker = tmp_path / "worker"
    worker.write_text('#!/bin/sh\necho "$CTXFLOW_JOB $(cat password) $(stat -c %a password) $1"; sleep 1\n')
    worker.chmod(0o700)
    jobs = condor.submit(WorkerJob("any", ["worker", "now"], [str(worker), str(password)], **SMALL), 3)
    assert len(set(jobs)) == 3
    for job in jobs:
        running = watch.until(job, "running")
        assert running.host.startswith("host")
    for job in jobs:
        assert watch.until(job, "ended").reason == "it ended with status 0"
        assert condor.last_words(job) == f"{job} secret 600 now"
    assert sorted(os.listdir(directory)) == sorted([f"{job}.out" for job in jobs] + ["htcondor.log"])
    assert os.stat(f"{directory}/htcondor.log").st_mode & 0o77 == 0


def test_arguments_and_environment_arrive_as_they_are(condor, watch):
    nasty = ["", " ", "'", '"', "it's", '""', "$", "$$", "$$$", "$(Cluster)", "$$(Cpus)", "$$([1+1])", "$ENV(HOME)"]
    nasty += ["a\tb", "\\", "\\n", "ends in \\", "${HOME}", "`id`", "*", ";", "ü ☃", "a=b", "#", "%s", "$$$(Cpus)"]
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], [os.environ[f'N{i}'] for i in range(%d)]]))"
    environment = {f"N{number}": word for number, word in enumerate(nasty)}
    job = WorkerJob("any", ["python3", "-c", script % len(nasty), *nasty], environment=environment, **SMALL)
    [job_id] = condor.submit(job, 1)
    assert watch.until(job_id, "ended").reason == "it ended with status 0"
    assert json.loads(condor.last_words(job_id)) == [nasty, nasty]


def test_a_vacated_worker_is_evicted_and_runs_again(condor, watch):
    [job] = condor.submit(sh("trap 'echo notice; exit 0' TERM; echo up; sleep 600 & wait"), 1)
    for words in (["-fast"], []):
        watch.until(job, "running")
        eventually(lambda: condor.last_words(job) == "up")
        subprocess.run(["condor_vacate_job", *words, job], check=True, capture_output=True)
        assert "vacated" in watch.until(job, "evicted").reason
    watch.until(job, "running")
    condor.remove([job])
    assert "gave the worker back" in watch.until(job, "ended").reason
    assert watch.changes == []  # No eviction beside it.
    condor.remove([job, "999999.0"])


def test_a_worker_that_waits_can_be_removed(condor, watch):
    one, two = condor.submit(sh("true", options={"requirements": "false"}), 2)
    condor.remove([one])
    watch.until(one, "ended")
    eventually(lambda: in_queue(condor.run) == [two.partition(".")[0]])


def test_workers_are_kept_from_machines_from_the_first_and_while_they_wait(condor, watch):
    bad = ("host1.testbed", "host2.testbed", "HOST3.testbed")
    [job] = condor.submit(sh("sleep 600", excluded=bad), 1)
    assert watch.until(job, "running").host == "host4.testbed"
    # One that runs goes elsewhere if it is evicted; one that waits may begin.
    [waiting] = condor.submit(sh("sleep 600", excluded=(*bad, "host4.testbed")), 1)
    [gone] = condor.submit(sh("true", options={"requirements": "false"}), 1)
    condor.remove([gone])
    assert condor.exclude([job, waiting, gone, "999999.0"], ["host1.testbed", "host4.testbed"]) == []
    assert watch.until(waiting, "running").host in ("host2.testbed", "host3.testbed")
    subprocess.run(["condor_vacate_job", "-fast", job], check=True, capture_output=True)
    watch.until(job, "evicted")
    assert watch.until(job, "running").host in ("host2.testbed", "host3.testbed")
    assert condor.exclude([job, waiting], []) == []


def test_a_held_worker_says_why_and_can_be_released(condor, watch, tmp_path):
    password = tmp_path / "password"
    password.write_text("secret")
    [job] = condor.submit(sh("cat password", files=[str(password)], options={"submit": {"hold": True}}), 1)
    password.rename(tmp_path / "away")
    subprocess.run(["condor_release", job], check=True, capture_output=True)
    watch.until(job, "queued")
    assert "No such file" in watch.until(job, "held").reason
    (tmp_path / "away").rename(password)
    subprocess.run(["condor_release", job], check=True, capture_output=True)
    watch.until(job, "running")
    watch.until(job, "ended")
    assert condor.last_words(job) == "secret"


def test_a_held_worker_that_ran_was_evicted_first(condor, watch):
    [job] = condor.submit(sh("sleep 600"), 1)
    watch.until(job, "running")
    subprocess.run(["condor_hold", "-reason", "nap time", job], check=True, capture_output=True)
    watch.until(job, "evicted")
    assert "nap time" in watch.until(job, "held").reason


def test_how_a_worker_failed(condor, watch):
    [failing] = condor.submit(sh("echo to the screen; echo no libcuda >&2; exit 3"), 1)
    assert watch.until(failing, "ended").reason == "it ended with status 3"
    assert condor.last_words(failing) == "to the screen\nno libcuda"
    [missing] = condor.submit(WorkerJob("any", ["no-such-worker"], **SMALL), 1)
    assert watch.until(missing, "ended").reason == "it ended with status 127"
    assert "no-such-worker" in condor.last_words(missing)
    [killed] = condor.submit(sh("kill -KILL $$"), 1)
    assert watch.until(killed, "ended").reason == "it was killed by SIGKILL"


def test_requests_reach_the_machine(condor, watch):
    script = "grep -E '^(RequestCpus|RequestMemory|RequestDisk|JobPrio|Colour) ' .job.ad; echo $CUDA_VISIBLE_DEVICES"
    options = {"requirements": 'Machine == "host2.testbed"', "submit": {"priority": 5, "+Colour": '"blue"'}}
    options["submit"]["require_gpus"] = "Capability < 7"
    [job] = condor.submit(sh(script, cores=2, gpus=1, memory=3 * 2**30, disk=2**30, options=options), 1)
    assert watch.until(job, "running").host == "host2.testbed"
    watch.until(job, "ended")
    *ad, gpu = condor.last_words(job).splitlines()
    wanted = {"RequestCpus": "2", "RequestMemory": "3072", "RequestDisk": "1048576", "JobPrio": "5", "Colour": '"blue"'}
    assert dict(line.split(" = ") for line in ad) == wanted
    assert gpu.startswith("GPU-") and "," not in gpu


def test_an_image_makes_a_container_job(condor):
    options = {"image": "docker://debian:stable", "submit": {"hold": True}}
    [job] = condor.submit(sh("true", options=options), 1)
    words = ["condor_q", job, "-af", "WantContainer", "ContainerImage"]
    asked = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    assert asked == ["true", "docker://debian:stable"]


def test_what_htcondor_does_not_take_is_one_sentence(condor):
    for options in ({"requirements": "((("}, {"submit": {"request_disk": "((("}}):
        with pytest.raises(ProviderError, match=r"HTCondor did not take 1 worker of tier any: .*condor_q"):
            condor.submit(sh("true", options=options), 1)
    lost = CondorProvider(run="lost", schedd="nobody@nowhere")
    lost.start(condor._directory)
    with pytest.raises(ProviderError, match="condor_status -schedd"):
        lost.submit(sh("true"), 1)
    away = CondorProvider(run="away", pool="127.0.0.1:1")
    away.start(condor._directory)
    with pytest.raises(ProviderError, match="condor_q works"):
        away.submit(sh("true"), 1)
    away.stop()
    assert in_queue("lost") == in_queue("away") == []


def test_stop_leaves_nothing_even_of_jobs_it_was_never_told_of(directory):
    provider = CondorProvider(run="stopped")
    provider.start(directory)
    jobs = provider.submit(sh("sleep 600"), 2)
    watch = JobWatch(provider)
    for job in jobs:
        watch.until(job, "running")
    provider.submit(sh("true", options={"requirements": "false"}), 1)
    provider.submit(sh("true", options={"submit": {"hold": True}}), 1)
    provider._states.clear()  # As if it had been interrupted before it knew.
    assert len(in_queue("stopped")) == 4
    provider.stop()
    assert in_queue("stopped") == []


def test_providers_of_one_run_stop_apart(condor):
    [ours] = condor.submit(sh("true", options={"requirements": "false"}), 1)
    other = CondorProvider(run=condor.run)
    with tempfile.TemporaryDirectory(dir=Path.home()) as path:
        other.start(path)
        other.submit(sh("true", options={"requirements": "false"}), 1)
        other.stop()
    eventually(lambda: in_queue(condor.run) == [ours.partition(".")[0]])


SIGNALS = """
import signal, sys
def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]
before = handlers()
from ctxflow.factory import CondorProvider
provider = CondorProvider(run="signals")
provider.start(sys.argv[1])
provider.changes()
provider.stop()
sys.exit(handlers() != before)
"""


def test_the_bindings_leave_signals_alone(directory):
    subprocess.run([sys.executable, "-c", SIGNALS, directory], check=True)


DRIVER = """
import sys, time
from ctxflow.factory import CondorProvider, WorkerJob
provider = CondorProvider(run=sys.argv[2], lease=10)
provider.start(sys.argv[1])
for options in ({"requirements": "false"}, {"submit": {"hold": True}}):
    provider.submit(WorkerJob("any", ["true"], options=options), 1)
print("submitted", flush=True)
while True:
    provider.changes()
    time.sleep(0.5)
"""


def test_waiting_jobs_outlive_the_lease_but_not_their_driver(directory):
    interval = int(htcondor2.param["PERIODIC_EXPR_INTERVAL"])
    drivers = {}
    try:
        for fate in ("spared", "killed"):
            os.mkdir(f"{directory}/{fate}")
            words = [sys.executable, "-c", DRIVER, f"{directory}/{fate}", f"{fate}-{os.getpid()}"]
            drivers[fate] = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert drivers[fate].stdout.readline() == "submitted\n"
        drivers["killed"].kill()
        nothing_left(lambda: in_queue(f"killed-{os.getpid()}"), within=60 + 4 * interval)
        assert len(in_queue(f"spared-{os.getpid()}")) == 2
    finally:
        for fate, driver in drivers.items():
            driver.kill()
            driver.communicate()
            words = ["condor_rm", "-constraint", f'CtxflowRun == "{fate}-{os.getpid()}"']
            subprocess.run(words, check=False, capture_output=True)


def test_an_unreachable_schedd_does_not_end_a_run(condor, monkeypatch):
    [job] = condor.submit(sh("true", options={"submit": {"hold": True}}), 1)

    with monkeypatch.context() as patched:
        patched.setattr(condor, "_place", (None, "127.0.0.1:1"))
        condor._renew_at = 0
        assert condor.changes() == []
        with pytest.raises(ProviderError, match="condor_q works"):
            condor.remove([job])
        with pytest.raises(ProviderError, match="later, call condor_rm -constraint"):
            condor.stop()
    condor.remove([job])
