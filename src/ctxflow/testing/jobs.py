"""Waiting for what a provider of workers tells of its jobs; used by every provider's tests."""

from __future__ import annotations

import time

from ctxflow.factory.provider import JobChange, Provider


class Watch:
    """A provider, and all that it told and nobody waited for.

    >>> class Told:
    ...     def changes(self):
    ...         return [JobChange("1.0", "running"), JobChange("1.1", "held", "no memory")]
    >>> watch = Watch(Told())
    >>> watch.until("1.1", "held").reason
    'no memory'
    >>> [(change.job, change.state) for change in watch.changes]
    [('1.0', 'running')]
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.changes: list[JobChange] = []

    def until(self, job: str, *states: str, limit: float = 60.0) -> JobChange:
        """The first change of a job to one of some states that was not waited for before.

        :param limit: seconds to wait.
        :raises AssertionError: if it does not come.
        """
        deadline = time.monotonic() + limit
        while True:
            self.changes += self.provider.changes()
            for place, change in enumerate(self.changes):
                if change.job == job and change.state in states:
                    self.changes[: place + 1] = [each for each in self.changes[:place] if each.job != job]
                    return change
            assert time.monotonic() < deadline, f"{job} was never {' or '.join(states)}: {self.changes}"
            time.sleep(0.02)
