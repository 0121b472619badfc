"""Workers through Parsl's providers: real processes by its LocalProvider, and what the others are told.

Slurm is tried for real in tests/cluster. PBS, Grid Engine and Kubernetes cannot be had: PATH has their programs played,
which run jobs as processes of this machine.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parsl.jobs.states import JobState, JobStatus
from parsl.launchers import SimpleLauncher, WrappedLauncher
from parsl.providers import GridEngineProvider, LocalProvider, PBSProProvider, SlurmProvider
from parsl.providers.kubernetes import kube

from ctxflow.factory import JobChange, ProviderError, WorkerJob, slurm
from ctxflow.factory.parsl_provider import ParslProvider
from ctxflow.factory.parsl_script import JobPaths, JobReport, worker_script
from ctxflow.factory.parsl_systems import kept_from, parsl_provider
from ctxflow.sites.site_model import Tier
from ctxflow.testing.evictions import JobWatch
from waiting import eventually, exited

# One program that is qsub, qstat and qdel, of PBS or of Grid Engine; a job is a process, and a file with its state.
BATCH = r"""#!{python}
import json, os, pathlib, signal, subprocess, sys, time
place, name, words = pathlib.Path(__file__).parent / "queue", os.path.basename(sys.argv[0]), sys.argv[1:]
pbs, variable = ("-terse" not in words and not (place / "ge").exists()), "PBS_JOBID"
if not pbs:
    (place / "ge").touch()
    variable = "JOB_ID"
def alive(pid):
    try:
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
jobs = {{path.stem: path.read_text() for path in place.glob("*.job")}}
if (place / "down").exists():
    sys.exit("cannot connect to server")
if name == "qsub":
    job = f"{{len(jobs) + 1}}.server_1" if pbs else str(len(jobs) + 1)
    out = open(words[-1] + ".stderr", "w")
    process = subprocess.Popen(["bash", words[-1]], env={{**os.environ, variable: job}}, stdin=subprocess.DEVNULL,
                               stdout=out, stderr=out, start_new_session=True)
    (place / f"{{job}}.job").write_text(str(process.pid))
    print(job)
elif name == "qdel":
    says = place / "says"
    gone = [says.read_text()] if says.exists() else []
    for job in words:
        try:
            os.killpg(int(jobs[job]), signal.SIGTERM)
        except ProcessLookupError:
            gone.append(f"qdel: Job has finished {{job}}" if pbs else f'denied: job "{{job}}" does not exist')
    sys.exit("\n".join(gone) or 0)
elif pbs:
    listed = {{job: {{"job_state": "R" if alive(pid) else "F"}} for job, pid in jobs.items() if job in words}}
    print(json.dumps({{"Jobs": listed}}))
else:
    print("job-ID prior name user state\n-----")
    for job, pid in jobs.items():
        if alive(pid):
            print(job, "0.5", "ctxflow", "ada", "r")
