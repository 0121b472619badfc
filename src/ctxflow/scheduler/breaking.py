"""When a context is broken, so that what waits for it fails: by hosts, by who might still show otherwise, by its past.

It failed on several hosts, or on all there are and as often as may be; nobody has it, and nobody who had begun before
still builds it; and, where it was built before, so many failures running are implausible by what it was. What does not
live here: who is asked to build (context_moves.py), and hosts where builds fail that succeed elsewhere (quarantine.py).
"""

from __future__ import annotations

import math

from ctxflow.scheduler import items
from ctxflow.scheduler.app_state import ContextState, Suspect
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.eligibility import able
from ctxflow.scheduler.events import ContextSpec, Failure
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Worker

LONGEST_PAUSE = 60.0  # Seconds before one of those that all failed is asked again, unless the first pause is longer.
FALSE_ALARM = 1e-6  # How improbable a run of failures must be, by what the context was before.


def blame(state: RunState, worker: Worker, context: ContextState, begun: float, failure: Failure) -> Failure | None:
    """Count a failure of a context on a worker; gives why it is broken, at the last that it may have.

    One that is to go makes it no more likely: there may be nobody else now who could show that it can be built.
    """
    before = context.suspects.get(worker.id)
    times = before.failures if before is not None else 0
    context.suspects[worker.id] = Suspect(times + 1, state.now + state.limits.retry_seconds * 2 ** min(times, 20))
    if worker.draining:
        return None
    if not context.failures:
        context.failing_since = state.now
    context.failures += 1
    context.failed_workers[worker.id] = worker.host
    first = state.limits.retry_seconds
    context.retry_at = state.now + min(first * 2 ** min(context.failures - 1, 20), max(first, LONGEST_PAUSE))
    _count(state, context, begun)
    return failure if _often_enough(state, worker, context) and _implausible(context) else None


def blame_loss(state: RunState, worker: Worker, context: ContextState, begun: float) -> Failure | None:
    """Count a worker that was lost while it was building a context; any that builds it clears the count.

    Workers that go together count once: only a build begun after the last counted loss adds to it. And it takes
    more than other failures do, since workers are lost for many reasons.
    """
    if begun <= context.lost_at:
        return None
    context.losses += 1
    context.lost_at = state.now
    _count(state, context, begun)
    if context.losses < 3 * state.limits.failures or not _implausible(context):
        return None
    message = (
        f"{context.losses} workers running were lost, without notice, while they were building the context: "
        "building it may exhaust the machine's memory or end the worker"
    )
    return Failure("lost", "WorkerLost", message, worker=worker.id)


def succeeded(state: RunState, context: ContextState) -> None:
    """Clear the count of failures: a context was built, so that they were not its fault."""
    context.builds += 1
    context.failed_builds += context.streak
    context.failed_workers.clear()
    context.failures, context.retry_at, context.losses, context.streak = 0, 0.0, 0, 0
    context.deciding = None
    state.undecided.pop(context.spec.id, None)


def decide(state: RunState, context: ContextState, failure: Failure, out: list[Command]) -> None:
    """Declare a context broken, unless somebody who builds it still shows otherwise in time."""
    if context.deciding is None:
        context.deciding = (state.now, failure)
        state.undecided[context.spec.id] = context
    follow(state, out)


def follow(state: RunState, out: list[Command]) -> None:
    """Break contexts that failed often enough: nobody has one, or builds one since before, or not within the time."""
    for name, context in list(state.undecided.items()):
        since, failure = context.deciding or (state.now, Failure("lost", "", ""))
        until = since + state.limits.verdict
        holders = [worker.contexts[name] for worker in state.workers.values() if name in worker.contexts]
        if any(not held.building for held in holders):
            continue
        if state.now < until and any(held.begun <= since for held in holders):
            state.wake(until)
            continue
        del state.undecided[name]
        context.broken = failure
        for app in context.apps:
            items.bury_backlog(state, state.apps[app], failure, out)
            items.redistribute(state, state.apps[app], out)


def _count(state: RunState, context: ContextState, begun: float) -> None:
    # Builds that are ended together are one misfortune.
    if begun > context.failed_at or not context.streak:
        context.streak += 1
        context.failed_at = state.now


def _implausible(context: ContextState) -> bool:
    """Return whether so many failures in a row are more than bad luck, given how often it was built before."""
    if not context.builds:
        return True
    share = (context.failed_builds + 1) / (context.builds + context.failed_builds + 2)
    return context.streak * -math.log(share) > -math.log(FALSE_ALARM)


def _often_enough(state: RunState, worker: Worker, context: ContextState) -> bool:
    """Return whether a context failed on several hosts; or on all there are, as often as may be.

    Workers of one host are alike: they count one by one where there is no other host, and none is awaited.
    """
    limit, tried = state.limits.failures, context.failures >= 3 * state.limits.failures
    builders = [each for each in state.workers.values() if each is worker or able(state, each, context.spec)]
    hosts = {each.host for each in builders}
    awaited = max(0, _asked(state, context.spec) - len(builders))
    failed_on = set(context.failed_workers.values())
    if len(hosts) == 1 and not awaited:
        return len(context.failed_workers) >= min(limit, len(builders)) or tried
    if len(failed_on) >= min(limit, len(hosts) + awaited):
        return True
    long = state.now >= context.failing_since + state.limits.verdict
    return tried and hosts <= failed_on and (long or not awaited)


def _asked(state: RunState, wanted: ContextSpec) -> int:
    """Return how many workers that could build a context were asked for."""
    return sum(tier.asked or 0 for name, tier in state.tiers.items() if state.plan.permits(wanted.id, name))
