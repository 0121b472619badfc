"""What policies' choices lead to: batches for free workers, and how they end; plans; workers asked for and released."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ctxflow.policies.protocols import Planning
from ctxflow.scheduler import attempts, context_moves, faults, items, reservations, steps
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App, Group
from ctxflow.scheduler.commands import Abandon, Acquire, Command, MakePlan, Note, Place, Release
from ctxflow.scheduler.eligibility import empty
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.view import ShownTier
from ctxflow.scheduler.worker_state import Attempt, TierState, Worker, show

HELD_SECONDS = 0.1  # How long work waits that a batching policy holds back beyond its linger.


def serve(state: RunState, out: list[Command]) -> None:
    """Ask the routing policy who gets what, as long as that leads to anything."""
    while state.drained:
        worker = state.drained.pop()
        promised, worker.promised = worker.promised, ""
        give(state, worker.id, promised, out)
    while state.free and state.ready:
        ready = state.ready.offered(state.now, len(state.free))
        if not ready:
            break
        chosen = state.policies.routing.assign(state.view, [app.shown for app in ready])
        given = [give(state, a.worker, a.app, out) for a in chosen]
        if not any(given):
            break


def widen(state: RunState, event: ev.Event) -> None:
    """Let workers have more in flight where something is queued of an app whose share of it they had.

    One is asked for each new item, since many that are full would cost each item a look; all are on the next tick. Of
    a queue to which nothing comes the rest is left to whoever is faster: a slow worker would take a share of it.
    """
    if type(event) is ev.Tick:
        for app in state.ready.offered(state.now, len(state.workers)):
            if app.windowed and app.arrived > app.widened:
                app.widened = app.arrived
                attempts.widen(state, app, len(state.workers))
    elif isinstance(event, ev.ItemsSubmitted):
        app = state.apps[event.app]
        for each in (app, *(state.apps[name] for name in app.alternatives)):
            if each.windowed and each.id in state.ready:
                attempts.widen(state, each, len(event.items))


def give(state: RunState, worker_id: str, app_id: str, out: list[Command]) -> bool:
    """Follow an assignment of the routing policy, if it is possible."""
    worker, app = state.free.get(worker_id), state.ready.get(app_id)
    if worker is None or app is None:
        return False
    held = worker.contexts.get(app.context)
    if held is not None:
        return held.state == "ready" and run(state, worker, app, out)
    if not context_moves.admissible(state, worker, app):
        return False
    if worker.unused_slots > 0 and context_moves.begin(state, worker, app, out):
        return True
    _turn(state, worker, app)
    return False


def _turn(state: RunState, worker: Worker, app: App) -> None:
    """Drain a worker for other work than what overlaps on it, unless it was filled just now."""
    if worker.free_slots > worker.unused_slots:
        state.turn(worker, worker.in_flight, app.id)


def run(state: RunState, worker: Worker, app: App, out: list[Command]) -> bool:
    """Give a worker that holds the app's context a batch.

    False if the batching policy holds the work back, or all that waits failed there and is to run elsewhere.
    """
    if not attempts.has_room(worker, app):
        if app.context not in worker.in_flight:
            _turn(state, worker, app)
        return False
    group, size = None, 0
    if app.isolated.items or app.overlaps:
        group, may = attempts.next_group(state, worker, app)
        if not may or (group is None and len(app.queue) <= app.cancelled):
            return False
        if group is None and app.windowed:
            return attempts.fill(state, worker, app, out)
    if group is None and (size := state.policies.batching.size(state.view, app.shown, worker.shown)) < 1:
        since = state.now if app.waiting_since is None else app.waiting_since
        until = since + state.policies.batching.linger
        # Never now: a policy that says 0 beyond its linger would be asked without end.
        until = until if until > state.now else state.now + HELD_SECONDS
        state.ready.hold(app, until)
        state.wake(until)
        return False
    attempts.start(state, worker, app, items.take(state, app, group, size, out), group, out)
    _set_window(state, worker, app, group)
    state.update_free(worker)
    return True


def _set_window(state: RunState, worker: Worker, app: App, group: Group | None) -> None:
    """Bound what overlaps on a worker from now on, of which one more was begun just now."""
    if app.overlaps:
        apart = group.apart if group is not None else 0
        worker.windows[app.context] = apart or attempts.window_for(state, worker, app)


def duplicate(state: RunState, event: ev.Event, out: list[Command]) -> None:
    """Let workers that have nothing to do run straggling batches a second time, where the policy says so.

    Asked are all of them on ticks, and else the one that has just come free: to ask all of them each time would
    make the end of a run on n workers take n * n steps.
    """
    freed = getattr(event, "worker", None)
    if isinstance(freed, ev.WorkerSpec):
        freed = freed.id
    idle = list(state.free.values()) if type(event) is ev.Tick else [state.free.get(freed)] if freed else []
    for worker in idle:
        if worker is None:
            continue
        number = state.policies.batching.duplicate(state.view, worker.shown)
        attempt = state.attempts.get(number) if number is not None else None
        if attempt is None or attempt.worker == worker.id or attempt.context not in worker.contexts:
            continue
        group = attempt.group
        if group is not None and (
            worker.place in group.failed_on or (group.alone and attempt.context in worker.in_flight)
        ):
            continue
        left = tuple([item for item in attempt.items if item in state.open])
        app = state.apps[attempt.app]
        if not left or worker.contexts[app.context].state != "ready" or not attempts.has_room(worker, app):
            continue
        if attempts.runs_apart(state, worker, app.context):
            continue
        for item in left:
            state.copies[item] = state.copies.get(item, 1) + 1
        state.counters.duplicates += 1
        attempts.start(state, worker, app, left, group, out)
        _set_window(state, worker, app, group)
        state.update_free(worker)


# --- contexts ahead of demand


def warm(state: RunState, out: list[Command]) -> None:
    """Load what the routing policy wants ahead of demand, on free workers that run nothing."""
    if state.awaiting or state.policies.warming is None:
        return
    for assignment in state.policies.warming.warm(state.view):
        worker, app = state.free.get(assignment.worker), state.apps.get(assignment.app)
        if worker is None or app is None or worker.running or app.context in worker.contexts:
            continue
        context = state.contexts[app.context]
        # What ends with its call is not built before there is one.
        if context.spec.level != ev.PERVASIVE or context.broken is not None:
            continue
        if context_moves.loadable(state, worker, context):
            context_moves.begin(state, worker, app, out, ahead=True)


# --- plans


def place(state: RunState, out: list[Command], tick: bool = False) -> None:
    """Place anew: on ticks, when a tier, a context or a worker is new, and when a plan was made.

    All workers are gone through where the plan is another, and on ticks: what a worker's own events change about what
    it may hold is looked at when they come.
    """
    plan = state.policies.placement.plan(state.view)
    changed = plan is not state.plan and plan != state.plan
    if changed:
        state.plan = plan
        out.append(Place.of(plan))
        items.divide(state, out)
    if changed or tick:
        context_moves.follow(state, out)
    if state.planning is None and state.policies.planning is not None:
        state.planning = state.policies.planning.planning(state.view)
        if state.planning is not None:
            out.append(MakePlan(state.planning))


def plan_made(state: RunState, event: ev.PlanMade, out: list[Command]) -> None:
    """Follow a plan that was computed; where it could not be, the one in place stays."""
    planning, state.planning = state.planning, None
    policy = state.policies.planning
    if planning is None or policy is None:
        return
    if event.failure is None:
        policy.planned(planning() if event.results is None else event.results)
    elif event.failure != state.planning_failure:  # It may fail again each time: who reads it knows already.
        text = f"placement: no new plan could be made ({event.failure}), and the one in place stays: please report it"
        out.append(Note(text, trouble=True))
    state.planning_failure = event.failure
    place(state, out)


def computed(planning: Planning, time: float = 0.0) -> ev.PlanMade:
    """Compute a plan, wherever that is: the event that tells of it.

    >>> computed(lambda: 1 / 0).failure
    'ZeroDivisionError: division by zero'
    """
    try:
        return ev.PlanMade(time, planning())
    except Exception as error:
        return ev.PlanMade(time, failure=f"{type(error).__name__}: {error}")


# --- attempts that run


def batch_finished(state: RunState, event: ev.BatchFinished, out: list[Command]) -> None:
    """Handle an attempt that answered all its items."""
    attempt = attempts.end(state, event.attempt, state.workers.get(event.worker))
    if attempt is None:
        return
    worker, items_of = state.workers[attempt.worker], attempt.items
    app, learning = state.apps[attempt.app], state.policies.learning
    worker.done += 1
    faults.learn(state, app, worker, attempt, len(items_of), event.seconds)
    if app.windowed and learning is not None and not attempt.apart:
        learning.finished(state.view, app.shown, worker.shown, event.seconds, event.tokens)
    items.answer(state, attempt, items_of, out)
    # What another attempt answered first is closed; nothing of this attempt stays open.
    level = state.contexts[attempt.context].spec.level
    if level != ev.PERVASIVE or state.plan.tiers or state.plan.holders:
        context_moves.used(state, worker, attempt.context, out)


def items_finished(state: RunState, event: ev.ItemsFinished, out: list[Command]) -> None:
    """Handle an attempt that answered some of its items, and goes on."""
    attempt = state.attempts.get(event.attempt)
    if attempt is not None and attempt.worker == event.worker:
        last = event.first + event.count
        state.answered[attempt.id] = max(state.answered.get(attempt.id, 0), last)
        items.answer(state, attempt, attempt.items[event.first : last], out)


def batch_ended(state: RunState, event: ev.BatchEnded, out: list[Command]) -> None:
    """Handle an attempt that answered its items one by one and has ended: what it did not answer is requeued."""
    answered = state.answered.get(event.attempt, 0)
    attempt = attempts.end(state, event.attempt, state.workers.get(event.worker))
    if attempt is None:
        return
    worker = state.workers[attempt.worker]
    worker.done += 1
    if answered:
        faults.learn(state, state.apps[attempt.app], worker, attempt, answered, event.seconds)
    context_moves.used(state, worker, attempt.context, out)
    items.requeue(state, attempt, items.unanswered(state, attempt), out)


def step_finished(state: RunState, event: ev.StepFinished, out: list[Command]) -> None:
    """Handle a step that has ended."""
    orders = state.streams.steps.get(event.attempt, ())
    attempt = attempts.end(state, event.attempt, state.workers.get(event.worker))
    if attempt is not None:
        worker = state.workers[attempt.worker]
        worker.done += 1
        steps.finished(state, attempt, worker, orders, event, out)


def batch_failed(state: RunState, event: ev.BatchFailed, out: list[Command]) -> None:
    """Handle a failed attempt: count it for its worker, its context and its items."""
    orders = state.streams.steps.get(event.attempt)
    numbers, there = (event.attempt, *event.beside), state.workers.get(event.worker)
    blamed = [each for number in numbers if (each := attempts.end(state, number, there)) is not None]
    if not blamed:
        return
    attempt = blamed[0]
    worker = state.workers[attempt.worker]
    if event.failure.kind in faults.CRASHES:
        state.counters.crashes += 1
    if event.lost_context:
        nobodys = event.failure.kind in faults.CRASHES and not event.beside
        if nobodys and attempts.died_together(state, attempt, worker, event.failure, out):
            return
        attempts.lose_context(state, worker, attempt.context, out)
    else:
        context_moves.used(state, worker, attempt.context, out)
    if orders is not None:
        steps.failed(state, attempt, orders, event.failure, out)
        return
    for attempt in blamed if len(blamed) == 1 else attempts.in_order(state, blamed):
        _items_failed(state, attempt, worker, event, out)


def _items_failed(state: RunState, attempt: Attempt, worker: Worker, event: ev.BatchFailed, out: list[Command]) -> None:
    """Count a failure for the items of an attempt that has ended with it."""
    left = items.unanswered(state, attempt)
    faults.charge(state, attempt, worker, left if event.at is None else left[:1], event.failure)
    if event.failure.kind == "cancelled":  # Nobody waits for these, unless another call was ended along with that.
        items.requeue(state, attempt, left, out)
    elif event.failure.kind == "lost":  # Its library process alone, and no item is to blame.
        items.lost(state, attempt, left, event.failure, out)
    elif event.at is None or event.failure.kind == "contract":
        items.failed(state, attempt, left, event.failure, out)
    else:
        items.raised(state, attempt, left, event.at, event.failure, out)


def stop(state: RunState, numbers: Iterable[int], out: list[Command]) -> None:
    """End running attempts by force, which costs their workers the contexts, and their items nothing."""
    for number in numbers:
        attempt = state.attempts.get(number)
        if attempt is None:  # It has gone with one beside it.
            continue
        worker = state.workers[attempt.worker]
        out.append(Abandon(worker.id, number, attempt.context))
        attempts.end(state, number, worker)
        attempts.lose_context(state, worker, attempt.context, out)
        items.requeue(state, attempt, items.unanswered(state, attempt), out)


def tier_offered(state: RunState, spec: ev.TierSpec, out: list[Command]) -> None:
    """Add a tier, or change its bounds."""
    known = state.tiers.get(spec.name)
    if known is None:
        connected = sum(w.tier == spec.name and w.acquired for w in state.workers.values())
        tier = TierState(spec, spec.gpu_memory, connected=connected)
        tier.shown = ShownTier(tier)
        state.tiers[spec.name] = tier
        show(state.tiers_shown, spec.name, tier.shown)
    else:
        lowered, known.spec = spec.maximum < known.spec.maximum, spec
        if lowered:
            _drain(state, known, out)


def _drain(state: RunState, tier: TierState, out: list[Command]) -> None:
    """Have workers beyond a tier's new maximum leave when they have done what they run, the idle ones first."""
    there = [w for w in state.workers.values() if w.tier == tier.spec.name and w.acquired and not w.leaving]
    for worker in _by_loss(state, tier, there)[: max(0, len(there) - tier.spec.maximum)]:
        _give_back(state, tier, worker, out)