"""


def sh(script: str, *words: str, **more: Any) -> WorkerJob:
    return WorkerJob("any", ["sh", "-c", script, "sh", *words], **more)


class Watched(ParslProvider):
    """A provider whose changes can be waited for; its seconds are short."""

    def __init__(self, parsl: Any, directory: Path, **more: Any) -> None:
        self._held: float | None = None
        super().__init__(parsl, "7", clock=lambda: self._held or time.monotonic() * 20, **more)
        watch = JobWatch(self)
        self.until, self.told = watch.until, watch.changes
        self.start(str(directory))

    def running(self, job: str) -> JobChange:
        """Wait until a job's script itself says that it runs: no time passes for the batch system to say so first."""
        self._held = time.monotonic() * 20
        try:
            return self.until(job, "running")
        finally:
            self._held = None


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Watched]:
    provider = Watched(LocalProvider(), tmp_path)
    yield provider
    provider.stop()


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of a batch system, and its queue."""
    programs = tmp_path / "bin"
    (programs / "queue").mkdir(parents=True)
    (programs / "qsub").write_text(BATCH.format(python=sys.executable))
    (programs / "qsub").chmod(0o755)
    for name in ("qstat", "qdel"):
        os.link(programs / "qsub", programs / name)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs / "queue"


# The protocol, with jobs that are real processes


def test_a_worker_runs_with_its_files_and_leaves_nothing(local: Watched, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o600)
    script = 'echo "$CTXFLOW_JOB $(cat password) $(stat -c %a password .) $COLOUR $1"; pwd; exit 3'
    job = sh(script, "it's $HOME", files=[str(password)], environment={"COLOUR": "a b", "CTXFLOW_JOB": "no"})
    [name] = local.submit(job, 1)
    assert local.running(name).host == os.uname().nodename
    assert local.until(name, "ended") == JobChange(name, "ended", "it ended with status 3")
    *words, scratch = local.last_words(name).split()
    assert " ".join(words) == f"{name} secret 600 700 a b it's $HOME"
    assert not os.path.exists(scratch) and "ctxflow-" in scratch


def test_the_batch_system_is_asked_ever_more_seldom(local: Watched) -> None:
    times: list[float] = []
    local._clock = lambda: times[-1]
    times.append(0.0)
    [job] = local.submit(sh("sleep 600"), 1)
    eventually(lambda: [change.state for change in local.changes()] == ["running"])
    local.queries = 0
    for second in range(1, 601):
        times.append(float(second))
        assert local.changes() == []
    assert 10 <= local.queries <= 16
    local.remove([job])
    queries = local.queries
    eventually(lambda: times.append(times[-1] + 1) or local.changes())
    assert local.queries > queries


def test_notice_is_passed_on_as_sigterm_and_the_status_is_the_workers(local: Watched) -> None:
    script = "trap 'echo notice; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    for number, reason in ((signal.SIGUSR1, "gave notice (SIGUSR1)"), (signal.SIGTERM, "the batch system ended it")):
        [job] = local.submit(sh(script), 1)
        local.until(job, "running")
        eventually(lambda job=job: local.last_words(job) == "up")
        os.kill(script_of(job), number)
        assert local.until(job, "evicted").reason.endswith(reason)
        local.until(job, "ended")
        assert local.last_words(job) == "up\nnotice"
        assert local.told == []


def script_of(job: str) -> int:
    """The process that runs a job's script."""
    words = ["pgrep", "-f", f"^/bin/bash .*/{job}.sh$"]
    return min(map(int, subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()))


def test_removal_is_no_eviction(local: Watched) -> None:
    one, two = local.submit(sh("sleep 600"), 2)
    local.until(one, "running")
    local.remove([one, "unknown"])
    assert local.until(one, "ended").reason == "ctxflow gave the worker back"
    assert not any(change.job == one for change in local.told)
    local.until(two, "running")


def test_a_job_that_begins_after_its_driver_is_gone_ends_at_once(local: Watched, tmp_path: Path) -> None:
    local._mark_at, local._lease = float("inf"), 6
    Path(JobPaths(str(tmp_path), "").seen).write_text(f"{int(time.time()) - 7}\n")
    [job] = local.submit(sh("echo never"), 1)
    assert local.until(job, "ended").reason == "it ended with status 1"
    assert "the run is over" in local.last_words(job)


def test_stop_ends_all(tmp_path: Path) -> None:
    provider = Watched(LocalProvider(), tmp_path, patience=600)
    jobs = provider.submit(sh("trap 'sleep 0.3; exit 0' TERM; while :; do sleep 0.05; done"), 2)
    for job in jobs:
        provider.running(job)
    running = [script_of(job) for job in jobs]
    provider.stop()
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in running))


