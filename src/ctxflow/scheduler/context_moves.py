"""Transitions of contexts: claimed, staging, loading, ready, spent, parked, unloaded, suspect, broken, forgotten."""

from __future__ import annotations

import math
from collections.abc import Collection

from ctxflow.errors import counted
from ctxflow.scheduler import events as ev
from ctxflow.scheduler import faults, items, residency
from ctxflow.scheduler.app_state import App, ContextState
from ctxflow.scheduler.commands import Command, Load, Note, Park, Stage, Unload, Wake
from ctxflow.scheduler.eligibility import able, cache_only, has_work
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.view import ShownContext
from ctxflow.scheduler.worker_state import Claim, OnWorker, ParkedContext, Worker, hide

MOST_LEFT = 8  # Contexts without an app that a worker keeps: whoever uses one again need not have it built.


def gives_way(state: RunState, worker: Worker, app: App) -> list[str] | None:
    """Return what a free worker that does not hold the app's context would unload or park to load it for its queue now.

    None if it could not load it.
    """
    if not admissible(state, worker, app):
        return None
    # A worker with room in a window could be drained, which is what comes of it where a policy chooses to.
    drained = worker.free_slots > worker.unused_slots
    return _in_the_way(state, worker, state.contexts[app.context].spec, drained)


def admissible(state: RunState, worker: Worker, app: App) -> bool:
    """Return whether the app's context may be loaded for its queue on a worker that does not hold it."""
    if app.unclaimed <= 0 or not has_work(state, app, worker):
        return False
    return loadable(state, worker, state.contexts[app.context])


def loadable(state: RunState, worker: Worker, context: ContextState) -> bool:
    """Return whether a context may be loaded on a worker that does not hold it."""
    if not able(state, worker, context.spec) or _held_by_enough(state, worker, context):
        return False
    return trusted(state, worker, context)


def trusted(state: RunState, worker: Worker, context: ContextState) -> bool:
    """Return whether a worker may be asked to build a context: a suspect one after its pause, or the context's."""
    suspect = context.suspects.get(worker.id)
    if suspect is None:
        return True
    others = any(w.id not in context.suspects and able(state, w, context.spec) for w in state.workers.values())
    due = suspect.retry_at if others else context.retry_at
    if state.now < due:
        state.wake(due)
        return False
    return True


def begin(state: RunState, worker: Worker, app: App, out: list[Command], ahead: bool = False) -> bool:
    """Stage or load the app's context on a worker, or wake it there; idle ones in its way are parked or unloaded.

    :param ahead: for no items yet.
    """
    context = state.contexts[app.context]
    others = _in_the_way(state, worker, context.spec)
    if others is None:
        return False
    room = residency.room(state, worker, context.spec, others)
    for other in room.unload:
        unload(state, worker, other, out)
    for parked in room.park:
        park(state, worker, parked, out)
    claim = None
    if not ahead:
        size = max(1, state.view.batch_size(app.shown, worker.shown)) if app.unclaimed else 0
        claim = Claim(app.id, min(app.unclaimed, size))
    if claim is not None:
        app.claimed += claim.items
        app.claims += 1
    stages = context.spec.files and context.spec.id not in worker.staged
    step: type[Stage | Load | Wake]
    step, first = (Stage, "staging") if stages else (Load, "loading")
    if state.free_tables.unpark(worker, context.spec.id):
        step, first = Wake, "waking"
    held = OnWorker(context.spec.id, first, state.now, state.now, claim=claim, begun=state.now)
    held.shown = ShownContext(held)
    worker.put(held)
    worker.loading += 1
    context.holders[worker.id] = worker.shown
    context.on_tier[worker.tier] += 1
    if step is Wake:
        state.counters.wakes += 1
    out.append(step(worker.id, context.spec.id))
    state.update_free(worker)
    return True


def _in_the_way(state: RunState, worker: Worker, wanted: ev.ContextSpec, drained: bool = False) -> list[str] | None:
    """Return the idle contexts that give way so that another fits, least recently used first; None if it cannot fit.

    :param drained: whether to count those as idle that have nothing but calls that overlap.
    """
    return residency.in_the_way(state, worker, wanted, idle(state, worker, drained))


