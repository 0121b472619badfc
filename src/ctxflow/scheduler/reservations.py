"""Reservations: GPUs of one machine that are made free, and kept, for one worker that holds one context.

A context that needs more GPUs than a worker has, or GPUs that are close together, and has no worker, gets one of its
own: the machines are surveyed, the preemption policy names a place and the workers to preempt, these are drained
and released ("clearing"), a worker is asked for on just these GPUs ("asked", "started" once its job runs), serves the
context ("held"), and goes when it has nothing to do ("leaving").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ctxflow.errors import counted
from ctxflow.policies.protocols import PlaceRequest, Room
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import App
from ctxflow.scheduler.commands import AcquireAt, Command, Drain, Forgo, Note, Release, Survey
from ctxflow.scheduler.eligibility import empty, may_hold, wide_tiers
from ctxflow.scheduler.run_state import Machine, Reservation, RunState, Want
from ctxflow.scheduler.worker_state import Worker
from ctxflow.topology import from_graph

SURVEY_SECONDS = 30.0  # How long a survey may take.
TRIES = 3  # How often in a row somebody else may get the GPUs first, before there is a pause.
PAUSE_SECONDS = 60.0  # After that, and where no machine has room.
LOOK_SECONDS = 1.0  # How often it is looked whether the worker that could run the context is still there.
GONE_SECONDS = 60.0  # How long released victims may take to be gone.
JOIN_SECONDS = 300.0  # How long a worker may take to join once its job runs.


# --- what others ask


def declared(state: RunState, spec: ev.ContextSpec) -> None:
    """Note a context that may need a place of its own."""
    if spec.gpus >= 2 and state.policies.preemption.reserves:
        state.reservations.wants[spec.id] = Want()


def bound(state: RunState, tier: str, target: int) -> int:
    """Return how many workers of a tier may be asked for, so that no reserved GPU goes to one of them.

    While GPUs are made free no tier grows, since jobs cannot be told to leave these alone; then it lacks the victims.
    """
    every = state.reservations.all.values()
    if any(each.worker is None for each in every):
        there = sum(w.tier == tier and w.acquired and not w.draining for w in state.workers.values())
        return min(target, there)
    return max(0, min(target, state.tiers[tier].spec.maximum - sum(each.tiers.count(tier) for each in every)))


# --- what happens


def started(state: RunState, pin: int) -> None:
    """Note that the job of a worker that was asked for runs."""
    reservation = state.reservations.all.get(pin)
    if reservation is not None and reservation.state == "asked":
        reservation.state, reservation.due = "started", state.now + JOIN_SECONDS
        state.wake(reservation.due)


def joined(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Give its place to a worker that joined; release it if nobody waits for it any more."""
    reservation = state.reservations.all.get(worker.pin or 0)
    if reservation is None or reservation.worker is not None:
        worker.draining = worker.released = True
        state.streams.leaving[worker.id] = worker
        out.append(Release(worker.id))
        return
    reservation.state, reservation.worker, reservation.idle_since = "held", worker.id, state.now
    state.reservations.wants[reservation.context].lost = 0
    name, got = _name(state, reservation), _gpus(worker.devices or reservation.room.devices)
    out.append(Note(f"the context {name} has a worker of its own on {worker.machine}, with the GPUs {got}"))


