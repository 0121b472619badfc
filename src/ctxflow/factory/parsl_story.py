"""What is known of a job that a batch system runs, from what it tells of itself and what the system says. Pure.

What does not live here: reading the events and asking the batch system (parsl_jobs.py, slurm.py).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from ctxflow.factory.provider import JobChange, JobState

_BY_HAND = re.compile("JobHeld|requeued.in.held.state")  # Slurm's, after `scontrol hold` and `requeuehold`.
GIVEN_BACK = "ctxflow gave the worker back"


@dataclass(frozen=True)
class Word:
    """What a batch system says of a job.

    :ivar state: `evicted` if it is suspended; `ended` also if it is unknown there.
    :ivar taken: of one that ended, whether the batch system took its machine.
    :ivar restarts: how often it was put back into the queue; None where nobody counts.

    >>> Word("queued", "Priority").taken
    False
    """

    state: JobState
    reason: str = ""
    taken: bool = False
    host: str | None = None
    restarts: int | None = None


@dataclass
class Story:
    """One job: what was told of it last, and what that was learnt from.

    Its script tells of beginnings, notices and ends. A SIGTERM is the end of its machine, since the batch system says
    it to all processes; any other signal only announces that, so that the eviction is told when the script has ended.

    :ivar status: with which the script ended, in its present incarnation.
    :ivar removed: whether we ended it: then only its end is news.

    >>> story = Story("12")
    >>> [change.state for line in ("began n1", "notice TERM", "ended 143", "began n2") for change in story.heard(line)]
    ['running', 'evicted', 'running']
    >>> [change.state for change in story.told(Word("ended", "Slurm says NODE_FAIL", taken=True))]
    ['evicted', 'ended']
    """

    job: str
    state: JobState = "queued"
    removed: bool = False
    status: int | None = None
    _noticed: str = ""
    _begun: int = 0
    _restarts: int = 0
    _ahead: bool = False  # The batch system said that it runs before the script did.
    _unheard: bool = False  # It was said to run, and its script has not begun.
    _doubted: bool = False

    @property
    def works(self) -> bool:
        """Whether it runs, and nothing says that it will end."""
        return self.state == "running" and not self._noticed and self.status is None and not self.removed

    def heard(self, line: str) -> list[JobChange]:
        """The news in an event of the script."""
        kind, _, rest = line.partition(" ")
        if kind == "began":
            news = [] if self._ahead else self._evicted("it began anew")
            self._begun += 1
            self.status, self._noticed, self._ahead, self._unheard = None, "", False, False
            return [*news, *self._become("running", host=rest)]
        if kind == "notice":
            self._noticed = rest
            return self._evicted("the batch system ended it") if rest == "TERM" else []
        if kind == "ended" and rest.isdigit():
            self.status = int(rest)
            return self._evicted(f"the batch system gave notice (SIG{self._noticed})") if self._noticed else []
        return []

    def told(self, word: Word) -> list[JobChange]:
        """The news in a word of the batch system, which was asked after all events so far were read."""
        if word.state == "ended":
            taken = self._evicted(word.reason) if word.taken else []
            return [*taken, *self.end(word.reason)]
        if word.state == "evicted":
            return self._evicted(word.reason)
        if word.state == "held":
            by_hand = bool(_BY_HAND.search(word.reason))
            evicted, held = self._evicted(word.reason), self._become("held", word.reason)
            return [*evicted, *(dataclasses.replace(each, by_hand=by_hand) for each in held)]
        news = self._evicted(word.reason or "it was queued again") if self._has_restarted(word) else []
        if word.state == "running" and self.state != "running" and self.status is None and not self._noticed:
            if word.host is not None or self._unheard:  # Else the script will say where.
                news += self._become("running", host=word.host)
                self._ahead = True
            self._unheard = True
        if word.state == "queued" and self.state == "held":
            return self._become("queued", word.reason)
        return news

    def end(self, reason: str) -> list[JobChange]:
        """It has left the batch system."""
        if self.state == "ended":
            return []
        removed, self.removed = self.removed, False
        how = f"it ended with status {self.status}" if self.status is not None else reason
        return self._become("ended", GIVEN_BACK if removed else reason if self.state == "evicted" else how)

    def _has_restarted(self, word: Word) -> bool:
        """Whether it was put back into the queue since it began."""
        if word.restarts is not None:
            before, self._restarts = self._restarts, word.restarts
            return word.restarts > before and word.restarts >= self._begun
        # A batch system may be slow to say that a job runs which has told so itself: only if it insists.
        again, self._doubted = self._doubted, word.state == "queued"
        return self._doubted and (again or self.status is not None)

    def _evicted(self, reason: str) -> list[JobChange]:
        return self._become("evicted", reason) if self.state == "running" else []

    def _become(self, state: JobState, reason: str = "", host: str | None = None) -> list[JobChange]:
        if self.state in (state, "ended"):
            return []
        self.state, self._ahead = state, False
        return [] if self.removed else [JobChange(self.job, state, reason, host)]