def staged(state: RunState, event: ev.ContextStaged, out: list[Command]) -> None:
    """Build a context whose files are there."""
    worker = state.workers.get(event.worker)
    held = worker.contexts.get(event.context) if worker is not None else None
    if worker is not None and held is not None and held.state == "staging":
        worker.staging_seconds[held.context] = state.now - held.since
        held.state, held.since = "loading", state.now
        if state.contexts[held.context].spec.level == ev.PARTIAL:
            worker.staged.add(held.context)
        out.append(Load(worker.id, held.context))


def ready(state: RunState, worker: Worker, event: ev.ContextReady | ev.ContextWoken, out: list[Command]) -> App | None:
    """Have calls run against a context that is built, or awake; return the app that this was for."""
    held, woken = worker.contexts.get(event.context), isinstance(event, ev.ContextWoken)
    if held is None or not held.building or (held.state == "waking") != woken:
        return None
    context, claim = state.contexts[event.context], held.claim
    _end_load(state, worker, held)
    held.state, held.since, held.last_used = "ready", state.now, state.now
    _measured(state, worker, context, event, out)
    if isinstance(event, ev.ContextWoken):
        context.wake_seconds, context.park_crashes = event.seconds, 0
    else:
        state.counters.loads += 1
        context.suspects.pop(worker.id, None)
        faults.built(state, worker, context)
        worker.context_seconds[event.context] = event.seconds
        context.built_on[worker.id] = worker.shown
        context.parks = event.parks if context.parks is not None else None
    state.update_free(worker)
    return state.apps[claim.app] if claim is not None else None


def _measured(
    state: RunState,
    worker: Worker,
    context: ContextState,
    event: ev.ContextReady | ev.ContextWoken,
    out: list[Command],
) -> None:
    """Learn the memory of a context; parked ones give way where it is more than was thought."""
    if isinstance(event, ev.ContextReady):  # One that is woken has the states of sessions, too.
        context.built_memory = residency.larger(context.built_memory, event.memory)
        context.built_gpu_memory = residency.larger(context.built_gpu_memory, event.gpu_memory)
    known = context.memory, context.gpu_memory
    # The most: a page counts for less where other workers share it, and for all again when those are gone.
    context.memory = residency.larger(context.memory, event.memory)
    context.gpu_memory = residency.larger(context.gpu_memory, event.gpu_memory)
    if known != (context.memory, context.gpu_memory):
        for each in _holders(state, context):
            residency.settle(state, each, out)


def _end_load(state: RunState, worker: Worker, held: OnWorker) -> None:
    if held.building:
        worker.loading -= 1
    if held.claim is not None:
        app = state.apps[held.claim.app]
        app.claimed -= held.claim.items
        app.claims -= 1
        held.claim = None


def drop(state: RunState, worker: Worker, context: str) -> bool:
    """Forget a context on a worker, loaded or being loaded; return whether it was there."""
    held = worker.take(context)
    if held is None:
        return False
    _end_load(state, worker, held)
    del state.contexts[context].holders[worker.id]
    state.contexts[context].on_tier[worker.tier] -= 1
    state.free_tables.drop(worker, context)
    state.update_free(worker)
    return True


# --- parked


def park(state: RunState, worker: Worker, parked: ParkedContext, out: list[Command]) -> None:
    """Have a worker keep a context that runs nothing, on its host alone."""
    worker.parked[parked.context] = parked
    drop(state, worker, parked.context)
    state.counters.parks += 1
    out.append(Park(worker.id, parked.context))