def test_missing_files_and_unshared_directories_are_said(local: Watched, tmp_path: Path) -> None:
    gone = tmp_path / "program"
    gone.write_text("")
    text = worker_script(sh("true", files=[str(gone)]), JobPaths(str(tmp_path), "job-1"), None, 120)
    gone.unlink()
    local._mark_alive()
    assert subprocess.run(["bash", "-c", text], check=False).returncode == 1
    assert "start the run in a directory that all machines share" in (tmp_path / "job-1.out").read_text()
    with pytest.raises(ProviderError, match="no spaces"):
        Watched(LocalProvider(), tmp_path / "my runs")


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (WorkerJob("any", []), "have no command"),
        (WorkerJob("any", ["true"], files=["/nowhere/password"]), "cannot be read"),
        (WorkerJob("any", ["true"], environment={"a b": "1"}), "environment variable"),
        (WorkerJob("any", ["a\0b"]), "zero byte"),
    ],
)
def test_impossible_jobs_are_refused(local: Watched, job: WorkerJob, complaint: str) -> None:
    with pytest.raises(ProviderError, match=complaint):
        local.submit(job, 1)


def test_launchers_that_keep_signals_are_replaced_and_others_kept() -> None:
    own = LocalProvider(launcher=WrappedLauncher("env"))
    ParslProvider(own)
    assert isinstance(own.launcher, WrappedLauncher)
    plain = LocalProvider()
    ParslProvider(plain)
    assert isinstance(plain.launcher, SimpleLauncher)


# Batch systems that cannot be had


@pytest.mark.parametrize(
    ("provider", "wanted"),
    [
        ("pbs", "1.server-1"),
        ("grid-engine", "1"),
    ],
)
def test_workers_through_programs_of_other_batch_systems(
    batch: Path, tmp_path: Path, provider: str, wanted: str
) -> None:
    tier = Tier(provider=provider, options={"worker_init": "export COLOUR=blue"})
    watched = Watched(parsl_provider(tier), tmp_path)
    [job] = watched.submit(sh('echo "$CTXFLOW_JOB $COLOUR"; exit 4'), 1)
    assert job == wanted
    watched.until(job, "running")
    assert watched.until(job, "ended").reason == "it ended with status 4"
    assert watched.last_words(job) == f"{job} blue"
    [two] = watched.submit(sh("trap 'exit 0' TERM; while :; do sleep 0.05; done"), 1)
    watched.until(two, "running")
    (batch / "down").touch()
    with pytest.raises(ProviderError, match=r"did not (take|cancel).*cannot connect to server"):
        watched.submit(sh("true"), 1)
    with pytest.raises(ProviderError, match=r"cancel the jobs 2"):
        watched.stop()
    (batch / "down").unlink()
    watched.stop()
    assert watched.find() == [] and watched.survey(sh("true")).machines is None


@pytest.mark.parametrize(
    ("says", "gone"),
    [
        ("qdel: Unknown Job Id 1.server", True),
        ("qdel: Job has finished 1.server", True),
        ('denied: job "1" does not exist', True),
        ("qdel: cannot connect to server", False),
        ("qdel: the server does not respond", False),
    ],
)
def test_to_cancel_a_job_that_has_gone_is_no_trouble(batch: Path, tmp_path: Path, says: str, gone: bool) -> None:
    """A job may end between the last question and its cancelling."""
    watched = Watched(parsl_provider(Tier(provider="pbs")), tmp_path)
    watched.submit(sh("sleep 60"), 1)
    (batch / "says").write_text(says)
    with contextlib.nullcontext() if gone else pytest.raises(ProviderError, match=says):
        watched.stop()
    (batch / "says").unlink()
    watched.stop()


