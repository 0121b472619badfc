"""What TaskVine's workers are told: commands as messages to their hosts, many in one call where that can be.

What does not live here: which workers there are, and what their answers mean (engine.py), the calls (calls.py), and how
files and states get to workers (stagings.py, states.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ctxflow.executors.contract import CallPayload, ContextPayload, Payloads, Pickled, RunServices
from ctxflow.executors.protocol import call_message, plain_message
from ctxflow.executors.taskvine.attachments import Attached, Attachments
from ctxflow.executors.taskvine.calls import Reports, Then, VineCalls
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.states import StateTransfers
from ctxflow.executors.taskvine.worker import VineWorker
from ctxflow.host.messages import BuildContext, ForgetParts, GivePart
from ctxflow.host.vine_messages import ToWorker
from ctxflow.host.yielding import EVERY_SECONDS
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

_MOST_UNNEEDED = 100  # Functions that a worker keeps in vain, rather than to have a call of its own for that.
_PARTS_PER_SECOND = 50  # How often, over all workers, results are sent before their batch has ended: each is a call.


class VineHosts:
    """Tells workers what to do, without waiting for it.

    :param run: has what calls and contexts are made of.
    :param workers: those that are there, by name.
    :param heard: called with the reports of each answer.
    :param happened: called with what is noticed while a command is carried out.
    """

    def __init__(
        self,
        run: RunServices,
        calls: VineCalls,
        stagings: Stagings,
        states: StateTransfers,
        workers: Mapping[str, VineWorker],
        heard: Then,
        happened: Callable[[ev.Event], None],
    ) -> None:
        self._run = run
        self._calls = calls
        self._attachments = Attachments(calls.link.send, os.path.join(run.directory, "taskvine", "outputs"))
        self._stagings = stagings
        self._states = states
        self._workers = workers
        self._heard = heard
        self._happened = happened

    def tell(self, worker: VineWorker, command: cmd.Command, payloads: Payloads, before: list[ToWorker]) -> None:
        """Have a worker carry out a command that names it.

        :param before: messages that go along with the next call to the worker; what ends at once is added to them.
        """
        if isinstance(command, cmd.Run):
            self._send_call(worker, command, payloads.calls[command.attempt], before)
        elif isinstance(command, cmd.Load):
            before.append(self._load(worker, payloads.contexts[command.context]))
            self.send(worker, before)
        elif isinstance(command, cmd.Stage):
            self._stagings.stage(worker, payloads.contexts[command.context])
        elif isinstance(command, cmd.Carry):
            self._states.carry(self._workers.get(command.source), worker, command)
        elif (message := plain_message(command)) is not None:
            before.append(message)
            if isinstance(command, cmd.Unload) and command.files:
                before += self._stagings.forget(worker, payloads.contexts[command.context])

    def send(self, worker: VineWorker, before: list[ToWorker]) -> None:
        """Send the messages that no call went along with."""
        if before:
            self._calls.make(worker, list(before), self._heard)
            before.clear()

    def _send_call(self, worker: VineWorker, command: cmd.Run, payload: CallPayload, before: list[ToWorker]) -> None:
        try:
            attached = None if payload.files is None else self._attachments.attach(worker.name, payload.files)
        except Exception as error:
            failure = ev.Failure("input", type(error).__name__, str(error))
            self._happened(ev.BatchFailed(self._run.clock(), worker.name, command.attempt, failure, exception=error))
            return
        then: Then = self._call_answered
        if worker.unneeded:
            before.append(_forget(worker))
        new = payload.new_parts(worker.functions)
        if new:
            # They go with every call until one is answered: TaskVine may let calls overtake each other.
            before += [GivePart(part.name, part.body) for part in new]
            then = self._with_functions(worker, new)
        key = worker.keys.get(command.context, "")
        every = max(EVERY_SECONDS, len(self._workers) / _PARTS_PER_SECOND) if payload.style == "batch" else None
        worker.running += 1
        if attached is None:
            before.append(call_message(command, payload, key, every))
            number = self._calls.make(worker, before, then)
        else:
            before.append(call_message(command, payload, key, every, attached.folder))
            then = self._with_files(attached, then)
            number = self._calls.make(worker, before, then, attached.inputs, attached.outputs)
        if payload.timeout is not None:
            worker.due[number] = time.monotonic() + payload.timeout
        before.clear()

    def _with_files(self, attached: Attached, then: Then) -> Then:
        def answered(worker: VineWorker, reports: Reports) -> None:
            then(worker, self._attachments.answered(worker.name, attached, reports))

        return answered

    def lost(self, worker: VineWorker) -> None:
        """No call of a worker is answered any more."""
        self._attachments.lost(worker.name)

    def forget(self, worker: VineWorker, functions: Collection[str]) -> None:
        """Have a worker keep functions no more that no call will need: with the next call, if there soon is one."""
        known = worker.functions.intersection(functions)
        worker.functions -= known
        for coming in worker.coming:
            coming.difference_update(functions)
        worker.unneeded += known
        if len(worker.unneeded) > _MOST_UNNEEDED:
            self.send(worker, [_forget(worker)])

    def _with_functions(self, worker: VineWorker, parts: Sequence[Pickled]) -> Then:
        names = {part.name for part in parts}
        needed = set(names)
        worker.coming.append(needed)

        def answered(worker: VineWorker, reports: Reports) -> None:
            worker.coming = [each for each in worker.coming if each is not needed]
            worker.functions |= needed
            worker.unneeded += names - needed
            self._call_answered(worker, reports)

        return answered

    def _call_answered(self, worker: VineWorker, reports: Reports) -> None:
        worker.running -= 1
        self._heard(worker, reports)

    def _load(self, worker: VineWorker, context: ContextPayload) -> BuildContext:
        worker.keys[context.id] = key = self._calls.key()
        return BuildContext(
            context.id,
            key,
            context.name,
            cached_files=self._stagings.places(worker, context),
            environment=context.environment,
            timeout=context.timeout,
            memory=context.memory,
            body=context.recipe,
        )


def _forget(worker: VineWorker) -> ForgetParts:
    """Return the instruction to forget what a worker keeps in vain."""
    names, worker.unneeded = worker.unneeded, []
    return ForgetParts(names)