def not_parked(state: RunState, event: ev.ParkFailed, out: list[Command]) -> None:
    """Handle a context that could not be parked or woken: it is unloaded and built, now and from now on.

    A process that died at it may have been killed: that counts once it has happened often, with no wake between.
    """
    worker, context = state.workers.get(event.worker), state.contexts.get(event.context)
    if worker is None or context is None:
        return
    held = worker.contexts.get(event.context)
    if held is not None and held.state == "waking":
        gone(state, worker, event.context, out)
    elif not state.free_tables.unpark(worker, event.context):
        return
    crashed = event.failure.kind in faults.CRASHES
    context.park_crashes += crashed
    forgiven = crashed and context.park_crashes < state.limits.failures
    if context.parks is not None and not forgiven:
        context.parks = None
        why = f"{event.failure.error}: {event.failure.message}"
        text = f"the context {context.spec.name} is unloaded from now on where it gives way, and not parked: {why}"
        out.append(Note(text, trouble=True))


# --- unloaded


def unload(state: RunState, worker: Worker, context: str, out: list[Command]) -> None:
    """Have a worker end a context that runs nothing, or is parked."""
    if context in worker.parked:
        residency.unload_parked(state, worker, context, out)
        return
    drop(state, worker, context)
    out.append(Unload(worker.id, context, files=state.contexts[context].spec.level == ev.NONE))


def used(state: RunState, worker: Worker, context: str, out: list[Command]) -> None:
    """Note that a call on a context has ended; unload a context that was built for that call alone."""
    held = worker.contexts.get(context)
    if held is not None and (
        held.state == "spent" or (_unplanned(state, worker, context) and context in idle(state, worker))
    ):
        unload(state, worker, context, out)


def follow(state: RunState, out: list[Command]) -> None:
    """Unload what the plan does not want where it is, of contexts that run nothing; of others, when their call ends."""
    if not state.plan.tiers and not state.plan.holders:
        return
    for worker in state.workers.values():
        for context in idle(state, worker):
            if _unplanned(state, worker, context):
                unload(state, worker, context, out)
        for context in [each for each in worker.parked if not state.plan.permits(each, worker.tier)]:
            unload(state, worker, context, out)
        # Of what overlaps there would never be none.
        state.turn(worker, [context for context in worker.in_flight if _unplanned(state, worker, context)])


def _unplanned(state: RunState, worker: Worker, context: str) -> bool:
    if worker.pin is not None:  # It is here for this context alone, and no plan counts on it.
        return False
    most = state.plan.holders.get((context, worker.tier))
    many = most is not None and _more_stay(state, state.contexts[context], worker.tier, most)
    return (many or not state.plan.permits(context, worker.tier)) and not _brings_out(state, worker, context)


def _brings_out(state: RunState, worker: Worker, context: str) -> bool:
    """Return whether a worker that may soon be released holds a context by which states leave its cache."""
    tier, (_, most) = state.tiers.get(worker.tier), state.plan.workers.get(worker.tier, (0, math.inf))
    shrinks = tier is not None and tier.connected > most
    return shrinks and any(session.context == context for session in cache_only(state, worker))


def _held_by_enough(state: RunState, worker: Worker, context: ContextState) -> bool:
    """Return whether as many workers of the tier hold the context as the plan wants."""
    most = None if worker.pin is not None else state.plan.holders.get((context.spec.id, worker.tier))
    return most is not None and _more_stay(state, context, worker.tier, most - 1)


def surplus(state: RunState, worker: Worker, context: ContextState) -> bool:
    """Return whether workers with more sessions hold a context, as many of the tier as the plan wants."""
    name = context.spec.id
    most = None if worker.pin is not None else state.plan.holders.get((name, worker.tier))
    if most is None or not _more_stay(state, context, worker.tier, most):
        return False

    def carried(holder: Worker) -> int:
        there = sum(session.context == name for session in holder.sessions.values())
        return there + state.streams.awaited[holder.id, name]

    holders = [w for w in _holders(state, context) if w.tier == worker.tier and not w.leaving]
    return worker not in sorted(holders, key=lambda holder: (-carried(holder), holder.order))[:most]


def _more_stay(state: RunState, context: ContextState, tier: str, most: int) -> bool:
    """Return whether more workers of a tier hold a context, without those that are about to go."""
    there = context.on_tier[tier]
    if there <= most:
        return False
    leaving = state.streams.leaving.values()
    return there - sum(each.tier == tier and context.spec.id in each.contexts for each in leaving) > most