def test_what_a_batch_system_is_told_has_no_variables(batch: Path, tmp_path: Path) -> None:
    """They are in the worker's own script, which only its user can read; others may see the batch system's."""
    # With patience: Parsl 2025.6.30 never says that a job of PBS is over.
    watched = Watched(parsl_provider(Tier(provider="pbs")), tmp_path, patience=600)
    [job] = watched.submit(sh("echo $HF_TOKEN; exec sleep 60", environment={"HF_TOKEN": "hf_abc"}), 1)
    watched.until(job, "running")
    eventually(lambda: watched.last_words(job) == "hf_abc")
    [own] = tmp_path.glob("job-*.sh")
    assert "hf_abc" in own.read_text() and stat.S_IMODE(own.stat().st_mode) == 0o700
    [script] = tmp_path.glob("ctxflow.7.any.*[0-9]")
    assert str(own) in script.read_text() and "hf_abc" not in script.read_text()
    watched.stop()
    assert not own.exists(), "nor does it lie about when the job is over"


def test_a_worker_that_gets_sigterm_together_with_its_script_has_a_status(batch: Path, tmp_path: Path) -> None:
    """Bash loses it half of the time."""
    watched = Watched(parsl_provider(Tier(provider="pbs")), tmp_path, patience=600)
    jobs = watched.submit(sh("exec sleep 60"), 6)
    for job in jobs:
        watched.running(job)
    watched.remove(jobs)
    for job in jobs:
        watched.until(job, "ended")
        told = Path(watched.output(job)).with_suffix(".events").read_text()
        assert told.endswith("notice TERM\nended 143\n")
    watched.stop()


