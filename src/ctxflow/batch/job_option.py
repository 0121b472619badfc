"""What is said of a key of a job beside its name, its type and its checks: its help, its flags, and its panel."""

from __future__ import annotations

import dataclasses
import re

WHAT, ROWS, PARAMETERS, WHERE, RUN = (
    "Task", "Input and output", "Generation parameters", "Execution", "Run control",
)  # fmt: skip
"""The panels of `ctxflow batch --help`, and the sections of the reference."""


@dataclasses.dataclass(frozen=True)
class Option:
    """The help and flags of a key of a job, in addition to its name, its type and its checks."""

    help: str
    panel: str
    flags: tuple[str, ...] = ()  # By default the key's name with dashes.
    metavar: str | None = None
    free: bool = False  # Whether another run of the same job may change it, since no result depends on it.


def error_limit(text: str) -> tuple[int | None, float | None]:
    """Return the number or the share (in percent) of rows that `max_errors` allows to fail, the other as None.

    :raises ValueError: if it is neither.

    >>> error_limit("20"), error_limit("2.5%")
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
