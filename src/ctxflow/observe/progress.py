"""How a batch job or a program's run stands while it runs. Plain data.

What does not live here: rates (rates.py), and what a scheduler knows (executors/status.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Progress:
    """A batch job, or a program's run, at a moment; all of it is plain data, and the keys of a status file.

    :ivar unit: what is counted: "rows" of a job, "items" of a program.
    :ivar done: rows that have a result, of this run and earlier ones; `dead` likewise.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar running: rows that are queued or at a worker.
    :ivar read: rows read in this run.
    :ivar total: rows of the input, None while that cannot be told; `guessed` if it is an estimate.
    :ivar seconds: since this run began.
    :ivar rate: rows a second now; `rate_overall`, over this run.
    :ivar tokens: that models read and wrote in this run, None where nobody counts them.
    :ivar left: seconds that the rest takes, likely between `left_low` and `left_high` (`ctxflow.observe.rates`).
    :ivar workers: how many there are, None before the first is needed.
    :ivar tiers: name -> workers that "joined" and are there, that were "asked" for (None: not said), and the tier's
        "gpu_hours", "worker_hours" and "cost" (None: no price) so far, and the "reason" why fewer joined, or "".
    :ivar contexts: name -> how many workers are "staging" or "loading" it, or have it "warm".
    :ivar evictions: workers that were taken back; `crashes`, library processes that died; `loads`, contexts built.
    :ivar gpu_hours: GPUs of workers, times the hours they were connected; `worker_hours` likewise.
    :ivar cost: by the tiers' prices; None unless all that gave workers have one.
    :ivar sessions: how many open sessions are "running", "waiting" for a worker, "migrating", "idle" or "suspended";
        empty where there never was one.
    :ivar chunks: that sessions made; `chunks_per_s` now; `migrations`, how often one went from worker to worker.
    :ivar limits: of GPU-hours and cost: the "scope" ("run", "factory", "user"), the "measure" ("gpu_hours", "cost"),
        what is "used" and the "limit".
    :ivar newest_dead: the place and the reason of the newest dead letter of this run, or "".
    """

    unit: str = "rows"
    done: int = 0
    dead: int = 0
    done_now: int = 0
    dead_now: int = 0
    running: int = 0
    read: int = 0
    total: int | None = None
    guessed: bool = False
    seconds: float = 0.0
    rate: float = 0.0
    rate_overall: float = 0.0
    tokens: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_overall: float | None = None
    left: float | None = None
    left_low: float | None = None
    left_high: float | None = None
    workers: int | None = None
    tiers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    contexts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    evictions: int = 0
    crashes: int = 0
    loads: int = 0
    gpu_hours: float = 0.0
    worker_hours: float = 0.0
    cost: float | None = None
    sessions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    chunks: int = 0
    migrations: int = 0
    chunks_per_s: float = 0.0
    limits: Sequence[Mapping[str, Any]] = ()
    newest_dead: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Progress:
        """What a status file says.

        >>> Progress.of({"version": 1, "done": 3, "pid": 17}).done
        3
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    @property
    def rest(self) -> int | None:
        """Rows that are left, None while that cannot be told."""
        return None if self.total is None else max(0, self.total - self.done - self.dead)

    @property
    def counts_rows(self) -> bool:
        """Whether there are rows or items to tell of: a program of sessions alone has none."""
        return not self.sessions or self.read > 0

    @property
    def by_state(self) -> dict[str, int]:
        """Contexts by what workers do with them, over all names."""
        found: dict[str, int] = {}
        for counts in self.contexts.values():
            for state, count in counts.items():
                found[state] = found.get(state, 0) + count
        return found
