"""What TaskVine's workers are told: commands as messages to their hosts, and files of calls.

Many messages go in one call where that can be. The manager sends input files along with a call, from disk to disk, and
workers keep those that calls share. Outputs come to the run's directory, and go to their places when their call's
answer has come, whose seal covers their sizes: never from a call that failed, or that was run once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pickle
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ctxflow.executors.contract import CallFiles, CallPayload, ContextPayload, OutputFile, Payloads, RunServices
from ctxflow.executors.protocol import LearnedModules, call_message, plain_message
from ctxflow.executors.taskvine.manager_messages import DeclareFile, ToManager, Undeclare
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.vine_workers import Reports, Then, VineCalls, VineWorker
from ctxflow.executors.taskvine.worker_artifacts import ArtifactTransfers
from ctxflow.executors.taskvine.worker_transfers import StateTransfers
from ctxflow.files import written_whole
from ctxflow.host.call_results import EVERY_SECONDS
from ctxflow.host.library_messages import BuildContext, CallFinished, CallRaised, ForgetParts, GivePart
from ctxflow.host.messages import FromWorker, ToWorker
from ctxflow.host.wire import Trouble
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

logger = logging.getLogger("ctxflow")
_KEPT = 100  # Inputs that workers keep for calls to come.
_MOST_UNNEEDED = 100  # Unneeded functions that a worker keeps before a call is made only to remove them.
_PARTS_PER_SECOND = 50  # How often, over all workers, results are sent before their batch has ended: each is a call.


class VineHosts:
    """Sends commands to workers, without waiting for answers.

    :param heard: called with the reports of each answer.
    :param happened: called with an event that a command leads to here.
    :ivar learned: what contexts import; whoever hears of one that is built passes that on.
    """

    def __init__(
        self,
        run: RunServices,
        calls: VineCalls,
        stagings: Stagings,
        artifacts: ArtifactTransfers,
        states: StateTransfers,
        workers: Mapping[str, VineWorker],
        heard: Then,
        happened: Callable[[ev.Event], None],
    ) -> None:
        self._run, self._calls, self._workers = run, calls, workers
        self._stagings, self._artifacts, self._states = stagings, artifacts, states
        self._heard, self._happened = heard, happened
        self.learned = LearnedModules()
        folder = os.path.join(run.directory, "taskvine", "outputs")
        self._attachments = Attachments(calls.link.send, folder, stagings.proven)

    def tell(self, worker: VineWorker, command: cmd.Command, payloads: Payloads, before: list[ToWorker]) -> None:
        """Send a worker a command that names it, with the next call to it where it is added to `before`."""
        if isinstance(command, cmd.Run):
            payload = payloads.calls[command.attempt]
            send = self._send_beside if payload.overlaps else self._send_call
            send(worker, command, payload, before)
        elif isinstance(command, cmd.Load):
            self._load(worker, payloads.contexts[command.context], before)
        elif isinstance(command, cmd.Stage):
            context = payloads.contexts[command.context]
            if (preload := self.learned.message(context)) is not None:
                before.append(preload)
                self.send(worker, before)
            self._stagings.stage(worker, context)
            self._artifacts.bring(worker, context)
        elif isinstance(command, cmd.Carry):
            self._states.carry(self._workers.get(command.source), worker, command)
        elif (message := plain_message(command)) is not None:
            if isinstance(command, (cmd.Unload, cmd.Abandon)):
                worker.forget_items(command.context)
                if (build := worker.builds.pop(command.context, None)) is not None:
                    before.append(build)  # There is always something to end.
            before.append(message)
            if isinstance(command, cmd.Unload) and command.files:
                before += self._stagings.forget(worker, payloads.contexts[command.context])

    def send(self, worker: VineWorker, before: list[ToWorker]) -> None:
        """Send the messages that went with no call."""
        if before:
            self._calls.make(worker, list(before), self._brought(worker, before))
            before.clear()

    def _brought(self, worker: VineWorker, messages: Sequence[ToWorker]) -> Then:
        """Return what takes the answer to messages: then the worker has the functions that they brought."""
        names = {message.name for message in messages if isinstance(message, GivePart)}
        if not names:
            return self._heard
        needed = set(names)
        worker.coming.append(needed)

        def answered(worker: VineWorker, reports: Reports) -> None:
            worker.coming = [each for each in worker.coming if each is not needed]
            worker.functions |= needed
            worker.unneeded += names - needed
            self._heard(worker, reports)

        return answered

    def _send_beside(self, worker: VineWorker, command: cmd.Run, payload: CallPayload, before: list[ToWorker]) -> None:
        """Send a call that overlaps others: it goes along with what comes after it, and a `Listen` brings its answer.

        So it takes none of the worker's slots in TaskVine, whose number stays what it was at the worker's start.
        """
        _give_parts(worker, payload, before)
        before.append(call_message(command, payload, worker.keys.get(command.context, ""), self._every(payload)))
        worker.items[command.attempt] = command.context

    def _every(self, payload: CallPayload) -> float | None:
        """Return how often a call is to send results before its end."""
        return max(EVERY_SECONDS, len(self._workers) / _PARTS_PER_SECOND) if payload.style == "batch" else None

    def _send_call(self, worker: VineWorker, command: cmd.Run, payload: CallPayload, before: list[ToWorker]) -> None:
        try:
            attached = None if payload.files is None else self._attachments.attach(worker.name, payload.files)
        except Exception as error:
            failure = ev.Failure("input", type(error).__name__, str(error))
            self._happened(ev.BatchFailed(self._run.clock(), worker.name, command.attempt, failure, exception=error))
            return
        if worker.unneeded:
            before.append(_forget(worker))
        _give_parts(worker, payload, before)

        def answered(worker: VineWorker, reports: Reports) -> None:
            if attached is not None:
                reports = self._attachments.answered(worker.name, attached, reports)
            worker.running -= 1
            brought(worker, reports)

        key = worker.keys.get(command.context, "")
        worker.running += 1
        folder = None if attached is None else (attached.taken, attached.made, "")
        before.append(call_message(command, payload, key, self._every(payload), folder))
        brought = self._brought(worker, before)
        files = () if attached is None else (attached.inputs, attached.outputs)
        number = self._calls.make(worker, before, answered, *files)
        if payload.timeout is not None:
            worker.due[number] = time.monotonic() + payload.timeout
        before.clear()

    def lost(self, worker: VineWorker) -> None:
        """Forget the calls of a worker that is gone."""
        self._attachments.lost(worker.name)

    def forget(self, worker: VineWorker, functions: Collection[str]) -> None:
        """Have a worker forget functions that no call will need: with the next call, if there soon is one."""
        known = worker.functions.intersection(functions)
        worker.functions -= known
        for coming in worker.coming:
            coming.difference_update(functions)
        worker.unneeded += known
        if len(worker.unneeded) > _MOST_UNNEEDED:
            self.send(worker, [_forget(worker)])

    def _load(self, worker: VineWorker, context: ContextPayload, before: list[ToWorker]) -> None:
        """Have a worker build a context, as soon as it has what builds on other hosts made."""
        worker.keys[context.id] = key = str(self._calls.number())
        build = BuildContext(
            context.id,
            key,
            context.name,
            cached_files=self._stagings.places(worker, context),
            environment=context.environment,
            timeout=context.timeout,
            memory=context.memory,
            preload=self.learned.of(context),
            park=context.park,
            artifacts=context.artifacts,
            body=context.recipe,
        )

        def come() -> None:
            if worker.builds.get(context.id) is build:
                del worker.builds[context.id]
                sent = self._artifacts.sent(worker, context)
                self.send(worker, [dataclasses.replace(build, sent=sent)])

        if self._artifacts.bring(worker, context, come):
            worker.builds[context.id] = build
        else:
            before.append(dataclasses.replace(build, sent=self._artifacts.sent(worker, context)))
        self.send(worker, before)


def _give_parts(worker: VineWorker, payload: CallPayload, before: list[ToWorker]) -> None:
    """Have a worker get the functions that it lacks: with every call until one is answered, for calls may overtake."""
    lacking = payload.new_parts(worker.functions)
    if lacking:
        sent = {message.name for message in before if isinstance(message, GivePart)}
        before += [GivePart(part.name, part.body) for part in lacking if part.name not in sent]


def _forget(worker: VineWorker) -> ForgetParts:
    """Return the instruction to forget functions that are not needed."""
    names, worker.unneeded = worker.unneeded, []
    return ForgetParts(names)


class Attached:
    """What goes with one call.

    :ivar inputs, outputs: name in the call's sandbox -> key of a file that the manager knows.
    :ivar taken, made: what the worker is told of them (see `CallFolder`); it knows the sandbox.
    """

    def __init__(self, files: CallFiles) -> None:
        self.files = files
        self.taken: list[tuple[str, str]] = []
        self.made: list[tuple[str, str, bool]] = []
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.places: dict[str, tuple[str, OutputFile]] = {}  # Name in the sandbox -> where it comes to, and what it is.


class Attachments:
    """Files of calls in flight; outputs come to a folder at first. Its owner locks.

    :param proven: whether all workers reach one another, so that they may send one another what they keep.
    """

    def __init__(self, send: Callable[[ToManager], None], folder: str, proven: Callable[[], bool]) -> None:
        self._send, self._proven = send, proven
        self._folder = folder
        self._numbers = itertools.count(1)
        # Path, time of change and size, and whether workers send it to one another -> key, the oldest first.
        self._declared: dict[tuple[tuple[str, int, int], bool], str] = {}
        self._users: dict[str, int] = {}  # Key -> calls in flight that take it.
        self._open: dict[str, list[Attached]] = {}  # By worker.

    def attach(self, worker: str, files: CallFiles) -> Attached:
        """Declare a call's files to the manager; an OSError, with what to do, if an input is no file here."""
        attached = Attached(files)
        sources = [(each, _identity(each.source)) for each in files.inputs]  # First of all: this may raise.
        for number, (each, identity) in enumerate(sources):
            if identity is None:
                attached.taken.append((each.name, each.source))
                continue
            name = f"input-{number}"
            attached.inputs[name] = key = self._declare(identity)
            self._users[key] += 1
            attached.taken.append((each.name, name))
        for number, output in enumerate(files.outputs):
            name, key = f"output-{number}", f"output {next(self._numbers)}"
            path = os.path.join(self._folder, key.replace(" ", "-"))
            os.makedirs(self._folder, exist_ok=True)
            self._send(DeclareFile(key, path))
            attached.outputs[name], attached.places[name] = key, (path, output)
            attached.made.append((output.name, name, output.required))
        self._open.setdefault(worker, []).append(attached)
        return attached

    def _declare(self, identity: tuple[str, int, int]) -> str:
        peers = self._proven()
        key = self._declared.pop((identity, peers), None)
        if key is None:
            key = f"input {next(self._numbers)}"
            self._users[key] = 0
            self._send(DeclareFile(key, identity[0], cache=True, peers=peers))
        self._declared[identity, peers] = key
        return key

    def answered(self, worker: str, attached: Attached, reports: Reports) -> Reports:
        """Put the outputs of a call that has ended in their places; return its reports, or of why that failed."""
        ended: list[FromWorker] = []
        for report in reports:
            if not isinstance(report, (CallFinished, CallRaised)):
                ended.append(report)
                continue
            try:
                if not attached.files.settled:
                    self._deliver(attached, report.made or {})
                attached.files.settled |= isinstance(report, CallFinished)
                ended.append(report)
            except OSError as error:
                context, key = (report.context, report.key) if isinstance(report, CallRaised) else ("", None)
                trouble = Trouble("exception", type(error).__name__, str(error))
                body = pickle.dumps(error)
                ended.append(CallRaised(report.call, context, report.seconds, trouble, key, body=body))
        self._close(worker, attached)
        return ended

    @staticmethod
    def _deliver(attached: Attached, made: Mapping[str, int]) -> None:
        for name, size in made.items():
            path, output = attached.places[name]
            try:
                _put(path, output, size)
            except OSError as error:
                reason = error.strerror or error
                raise OSError(error.errno, f"the call's output {output.target} cannot be put there: {reason}") from None

    def lost(self, worker: str) -> None:
        """Forget the calls of a worker that is gone."""
        for attached in list(self._open.get(worker, [])):
            self._close(worker, attached)

    def _close(self, worker: str, attached: Attached) -> None:
        self._open[worker].remove(attached)
        if not self._open[worker]:
            del self._open[worker]
        for key in attached.outputs.values():
            self._send(Undeclare(key))
        for path, _ in attached.places.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for key in attached.inputs.values():
            self._users[key] -= 1
        for identity, key in list(self._declared.items())[: max(0, len(self._declared) - _KEPT)]:
            if not self._users[key]:
                del self._declared[identity], self._users[key]
                self._send(Undeclare(key))


