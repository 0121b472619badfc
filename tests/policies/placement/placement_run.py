"""What a recorded run whose demand turned round half way shows of its plans: for the run itself, and for its replay."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler.log import replayed


@dataclasses.dataclass(frozen=True)
class Moment:
    """What there is: workers by tier, how many of them hold or build a context (by name and tier), and the plan."""

    time: float
    workers: Counter[str]
    held: Counter[tuple[str, str]]
    plan: Plan

    @property
    def as_planned(self) -> bool:
        """Whether there are the planned workers, with the planned contexts."""
        wanted = Counter({tier: most for tier, (_, most) in self.plan.workers.items()})
        return bool(self.plan.holders) and self.workers == +wanted and self.held == Counter(self.plan.holders)


def moments(lines: Iterable[str]) -> list[Moment]:
    """Replay a log, which takes every decision again, plans among them: what there was after each event."""
    found = []
    for event, state in replayed(lines):
        names = {context.spec.id: context.spec.name for context in state.contexts.values()}
        plan = dataclasses.replace(
            state.plan, holders={(names[each], tier): n for (each, tier), n in state.plan.holders.items()}
        )
        workers = Counter(worker.tier for worker in state.workers.values() if not worker.draining)
        held = Counter((names[each], w.tier) for w in state.workers.values() for each in w.contexts if each)
        found.append(Moment(event.time, workers, held, plan))
    return found


def placed(found: Iterable[Moment], begin: float, end: float) -> Moment:
    """The last moment of a part of a run at which what there was was as planned."""
    those = [moment for moment in found if begin <= moment.time < end and moment.as_planned]
    assert those, f"from {begin:.1f} to {end:.1f} s nothing was ever as planned"
    return those[-1]


def stood_in_vain(found: Iterable[Moment], seconds: float) -> list[Plan]:
    """The plans that stood for so long, and that there was no moment at which what there was was as planned."""
    missed = []
    for plan, those in itertools.groupby(found, key=lambda moment: moment.plan):
        listed = list(those)
        if plan.holders and listed[-1].time - listed[0].time >= seconds and not any(m.as_planned for m in listed):
            missed.append(plan)
    return missed
