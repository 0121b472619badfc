"""What fits on a worker beside what; and of contexts that give way, which are parked, and which are unloaded.

A parked context keeps its library process and the host's memory; its GPU memory it has given up. It is worth its place
where its app is expected to want it again, and where parking and waking it cost less than a build; where the host's
memory is short, those go first whose rebuild costs least for each byte that they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import ContextState
from ctxflow.scheduler.commands import Command, Unload
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import ParkedContext, Worker


class Leaving(NamedTuple):
    """What becomes of what is in a context's way, by context: some is parked, some unloaded, of the parked ones too."""

    park: Sequence[ParkedContext]
    unload: Sequence[str]


def in_the_way(state: RunState, worker: Worker, wanted: ev.ContextSpec, idle: Iterable[str]) -> list[str] | None:
    """Return the contexts that have to give way so that another fits, in the order of `idle`; None if it cannot fit."""
    leave: list[str] = []
    for candidate in idle:
        if _fits(state, worker, wanted, leave):
            return leave
        leave.append(candidate)
    return leave if _fits(state, worker, wanted, leave) else None


def room(state: RunState, worker: Worker, wanted: ev.ContextSpec, leave: Collection[str]) -> Leaving:
    """Return what becomes of the contexts that give way to another, and of those that are parked."""
    staying = [state.contexts[name] for name in dict.fromkeys((wanted.id, *worker.contexts)) if name not in leave]
    asleep = [each for name in leave if (each := _parked(state, worker, name)) is not None]
    parked = [*(each for each in worker.parked.values() if each.context != wanted.id), *asleep]
    kept = _kept(state, worker, staying, parked)
    left = {each.context for each in kept}
    names = [*leave, *(name for name in worker.parked if name != wanted.id)]
    return Leaving([each for each in asleep if each in kept], [name for name in names if name not in left])


def parked(state: RunState, event: ev.ContextParked, out: list[Command]) -> None:
    """Learn what a parked context costs; where that is more than there is room for, the least valuable one goes."""
    context, worker = state.contexts.get(event.context), state.workers.get(event.worker)
    if context is None:
        return
    context.park_seconds = event.seconds
    context.parked_memory = event.memory if event.memory is not None else context.parked_memory
    there = worker.parked.get(event.context) if worker is not None else None
    if worker is not None and there is not None:
        there.memory = event.memory if event.memory is not None else there.memory
        there.gpu_memory = event.gpu_memory or 0
        settle(state, worker, out)


def settle(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Unload parked contexts for which a worker has no memory any more: something has turned out to be larger."""
    if worker.parked:
        staying = [state.contexts[name] for name in worker.contexts]
        kept = {each.context for each in _kept(state, worker, staying, list(worker.parked.values()))}
        for name in [name for name in worker.parked if name not in kept]:
            unload_parked(state, worker, name, out)


def unload_parked(state: RunState, worker: Worker, context: str, out: list[Command]) -> None:
    """Have a worker end a context that is parked there."""
    state.free_tables.unpark(worker, context)
    out.append(Unload(worker.id, context))


def fit_beside(worker: Worker, staying: Sequence[ContextState], parked: Sequence[ParkedContext]) -> bool:
    """Return whether a worker has the memory for parked contexts beside those that stay."""
    if not parked:
        return True
    used = sum(_host_bytes(each) for each in staying) + sum(each.memory for each in parked)
    if worker.spec.memory is not None and used > worker.spec.memory:
        return False
    left = sum(each.gpu_memory for each in parked)
    # A size that nobody knows is no reason: a build that fails beside what they have left is tried again without them.
    sizes = [size for each in staying if each.spec.gpus and (size := _gpu_bytes(each)) is not None]
    return not left or not sizes or worker.spec.gpu_memory is None or left + sum(sizes) <= worker.spec.gpu_memory


def larger(*sizes: int | None) -> int | None:
    """Return the largest size that is known."""
    return max((size for size in sizes if size is not None), default=None)


def _fits(state: RunState, worker: Worker, wanted: ev.ContextSpec, without: Collection[str]) -> bool:
    """Return whether a context fits beside others; parked ones give way to any."""
    others = [state.contexts[c] for c in worker.contexts if c not in without]
    context = state.contexts[wanted.id]
    used = sum(_host_bytes(each) for each in (context, *others))
    if worker.spec.memory is not None and used > worker.spec.memory and others:
        return False
    on_gpu = [other for other in others if other.spec.gpus]
    if not wanted.gpus or not on_gpu:
        return True
    # GPU memory that nobody declared or measured is taken to be all of it.
    sizes = [_gpu_bytes(each) for each in (context, *on_gpu)]
    known = [size for size in sizes if size is not None]
    return worker.spec.gpu_memory is not None and len(known) == len(sizes) and sum(known) <= worker.spec.gpu_memory


def _host_bytes(context: ContextState) -> int:
    """Return what a context that takes calls has of the host: declared is that for calls too, measured the build's."""
    return larger(context.spec.memory, context.memory) or 0


def _gpu_bytes(context: ContextState) -> int | None:
    return larger(context.spec.gpu_memory, context.gpu_memory)


def _parked(state: RunState, worker: Worker, name: str) -> ParkedContext | None:
    """Return a context as it will be once it is parked, by what is known of it; None if it is to be unloaded."""
    context = state.contexts[name]
    if not context.parks or worker.leaving or not _worth_it(state, worker, context):
        return None
    size = context.parked_memory
    if size is None:  # What it has built, and what comes from the GPU; it runs no calls.
        on_gpu = (_gpu_bytes(context) or worker.spec.gpu_memory) if context.spec.gpus else 0
        if on_gpu is None:
            return None
        size = (context.memory or context.spec.memory or 0) + context.spec.gpus * on_gpu
    return ParkedContext(name, worker.contexts[name].last_used, size)


def _worth_it(state: RunState, worker: Worker, context: ContextState) -> bool:
    build = worker.context_seconds.get(context.spec.id, 0.0)
    cheaper = context.park_seconds + context.wake_seconds < build
    return cheaper and context.spec.level == ev.PERVASIVE and _expected(state, context)


def _expected(state: RunState, context: ContextState) -> bool:
    """Return whether calls on a context are to be expected: some wait, or came in this run."""
    if context.broken is not None:
        return False
    apps = [state.apps[name] for name in context.apps]
    return any(app.backlog or app.arrived or app.open_sessions for app in apps)


def _kept(
    state: RunState, worker: Worker, staying: Sequence[ContextState], parked: Sequence[ParkedContext]
) -> list[ParkedContext]:
    """Return the parked contexts for which a worker has memory, without the least valuable ones."""

    def value(each: ParkedContext) -> tuple[bool, float, float]:
        context = state.contexts[each.context]
        saved = worker.context_seconds.get(each.context, 0.0) - context.wake_seconds
        return _expected(state, context), saved / max(1, each.memory), each.last_used

    kept = sorted(parked, key=value, reverse=True)
    while not fit_beside(worker, staying, kept):
        kept.pop()
    return kept