def test_of_jobs_that_ended_the_last_are_known_and_keep_their_files(
    batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxflow.factory.parsl_provider._MOST_ENDED", 2)
    watched = Watched(parsl_provider(Tier(provider="pbs")), tmp_path)
    jobs = []
    for number in range(4):
        jobs += watched.submit(sh(f"echo {number}"), 1)
        watched.until(jobs[-1], "ended")
    assert [watched.last_words(job) for job in jobs] == ["", "", "2", "3"]
    kept = sorted(path.read_text() for path in tmp_path.glob("job-*.out"))
    assert kept == ["2\n", "3\n"]
    assert {watched.output(job) for job in jobs} == {"", *map(str, tmp_path.glob("job-*.out"))}
    assert len(list(tmp_path.glob("job-*"))) == 4, "the output and the events of two"
    assert len([path for path in scripts(tmp_path) if path.suffix not in (".stdout", ".stderr")]) == 2
    assert len(list(tmp_path.glob("*.stderr"))) == 2
    watched.stop()


def test_what_a_tier_asks_for_is_in_the_scripts(batch: Path, tmp_path: Path) -> None:
    wanted = {"cores": 4, "memory_gb": 16, "gpus": 2}
    pbs = Watched(
        parsl_provider(Tier(provider="pbs", options={"queue": "gpu", "walltime": "02:00:00"}, **wanted)), tmp_path
    )
    pbs.submit(sh("true"), 1)
    [script] = tmp_path.glob("ctxflow.7.any.*[0-9]")
    text = script.read_text()
    assert "#PBS -l select=1:ncpus=4:mem=15259mb:ngpus=2\n" in text and "walltime=02:00:00" in text
    pbs.stop()
    (batch / "ge").touch()
    options = {"scheduler_options": "#$ -l gpu=a100", "parallel_environment": "threaded"}
    engine = Watched(parsl_provider(Tier(provider="grid-engine", options=options, **wanted)), tmp_path)
    engine.submit(sh("true"), 1)
    [script] = tmp_path.glob("ctxflow.7.any.*.submit")
    lines = [line for line in script.read_text().splitlines() if line.startswith("#$")][5:]
    assert lines == ["#$ -l gpu=a100", "#$ -pe threaded 4", "#$ -l mem_free=15259M", "#$ -notify"]
    engine.stop()


def scripts(directory: Path) -> set[Path]:
    return set(directory.glob("ctxflow.7.any.*"))


@pytest.mark.parametrize(
    ("provider", "line", "anew"),
    [("grid-engine", "#$ -l hostname=!(n1|n2)", True), ("pbs", None, False)],
)
def test_a_job_is_kept_from_hosts_where_the_batch_system_has_a_word_for_it(
    batch: Path, tmp_path: Path, provider: str, line: str | None, anew: bool
) -> None:
    if provider == "grid-engine":
        (batch / "ge").touch()
    watched = Watched(parsl_provider(Tier(provider=provider)), tmp_path)
    [anywhere] = watched.submit(sh("sleep 60"), 1)
    before = scripts(tmp_path)
    watched.submit(sh("sleep 60", excluded=("n1", "n2")), 1)
    [script] = [each for each in scripts(tmp_path) - before if each.suffix not in (".stderr", ".stdout")]
    told = script.read_text().splitlines()
    assert (line in told) if line else not any("n1" in each for each in told)
    watched.submit(sh("sleep 60"), 1)  # What was said of one job holds for it alone.
    assert sum("n1" in each.read_text() for each in scripts(tmp_path)) == (line is not None)
    # A job that waits cannot be told.
    assert watched.exclude([anywhere, "unknown"], ["n1"]) == ([anywhere] if anew else None)
    watched.until(anywhere, "running")
    assert watched.exclude([anywhere], ["n1"]) == ([] if anew else None)
    watched.stop()


def test_slurm_leaves_out_what_the_site_does_besides(tmp_path: Path) -> None:
    """Of several `--exclude`, Slurm heeds the last alone."""
    tier = Tier(provider="slurm", options={"scheduler_options": "#SBATCH --exclude=n7"})
    provider = ParslProvider(parsl_provider(tier), "7")
    before = provider._parsl.scheduler_options
    with kept_from(provider._parsl, "slurm", ("n1", "n2")):
        lines = provider.description(sh("true"), 1, str(tmp_path)).splitlines()
    assert [line for line in lines if "exclude" in line][-1] == "#SBATCH --exclude=n7,n1,n2"
    assert any(line.startswith("#SBATCH --cpus-per-task") for line in lines)
    assert provider._parsl.scheduler_options == before


def test_what_would_be_submitted_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    provider = ParslProvider(parsl_provider(Tier(provider="slurm", options={"partition": "gpu"})), "7")
    text = provider.description(sh("true"), 3, str(tmp_path))
    assert text.startswith("# 3 times, through Parsl (slurm):\n#!/bin/bash\n")
    assert "#SBATCH --partition=gpu\n" in text and f"exec /bin/bash {tmp_path}/job-ID.sh\n" in text
    assert "sh -c true sh &\n" in text
    assert list(tmp_path.iterdir()) == [] and not caplog.records
    assert "sh -c true sh &\n" in ParslProvider(LocalProvider()).description(sh("true"), 1, str(tmp_path))


class Cluster:
    """Kubernetes, as far as Parsl's provider knows it: pods that end when they are told to."""

    def __init__(self) -> None:
        self.pods: dict[str, Any] = {}

    def create_namespaced_pod(self, namespace: str, body: Any) -> Any:
        body.status = SimpleNamespace(phase="Running")
        self.pods[body.metadata.name] = body
        return body

    def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        return self.pods[name]

    def delete_namespaced_pod(self, name: str, namespace: str, body: Any) -> Any:
        return self.pods.pop(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()

    class Client:
        CoreV1Api = staticmethod(lambda: made)

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace

    monkeypatch.setattr(kube, "client", Client(), raising=False)
    monkeypatch.setattr(kube, "config", SimpleNamespace(load_kube_config=lambda: None), raising=False)
    monkeypatch.setattr(kube, "_kubernetes_enabled", True)
    return made


def test_a_pod_runs_once_with_what_the_tier_asks_for(cluster: Cluster, tmp_path: Path) -> None:
    options = {"persistent_volumes": [["runs", str(tmp_path)]], "namespace": "ada"}
    tier = Tier(provider="kubernetes", image="ctxflow:1", cores=4, memory_gb=16, gpus=2, options=options)
    watched = Watched(parsl_provider(tier), tmp_path)
    [job] = watched.submit(sh("true"), 1)
    [pod] = cluster.pods.values()
    assert pod.spec.restart_policy == "Never"
    [container] = pod.spec.containers
    assert container.image == "ctxflow:1"
    assert container.resources.limits == {"cpu": "4", "memory": "15259Mi", "nvidia.com/gpu": "2"}
    assert container.volume_mounts[0].mount_path == str(tmp_path)
    subprocess.run(container.command + container.args, check=True)  # As the kubelet does.
    watched.until(job, "running")
    assert watched.until(job, "ended").reason == "it ended with status 0"
    assert cluster.pods == {}


def test_a_pod_knows_its_node_and_is_kept_from_others(cluster: Cluster, tmp_path: Path) -> None:
    options = {"persistent_volumes": [["runs", str(tmp_path)]]}
    watched = Watched(parsl_provider(Tier(provider="kubernetes", image="x", options=options)), tmp_path)
    [anywhere] = watched.submit(sh("true"), 1)
    [pod] = cluster.pods.values()
    assert not hasattr(pod.spec, "affinity")
    node = {"name": "CTXFLOW_MACHINE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert node in pod.spec.containers[0].env
    watched.submit(sh("true", excluded=("n1", "n2")), 1)
    [other] = [each for each in cluster.pods.values() if each is not pod]
    [term] = other.spec.affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    # All conditions of a term must hold, and on names each may have one value.
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in ("n1", "n2")]}
    assert watched.exclude([anywhere], ["n1"]) == [anywhere]
    watched.submit(sh("true"), 1)
    assert sum(hasattr(each.spec, "affinity") for each in cluster.pods.values()) == 1
    watched.stop()


def test_a_pod_must_see_the_runs_directory(cluster: Cluster, tmp_path: Path) -> None:
    options = {"persistent_volumes": [["runs", "/elsewhere"]]}
    with pytest.raises(ProviderError, match="persistent_volumes"):
        Watched(parsl_provider(Tier(provider="kubernetes", image="x", options=options)), tmp_path)


# From a tier to Parsl's provider


@pytest.mark.parametrize(
    ("tier", "complaint"),
    [
        ({"provider": "slurm", "options": {"partitoin": "gpu"}}, "did you mean 'partition'"),
        ({"provider": "slurm", "options": {"max_blocks": 3}}, "which ctxflow does itself"),
        ({"provider": "slurm", "options": {"walltime": "2h"}}, "write HH:MM:SS"),
        ({"provider": "slurm", "options": {"grace": "1m"}}, "write seconds"),
        ({"provider": "slurm", "options": {"partition": 3}}, "cannot be made: .*partition"),
        ({"provider": "slurm", "requirements": "Memory > 1"}, "'requirements', which slurm does not know"),
        ({"provider": "pbs", "image": "x.sif"}, "'image', which pbs does not know"),
        ({"provider": "kubernetes"}, "has no image"),
        ({"provider": "kubernetes", "image": "x"}, "persistent_volumes"),
        ({"provider": "nowhere:made"}, "cannot be imported"),
        ({"provider": "os:sep"}, "is no Parsl provider"),
        ({"provider": "os:getcwd"}, "does not make a Parsl provider"),
        ({"provider": "parsl.providers:SlurmProvider", "options": {"x": 1}}, "cannot be made"),
    ],
)
def test_tiers_that_cannot_be_had_are_explained(tier: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProviderError, match=complaint):
        parsl_provider(Tier(name="gpu", **tier))


def test_kubernetes_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kube, "_kubernetes_enabled", False)
    options = {"persistent_volumes": [["runs", str(tmp_path)]]}
    with pytest.raises(ProviderError, match=r"pip install .*kubernetes"):
        parsl_provider(Tier(provider="kubernetes", image="x", options=options))


