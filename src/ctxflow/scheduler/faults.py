"""Whose fault a failure is: trials of workers, which the health policy counts; bad hosts; contexts that fail anywhere.

A failed attempt is a charge against its place: the trial is failed once all its items were answered elsewhere, and
the charge is dropped if one of them fails elsewhere too, is answered there after all, or is given up. So no item's own
fault, and nothing that hits all hosts alike, speaks against one of them. A host, or a worker with its GPUs, that the
health policy finds bad is in quarantine, but never the last that could run something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ctxflow.errors import counted
from ctxflow.policies.protocols import Trial, Verdict
from ctxflow.scheduler.app_state import App, ContextState, Suspect
from ctxflow.scheduler.commands import Command, Exclude, Note, Quarantine, Release
from ctxflow.scheduler.eligibility import PATIENCE, able, empty, fits
from ctxflow.scheduler.events import Failure, HostDrained, JobFailed
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Attempt, Charge, Charges, Pace, Unit, Unproven, Worker

REMEMBERED_ITEMS = 100  # Before a batch, that count beside its own in a worker's speed: fewer would follow luck.
FULL = 0.9  # From this share of it on a window is full.
AS_FULL = 0.7  # As much in flight as usual: with less than this share of it, an item's share of the time is another.
SHORTEST = 0.1  # Seconds below which a batch says nothing of a worker's speed.
CRASHES = ("crash", "lost")  # Kinds of failures that cost a library process, or a worker.
LONGEST_MESSAGE = 200  # Characters of a failure that are told.
NOBODYS = ("cancelled", "input", "contract")  # Kinds of failures that say nothing of a worker.

RELIEF_SECONDS = 1.0  # For which submissions do not look for relief, where none was found.
RETURNS = 3  # How often a worker that comes back from quarantine is given back: then it is held, without work.
LONGEST_QUARANTINE = 6 * 3600.0  # Seconds.

LONGEST_PAUSE = 60.0  # Seconds before one of those that all failed is asked again, unless the first pause is longer.
FALSE_ALARM = 1e-6  # How improbable a run of failures must be, by what the context was before.


# --- what attempts and builds say of their workers


def learn(state: RunState, app: App, worker: Worker, attempt: Attempt, count: int, seconds: float) -> None:
    """Learn from an attempt that answered so many items in so many seconds, as its worker says, and has just ended."""
    if app.overlaps:
        _learn_of_window(state, app, worker, attempt, count, seconds)
        return
    cost = app.call_cost
    # Calls of one worker may wait for each other: that is no cost.
    cost.add(state.now - attempt.started - seconds if worker.slots == 1 else 0.0, seconds)
    # At least a tenth is the items': the cost is that of all workers, and this one may be far faster.
    item_seconds = max(seconds - cost.inside, 0.1 * seconds) / count
    known = _learn_pace(worker, app, item_seconds, count, seconds)
    if known is not None:
        cost.add_pair(known.last, (count, seconds), known.item_seconds)
        known.last = (count, seconds)
    measured = max(seconds - cost.inside, 0.1 * seconds) / count if seconds >= SHORTEST else None
    trial = Trial(worker.shown, "call", app.id, app.spec.name, True, attempt.id, measured)
    state.policies.health.observe(state.view, trial)


def _learn_of_window(state: RunState, app: App, worker: Worker, attempt: Attempt, count: int, seconds: float) -> None:
    """Learn from a call that others overlapped: an item took its share of that time (Little's law)."""
    beside = worker.in_flight.get(attempt.context, 0)
    item_seconds = seconds / (count * (beside + 1))
    if not attempt.apart:  # Its window was another.
        known = worker.paces.get(app.id)
        usual = min(known.beside, worker.full.get(attempt.context, beside + 1)) if known is not None else 0.0
        if known is None or beside + 1 >= AS_FULL * usual:
            _learn_pace(worker, app, item_seconds, count, seconds, beside + 1)
        else:
            known.items += count
    # While a window is not full, or is a share of a short queue, an item's share tells of the queue, not the worker.
    full = not attempt.apart and beside + 1 >= FULL * worker.full.get(attempt.context, math.inf)
    measured = item_seconds if full and seconds >= SHORTEST else None
    trial = Trial(worker.shown, "call", app.id, app.spec.name, True, attempt.id, measured)
    state.policies.health.observe(state.view, trial)


def _learn_pace(
    worker: Worker, app: App, item_seconds: float, count: int, seconds: float, flying: int = 1
) -> Pace | None:
    """Learn a worker's seconds of an item; return what was known of it before, brought up to date, if anything was."""
    known = worker.paces.get(app.id)
    if known is None:
        worker.paces[app.id] = Pace(item_seconds, count, (count, seconds), flying)
        app.measured_on[worker.id] = worker.shown
    else:
        share = count / (count + min(known.items, REMEMBERED_ITEMS))
        known.item_seconds += share * (item_seconds - known.item_seconds)
        known.beside += share * (flying - known.beside)
        known.items += count
    return known


def passed(state: RunState, worker: Worker, app: App) -> None:
    """Count a step that made chunks for its worker."""
    state.policies.health.observe(state.view, Trial(worker.shown, "call", app.id, app.spec.name, passed=True))


def charge(
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
    message, opens = _shortened(failure), charges.room(worker)
    number = attempt.id if opens else 0
    miss = Trial(worker.shown, "miss", app.id, app.spec.name, False, number, message=message, machine=failure.machine)
    health.observe(state.view, miss)
    if charges.of and not health.doubts(state.view, worker.shown, app.shown):  # Else it says nothing of the items.
        for item in items:
            for other in list(charges.of.get(item, ())):
                if other in charges.open and other.worker.place != worker.place:
                    charges.drop(other)
    if opens:
        charges.add(Charge(attempt.id, worker, app, set(items), message, failure.kind in CRASHES))


def answered(state: RunState, attempt: Attempt, items: Iterable[int], charges: Charges | None = None) -> None:
    """Count items that were answered elsewhere than where they failed against the place of the failure."""
    charges = state.charges if charges is None else charges
    health = state.policies.health
    for item in items:
        for each in charges.of.get(item, ()):
            if each.worker.place == attempt.place:  # It failed now and then, or others were to blame.
                charges.drop(each)
                continue
            each.items.discard(item)
            if not each.items:
                charges.close(each)
                shown, app = each.worker.shown, each.app
                trial = Trial(shown, "call", app.id, app.spec.name, False, each.attempt, None, each.message)
                health.observe(state.view, trial)
                if each.crash:
                    health.observe(state.view, Trial(shown, "crash", "", "", False, message=each.message))
        charges.of.pop(item, None)


def built(state: RunState, worker: Worker, context: ContextState) -> None:
    """Count a context that was built for its worker, and clear the context's failures: they were not its fault."""
    context.builds += 1
    context.failed_builds += context.streak
    context.failed_workers.clear()
    context.failures, context.retry_at, context.losses, context.streak = 0, 0.0, 0, 0
    context.deciding = None
    state.undecided.pop(context.spec.id, None)
    trial = Trial(worker.shown, "build", context.spec.id, context.spec.name, passed=True)
    state.policies.health.observe(state.view, trial)


def not_built(state: RunState, worker: Worker, context: ContextState, failure: Failure) -> None:
    """Count a context that could not be built against its worker."""
    message = _shortened(failure)
    trial = Trial(worker.shown, "build", context.spec.id, context.spec.name, passed=False, message=message)
    state.policies.health.observe(state.view, trial)


def worker_lost(state: RunState, worker: Worker, failure: Failure) -> Attempt | None:
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


def _shortened(failure: Failure) -> str:
    text = " ".join(f"{failure.error}: {failure.message}".split())
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 3]}..."


