"""Parsl's execution providers: made for tiers, intercepted for what they leave out, and kept from hosts."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from parsl.jobs.states import JobState as ParslState
from parsl.jobs.states import JobStatus
from parsl.launchers import SimpleLauncher
from parsl.providers import GridEngineProvider, KubernetesProvider, PBSProProvider, SlurmProvider
from parsl.providers.base import ExecutionProvider

from ctxflow.factory.parsl_script import JobReport
from ctxflow.factory.provider import JobState, ProviderError
from ctxflow.installing import how_to_install
from ctxflow.sites.provider_keys import option_problems
from ctxflow.sites.site_model import Tier

PARSL: Mapping[str, type[ExecutionProvider]] = {
    "slurm": SlurmProvider,
    "pbs": PBSProProvider,
    "grid-engine": GridEngineProvider,
    "kubernetes": KubernetesProvider,
}


def parsl_provider(tier: Tier) -> ExecutionProvider:
    """Return the Parsl provider of a tier, whose options are that provider's keyword arguments.

    - `slurm`: cores, memory and GPUs become cores_per_node, mem_per_node (in whole GiB) and `--gpus-per-node` in
      scheduler_options, unless the options have these, or a gres with GPUs. Nodes are shared (`exclusive`). One more
      option: `grace`, the seconds before the end of the walltime at which Slurm gives notice (60).
    - `pbs` (PBS Pro, OpenPBS): cpus_per_node; memory and GPUs go into select_options, as `mem` and `ngpus`, unless
      they are there.
    - `grid-engine`: what is asked for goes into scheduler_options, unless they ask for it: `-pe` for more than one core
      (one more option: `parallel_environment`, by default "smp"), `-l mem_free` and `-l gpu`; and `-notify`.
    - `kubernetes`: init_cpu and max_cpu, init_mem and max_mem, and the limit `nvidia.com/gpu`. The tier's `image` is
      needed, and `persistent_volumes`, [[CLAIM, PATH], ...]: the run's directory must lie in one of them.
    - `MODULE:NAME`: a Parsl provider that is used as it is, or what makes one when it is called with the options.

    The walltime is an hour if the options have none.

    :raises ProviderError: for an option that there is not, or one that will not do, saying what to write.

    >>> provider = parsl_provider(Tier(provider="slurm", memory_gb=8, options={"partition": "gpu"}))
    >>> provider.mem_per_node, provider.exclusive, "#SBATCH --gpus-per-node=1" in provider.scheduler_options
    (8, False, True)
    """
    if ":" in tier.provider:
        return _named(tier)
    kind = PARSL[tier.provider]
    for key in tier.wishes:
        if not (key == "image" and tier.provider == "kubernetes"):
            raise ProviderError(f"tier {tier.name} has {key!r}, which {tier.provider} does not know: leave it out")
    for problem in option_problems(tier):
        raise ProviderError(problem.text)
    wanted = {"slurm": _slurm, "pbs": _pbs, "grid-engine": _grid_engine, "kubernetes": _kubernetes}[tier.provider]
    words = wanted(tier, dict(tier.options))
    if tier.provider != "kubernetes":
        words = {"walltime": "01:00:00", **words, "launcher": SimpleLauncher()}
    try:
        return kind(**words)
    except Exception as error:  # Each provider checks its arguments in its own way.
        raise ProviderError(_explained(tier, error)) from None


def _slurm(tier: Tier, options: dict[str, Any]) -> dict[str, Any]:
    grace = options.pop("grace", 60)
    if not isinstance(grace, int) or grace < 0:
        raise ProviderError(f"tier {tier.name}'s grace cannot be {grace!r}: write seconds")
    lines = [options.get("scheduler_options", "")]
    if grace and "--signal" not in lines[0]:
        lines.append(f"#SBATCH --signal=B:USR1@{grace}")
    asked = "gpus_per_node" in options or "gpu" in options.get("gres", "")
    if tier.gpus and not asked and not re.search(r"--gpus|--gres=\S*gpu", lines[0]):
        lines.append(f"#SBATCH --gpus-per-node={tier.gpus}")  # Parsl knows it only since 2026.2.23.
    return {
        "cores_per_node": tier.cores,
        "mem_per_node": math.ceil(tier.memory / 2**30),
        "exclusive": False,
        "cmd_timeout": 30,
        **options,
        "scheduler_options": "\n".join(line for line in lines if line),
    }


def _pbs(tier: Tier, options: dict[str, Any]) -> dict[str, Any]:
    select = str(options.get("select_options", "")).strip(":")
    parts = [select] if select else []
    if not re.search(r"(^|:)mem=", select):
        parts.append(f"mem={_mebibytes(tier)}mb")
    if tier.gpus and "ngpus=" not in select:
        parts.append(f"ngpus={tier.gpus}")
    return {"cpus_per_node": tier.cores, **options, "select_options": ":".join(parts)}


def _grid_engine(tier: Tier, options: dict[str, Any]) -> dict[str, Any]:
    environment = options.pop("parallel_environment", "smp")
    given = str(options.get("scheduler_options", ""))
    lines = [given] if given else []
    if tier.cores > 1 and "-pe " not in given:
        lines.append(f"#$ -pe {environment} {tier.cores}")
    if not re.search(r"mem_free|h_vmem|h_rss|-l mem", given):
        lines.append(f"#$ -l mem_free={_mebibytes(tier)}M")
    if tier.gpus and "gpu" not in given:
        lines.append(f"#$ -l gpu={tier.gpus}")
    if "-notify" not in given:
        lines.append("#$ -notify")
    return {**options, "scheduler_options": "\n".join(lines)}


def _kubernetes(tier: Tier, options: dict[str, Any]) -> dict[str, Any]:
    image = options.pop("image", tier.image)
    volumes = options.pop("persistent_volumes")
    memory = f"{_mebibytes(tier)}Mi"
    limits = dict(options.pop("extra_limits", {}))
    if tier.gpus:
        limits.setdefault("nvidia.com/gpu", str(tier.gpus))
    asked = {"init_cpu": tier.cores, "max_cpu": tier.cores, "init_mem": memory, "max_mem": memory}
    pairs = [(str(claim), str(path)) for claim, path in volumes]
    return {**asked, **options, "image": image, "persistent_volumes": pairs, "extra_limits": limits}


def _named(tier: Tier) -> ExecutionProvider:
    """Return a site's own provider."""
    module, _, name = tier.provider.partition(":")
    its = f"tier {tier.name}'s provider {tier.provider!r}"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        where = "write MODULE:NAME, of a module on PYTHONPATH"
        raise ProviderError(f"{its} cannot be imported ({error}): {where}") from None
    if isinstance(found, ExecutionProvider):
        if tier.options:
            raise ProviderError(f"tier {tier.name} has options, but {tier.provider!r} is made already: leave them out")
        return found
    if not callable(found):
        raise ProviderError(f"{its} is no Parsl provider: name one")
    try:
        made = found(**tier.options)
    except Exception as error:  # Theirs to raise.
        raise ProviderError(_explained(tier, error)) from None
    if not isinstance(made, ExecutionProvider):
        raise ProviderError(f"{its} does not make a Parsl provider")
    return made


