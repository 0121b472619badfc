"""Tiers: how many workers of each are asked for and given back, and what is measured of those who lend them.

What does not live here: how many to want (policies/scaling), and what the loss of a worker means for its items.
"""

from __future__ import annotations

import math
from collections import Counter

from ctxflow.scheduler import eligibility, reservations
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Acquire, Command, Release
from ctxflow.scheduler.proxies import ShownTier
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import TierState, Worker, show


def offered(state: RunState, spec: ev.TierSpec, out: list[Command]) -> None:
    """Add a tier, or change its bounds."""
    known = state.tiers.get(spec.name)
    if known is None:
        connected = sum(w.tier == spec.name and w.acquired for w in state.workers.values())
        tier = TierState(spec, spec.gpu_memory, connected=connected)
        tier.shown = ShownTier(tier)
        state.tiers[spec.name] = tier
        show(state.tiers_shown, spec.name, tier.shown)
    else:
        lowered, known.spec = spec.maximum < known.maximum, spec
        if lowered:
            _drain(state, known, out)


def _drain(state: RunState, tier: TierState, out: list[Command]) -> None:
    """Have workers beyond a tier's new maximum leave when they have done what they run, the idle ones first."""
    there = [w for w in state.workers.values() if w.tier == tier.name and w.acquired and not eligibility.goes(w)]
    there.sort(key=lambda worker: (len(worker.running), len(worker.sessions), len(worker.contexts)))
    for worker in there[: max(0, len(there) - tier.maximum)]:
        _give_back(state, tier, worker, out)


def scale(state: RunState, out: list[Command]) -> None:
    """Ask for as many workers as the scaling policy wants, within the bounds, and give back those beyond."""
    state.scaled_at = state.now
    unplanned = bool(state.plan.workers) and _sessions_unplanned(state)
    for name, wanted in state.policies.scaling.target(state.view).items():
        tier = state.tiers.get(name)
        if tier is None:
            continue
        bounds = tier.minimum, tier.maximum
        low, high = bounds if unplanned else state.plan.workers.get(name, bounds)
        target = reservations.bound(state, name, max(low, min(high, wanted)))
        if tier.asked != target:
            tier.asked = target
            out.append(Acquire(name, target))
        _release(state, tier, target, out)
    _measure(state)


def _sessions_unplanned(state: RunState) -> bool:
    """Return whether sessions have something to do of whose context the plan knows nothing."""
    return any(each.context not in state.plan.tiers and not each.idle for each in state.sessions.values())


def _release(state: RunState, tier: TierState, target: int, out: list[Command]) -> None:
    """Give back workers beyond the target: idle ones at once, those with sessions or states when these have left them.

    Those with batches are looked at again on the next tick. Those that were started by hand are nobody's to give back,
    and do not count.
    """
    if tier.connected <= target and not tier.emptying:
        return
    held = [
        w
        for w in state.workers.values()
        if w.tier == tier.name and w.acquired and w.noticed is None and (not w.draining or w.id in tier.emptying)
    ]
    surplus = max(0, len(held) - target)
    able = [w for w in held if w.id in tier.emptying or not (w.loading or any(a.items for a in w.running.values()))]
    frozen = Counter(session.frozen.worker for session in state.sessions.values() if session.frozen is not None)
    able.sort(key=lambda w: (len(w.sessions) + frozen[w.id], len(w.contexts)))
    for worker in able[:surplus]:
        _give_back(state, tier, worker, out)
    for worker in able[surplus:]:
        if worker.id in tier.emptying:  # It is wanted again.
            tier.emptying.remove(worker.id)
            worker.draining = False
            state.streams.unsettled = True
            state.update_free(worker)


def _give_back(state: RunState, tier: TierState, worker: Worker, out: list[Command]) -> None:
    worker.draining = True
    state.streams.unsettled = True
    state.update_free(worker)
    if worker.running or worker.loading or not eligibility.empty(state, worker):
        tier.emptying.add(worker.id)
    else:
        tier.emptying.discard(worker.id)
        worker.released = True
        out.append(Release(worker.id))


# --- waiting for workers before the first call


def first_needed(state: RunState) -> int:
    """Return how many workers must be connected before the first call: a share of those asked for, at least one."""
    asked = sum(tier.asked or 0 for tier in state.tiers.values())
    return max(1, math.ceil(state.start_when * asked - 1e-9))  # 0.07 * 100 is a little more than 7.


def enough(state: RunState) -> bool:
    """Return whether the workers that the first call waits for are there."""
    return len(state.workers) >= first_needed(state)


# --- what is measured


def _measure(state: RunState) -> None:
    """Count the time since the last look, if workers were lacking then: the batch system could have given more."""
    for tier in state.tiers.values():
        if tier.lacking_since is not None:
            tier.lacking_seconds += state.now - tier.lacking_since
        lacks = tier.connected < (tier.asked or 0)
        tier.lacking_since = state.now if lacks else None


def joined(state: RunState, worker: Worker) -> None:
    """Count a worker that joined."""
    tier = state.tiers.get(worker.tier)
    if tier is not None:
        tier.connected += worker.acquired
        known = [each for each in (tier.gpu_memory, worker.spec.gpu_memory) if each is not None]
        tier.gpu_memory = min(known, default=None)


def gone(state: RunState, worker: Worker, evicted: bool) -> None:
    """Count a worker that is gone, and how long it was there."""
    tier = state.tiers.get(worker.tier)
    if tier is None:
        return
    tier.connected -= worker.acquired
    tier.emptying.discard(worker.id)
    tier.worker_seconds += state.now - worker.joined
    tier.gpu_seconds += (state.now - worker.joined) * worker.gpus
    if evicted:
        if tier.lifetimes is None:
            tier.lifetimes = []
        tier.lifetimes.append(state.now - worker.joined)


def job_changed(state: RunState, event: ev.JobStarted | ev.JobEvicted | ev.JobHeld) -> None:
    """Count what became of a worker's job; what it means for a worker that had joined, `WorkerLost` tells."""
    tier = state.tiers.get(event.tier)
    if tier is None:
        return
    if isinstance(event, ev.JobStarted):
        tier.jobs_started += event.pin is None
    elif isinstance(event, ev.JobEvicted):
        tier.jobs_evicted += 1
    else:
        tier.held[event.reason] = tier.held.get(event.reason, 0) + 1