def test_slurms_options() -> None:
    provider = parsl_provider(Tier(provider="slurm", cores=8, memory_gb=32, gpus=2, options={"grace": 120}))
    assert (provider.cores_per_node, provider.mem_per_node) == (8, 30)
    assert provider.scheduler_options.splitlines() == ["#SBATCH --signal=B:USR1@120", "#SBATCH --gpus-per-node=2"]
    options = {"scheduler_options": "#SBATCH --gres=gpu:a100:2", "grace": 0}
    model = parsl_provider(Tier(provider="slurm", gpus=2, options=options))
    assert model.scheduler_options.splitlines() == ["#SBATCH --gres=gpu:a100:2"]


@pytest.mark.skipif("gres" not in signature(SlurmProvider).parameters, reason="this Parsl has no gres for Slurm")
def test_parsls_own_gres_for_slurm_is_not_asked_for_twice() -> None:
    model = parsl_provider(Tier(provider="slurm", gpus=2, options={"gres": "gpu:a100:2", "grace": 0}))
    assert model.scheduler_options.splitlines() == ["", "#SBATCH --gres=gpu:a100:2"]


def test_a_sites_own_provider_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_site.py").write_text(
        "from parsl.providers import LocalProvider\nready = LocalProvider(cmd_timeout=7)\n"
        "def make(cmd_timeout):\n    return LocalProvider(cmd_timeout=cmd_timeout)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert parsl_provider(Tier(provider="my_site:ready")).cmd_timeout == 7
    assert parsl_provider(Tier(provider="my_site:make", options={"cmd_timeout": 9})).cmd_timeout == 9
    with pytest.raises(ProviderError, match="made already"):
        parsl_provider(Tier(provider="my_site:ready", options={"cmd_timeout": 9}))


