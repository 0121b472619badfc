"""What attempts and builds say of the workers that made them: trials, which the health policy counts.

A failed attempt is a charge against its place: the trial is failed once all its items were answered elsewhere, and
the charge is dropped if one of them fails elsewhere too, is answered there after all, or is given up. So no item's own
fault, and nothing that hits all hosts alike, speaks against one of them. What does not live here: what is made of
trials (policies/health), and what becomes of bad hosts (quarantine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ctxflow.policies.protocols import Trial
from ctxflow.scheduler.app_state import App, ContextState
from ctxflow.scheduler.events import Failure
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.shared_tables import Charge, Charges
from ctxflow.scheduler.worker_state import Attempt, Pace, Worker

REMEMBERED_ITEMS = 100
"""How many items before a batch count beside its own in a worker's speed: fewer would follow the luck of a few
items."""
SHORTEST = 0.1  # Seconds below which a batch says nothing of a worker's speed.
CRASHES = ("crash", "lost")  # Kinds of failures that cost a library process, or a worker.
LONGEST = 200  # Characters of a failure that are told.
NOBODYS = ("cancelled", "input", "contract")  # Kinds of failures that say nothing of a worker.


def finished(state: RunState, worker: Worker, app: App, count: int, seconds: float) -> None:
    """Count an attempt that answered so many items for its worker."""
    item_seconds = max(seconds - app.call_cost.inside, 0.1 * seconds) / count if seconds >= SHORTEST else None
    trial = Trial(worker.shown, "call", app.id, app.spec.name, passed=True, item_seconds=item_seconds)
    state.policies.health.observe(state.view, trial)


def failed(
    state: RunState,
    attempt: Attempt,
    worker: Worker,
    items: Sequence[int],
    failure: Failure,
    charges: Charges | None = None,
) -> None:
    """Open a charge for a failed attempt, and drop those of others that it shows to be wrong.

    :param charges: those of sessions, of whose numbers `items` are then.
    """
    if failure.kind in NOBODYS or not items:
        return
    app, health = state.apps[attempt.app], state.policies.health
    charges = state.charges if charges is None else charges
    message, opens = _told(failure), charges.room(worker)
    number = attempt.id if opens else 0
    miss = Trial(worker.shown, "miss", app.id, app.spec.name, False, number, message=message, machine=failure.machine)
    health.observe(state.view, miss)
    if charges.of and not health.doubts(state.view, worker.shown, app.shown):  # Else it says nothing of the items.
        for item in items:
            for charge in list(charges.of.get(item, ())):
                if charge in charges.open and charge.worker.place != worker.place:
                    charges.drop(charge)
    if opens:
        charges.add(Charge(attempt.id, worker, app, set(items), message, failure.kind in CRASHES))


def answered(state: RunState, attempt: Attempt, items: Iterable[int], charges: Charges | None = None) -> None:
    """Count items that were answered elsewhere than where they failed against the place of the failure."""
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
                state.policies.health.observe(
                    state.view, Trial(charge.worker.shown, "call", app.id, app.spec.name, False, *told)
                )
                if charge.crash:
                    crash = Trial(charge.worker.shown, "crash", "", "", False, message=charge.message)
                    state.policies.health.observe(state.view, crash)
        charges.of.pop(item, None)


def built(state: RunState, worker: Worker, context: ContextState) -> None:
    """Count a context that was built for its worker."""
    trial = Trial(worker.shown, "build", context.spec.id, context.spec.name, passed=True)
    state.policies.health.observe(state.view, trial)


def not_built(state: RunState, worker: Worker, context: ContextState, failure: Failure) -> None:
    """Count a context that could not be built against its worker."""
    message = _told(failure)
    trial = Trial(worker.shown, "build", context.spec.id, context.spec.name, passed=False, message=message)
    state.policies.health.observe(state.view, trial)


def lost(state: RunState, worker: Worker, failure: Failure) -> Attempt | None:
    """Count a build against a worker lost without notice; return the attempt to charge with it, if there is one.

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


def learn(app: App, worker: Worker, attempt: Attempt, count: int, seconds: float, now: float) -> None:
    """Learn from a batch that answered so many items in so many seconds, as its worker says, and has just come back."""
    cost = app.call_cost
    # Calls of one worker may wait for each other: that is no cost.
    cost.add(now - attempt.started - seconds if worker.slots == 1 else 0.0, seconds)
    # At least a tenth is the items': the cost is that of all workers, and this one may be far faster.
    item_seconds = max(seconds - cost.inside, 0.1 * seconds) / count
    known = worker.paces.get(app.id)
    if known is None:
        worker.paces[app.id] = Pace(item_seconds, count, (count, seconds))
        app.measured_on.add(worker.id)
        return
    share = count / (count + min(known.items, REMEMBERED_ITEMS))
    known.item_seconds += share * (item_seconds - known.item_seconds)
    known.items += count
    cost.add_pair(known.last, (count, seconds), known.item_seconds)
    known.last = (count, seconds)
