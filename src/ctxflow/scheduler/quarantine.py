"""Hosts and workers in quarantine: told once, given back, asked for nowhere else, and tried again on probation.

Never the last that could run something. What does not live here: who is bad (policies/health), and the evidence for it
(evidence.py).
"""

from __future__ import annotations

from ctxflow.errors import counted
from ctxflow.policies.protocols import Verdict
from ctxflow.scheduler.commands import Command, Exclude, Note, Quarantine, Release
from ctxflow.scheduler.eligibility import able, empty
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.shared_tables import Unit
from ctxflow.scheduler.worker_state import Worker

RETURNS = 3  # How often a worker that comes back all the same is given back: then it is held, without work.
LONGEST = 6 * 3600.0  # Seconds in quarantine.


def follow(state: RunState, out: list[Command]) -> list[int]:
    """Look at who is bad, and at who has served their time; gives the attempts that are to be stopped. On ticks."""
    wards, stop = state.wards, []
    over = [unit for unit in wards.units if unit.until <= state.now]
    for unit in over:
        _release_unit(state, unit, out)
    for verdict in state.policies.health.judge(state.view):
        stop += _commit(state, verdict, out)
    if wards.units:
        _give_back(state, out)
    if over or wards.units:
        _exclude(state, out)
    return stop


def joined(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Hold a worker that joined from quarantine, unless nobody else could do the work."""
    unit = state.wards.of(worker)
    if unit is not None and (unit.by_hand or not _is_last(state, [worker])):
        unit.returned += 1
        _hold(state, worker)
        _give_back(state, out)


def drain(state: RunState, host: str, out: list[Command]) -> None:
    """Leave a host, as a person says: its workers go when they have done what they run, and none is asked for."""
    there = [worker for worker in state.workers.values() if worker.host == host]
    machine = there[0].machine if there else host
    state.wards.units = [unit for unit in state.wards.units if unit.host != host]
    state.wards.units.append(Unit(host, machine, (), "", "it is drained", float("inf"), by_hand=True))
    for worker in there:
        _hold(state, worker)
    out.append(Note(f"host {host} is drained: its {counted(len(there), 'worker')} will leave", trouble=True))
    _give_back(state, out)
    _exclude(state, out)


def use_again(state: RunState, host: str, out: list[Command]) -> None:
    """Use a host again that was drained."""
    for unit in [unit for unit in state.wards.units if unit.by_hand and unit.host == host]:
        _release_unit(state, unit, out)
    _exclude(state, out)


def _commit(state: RunState, verdict: Verdict, out: list[Command]) -> list[int]:
    """Put a unit in quarantine, unless nobody else could do what it does; gives what it runs."""
    named = [w for w in state.workers.values() if w.host == verdict.host and verdict.worker in ("", w.id)]
    if not named or state.wards.of(named[0]) is not None:
        return []
    devices = tuple(named[0].devices) if verdict.worker else ()
    first = Unit(verdict.host, named[0].machine, devices, verdict.worker, verdict.cause, 0.0)
    workers = [worker for worker in state.workers.values() if first.has(worker)]
    if _is_last(state, workers):
        return []
    times = state.wards.times.get((verdict.host, devices), 0)
    state.wards.times[verdict.host, devices] = times + 1
    first.until = state.now + min(LONGEST, state.policies.health.probation * 2 ** min(times, 20))
    state.wards.units = [unit for unit in state.wards.units if verdict.worker or unit.host != verdict.host]
    state.wards.units.append(first)
    state.wake(first.until)
    out.append(Quarantine(first.host, first.worker, first.devices, first.cause, first.until))
    out.append(Note(_told(state, first, times), trouble=True))
    for worker in workers:
        _hold(state, worker)
    return [number for worker in workers for number, attempt in worker.running.items() if attempt.items]


def _told(state: RunState, unit: Unit, times: int) -> str:
    what = f"host {unit.host}"
    if unit.worker:
        gpus = f" (GPU {', '.join(unit.devices)})" if unit.devices else ""
        what = f"worker {unit.worker}{gpus} on host {unit.host}"
    again = "" if not times else ", not for the first time"
    return f"{what} gets no work for {unit.until - state.now:.0f} s{again}: {unit.cause}"


def _hold(state: RunState, worker: Worker) -> None:
    worker.draining = True
    worker.held = True
    state.streams.unsettled = True
    state.update_free(worker)


def _give_back(state: RunState, out: list[Command]) -> None:
    """Give back who has nothing left to do; one that comes back again and again is held without work instead."""
    for worker in state.workers.values():
        if not worker.held or worker.released or worker.noticed is not None:
            continue
        unit = state.wards.of(worker)
        if (
            unit is None
            or not (worker.acquired or unit.by_hand)
            or unit.returned > RETURNS
            or worker.running
            or worker.loading
        ):
            continue
        if empty(state, worker):
            worker.released = True
            out.append(Release(worker.id))


def _release_unit(state: RunState, unit: Unit, out: list[Command]) -> None:
    """Let a unit whose time is over take work again, on probation."""
    state.wards.units.remove(unit)
    for worker in state.workers.values():
        if worker.held and not worker.released and unit.has(worker) and state.wards.of(worker) is None:
            worker.held = worker.draining = False
            state.streams.unsettled = True
            state.update_free(worker)
    what = f"worker {unit.worker} on host {unit.host}" if unit.worker else f"host {unit.host}"
    out.append(Note(f"{what} is tried again"))


def _exclude(state: RunState, out: list[Command]) -> None:
    """Tell the engine where not to ask: only of whole hosts can a batch system be told."""
    hosts = tuple(sorted({unit.machine for unit in state.wards.units if not unit.worker}))
    for name in state.tiers:
        if state.wards.excluded.get(name, ()) != hosts:
            state.wards.excluded[name] = hosts
            out.append(Exclude(name, hosts))


def _is_last(state: RunState, workers: list[Worker]) -> bool:
    """Return whether nobody but these workers could run something that waits or runs."""
    contexts = {app.context for app in state.ready.values()} | {each.context for each in state.attempts.values()}
    contexts |= {session.context for session in state.sessions.values()}
    names = {worker.id for worker in workers}
    others = [worker for worker in state.workers.values() if worker.id not in names]
    if not others:
        return True
    for name in contexts:
        context = state.contexts[name]
        if not any(able(state, worker, context.spec) for worker in workers):
            continue
        if not any(w.id not in context.suspects and able(state, w, context.spec) for w in others):
            return True
    return False