# --- whether a context can be built at all


def blame(state: RunState, worker: Worker, context: ContextState, begun: float, failure: Failure) -> Failure | None:
    """Count a failure of a context on a worker; return why it is broken, at the last that it may have."""
    before = context.suspects.get(worker.id)
    times = before.failures if before is not None else 0
    context.suspects[worker.id] = Suspect(times + 1, state.now + state.limits.retry_seconds * 2 ** min(times, 20))
    if worker.draining:  # There may be nobody else now who could show that it can be built.
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


def _count(state: RunState, context: ContextState, begun: float) -> None:
    # Builds that are ended together count once.
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
    asked = sum(tier.asked or 0 for name, tier in state.tiers.items() if state.plan.permits(context.spec.id, name))
    awaited = max(0, asked - len(builders))
    failed_on = set(context.failed_workers.values())
    if len(hosts) == 1 and not awaited:
        return len(context.failed_workers) >= min(limit, len(builders)) or tried
    if len(failed_on) >= min(limit, len(hosts) + awaited):
        return True
    long = state.now >= context.failing_since + state.limits.verdict
    return tried and hosts <= failed_on and (long or not awaited)


# --- quarantine


def judge(state: RunState, out: list[Command]) -> list[int]:
    """Look at who is bad, and at who has served their time; return the attempts that are to be stopped. On ticks."""
    wards, stop = state.wards, []
    if wards.slow:
        there = {(worker.host, name) for worker in state.workers.values() for name in ("", worker.id)}
        wards.slow = [each for each in wards.slow if each.until > state.now and (each.host, each.worker) in there]
    for unit in [unit for unit in wards.units if unit.until <= state.now]:
        _release_unit(state, unit, out)
    for verdict in state.policies.health.judge(state.view):
        stop += _commit(state, verdict, out)
    _look_at_the_only_host(state, out)
    if wards.units:
        relieve(state, out)
        _admit(state, out)
        _give_back(state, out)
    if wards.units or wards.excluded:
        _exclude(state, out)
    return stop