def scale(state: RunState, out: list[Command]) -> None:
    """Ask for as many workers as the scaling policy wants, within the bounds, and give back those beyond."""
    state.scaled_at = state.now
    plan, sessions = state.plan, state.sessions.values()
    # Whether sessions have something to do of whose context the plan knows nothing.
    unplanned = bool(plan.workers) and any(each.context not in plan.tiers and not each.idle for each in sessions)
    for name, wanted in state.policies.scaling.target(state.view).items():
        tier = state.tiers.get(name)
        if tier is None:
            continue
        bounds = tier.spec.minimum, tier.spec.maximum
        low, high = bounds if unplanned else state.plan.workers.get(name, bounds)
        target = reservations.bound(state, name, max(low, min(high, wanted)))
        if tier.asked != target:
            tier.asked = target
            out.append(Acquire(name, target))
        _release(state, tier, target, out)
    _measure(state)


def exceeds_target(state: RunState, worker: Worker) -> bool:
    """Return whether more workers of a worker's tier are connected than were requested last."""
    tier = state.tiers.get(worker.tier)
    return tier is not None and tier.connected > (tier.asked or 0)


def _release(state: RunState, tier: TierState, target: int, out: list[Command]) -> None:
    """Give back workers beyond the target: idle ones at once, those with sessions or states when these have left them.

    Those of them that run a batch or load a context are looked at again on the next tick, and no worker with sessions
    is emptied in their place; those that were started by hand do not count.
    """
    if tier.connected <= target and not tier.emptying:
        return
    there = [w for w in state.workers.values() if w.tier == tier.spec.name and w.acquired and w.noticed is None]
    held = _by_loss(state, tier, [w for w in there if not w.draining or w.id in tier.emptying])
    surplus = max(0, len(held) - target)
    for worker in held[:surplus]:
        if worker.id in tier.emptying or not (worker.loading or _runs_batch(state, worker)):
            _give_back(state, tier, worker, out)
    for worker in held[surplus:]:
        if worker.id in tier.emptying:  # It is wanted again.
            tier.emptying.remove(worker.id)
            state.drain(worker, draining=False)