class UnkeptFiles:
    """Warns of what calls leave in their folders: once for each app and kind of name, in which digits do not count."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, app: str, names: Sequence[str]) -> None:
        """Warn of files, and of folders, whose names end with a slash."""
        new = {re.sub(r"\d+", "*", name): name for name in reversed(names)}
        news = [name for kind, name in new.items() if (app, kind) not in self._told]
        self._told |= {(app, kind) for kind in new}
        if news:
            logger.warning(
                "a call of %s left %s in its folder on a worker, which is removed after it: what is to be kept it "
                "returns, or names in outputs=[File(...)] (docs/where-your-code-runs.md; told once for each app and "
                "kind of name)",
                app,
                ", ".join(sorted(news)),
            )


def _identity(source: str) -> tuple[str, int, int] | None:
    """Return what identifies an input and its version; None if it is a URL."""
    if "://" in source:
        return None
    try:
        status = os.stat(source)
    except OSError as error:
        raise OSError(error.errno, f"the input {source} cannot be sent to a worker: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(
            errno.EINVAL, f"the input {source} is no file: send a folder as an archive, or in files= of a context"
        )
    return source, status.st_mtime_ns, status.st_size


def _put(path: str, output: OutputFile, size: int) -> None:
    """Put an output in its place, atomically, also on another disk."""
    if (found := os.path.getsize(path)) != size:
        raise OSError(errno.EIO, f"{found} of its {size} bytes have come; is there room on this disk?")
    place = os.path.realpath(output.target)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if output.append or (os.path.exists(place) and not os.path.isfile(place)):  # A device, say, is not replaced.
        with open(path, "rb") as source, open(place, "ab") as target:
            shutil.copyfileobj(source, target)
        return
    try:
        os.replace(path, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with open(path, "rb") as source, written_whole(Path(place), sync=False) as target:
            shutil.copyfileobj(source, target)
            os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