def _explained(tier: Tier, error: Exception) -> str:
    if type(error).__name__ == "OptionalModuleMissing":
        command = how_to_install("kubernetes", extra="kubernetes")
        return f"tier {tier.name}'s provider {tier.provider} needs the package kubernetes: {command}"
    return f"Parsl's provider for tier {tier.name} ({tier.provider}) cannot be made: {sentence(str(error))}"


def _mebibytes(tier: Tier) -> int:
    return math.ceil(tier.memory / 2**20)


_STATES: dict[ParslState, JobState] = {
    ParslState.PENDING: "queued",
    ParslState.RUNNING: "running",
    ParslState.HELD: "held",
    ParslState.CANCELLED: "ended",
    ParslState.COMPLETED: "ended",
    ParslState.FAILED: "ended",
    ParslState.TIMEOUT: "ended",
}


class ParslIntercept:
    """Intercept Parsl's commands to the batch system, and the answers, which Parsl's own messages leave out.

    :ivar script: the script that was submitted last.
    """

    def __init__(self, parsl: Any, label: str) -> None:
        self._label = label
        self.script = ""
        self._answer: tuple[int, str, str] = (0, "", "")
        self._trying = self._muted = False
        self._plain = getattr(parsl, "execute_wait", None)
        if self._plain is not None:
            parsl.execute_wait = self._execute

    def _execute(self, command: str, timeout: float | None = None) -> tuple[int, str, str]:
        if command.startswith(("sbatch ", "qsub ", "bsub ")):
            self.script = command.rsplit(maxsplit=1)[-1]
        if self._muted:
            return 1, "", ""
        if self._trying:
            command = command.replace("sbatch ", "sbatch --test-only ", 1)
        assert self._plain is not None
        self._answer = self._plain(command, timeout)
        return self._answer

    def complaint(self) -> str:
        """Return the batch system's last message, "" if there is none."""
        return sentence(self._answer[2] or self._answer[1])

    def called(self, what: str, call: Callable[..., Any], *words: Any) -> Any:
        """Call Parsl, and turn its exceptions into one sentence.

        :param what: what the batch system did, or did not, if that fails.
        :raises ProviderError: if Parsl complains.
        """
        self._answer = (0, "", "")
        try:
            return call(*words)
        except Exception as error:  # Whatever a provider raises: each has errors of its own.
            raise ProviderError(f"{self._label} {what}: {self.complaint() or sentence(str(error))}") from None

    def run(self, command: str) -> str:
        """Return what a command of the batch system writes."""
        status, output, _ = self.called("does not answer", self._execute, command)
        if status != 0:
            raise ProviderError(f"{self._label} does not answer: {self.complaint() or f'status {status}'}")
        return str(output)

    def rehearsal(self, submit: Callable[[], object]) -> str:
        """Return the script that would be submitted, "" where Parsl has none; nothing is submitted."""
        if self._plain is None:
            return ""
        self._muted = True
        log = logging.getLogger("parsl")
        before, log.propagate = log.propagate, False
        try:
            submit()
        except Exception:
            if not self.script:
                raise
        finally:
            self._muted, log.propagate = False, before
        with open(self.script) as file:
            return file.read()

    def trial(self, submit: Callable[[], object]) -> str:
        """Return what Slurm has against a submission that is only tried, "" if nothing."""
        self._trying, self._answer = True, (0, "", "")
        log = logging.getLogger("parsl.providers.slurm.slurm")  # It takes a trial for a failure.
        before, log.disabled = log.disabled, True
        try:
            submit()
        except Exception:
            if not self._answer[2]:  # Parsl itself has something against it: a walltime that is none, for example.
                raise
        finally:
            self._trying, log.disabled = False, before
        status, output, error = self._answer
        return (error or output).strip() if status else ""