def lost(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Give up the place of a worker that is gone, if it had one."""
    for reservation in list(state.reservations.all.values()):
        if reservation.worker == worker.id:
            _end(state, reservation, out)


def machines_found(state: RunState, event: ev.MachinesFound, out: list[Command]) -> None:
    """Take in a survey's answer."""
    surveys = state.surveys
    if event.reason:  # It is asked again when an answer would be overdue.
        if event.reason != surveys.told:
            surveys.told = event.reason
            out.append(Note(f"tier {event.tier}: {event.reason}", trouble=True))
        return
    surveys.awaited.pop(event.tier, None)
    surveys.told = ""
    surveys.machines = {key: each for key, each in surveys.machines.items() if each.tier != event.tier}
    for name, graph in event.machines.items():
        # Tiers may share a machine, and each have other GPUs of it.
        surveys.machines[f"{event.tier} {name}"] = Machine(name, event.tier, from_graph(graph))
    surveys.fresh.add(event.tier)


# --- what is done


def follow(state: RunState, out: list[Command]) -> bool:
    """Take every reservation one step further, and make new ones; gives whether tiers are to be asked for anew."""
    changed = False
    for reservation in list(state.reservations.all.values()):
        changed |= _advance(state, reservation, out)
    if not state.awaiting:
        for context, want in state.reservations.wants.items():
            changed |= _consider(state, context, want, out)
    return changed


def overdue(state: RunState) -> Iterator[int]:
    """Return the batches of victims whose time to finish has run out."""
    for reservation in state.reservations.all.values():
        if reservation.state == "clearing" and state.now >= reservation.grace_until:
            for worker in _victims_left(state, reservation):
                yield from worker.running


def _advance(state: RunState, reservation: Reservation, out: list[Command]) -> bool:
    if reservation.state == "clearing":
        return _clear(state, reservation, out)
    if reservation.worker is not None:
        _hold(state, reservation, out)
        return False
    if _waiting(state, reservation.context) is None:
        out.append(Note(f"the context {_name(state, reservation)} has no work any more, so it needs no place"))
    elif state.now < reservation.due:
        return False
    else:
        _missed(state, reservation, out)
    _end(state, reservation, out)
    return True


def _clear(state: RunState, reservation: Reservation, out: list[Command]) -> bool:
    left = _victims_left(state, reservation)
    for worker in left:
        stays = worker.running or (state.now < reservation.grace_until and not empty(state, worker))
        if not stays and worker.id not in reservation.released:
            reservation.released.add(worker.id)
            worker.released = True
            out.append(Release(worker.id))
    if left:
        if state.now < reservation.due:
            return False
        names = ", ".join(sorted(worker.id for worker in left))
        out.append(Note(f"the workers {names} do not go, though they were given back", trouble=True))
        _pause(state, reservation.context, PAUSE_SECONDS)
        del state.reservations.all[reservation.pin]
        return True
    if _waiting(state, reservation.context) is None:
        del state.reservations.all[reservation.pin]
        return True
    room = reservation.room
    reservation.state, reservation.due = "asked", state.now + state.policies.preemption.patience
    state.wake(reservation.due)
    out.append(AcquireAt(reservation.pin, room.tier, room.machine, room.devices))
    return True


def _missed(state: RunState, reservation: Reservation, out: list[Command]) -> None:
    """Try again elsewhere, or after a pause, since the worker did not come."""
    want, room = state.reservations.wants[reservation.context], reservation.room
    want.lost += 1
    if reservation.state == "started":
        why = "its job runs, but it does not join"
    else:
        why = "somebody else has taken them, or its job does not fit there"
    if want.lost >= TRIES:
        want.lost = 0
        _pause(state, reservation.context, PAUSE_SECONDS)
        then = f"it is tried again in {PAUSE_SECONDS:.0f} s"
    else:
        then = "it is tried again"
    name, devices = _name(state, reservation), _gpus(room.devices)
    text = f"no worker came to the GPUs {devices} of {room.machine}, kept for the context {name}: {why}; {then}"
    out.append(Note(text, trouble=True))


def _hold(state: RunState, reservation: Reservation, out: list[Command]) -> None:
    """Give a worker back that has had nothing to do for long enough; its place is kept until it is gone."""
    worker = state.workers[reservation.worker or ""]
    if reservation.state == "leaving":
        _leave(state, reservation, worker, out)
        return
    if worker.draining:  # It is preempted for another place, whose reservation releases it.
        _expect_gone(state, reservation, worker, out)
        return
    active = any(not session.idle for session in worker.sessions.values())
    if worker.running or worker.loading or active or _waiting(state, reservation.context) is not None:
        reservation.idle_since = None
        return
    if reservation.idle_since is None:
        reservation.idle_since = state.now
    until = reservation.idle_since + state.policies.preemption.idle
    if state.now < until:
        state.wake(until)
        return
    reservation.state = "leaving"
    state.drain(worker)
    out.append(Note(f"the worker of the context {_name(state, reservation)} has nothing to do, and is given back"))
    _leave(state, reservation, worker, out)


def _leave(state: RunState, reservation: Reservation, worker: Worker, out: list[Command]) -> None:
    """Release a worker when its sessions, and states of others, have left it, unless it is wanted again before that."""
    if worker.released:
        _expect_gone(state, reservation, worker, out)
    elif _waiting(state, reservation.context) is not None:
        reservation.state, reservation.idle_since = "held", None
        state.drain(worker, draining=False)
    elif not worker.running and empty(state, worker):
        worker.released, reservation.due = True, state.now + GONE_SECONDS
        state.wake(reservation.due)
        out.append(Release(worker.id))


def _expect_gone(state: RunState, reservation: Reservation, worker: Worker, out: list[Command]) -> None:
    if state.now >= reservation.due:
        out.append(Note(f"the worker {worker.id} does not go, though it was given back", trouble=True))
        _end(state, reservation, out)


def _consider(state: RunState, context: str, want: Want, out: list[Command]) -> bool:
    """Reserve GPUs for a context that waits and has no worker."""
    if state.now < want.again_at or any(each.context == context for each in state.reservations.all.values()):
        return False
    app = _waiting(state, context)
    if app is None:
        return False
    spec = state.contexts[context].spec
    tiers = wide_tiers(state, spec)
    if not tiers or not _needed(state, spec):
        _pause(state, context, LOOK_SECONDS)
        return False
    if not _surveyed(state, tiers, out):
        return False
    state.surveys.fresh.clear()  # They are old for whoever comes next.
    request = PlaceRequest(app.id, app.priority, spec.gpus, spec.affinity, _later(state, context))
    room = state.policies.preemption.victims(state.view, request)
    if room is None:
        _pause(state, context, PAUSE_SECONDS)
        close = " close together" if spec.affinity == "guaranteed" else ""
        text = (
            f"no machine has {counted(spec.gpus, 'GPU')}{close} for the context {spec.name}, even if all workers of "
            f"lower priority than {app.priority} gave way: it waits"
        )
        if text != want.told:
            want.told = text
            out.append(Note(text, trouble=True))
        return False
    want.told = ""
    _reserve(state, spec, room, out)
    return True


def _later(state: RunState, context: str) -> tuple[PlaceRequest, ...]:
    """Return what other contexts that need room, and have none, may ask for."""
    served = {context, *(each.context for each in state.reservations.all.values())}
    urgent: dict[str, App] = {}
    for app in state.apps.values():
        if app.context in state.reservations.wants and app.context not in served:
            first = urgent.get(app.context)
            if first is None or app.priority > first.priority:
                urgent[app.context] = app
    specs = ((app, state.contexts[name].spec) for name, app in urgent.items())
    return tuple(PlaceRequest(a.id, a.priority, spec.gpus, spec.affinity) for a, spec in specs if _needed(state, spec))


def _reserve(state: RunState, spec: ev.ContextSpec, room: Room, out: list[Command]) -> None:
    table, policy = state.reservations, state.policies.preemption
    victims = [state.workers[name] for name in room.victims]
    grace = state.now + policy.grace
    reservation = Reservation(
        table.next_pin,
        spec.id,
        room,
        "clearing",
        grace + GONE_SECONDS,
        grace,
        tuple(worker.tier for worker in victims if worker.acquired),
    )
    table.all[reservation.pin] = reservation
    table.next_pin += 1
    who = f"the workers {', '.join(sorted(room.victims))} give way" if victims else "nobody has to give way"
    place = f"the GPUs {_gpus(room.devices)} of {room.machine}"
    out.append(Note(f"{place} are kept for the context {spec.name}: {who}"))
    for held in table.all.values():
        if held.worker in room.victims:
            held.due = reservation.due
    for worker in victims:
        state.drain(worker)  # Sessions that it carries go elsewhere.
        if worker.running:
            out.append(Drain(worker.id))
    if victims:
        state.wake(grace)


# --- what is the case


def _surveyed(state: RunState, tiers: Collection[str], out: list[Command]) -> bool:
    """Return whether all these tiers' machines are known as they are now; ask for what is not."""
    surveys = state.surveys
    for tier in tiers:
        if tier not in surveys.fresh and surveys.awaited.get(tier, -SURVEY_SECONDS) + SURVEY_SECONDS <= state.now:
            surveys.awaited[tier] = state.now
            state.wake(state.now + SURVEY_SECONDS)
            out.append(Survey(tier))
    return surveys.fresh.issuperset(tiers)


def _waiting(state: RunState, context: str) -> App | None:
    """Return the most urgent app that waits for a context: with queued items, or sessions that nobody carries."""
    carried = [app for name in state.streams.waiting if (app := state.apps[name]).context == context]
    return min([*state.ready.waiting_for(context), *carried], key=lambda app: app.urgency, default=None)


def _needed(state: RunState, spec: ev.ContextSpec) -> bool:
    """Return whether a context has no worker, and gets none in the ordinary way."""
    wide = spec.affinity is not None or spec.gpus > max((tier.spec.gpus for tier in state.tiers.values()), default=0)
    return wide and not any(
        worker.gpus >= spec.gpus
        and not worker.draining
        and worker.noticed is None
        and may_hold(state, worker, spec)
        and worker.id not in state.contexts[spec.id].suspects
        for worker in state.workers.values()
    )


def _victims_left(state: RunState, reservation: Reservation) -> list[Worker]:
    return [state.workers[name] for name in reservation.room.victims if name in state.workers]


def _gpus(devices: Sequence[str]) -> str:
    """Return GPUs as people are told of them: by the first digits of their UUIDs, as HTCondor does."""
    return ", ".join(device[:12] for device in devices)


def _name(state: RunState, reservation: Reservation) -> str:
    return state.contexts[reservation.context].spec.name


def _pause(state: RunState, context: str, seconds: float) -> None:
    state.reservations.wants[context].again_at = state.now + seconds
    state.wake(state.now + seconds)


def _end(state: RunState, reservation: Reservation, out: list[Command]) -> None:
    """Give up a reservation; a job that waits must not start."""
    del state.reservations.all[reservation.pin]
    out.append(Forgo(reservation.pin, reservation.room.tier))