def _holders(state: RunState, context: ContextState) -> list[Worker]:
    """Return the workers that have a context in any state."""
    return [state.workers[name] for name in context.holders]


def gone(state: RunState, worker: Worker, context: str, out: list[Command]) -> bool:
    """Handle a library process that ended by itself, or was never built; return whether the worker had it."""
    if not drop(state, worker, context):
        return False
    if state.contexts[context].spec.level == ev.NONE:
        out.append(Unload(worker.id, context, files=True))  # Its files are still there.
    return True


def failed(state: RunState, worker: Worker, context_id: str, failure: ev.Failure, out: list[Command]) -> None:
    """Handle a context that could not be built: its worker is suspect, or it is broken."""
    held = worker.contexts.get(context_id)
    begun = held.begun if held is not None else state.now
    if not gone(state, worker, context_id, out):
        return
    worker.staged.discard(context_id)  # They may be what is wrong with it.
    context = state.contexts[context_id]
    # Of a parked context's GPU memory some may be left, and engines say in many ways that they lack it.
    parked = list(worker.parked) if failure.kind == "memory" or context.spec.gpus else []
    unused = [*parked, *(idle(state, worker) if failure.kind == "memory" else ())]
    if unused:
        for other in unused:
            unload(state, worker, other, out)
        return
    faults.not_built(state, worker, context, failure)
    broken = faults.blame(state, worker, context, begun, failure)
    if broken is not None:
        decide(state, context, broken, out)