def test_files_of_jobs_are_their_users_alone(local: Watched, tmp_path: Path) -> None:
    [job] = local.submit(sh("true"), 1)
    assert stat.S_IMODE((tmp_path / f"{job}.sh").stat().st_mode) == 0o700
    assert "secret" not in (tmp_path / f"{job}.sh").read_text()
    local.until(job, "ended")


def test_providers_of_parsl_are_what_the_keys_say() -> None:
    assert isinstance(parsl_provider(Tier(provider="pbs")), PBSProProvider)
    one_core = parsl_provider(Tier(provider="grid-engine", cores=1, memory_gb=16))
    assert isinstance(one_core, GridEngineProvider)
    assert one_core.scheduler_options.splitlines() == ["#$ -l mem_free=15259M", "#$ -l gpu=1", "#$ -notify"]


class _Many:
    """What stands for one of Parsl's providers: jobs that are files alone."""

    label = "played"

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, command: str, tasks: int, name: str) -> str:
        self.jobs += 1
        return str(self.jobs)

    def status(self, jobs: list[str]) -> list[JobStatus]:
        return [JobStatus(JobState.RUNNING) for _ in jobs]

    def cancel(self, jobs: list[str]) -> list[bool]:
        return [True for _ in jobs]


def test_a_thousand_workers_cost_a_file_server_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a file of a shared filesystem asks its server: of jobs that work a second's delay matters to nobody."""
    now = 1000.0
    provider = ParslProvider(_Many(), "7", clock=lambda: now)
    provider.start(str(tmp_path))
    jobs = provider.submit(sh("true"), 200)
    for script in tmp_path.glob("job-*.sh"):
        script.with_suffix(".events").write_text("began n1\n")
    news = provider.changes()
    assert [change.state for change in news] == ["running"] * 200
    opened, real = 0, builtins.open

    def counting(file: Any, *given: Any, **named: Any) -> Any:
        nonlocal opened
        opened += str(file).endswith(".events")
        return real(file, *given, **named)

    monkeypatch.setattr(builtins, "open", counting)
    for _ in range(600):
        now += 1
        assert provider.changes() == []
    assert opened < 600 * 200 / 5
    # After a loss changes are asked for five times a second, and who ended is known within two.
    with real(tmp_path / f"{provider._jobs[jobs[7]].places.name}.events", "a") as file:
        file.write("notice TERM\n")
    found: list[JobChange] = []
    for _ in range(10):
        now += 0.2
        found += provider.changes()
    assert [(change.job, change.state) for change in found] == [(jobs[7], "evicted")]
    # Those that have not begun are read at once.
    [late] = provider.submit(sh("true"), 1)
    now += 1
    provider.changes()
    (tmp_path / f"{provider._jobs[late].places.name}.events").write_text("began n2\n")
    now += 1
    assert [(change.job, change.state) for change in provider.changes()] == [(late, "running")]


