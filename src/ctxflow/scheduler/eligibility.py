"""Which workers could do what, and which could go without harm.

A group of items goes to a host where it did not fail, else to other GPUs of such a host, and to where it failed only if
there is nobody else, or nobody else came free for a while.
"""

from __future__ import annotations

from collections.abc import Collection

from ctxflow.scheduler.app_state import App, Group, Place
from ctxflow.scheduler.events import ContextSpec
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import SessionState, Worker

PATIENCE = 60.0  # Seconds that a group waits for another host: all others may be at work on something else for ever.


def able(state: RunState, worker: Worker, wanted: ContextSpec) -> bool:
    """Return whether a worker stays, has the GPUs that a context needs, and is where the plan permits it."""
    return not worker.leaving and fits(state, worker, wanted)


def fits(state: RunState, worker: Worker, wanted: ContextSpec) -> bool:
    """Return whether a worker, if it stays, has the GPUs that a context needs, and is where the plan permits it."""
    if wanted.gpus > worker.gpus or not may_hold(state, worker, wanted):
        return False
    return worker.pin is not None or state.plan.permits(wanted.id, worker.tier)


def has_work(state: RunState, app: App, worker: Worker) -> bool:
    """Return whether anything that an app has queued may run on a worker."""
    return len(app.queue) > app.cancelled or not app.isolated.items or group_for(state, app, worker) is not None


def group_for(state: RunState, app: App, worker: Worker) -> Group | None:
    """Return the group that a worker is to run next, None if it is to run none of those that wait."""
    doubted: bool | None = None  # Found out for the first group for which it matters.
    for group in app.isolated.firsts:
        until = group.since + PATIENCE
        failed_here = any(host == worker.host for host, _ in group.failed_on)
        blocked = failed_here and elsewhere(state, app, group.failed_on, worker)
        if worker.place in group.machines and not blocked:
            blocked = awaited(state) or elsewhere(state, app, group.machines, worker)
        if group.failed_on and not blocked:
            if doubted is None:
                doubted = state.policies.health.doubts(state.view, worker.shown, app.shown)
                doubted = doubted and (awaited(state) or _others(state, app, worker))
            blocked = doubted
        if not blocked or state.now >= until:
            return group
        state.wake(until)
    return None


def awaited(state: RunState) -> bool:
    """Return whether more workers were asked for than are there."""
    return any(tier.connected < (tier.asked or 0) for tier in state.tiers.values())


def _others(state: RunState, app: App, worker: Worker) -> bool:
    """Return whether somebody else could run an app, and is not in doubt."""
    if _witness(state, app, {worker.host}):
        return True
    for other in state.workers.values():
        if other.host != worker.host and trustworthy(state, app, other):
            app.witness = other.id
            return True
    return False


def _witness(state: RunState, app: App, hosts: Collection[str]) -> bool:
    """Return whether the worker that was found last would still do, as it mostly does."""
    worker = state.workers.get(app.witness)
    return worker is not None and worker.host not in hosts and trustworthy(state, app, worker)


def trustworthy(state: RunState, app: App, worker: Worker) -> bool:
    """Return whether a worker could run an app, and what it says of an item would be believed."""
    context = state.contexts[app.context]
    if worker.id in context.suspects or not able(state, worker, context.spec):
        return False
    return not state.policies.health.doubts(state.view, worker.shown, app.shown)


def elsewhere(state: RunState, app: App, failed_on: frozenset[Place], worker: Worker | None = None) -> bool:
    """Return whether what failed at some places could run on another host, or else on other GPUs of theirs.

    :param worker: if given, whether that is better than to run there.
    """
    hosts = {host for host, _ in failed_on}
    fresh = worker is not None and worker.place not in failed_on
    there = False
    if _witness(state, app, hosts):
        return True
    for other in state.workers.values():
        if other.host in hosts and (fresh or other.place in failed_on):
            continue
        if not trustworthy(state, app, other):
            continue
        if other.host not in hosts:
            app.witness = other.id
            return True
        there = True
    return there


def may_hold(state: RunState, worker: Worker, wanted: ContextSpec) -> bool:
    """Return whether a worker may hold a context: one with a place of its own, only that; close GPUs need such."""
    if worker.pin is not None:
        reservation = state.reservations.all.get(worker.pin)
        return reservation is not None and reservation.context == wanted.id
    return wanted.affinity != "guaranteed" or wanted.id not in state.reservations.wants or not wide_tiers(state, wanted)


def wide_tiers(state: RunState, spec: ContextSpec) -> list[str]:
    """Return the tiers whose machines have as many GPUs as a context needs."""
    return [name for name, tier in state.tiers.items() if tier.spec.machine_gpus >= spec.gpus]


# --- workers that are to go


def cache_only(state: RunState, worker: Worker) -> list[SessionState]:
    """Return the sessions that nobody carries, and whose states are in a worker's cache alone."""
    return [
        session
        for session in state.streams.open.values()
        if session.worker is None
        and session.frozen is not None
        and session.frozen.worker == worker.id
        and session.frozen.made > session.kept
    ]


def empty(state: RunState, worker: Worker) -> bool:
    """Return whether a worker could go now at no cost to sessions whose states can still be saved."""
    if worker.sessions or any(number in state.streams.steps for number in worker.running):
        return False
    if any(_hands_over(session, worker) for session in state.streams.open.values()):
        return False
    return not any(can_be_kept(state, session, worker) for session in cache_only(state, worker))


def can_be_kept(state: RunState, session: SessionState, worker: Worker) -> bool:
    """Return whether a state in a worker's cache can be saved: its context is there, or may be built once more."""
    context = state.contexts[session.context]
    if context.broken is not None:
        return False
    if session.context in worker.contexts:
        return True
    return worker.noticed is None and worker.id not in context.suspects and session.context not in worker.rebuilt


def _hands_over(session: SessionState, worker: Worker) -> bool:
    """Return whether a session's state is on its way from or to a worker."""
    if session.state != "migrating":
        return False
    return session.worker == worker.id or (session.frozen is not None and session.frozen.worker == worker.id)
