"""Brings frozen states of sessions from worker to worker: between hosts as a TaskVine temp file, within one by a move.

A temp file is written once, by a call on the worker that has the state, and TaskVine sends it to the one where a call
asks for it. RDMA is not used, nor does a state ever go through the manager. What does not live here: when a session
moves (scheduler/sessions.py), and what is done on workers (host/vine_calls.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ctxflow.executors.contract import RunServices
from ctxflow.executors.taskvine.manager_messages import DeclareTemp, Undeclare
from ctxflow.executors.taskvine.vine_workers import Reports, VineCalls, VineWorker
from ctxflow.host.vine_messages import FileFailed, SendState, TakeState
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


@dataclasses.dataclass
class _Carrying:
    """A state on its way. `temp`: the key of its temp file, "" within a host; `call`: the one that waits for it."""

    command: cmd.Carry
    temp: str = ""
    call: int = 0


class StateTransfers:
    """All states on their way. Its owner locks.

    :param report: takes events.
    """

    def __init__(self, run: RunServices, calls: VineCalls, report: Callable[[ev.Event], None]) -> None:
        self._run, self._calls, self._report = run, calls, report
        self._carrying: dict[int, _Carrying] = {}

    def carry(self, source: VineWorker | None, target: VineWorker, command: cmd.Carry) -> None:
        """Bring a state from one worker to another."""
        if source is None:
            self._lost(command, f"the worker {command.source} is gone")
            return
        carrying = self._carrying[self._calls.number()] = _Carrying(command)
        if source.place == target.place:
            self._take(carrying, target, TakeState(command.session, command.made, cache=source.cache))
            return
        name = f"ctxflow-state-{command.session}-{command.made}"
        carrying.temp = f"state {command.session} {command.made} {self._calls.number()}"
        self._calls.link.send(DeclareTemp(carrying.temp))

        def sent(_: VineWorker, reports: Reports) -> None:
            problem = _problem(reports)
            if problem is not None:
                self._end(carrying, problem)
            else:
                self._take(carrying, target, TakeState(command.session, command.made, input=name))

        message = SendState(command.session, command.made, name)
        self._calls.make(source, [message], sent, outputs={name: carrying.temp})

    def _take(self, carrying: _Carrying, target: VineWorker, message: TakeState) -> None:
        def taken(_: VineWorker, reports: Reports) -> None:
            self._end(carrying, _problem(reports))

        inputs = {message.input: carrying.temp} if message.input else None
        carrying.call = self._calls.make(target, [message], taken, inputs)

    def _end(self, carrying: _Carrying, problem: str | None) -> None:
        self._forget(carrying)
        command = carrying.command
        if problem is None:
            self._report(ev.StateArrived(self._run.clock(), command.worker, command.session, command.made))
        else:
            self._lost(command, problem)

    def _lost(self, command: cmd.Carry, problem: str) -> None:
        message = f"the state of a session cannot be brought to its worker: {problem}"
        self._report(ev.StateLost(self._run.clock(), command.worker, command.session, command.made, message))

    def _forget(self, carrying: _Carrying) -> None:
        for number in [number for number, each in self._carrying.items() if each is carrying]:
            del self._carrying[number]
        if carrying.temp:
            self._calls.link.send(Undeclare(carrying.temp))

    def lost(self, worker: str) -> None:
        """A worker is gone: what came from it or went to it is of no more use, and the scheduler knows."""
        for carrying in list(self._carrying.values()):
            if worker in (carrying.command.source, carrying.command.worker):
                if carrying.call:
                    self._calls.cancel(carrying.call)
                self._forget(carrying)


def _problem(reports: Reports) -> str | None:
    return next((report.trouble.message for report in reports if isinstance(report, FileFailed)), None)
