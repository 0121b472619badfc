"""The placement problem of a run at a moment: what each context has to do, on which workers.

What does not live here: what apps want (`demand`), how their items are divided among contexts (`mixes`), when to plan
(`live`), and finding plans (`rolling`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ctxflow.policies.agh.arrays import Arrays
from ctxflow.policies.agh.demand import Wanted
from ctxflow.policies.agh.heuristics import greedy
from ctxflow.policies.agh.problem import Model, Problem, QueryType
from ctxflow.policies.agh.workers import Offer, Speed, problem_of

UTILIZATION = 0.9
ROOM_GB = 1e9
"""Of a worker. What fits its memory the scheduler knows; here a model's "GB" are its seconds of loading."""
SERVED = 1e-3
"""The share of the demand that may be unserved: there is more room than that in the utilization."""
_LESS = 0.9  # By how much demand is scaled down at a time until the site can serve it.
_ANY_DELAY = 1e6
_DEAR = 1e3  # What it costs to leave all unserved, in rents of the whole site: more than serving a bit of it ever does.

Mixes = Mapping[str, Mapping[str, float]]
"""App -> context -> the share of the app's items that it answers."""


@dataclasses.dataclass
class Task:
    """What a context has to do.

    :ivar per_hour: items in an hour, of all apps.
    :ivar work: by tier, the seconds of a worker that an hour's items take.
    :ivar urgent: how many items in an hour of apps with a limit on the delay; `urgent_work` likewise.
    """

    context: str
    load_seconds: float
    per_hour: float = 0.0
    max_delay: float | None = None
    work: Counter[str] = dataclasses.field(default_factory=Counter)
    urgent: float = 0.0
    urgent_work: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def workers(self) -> float:
        """How many it would keep busy where it is fastest."""
        return min(self.work.values()) / 3600


@dataclasses.dataclass(frozen=True)
class Asked:
    """The contexts with something to do, and the tiers.

    :ivar speeds: as `problem_of` takes them: query types and models are the contexts.
    """

    tasks: Sequence[Task]
    offers: Sequence[Offer]
    speeds: Sequence[Sequence[Sequence[Speed | None]]]

    @classmethod
    def of(cls, wanted: Sequence[Wanted], mixes: Mixes, offers: Sequence[Offer]) -> Asked:
        """What the apps want, divided so."""
        tasks: dict[str, Task] = {}
        for each in wanted:
            for candidate in each.candidates:
                rate = mixes[each.app].get(candidate.context, 0.0) * each.per_hour
                if rate <= 0:
                    continue
                task = tasks.setdefault(candidate.context, Task(candidate.context, candidate.load_seconds))
                task.per_hour += rate
                work = {tier: rate * seconds for tier, seconds in candidate.seconds.items()}
                task.work.update(work)
                if each.max_delay is not None:
                    task.max_delay = min((d for d in (task.max_delay, each.max_delay) if d is not None), default=None)
                    task.urgent += rate
                    task.urgent_work.update(work)
        listed = list(tasks.values())
        speeds = [
            [[_speed(task, offer.name) if task is other else None for offer in offers] for other in listed]
            for task in listed
        ]
        return cls(listed, offers, speeds)

    def possible(self) -> float:
        """A share of the demand beyond which no plan can go."""
        needed = sum(task.workers for task in self.tasks)
        return min(1.0, UTILIZATION * sum(offer.workers for offer in self.offers) / needed) if needed else 1.0

    def problem(self, share: float) -> Problem:
        """The problem, with so much of the demand."""
        rent = sum(offer.price * offer.workers for offer in self.offers)
        queries = [
            QueryType(
                name=task.context, queries_per_hour=share * task.per_hour, input_tokens=1.0, output_tokens=0.0,
                max_delay_seconds=_ANY_DELAY if task.max_delay is None else task.max_delay, max_error=1.0,
                unserved_dollars=_DEAR * (rent + 1.0),
            )
            for task in self.tasks
        ]  # fmt: skip
        models = [Model(name=task.context, weights_gb=max(1e-3, task.load_seconds)) for task in self.tasks]
        return problem_of("live", queries, models, self.offers, self.speeds, hours=1.0, utilization=UTILIZATION)

    def fitting(self, share: float) -> Problem:
        """The problem with all demand scaled down alike until it can be served."""
        for _ in range(50):
            problem = self.problem(share)
            if max(greedy(Arrays.of(problem)).allocation().unserved) <= SERVED:
                break
            share *= _LESS
        return problem

    def fill(self, counts: dict[tuple[str, str], int]) -> None:
        """Give what is left of the workers, where there is more work than they can do: each to who has most for one."""
        total = Counter({task.context: 0 for task in self.tasks})
        for (context, _), workers in counts.items():
            total[context] += workers
        for offer in self.offers:
            able = [task for task in self.tasks if offer.name in task.work]
            left = offer.workers - sum(n for (_, tier), n in counts.items() if tier == offer.name)
            for _ in range(left if able else 0):
                context = max(able, key=lambda task: task.workers / (total[task.context] + 1)).context
                counts[context, offer.name] = counts.get((context, offer.name), 0) + 1
                total[context] += 1


def _speed(task: Task, tier: str) -> Speed | None:
    if tier not in task.work:
        return None
    delay = task.urgent_work[tier] / task.urgent if task.urgent else 0.0
    return Speed(delay, task.work[tier] / task.per_hour)