def lost(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Drop all contexts of a worker lost without notice; what it was building is charged with that."""
    building = [held for held in worker.contexts.values() if held.building and held.state != "waking"]
    for context in list(worker.contexts):
        drop(state, worker, context)
    for held in building:
        lost_with = state.contexts[held.context]
        broken = faults.blame_loss(state, worker, lost_with, held.begun)
        if broken is not None:
            decide(state, lost_with, broken, out)


def decide(state: RunState, context: ContextState, failure: ev.Failure, out: list[Command]) -> None:
    """Declare a context broken, unless somebody who builds it still shows otherwise in time."""
    if context.deciding is None:
        context.deciding = (state.now, failure)
        state.undecided[context.spec.id] = context
    settle_undecided(state, out)


def settle_undecided(state: RunState, out: list[Command]) -> None:
    """Break contexts that failed often enough: nobody has one, or builds one since before, or not within the time."""
    for name, context in list(state.undecided.items()):
        since, failure = context.deciding or (state.now, ev.Failure("lost", "", ""))
        until = since + state.limits.verdict
        holders = [worker.contexts[name] for worker in _holders(state, context)]
        if any(not held.building or held.state == "waking" for held in holders):
            continue
        if state.now < until and any(held.begun <= since for held in holders):
            state.wake(until)
            continue
        del state.undecided[name]
        context.broken = failure
        for app in context.apps:
            items.bury_backlog(state, state.apps[app], failure, out)
            items.redistribute(state, state.apps[app], out)


def idle(state: RunState, worker: Worker, drained: bool = False) -> list[str]:
    """Return the contexts that are ready, run nothing, and that no session needs there; longest unused first.

    :param drained: whether to leave calls out of account that overlap.
    """
    busy = {
        attempt.context for attempt in worker.running.values() if not (drained and state.apps[attempt.app].overlaps)
    }
    busy.update(session.context for session in worker.sessions.values())  # Their states are in its library process.
    held = sorted(worker.contexts.values(), key=lambda h: h.last_used)
    return [
        h.context
        for h in held
        if h.state == "ready" and h.context not in busy and (worker.id, h.context) not in state.streams.awaited
    ]


# --- declared but never used, and used no more


def refused(spec: ev.ContextSpec, tiers: Collection[ev.TierSpec], reserves: bool) -> str | None:
    """Return why a context can never have its GPUs, in a sentence that says what to do; None if it can.

    :param reserves: whether the preemption policy makes room on machines for workers with more GPUs than others have.

    >>> tiers = [ev.TierSpec("a10", gpus=1, machine_gpus=8)]
    >>> refused(ev.ContextSpec("c", "llama", gpus=4), tiers, reserves=True)
    >>> print(refused(ev.ContextSpec("c", "llama", gpus=4), tiers, reserves=False))
    the context llama needs 4 GPUs, but a worker here has 1: set preemption = "exact" in the site
    """
    most = max((tier.gpus for tier in tiers), default=0)
    widest = max((tier.machine_gpus for tier in tiers), default=0)
    close = spec.affinity == "guaranteed" and spec.gpus >= 2
    if (reserves and spec.gpus <= widest) or (spec.gpus <= most and not close):
        return None
    need = f"needs {counted(spec.gpus, 'GPU')}, but a worker here has {most}"
    hint = "use a site whose workers have as many, or a recipe with fewer (gpus=0 for none)"
    if close and spec.gpus <= most:
        need = f"wants its {counted(spec.gpus, 'GPU')} close together, and nobody sees to that here"
        hint = 'use a site where workers can be asked for on GPUs of one\'s choice, or affinity="best-effort"'
    elif widest >= most and reserves and widest:
        need += f" and a machine {widest}"
    if not reserves and spec.gpus <= widest:
        hint = 'set preemption = "exact" in the site'
    return f"the context {spec.name} {need}: {hint}"


def retired(state: RunState, event: ev.Retired, out: list[Command]) -> None:
    """Forget apps, with their alternatives, and then contexts; those that are used meanwhile stay."""
    for name in event.apps:
        app = state.apps.get(name)
        if app is not None and not app_is_used(state, app):
            for each in [*app.alternatives, name]:
                _forget_app(state, state.apps[each])
    for worker in state.workers.values() if event.apps else ():
        if len(worker.contexts) + len(worker.parked) > MOST_LEFT:
            there = [*worker.parked, *idle(state, worker)]
            left = [each for each in there if each != ev.PLAIN and not state.contexts[each].apps]
            for each in left[: max(0, len(left) - MOST_LEFT)]:
                unload(state, worker, each, out)
    for name in event.contexts:
        if name in state.contexts and not context_is_used(state, name):
            _forget_context(state, name)


def app_is_used(state: RunState, app: App) -> bool:
    """Return whether an app, or an alternative of it, has items or sessions; an alternative, whether its app exists."""
    if app.spec.alternative_of:
        return app.spec.alternative_of in state.apps
    return any(_has_work(state, each) for each in (app, *(state.apps[name] for name in app.alternatives)))


def _has_work(state: RunState, app: App) -> bool:
    if app.backlog or app.claims or app.attempts or app.open_sessions:
        return True
    return any(name == app.id for _, name in state.streams.drops)


def context_is_used(state: RunState, name: str, but: Collection[str] = ()) -> bool:
    """Return whether a context has apps, without `but` these, is on a worker, or has a place of its own."""
    context = state.contexts[name]
    if name == ev.PLAIN or context.holders or any(app not in but for app in context.apps):
        return True
    if any(name in worker.parked for worker in state.workers.values()):
        return True
    return any(each.context == name for each in state.reservations.all.values())


def _forget_app(state: RunState, app: App) -> None:
    del state.apps[app.id], state.contexts[app.context].apps[app.id]
    hide(state.apps_shown, app.id)
    state.deals.pop(app.id, None)
    for name in app.measured_on:
        worker = state.workers.get(name)
        if worker is not None:
            worker.paces.pop(app.id, None)
            worker.steps.pop(app.id, None)


def _forget_context(state: RunState, name: str) -> None:
    state.forget_holders(name)
    state.reservations.wants.pop(name, None)
    del state.contexts[name]
    for worker in state.workers.values():  # Not only where it was built: files may have been staged elsewhere.
        worker.context_seconds.pop(name, None)
        worker.staging_seconds.pop(name, None)
        worker.staged.discard(name)
        worker.rebuilt.discard(name)