def _by_loss(state: RunState, tier: TierState, workers: list[Worker]) -> list[Worker]:
    """Return workers of a tier in the order in which they are given back: those first that are missed least.

    As many as the plan wants to hold a context are the last; of the others, and of these, those with the most sessions
    that they carry, await or keep frozen: to move these costs each a pause.
    """
    sessions = Counter(session.frozen.worker for session in state.sessions.values() if session.frozen is not None)
    for (name, _), awaited in state.streams.awaited.items():
        sessions[name] += awaited
    for worker in workers:
        sessions[worker.id] += len(worker.sessions)
    ranked = sorted(workers, key=lambda w: (sessions[w.id], w.id not in tier.emptying, w.slots_used, len(w.contexts)))
    planned: set[str] = set()
    for (context, name), most in state.plan.holders.items():
        if name == tier.spec.name:
            holders = [worker.id for worker in ranked if context in worker.contexts]
            planned.update(holders[max(0, len(holders) - most) :])
    return sorted(ranked, key=lambda worker: worker.id in planned)


def _runs_batch(state: RunState, worker: Worker) -> bool:
    """Return whether a worker runs a batch: of calls that overlap it would never have none until it is drained."""
    return any(attempt.items and not state.apps[attempt.app].overlaps for attempt in worker.running.values())