@pytest.mark.parametrize("behind", [0, 3600])
def test_a_driver_whose_clock_is_behind_lives(tmp_path: Path, behind: int) -> None:
    """By its worker's clock nobody has looked after the job for an hour; but somebody does."""
    places = JobPaths(str(tmp_path), "job-1")
    script = tmp_path / "script.sh"
    script.write_text(worker_script(sh("echo works"), places, None, lease=3 if behind else 120))
    Path(places.seen).write_text(f"{int(time.time()) - behind}\n")
    process = subprocess.Popen(["bash", script])
    try:
        if behind:
            seen = itertools.count(int(time.time()) - behind + 1)
            eventually(lambda: Path(places.seen).write_text(f"{next(seen)}\n") and process.poll() is not None)
        assert exited(process) == 0
    finally:
        process.kill()
        process.wait()
    assert Path(places.output).read_text() == "works\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "#SBATCH --comment=ctxflow.run-7"),
        ("#SBATCH --exclusive", "#SBATCH --exclusive\n#SBATCH --comment=ctxflow.run-7"),
        ("#SBATCH --comment=mine", "#SBATCH --comment=mine"),
    ],
)
def test_slurm_s_jobs_of_a_run_have_one_comment_unless_a_site_gives_one(given, expected):
    slurm = SlurmProvider(exclusive=False, scheduler_options=given)
    ParslProvider(slurm, "run-7")
    assert slurm.scheduler_options.rstrip("\n") == expected


def test_a_job_of_slurm_that_is_held_after_its_script_ended_waits_until_it_is_released(tmp_path: Path) -> None:
    """As `scontrol requeuehold` leaves it, or a preemption: it is not one whose end Slurm fails to see."""
    now = [0.0]
    parsl = parsl_provider(Tier(provider="slurm"))
    parsl.submit = lambda command, tasks, name: "12"
    cancelled: list[list[str]] = []
    parsl.cancel = lambda jobs: cancelled.append(jobs) or [True for _ in jobs]
    provider = ParslProvider(parsl, "7", clock=lambda: now[0])
    provider.start(str(tmp_path))
    says = slurm.QueueEntry("12", "ctxflow.7.any.1.1", JobReport("running", host="n1", restarts=0))
    provider._squeue = lambda: {"12": says}  # type: ignore[method-assign]

    def after(*lines: str) -> list[str]:
        with open(provider._jobs["12"].places.events, "a") as file:
            file.writelines(f"{line}\n" for line in lines)
        found: list[str] = []
        for _ in range(120):
            now[0] += 1.0
            found += [change.state + " by hand" * change.by_hand for change in provider.changes()]
        return found

    assert provider.submit(sh("true"), 1) == ["12"]
    assert after("began n1") == ["running"]
    says = slurm.QueueEntry("12", says.name, JobReport("held", "job requeued in held state", restarts=1))
    assert after("notice TERM", "ended 143") == ["evicted", "held by hand"]
    says = slurm.QueueEntry("12", says.name, JobReport("queued", "Priority", restarts=1))
    assert after() == ["queued"]
    says = slurm.QueueEntry("12", says.name, JobReport("running", host="n2", restarts=1))
    assert after("began n2") == ["running"]
    assert cancelled == []
    # One whose end Slurm does not see is ended, as before.
    assert after("ended 0") == ["ended"] and cancelled == [["12"]]
