"""The limits that a factory keeps over its runs: of its own life, and of its user over all runs.

What does not live here: counting (spending.py), the record (spending_record.py), and what follows (service.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ctxflow.factory.spending import Spent, limits_of, reached, standing
from ctxflow.factory.spending_record import SpendingRecord
from ctxflow.sites import Site

_RECORD_SECONDS = 10.0


class FactoryLimits:
    """What is used of a factory's limits.

    :param site: the site's name, by which the user's record is kept.
    :param say: takes note of a sentence.
    :ivar standing: what is used of each limit.
    :ivar reached: the limit that is reached, in words; "" if none is.
    """

    def __init__(self, site: str, say: Callable[[str], None]) -> None:
        self.standing: list[dict[str, Any]] = []
        self.reached = ""
        self._name = site
        self._say = say
        self._record: SpendingRecord | None = None
        self._trouble = ""
        self._write_at = 0.0

    def look(self, site: Site, spent: Spent, last: bool = False) -> None:
        """See what the limits say now; what is reached is told once.

        :param spent: what the factory's runs have used since it began.
        :param last: whether the record must be written.
        :raises CtxflowError: if the user's record cannot be read.
        """
        own, user = limits_of(site, "factory"), limits_of(site, "user")
        if user and self._record is None:
            self._record = SpendingRecord(self._name)
        self.standing = standing("factory", spent, own)
        if user and self._record is not None:
            self._keep(self._record, spent, last)
            self.standing += standing("user", self._record.total(spent), user)
        before, self.reached = self.reached, reached(self.standing)
        if self.reached and not before:
            self._say(f"{self.reached}; no worker is asked for, and those that run end what they do and leave")
        elif before and not self.reached:
            self._say("no limit is reached any more: workers are asked for again")

    def _keep(self, record: SpendingRecord, spent: Spent, last: bool) -> None:
        if not last and time.monotonic() < self._write_at:
            return
        self._write_at = time.monotonic() + _RECORD_SECONDS
        try:
            record.write(spent)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"what was used cannot be recorded in {record.path}: {error}; it is tried again")