def _give_back(state: RunState, tier: TierState, worker: Worker, out: list[Command]) -> None:
    state.drain(worker)
    if worker.running or worker.loading or not empty(state, worker):
        tier.emptying.add(worker.id)
    else:
        tier.emptying.discard(worker.id)
        worker.released = True
        out.append(Release(worker.id))


def first_needed(state: RunState) -> int:
    """Return how many workers must be connected before the first call: a share of those asked for, at least one."""
    asked = sum(tier.asked or 0 for tier in state.tiers.values())
    return max(1, math.ceil(state.start_when * asked - 1e-9))  # 0.07 * 100 is a little more than 7.


# --- what is measured


def _measure(state: RunState) -> None:
    """Count the time since the last look, if workers were lacking then: the batch system could have given more."""
    for tier in state.tiers.values():
        if tier.lacking_since is not None:
            tier.lacking_seconds += state.now - tier.lacking_since
        tier.lacking_since = state.now if tier.connected < (tier.asked or 0) else None


def _host_keys(worker: Worker) -> tuple[tuple[str, str | None], ...]:
    return (worker.tier, worker.spec.gpu_model), (worker.tier, "*")


def worker_joined(state: RunState, worker: Worker) -> None:
    """Count a worker that joined."""
    for key in _host_keys(worker):
        state.hosts[key][worker.host] += 1
    tier = state.tiers.get(worker.tier)
    if tier is not None:
        tier.connected += worker.acquired
        known = [each for each in (tier.gpu_memory, worker.spec.gpu_memory) if each is not None]
        tier.gpu_memory = min(known, default=None)


