"""How many rows may fail before a job is ended: `--max-errors`.

What does not live here: the loop that asks (pump.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ctxflow.batch.words import one_line
from ctxflow.errors import CtxflowError
from ctxflow.observe.causes import Causes
from ctxflow.wording import counted

FIRST = 100
"""So many rows are looked at before a job can be said to go wrong throughout, or a share be told."""


class TooManyErrors(CtxflowError):
    """So many rows failed that the rest of the job is not run."""


def parsed(text: str) -> tuple[int | None, float | None]:
    """Return the number or the share that a person wrote, the other as None.

    :raises ValueError: if it is neither.

    >>> parsed("20"), parsed("2.5%")
    ((20, None), (None, 2.5))
    """
    if re.fullmatch(r"\d+", text.strip()):
        return int(text), None
    share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if share is None or float(share[1]) > 100:
        raise ValueError(
            f"the most errors cannot be {text!r}: write a number of rows such as 20, or a share such as 5%"
        )
    return None, float(share[1])


class Tolerance:
    """Counts what fails in this run of a job, and says when it is too much.

    By default that is when each of the first `FIRST` rows failed, and no other row went well so far.

    :param most: as a person writes it, None for the default.

    >>> tolerance = Tolerance("1")
    >>> tolerance.read([0, 1, 2]); tolerance.dead(0, "ValueError", "no"); tolerance.exceeded() is None
    True
    >>> tolerance.dead(1, "ValueError", "no"); tolerance.exceeded()
    '2 rows failed, and --max-errors allows 1: ValueError: no'
    """

    def __init__(self, most: str | None = None) -> None:
        self._most, self._share = parsed(most) if most is not None else (None, None)
        self._read = self._dead = self._first_dead = 0
        self._last_of_first = -1  # The number of the last of the first rows.
        self._went_well = False
        self._causes = Causes()

    def read(self, numbers: Sequence[int]) -> None:
        """Rows were read, whose numbers ascend."""
        if numbers and self._read < FIRST:
            self._last_of_first = numbers[: FIRST - self._read][-1]
        self._read += len(numbers)

    def done(self, amount: int) -> None:
        """Rows went well."""
        self._went_well |= amount > 0

    def dead(self, number: int, error: str, message: str) -> None:
        """A row failed."""
        self._dead += 1
        self._first_dead += number <= self._last_of_first
        self._causes.bury({"kind": "exception", "error": error, "message": message}, 1)

    def exceeded(self) -> str | None:
        """Return why the job is to be ended, None if it is not."""
        if self._most is not None:
            too_many = self._dead > self._most
            said = f"{counted(self._dead, 'row')} failed, and --max-errors allows {self._most:,}"
        elif self._share is not None:
            too_many = self._read >= FIRST and self._dead > self._read * self._share / 100
            said = f"{counted(self._dead, 'row')} of {self._read:,} failed, and --max-errors allows {self._share:g} %"
        else:
            too_many = not self._went_well and self._first_dead >= FIRST
            said = f"each of the first {self._first_dead:,} rows failed"
        return f"{said}: {self._commonest()}" if too_many else None

    def _commonest(self) -> str:
        cause = self._causes.ordered()[0]
        share = "" if cause.items == self._dead else f"most often ({cause.items:,}) for "
        return f"{share}{cause.error}: {one_line(cause.message)}"