class OnePod:
    """Kubernetes' client for Parsl, with pods that run once, and not on the nodes `excluded`: Parsl's would restart."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.excluded: tuple[str, ...] = ()

    def create_namespaced_pod(self, namespace: str, body: Any) -> Any:
        """Create a pod that is not restarted, and knows its node."""
        body.spec.restart_policy = "Never"
        if self.excluded:
            body.spec.affinity = node_affinity(self.excluded)
        field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        for container in body.spec.containers:
            container.env = [*(container.env or ()), {"name": MACHINE_VARIABLE, "valueFrom": field}]
        return self._client.create_namespaced_pod(namespace=namespace, body=body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def report_of(status: JobStatus, label: str) -> JobReport | None:
    """Return what Parsl reports of a job, None if it does not know.

    >>> report_of(JobStatus(ParslState.TIMEOUT), "pbspro")
    JobReport(state='ended', reason='pbspro says TIMEOUT', taken=True, host=None, restarts=None)
    """
    state = _STATES.get(status.state)
    if state is None:
        return None
    taken = status.state in (ParslState.TIMEOUT, ParslState.CANCELLED)
    return JobReport(state, status.message or f"{label} says {status.state.name}", taken)


def sentence(text: str) -> str:
    """Return text as one sentence that may be followed by more.

    >>> sentence("sbatch: error:\\n it is down.")
    'sbatch: error: it is down'
    """
    return " ".join(text.split()).rstrip(".")[:500]


MACHINE_VARIABLE = "CTXFLOW_MACHINE"
"""The variable in which a pod finds the name of its node: its host name is the pod's own."""


def slurm_options(options: str, hosts: Sequence[str]) -> str:
    """Return Slurm's options with these nodes excluded too: only the last `--exclude` counts.

    >>> print(slurm_options("#SBATCH --exclude=n1", ["n2"]), end="")
    #SBATCH --exclude=n1
    #SBATCH --exclude=n1,n2
    """
    theirs = re.findall(r"^#SBATCH\s+(?:--exclude[=\s]|-x)\s*(\S+)", options, re.MULTILINE)
    return f"{options.rstrip()}\n#SBATCH --exclude={','.join([*theirs[-1:], *hosts])}\n".lstrip()


def grid_engine_options(options: str, hosts: Sequence[str]) -> str:
    """Return Grid Engine's options with these hosts excluded; requests on several lines add up.

    >>> print(grid_engine_options("#$ -l gpu=1", ["n1", "n2"]), end="")
    #$ -l gpu=1
    #$ -l hostname=!(n1|n2)
    """
    return f"{options.rstrip()}\n#$ -l hostname=!({'|'.join(hosts)})\n".lstrip()


EXCLUDES: Mapping[str, Callable[[str, Sequence[str]], str] | None] = {
    "slurm": slurm_options,
    "grid_engine": grid_engine_options,
    "kubernetes": None,
}
"""The providers of Parsl, by label, that can exclude hosts, and by which change of their `scheduler_options`."""


@contextlib.contextmanager
def kept_from(parsl: Any, label: str, hosts: Sequence[str]) -> Iterator[None]:
    """Keep what Parsl submits meanwhile from these hosts, as far as its batch system can."""
    change = EXCLUDES.get(label)
    if label == "kubernetes":
        parsl.kube_client.excluded = tuple(hosts)
    if change is None or not hosts:
        yield
        return
    before = parsl.scheduler_options
    parsl.scheduler_options = change(before, hosts)
    try:
        yield
    finally:
        parsl.scheduler_options = before


def node_affinity(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the affinity of a pod that is on none of these nodes; Kubernetes takes one node name in a condition."""
    conditions = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
    terms = {"nodeSelectorTerms": [{"matchFields": conditions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