def worker_lost(state: RunState, worker: Worker, evicted: bool) -> None:
    """Count a worker that is gone, and how long it was there."""
    for key in _host_keys(worker):
        state.hosts[key][worker.host] -= 1
        if not state.hosts[key][worker.host]:
            del state.hosts[key][worker.host]
    state.counters.lost += 1
    state.counters.evicted += evicted
    tier = state.tiers.get(worker.tier)
    if tier is None:
        return
    seconds = state.now - worker.joined
    tier.connected -= worker.acquired
    tier.emptying.discard(worker.id)
    tier.worker_seconds += seconds
    tier.gpu_seconds += seconds * worker.gpus
    if evicted:
        tier.lifetimes.append(seconds)


def job_changed(state: RunState, event: ev.JobStarted | ev.JobEvicted | ev.JobHeld, out: list[Command]) -> None:
    """Count what became of a worker's job; what it means for a worker that had joined, `WorkerLost` tells."""
    if isinstance(event, ev.JobStarted) and event.pin is not None:
        reservations.started(state, event.pin)
    tier = state.tiers.get(event.tier)
    if tier is None:
        return
    if isinstance(event, ev.JobStarted):
        tier.jobs_started += event.pin is None
    elif isinstance(event, ev.JobEvicted):
        tier.jobs_evicted += 1
    else:
        tier.held[event.reason] = tier.held.get(event.reason, 0) + 1
