"""Hearing what Parsl and a batch system tell each other, which Parsl's own words leave out.

What does not live here: what is to be told (parsl_jobs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from parsl.jobs.states import JobState as ParslState
from parsl.jobs.states import JobStatus

from ctxflow.factory.parsl_exclusion import MACHINE_VARIABLE, node_affinity
from ctxflow.factory.parsl_story import Word
from ctxflow.factory.provider import JobState, ProviderError

_STATES: dict[ParslState, JobState] = {
    ParslState.PENDING: "queued",
    ParslState.RUNNING: "running",
    ParslState.HELD: "held",
    ParslState.CANCELLED: "ended",
    ParslState.COMPLETED: "ended",
    ParslState.FAILED: "ended",
    ParslState.TIMEOUT: "ended",
}


class Ear:
    """Hears what Parsl tells the batch system, and what that answers: Parsl's own words leave it out.

    :param label: what the batch system is called.
    :ivar script: the script that was submitted last.
    """

    def __init__(self, parsl: Any, label: str) -> None:
        self._label = label
        self.script = ""
        self._answer: tuple[int, str, str] = (0, "", "")
        self._trying = self._muted = False
        self._plain = getattr(parsl, "execute_wait", None)
        if self._plain is not None:
            parsl.execute_wait = self._heard

    def _heard(self, command: str, timeout: float | None = None) -> tuple[int, str, str]:
        if command.startswith(("sbatch ", "qsub ", "bsub ")):
            self.script = command.rsplit(maxsplit=1)[-1]
        if self._muted:
            return 1, "", ""
        if self._trying:
            command = command.replace("sbatch ", "sbatch --test-only ", 1)
        assert self._plain is not None
        self._answer = self._plain(command, timeout)
        return self._answer

    def forget(self) -> None:
        """Nothing was heard yet."""
        self._answer = (0, "", "")

    def complaint(self) -> str:
        """What the batch system said last, "" if nothing."""
        return sentence(self._answer[2] or self._answer[1])

    def called(self, what: str, call: Callable[..., Any], *words: Any) -> Any:
        """Call Parsl, whose complaints become one sentence.

        :param what: what the batch system did, or did not, if that fails.
        :raises ProviderError: if Parsl complains.
        """
        self.forget()
        try:
            return call(*words)
        except Exception as error:  # Whatever a provider raises: each has errors of its own.
            raise ProviderError(f"{self._label} {what}: {self.complaint() or sentence(str(error))}") from None

    def run(self, command: str) -> str:
        """What a command of the batch system writes.

        :raises ProviderError: if it fails.
        """
        status, output, _ = self.called("does not answer", self._heard, command)
        if status != 0:
            raise ProviderError(f"{self._label} does not answer: {self.complaint() or f'status {status}'}")
        return str(output)

    def rehearsal(self, submit: Callable[[], object]) -> str:
        """The script that would be submitted, "" where Parsl has none; nothing is."""
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
        """What Slurm has against a submission that is only tried, "" if nothing."""
        self._trying = True
        self.forget()
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
    """Kubernetes' client as Parsl uses it, for pods that run once: else what ends is started again.

    :ivar excluded: the nodes on which the next ones are not to run.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.excluded: tuple[str, ...] = ()

    def create_namespaced_pod(self, namespace: str, body: Any) -> Any:
        """Create a pod that is not started again, and knows its node."""
        body.spec.restart_policy = "Never"
        if self.excluded:
            body.spec.affinity = node_affinity(self.excluded)
        field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        for container in body.spec.containers:
            container.env = [*(container.env or ()), {"name": MACHINE_VARIABLE, "valueFrom": field}]
        return self._client.create_namespaced_pod(namespace=namespace, body=body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def word_of(status: JobStatus, label: str) -> Word | None:
    """What Parsl says of a job, None if it does not know.

    >>> word_of(JobStatus(ParslState.TIMEOUT), "pbspro")
    Word(state='ended', reason='pbspro says TIMEOUT', taken=True, host=None, restarts=None)
    """
    state = _STATES.get(status.state)
    if state is None:
        return None
    taken = status.state in (ParslState.TIMEOUT, ParslState.CANCELLED)
    return Word(state, status.message or f"{label} says {status.state.name}", taken)


def sentence(text: str) -> str:
    """Text as one sentence that may be followed by more.

    >>> sentence("sbatch: error:\\n it is down.")
    'sbatch: error: it is down'
    """
    return " ".join(text.split()).rstrip(".")[:500]