def _look_at_the_only_host(state: RunState, out: list[Command]) -> None:
    """Tell of apps whose calls fail on the only host of its tier, while no other answers any: what failed waits."""
    unproven, health = state.wards.unproven, state.policies.health
    if not state.charges.open and not unproven:
        return
    found = {
        charge.app.id: charge
        for charge in state.charges.open
        if charge.worker.id in state.workers and len(state.hosts[charge.worker.tier, "*"]) == 1
    }
    found = {
        name: charge
        for name, charge in found.items()
        if all(worker.host == charge.worker.host for worker in charge.app.measured_on.values())
        and health.doubts(state.view, charge.worker.shown, charge.app.shown)
    }
    for name in unproven.keys() - found.keys():
        del unproven[name]
    for name, charge in found.items():
        if name not in unproven:
            unproven[name] = Unproven(charge.worker.host, charge.app.spec.name, charge.message)
            out.append(Note(f"{unproven[name].text}: {charge.message}", trouble=True))


def worker_joined(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Hold a worker that joined from quarantine, unless nobody else could do the work."""
    if worker.acquired and state.policies.job_health is not None:
        state.policies.job_health.tried_job(state.view, worker.tier, worker.machine, True)
    unit = state.wards.of(worker)
    if unit is not None:
        unit.returned += 1
        _hold(state, worker)
        relieve(state, out)
        _give_back(state, out)


def job_failed(state: RunState, event: JobFailed, out: list[Command]) -> None:
    """Count a job that ended before its worker had joined against its host."""
    if state.policies.job_health is not None:
        state.policies.job_health.tried_job(state.view, event.tier, event.host, False, event.reason)


def relieve(state: RunState, out: list[Command], submitted: App | None = None) -> None:
    """Release units before their time, the soonest first, while what waits could run on held workers alone.

    :param submitted: look only at what this app waits for, and not again for a second where no unit helped.
    """
    wards = state.wards
    if not wards.held or (submitted is not None and state.now < wards.relief_at):
        return
    for name in _waiting(state) if submitted is None else [submitted.context] * (submitted.id in state.ready):
        context = state.contexts[name]
        for suspects in (frozenset(context.suspects), frozenset[str]()):  # Those who failed to build it come last.
            if _attended(state, context, suspects):
                break
            unit = _first_over(state, context, suspects)
            if unit is not None:
                _release_unit(state, unit, out, "no other host can do what waits")
                _exclude(state, out)
                break
            wards.relief_at = state.now + RELIEF_SECONDS


def _waiting(state: RunState) -> dict[str, None]:
    """Return the contexts of all that waits for a worker."""
    streams = (state.apps[name].context for name in state.streams.waiting)
    return dict.fromkeys((*(app.context for app in state.ready.values()), *streams))


def _attended(state: RunState, context: ContextState, suspects: frozenset[str]) -> bool:
    """Return whether a worker that is no suspect could run something with a context; mostly the one found last."""
    found, spec = state.workers.get(context.witness), context.spec
    if found is None or found.id in suspects or not able(state, found, spec):
        found = next((w for w in state.workers.values() if w.id not in suspects and able(state, w, spec)), None)
        context.witness = found.id if found is not None else ""
    return found is not None


def _first_over(state: RunState, context: ContextState, suspects: frozenset[str]) -> Unit | None:
    """Return the unit whose time is over first, of those with a worker that could run something with a context."""
    found = []
    for worker in state.wards.held.values():
        if worker.released or worker.noticed is not None or worker.id in suspects:
            continue
        units = [unit for unit in state.wards.units if unit.has(worker)]
        if fits(state, worker, context.spec) and not any(unit.by_hand for unit in units):
            found += units
    return min(found, key=lambda unit: unit.until, default=None)


def _admit(state: RunState, out: list[Command]) -> None:
    """Release the whole host that is over first, where nobody has been there for long who could do what waits.

    So it is asked for again. Only hosts count whose workers had the GPUs for it.
    """
    wards, none = state.wards, frozenset[str]()
    waiting = [state.contexts[name] for name in _waiting(state) if name not in state.reservations.wants]
    needed = [context.spec.gpus for context in waiting if not _attended(state, context, none)]
    units = [unit for unit in wards.units if not (unit.by_hand or unit.worker)]
    units = [unit for unit in units if needed and unit.gpus >= min(needed)]
    if not units:
        wards.deserted = None
    elif wards.deserted is None:
        wards.deserted = state.now
    elif state.now >= wards.deserted + PATIENCE:
        wards.deserted = None
        _release_unit(state, min(units, key=lambda unit: unit.until), out, "nobody else can do what waits")


def host_drained(state: RunState, event: HostDrained, out: list[Command]) -> None:
    """Leave a host, as a person says, when what runs there is done; or use it again."""
    host = event.host
    if not event.drained:
        for unit in [unit for unit in state.wards.units if unit.by_hand and unit.host == host]:
            _release_unit(state, unit, out)
        _exclude(state, out)
        return
    there = [worker for worker in state.workers.values() if worker.host == host]
    machine = there[0].machine if there else host
    state.wards.units = [unit for unit in state.wards.units if unit.host != host]
    state.wards.units.append(Unit(host, machine, (), "", "it is drained", float("inf"), by_hand=True))
    for worker in there:
        _hold(state, worker)
    out.append(Note(f"host {host} is drained: its {counted(len(there), 'worker')} will leave", trouble=True))
    _give_back(state, out)
    _exclude(state, out)


def _commit(state: RunState, verdict: Verdict, out: list[Command]) -> list[int]:
    """Put a unit in quarantine, unless nobody else could do what it does; return what it runs."""
    if verdict.jobs:
        whole = [unit for unit in state.wards.units if unit.machine == verdict.host and not unit.worker]
        if any(not unit.jobs or unit.tier == verdict.tier for unit in whole):
            return []
        devices: tuple[str, ...] = ()
        first = Unit(verdict.host, verdict.host, devices, "", verdict.cause, 0.0, jobs=True, tier=verdict.tier)
        first.gpus = state.tiers[verdict.tier].spec.gpus if verdict.tier in state.tiers else 0
    else:
        named = [w for w in state.workers.values() if w.host == verdict.host and verdict.worker in ("", w.id)]
        if not named or state.wards.of(named[0]) is not None:
            return []
        devices = tuple(named[0].devices) if verdict.worker else ()
        first = Unit(verdict.host, named[0].machine, devices, verdict.worker, verdict.cause, 0.0)
        first.gpus = max(worker.gpus for worker in named)
    workers = [worker for worker in state.workers.values() if first.has(worker)]
    if verdict.told:
        return _tell(state, first, out)
    if _is_last(state, workers):
        return []
    times = state.wards.times.get((verdict.host, devices), 0)
    state.wards.times[verdict.host, devices] = times + 1
    seconds = min(LONGEST_QUARANTINE, state.policies.health.probation * 2 ** min(times, 20))
    first.until = state.now + seconds
    if not verdict.jobs:
        # A whole host takes the place of what is in it.
        state.wards.units = [unit for unit in state.wards.units if verdict.worker or unit.host != verdict.host]
        state.wards.slow = [each for each in state.wards.slow if each.host != first.host]
    state.wards.units.append(first)
    state.wake(first.until)
    out.append(Quarantine(first.host, first.worker, first.devices, first.cause, first.until))
    gpus = f" (GPU {', '.join(devices)})" if devices else ""
    what = f"worker {first.worker}{gpus} on host {first.host}" if first.worker else first.what
    again = ", not for the first time" if times else ""
    gets = "gets no new workers" if first.jobs else "gets no work"
    out.append(Note(f"{what} {gets} for {first.until - state.now:.0f} s{again}: {first.cause}", trouble=True))
    for worker in workers:
        _hold(state, worker)
    return [number for worker in workers for number, attempt in worker.running.items() if attempt.items]


def _tell(state: RunState, unit: Unit, out: list[Command]) -> list[int]:
    """Tell of a unit that keeps its work all the same; for as long as one that does not would have none."""
    unit.until = state.now + state.policies.health.probation
    others = [each for each in state.wards.slow if (each.host, each.worker) != (unit.host, unit.worker)]
    is_new = len(others) == len(state.wards.slow)
    state.wards.slow = [*others, unit]
    if is_new:
        out.append(Quarantine(unit.host, unit.worker, unit.devices, unit.cause, state.now))
        out.append(Note(f"{unit.what} keeps its work, though {unit.cause}", trouble=True))
    return []


def _hold(state: RunState, worker: Worker) -> None:
    state.wards.held[worker.id] = worker
    state.drain(worker)


def _give_back(state: RunState, out: list[Command]) -> None:
    """Give back who has nothing left to do; one that comes back again and again is held without work instead."""
    for worker in state.wards.held.values():
        if worker.released or worker.noticed is not None or worker.running or worker.loading:
            continue
        unit = state.wards.of(worker)
        if unit is None or not (worker.acquired or unit.by_hand) or unit.returned > RETURNS:
            continue
        if empty(state, worker):
            worker.released = True
            out.append(Release(worker.id))


def _release_unit(state: RunState, unit: Unit, out: list[Command], why: str = "") -> None:
    """Let a unit take work again, on probation: its time is over, or there is another reason."""
    state.wards.units.remove(unit)
    for worker in list(state.wards.held.values()):
        if not worker.released and unit.has(worker) and state.wards.of(worker) is None:
            del state.wards.held[worker.id]
            state.drain(worker, draining=False)
    out.append(Note(f"{unit.what} is tried again" + (f": {why}" if why else "")))


def _exclude(state: RunState, out: list[Command]) -> None:
    """Tell the engine where not to ask: only of whole hosts can a batch system be told."""
    whole = [unit for unit in state.wards.units if not unit.worker]
    for name in state.tiers:
        hosts = tuple(sorted({unit.machine for unit in whole if unit.tier in ("", name)}))
        if state.wards.excluded.get(name, ()) != hosts:
            state.wards.excluded[name] = hosts
            out.append(Exclude(name, hosts))


def _is_last(state: RunState, workers: list[Worker]) -> bool:
    """Return whether only these workers, of those that stay, could run something that waits or runs."""
    contexts = {app.context for app in state.ready.values()} | {each.context for each in state.attempts.values()}
    contexts |= {session.context for session in state.sessions.values()}
    names = {worker.id for worker in workers}
    others = [worker for worker in state.workers.values() if worker.id not in names and not worker.leaving]
    if not others:
        return True
    for name in contexts:
        context = state.contexts[name]
        if not any(fits(state, worker, context.spec) for worker in workers):
            continue
        if not any(w.id not in context.suspects and able(state, w, context.spec) for w in others):
            return True
    return False
