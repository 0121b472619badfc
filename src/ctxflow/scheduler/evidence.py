"""What attempts and builds say of the workers that made them: trials, which the health policy counts.

A failed attempt is a charge against its place: the trial is failed once all its items were answered elsewhere, and
the charge is dropped if one of them fails elsewhere too, is answered there after all, or is given up. So no item's own
fault, and nothing that hits all hosts alike, speaks against one of them. What does not live here: what is made of
trials (policies/health), and what becomes of bad hosts (quarantine.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ctxflow.policies.protocols import Trial
from ctxflow.scheduler.events import Failure
from ctxflow.scheduler.groups import Place
from ctxflow.scheduler.state import App, Attempt, ContextState, Worker

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState

SHORTEST = 0.1  # Seconds below which a batch says nothing of a worker's speed.
MOST = 20  # Charges that are open against a place: what fails at once would crowd out those of all others.
CRASHES = ("crash", "lost")  # Kinds of failures that cost a library process, or a worker.
LONGEST = 200  # Characters of a failure that are told.
NOBODYS = ("cancelled", "input", "contract")  # Kinds of failures that say nothing of a worker.


@dataclasses.dataclass(eq=False, slots=True)
class Charge:
    """A failed attempt, until it is known whose fault that was.

    :ivar items: those that were not answered elsewhere yet.
    :ivar crash: whether a library process or a worker ended over it.
    """

    attempt: int

    worker: Worker
    app: App
    items: set[int]
    message: str
    crash: bool


class Charges:
    """The charges that are open, oldest first, those that each item is part of, and how many there are by place.

    :ivar lost_at: when a host's last loss of a worker was counted.
    """

    def __init__(self) -> None:
        self.open: collections.OrderedDict[Charge, None] = collections.OrderedDict()
        self.of: dict[int, list[Charge]] = {}
        self.against = collections.Counter[Place]()
        self.lost_at: dict[str, float] = {}

    def room(self, worker: Worker) -> bool:
        """Whether another charge against a worker's place may be opened."""
        return self.against[worker.place] < MOST

    def add(self, charge: Charge) -> None:
        """Open a charge."""
        self.open[charge] = None
        self.against[charge.worker.place] += 1
        for item in charge.items:
            self.of.setdefault(item, []).append(charge)

    def close(self, charge: Charge) -> None:
        """A charge of which no item is left."""
        del self.open[charge]
        self.against[charge.worker.place] -= 1
        if not self.against[charge.worker.place]:
            del self.against[charge.worker.place]

    def drop(self, charge: Charge) -> None:
        """Nothing follows from a charge."""
        self.close(charge)
        for item in charge.items:
            left = [each for each in self.of.pop(item) if each is not charge]
            if left:
                self.of[item] = left

    def settle(self, items: Iterable[int]) -> None:
        """These items are given up, or nobody waits for them."""
        for item in items:
            for charge in self.of.get(item, ()):
                self.drop(charge)


def finished(state: RunState, worker: Worker, app: App, count: int, seconds: float) -> None:
    """An attempt has answered so many items."""
    item_seconds = max(seconds - app.call_cost.inside, 0.1 * seconds) / count if seconds >= SHORTEST else None
    trial = Trial(worker, "call", app.id, app.spec.name, passed=True, item_seconds=item_seconds)
    state.policies.health.observe(state, trial)


def failed(
    state: RunState,
    attempt: Attempt,
    worker: Worker,
    items: Sequence[int],
    failure: Failure,
    charges: Charges | None = None,
) -> None:
    """An attempt failed with these items: a charge, and the end of those of others that it shows to be wrong.

    :param charges: those of sessions, of whose numbers `items` are then.
    """
    if failure.kind in NOBODYS or not items:
        return
    app, health = state.apps[attempt.app], state.policies.health
    charges = state.charges if charges is None else charges
    message, opens = _told(failure), charges.room(worker)
    number = attempt.id if opens else 0
    miss = Trial(worker, "miss", app.id, app.spec.name, False, number, message=message, machine=failure.machine)
    health.observe(state, miss)
    if charges.of and not health.doubts(state, worker, app):  # Else it says nothing of the items.
        for item in items:
            for charge in list(charges.of.get(item, ())):
                if charge in charges.open and charge.worker.place != worker.place:
                    charges.drop(charge)
    if opens:
        charges.add(Charge(attempt.id, worker, app, set(items), message, failure.kind in CRASHES))


def answered(state: RunState, attempt: Attempt, items: Iterable[int], charges: Charges | None = None) -> None:
    """Items were answered by an attempt: elsewhere than where they failed, that tells against the place."""
    charges = state.charges if charges is None else charges
    for item in items:
        for charge in charges.of.get(item, ()):
            if charge.worker.place == attempt.place:  # It failed now and then, or others were to blame.
                charges.drop(charge)
                continue
            charge.items.discard(item)
            if not charge.items:
                charges.close(charge)
                app = charge.app
                told = charge.attempt, None, charge.message
                state.policies.health.observe(state, Trial(charge.worker, "call", app.id, app.spec.name, False, *told))
                if charge.crash:
                    crash = Trial(charge.worker, "crash", "", "", False, message=charge.message)
                    state.policies.health.observe(state, crash)
        charges.of.pop(item, None)


def built(state: RunState, worker: Worker, context: ContextState) -> None:
    """A worker has built a context."""
    trial = Trial(worker, "build", context.spec.id, context.spec.name, passed=True)
    state.policies.health.observe(state, trial)


def not_built(state: RunState, worker: Worker, context: ContextState, failure: Failure) -> None:
    """A worker could not build a context."""
    message = _told(failure)
    trial = Trial(worker, "build", context.spec.id, context.spec.name, passed=False, message=message)
    state.policies.health.observe(state, trial)


def lost(state: RunState, worker: Worker, failure: Failure) -> Attempt | None:
    """A worker was lost without notice: the build that this speaks against, and gives the attempt, if there is one.

    Workers of a host that go together are lost once: only what began after the last counted loss there counts.
    """
    lost_at = state.charges.lost_at
    before = lost_at.get(worker.host, -1.0)
    building = [held for held in worker.contexts.values() if held.building and held.begun > before]
    running = [attempt for attempt in worker.running.values() if attempt.items and attempt.started > before]
    if building or running:
        lost_at[worker.host] = state.now
    if building and not running:
        not_built(state, worker, state.contexts[building[0].context], failure)
    return running[0] if running else None


def _told(failure: Failure) -> str:
    text = " ".join(f"{failure.error}: {failure.message}".split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
