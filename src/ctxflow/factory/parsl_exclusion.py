"""How batch systems that Parsl has a provider for are told on which hosts a job is not to run.

PBS has no words for it. What does not live here: jobs that wait already (parsl_jobs.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MACHINE_VARIABLE = "CTXFLOW_MACHINE"
"""In which variable a pod finds the name of its node: its host name is the pod's own."""


def slurm_options(options: str, hosts: Sequence[str]) -> str:
    """Slurm's options with these nodes left out, beside those that they leave out: only the last `--exclude` counts.

    >>> print(slurm_options("#SBATCH --exclude=n1", ["n2"]), end="")
    #SBATCH --exclude=n1
    #SBATCH --exclude=n1,n2
    """
    theirs = re.findall(r"^#SBATCH\s+(?:--exclude[=\s]|-x)\s*(\S+)", options, re.MULTILINE)
    return f"{options.rstrip()}\n#SBATCH --exclude={','.join([*theirs[-1:], *hosts])}\n".lstrip()


def grid_engine_options(options: str, hosts: Sequence[str]) -> str:
    """Grid Engine's options with these hosts left out; requests of several lines hold together.

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
"""Who can be told, by the label of Parsl's provider, and with which change of its `scheduler_options`."""


@contextlib.contextmanager
def kept_from(parsl: Any, label: str, hosts: Sequence[str]) -> Iterator[None]:
    """Have what Parsl submits meanwhile kept from these hosts, as far as its batch system can."""
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
    """The affinity of a pod that is on none of these nodes; of node names, Kubernetes takes one in a condition."""
    conditions = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
    terms = {"nodeSelectorTerms": [{"matchFields": conditions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
