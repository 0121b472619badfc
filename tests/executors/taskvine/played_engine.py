"""An executor whose one worker is a real context host, to which calls come as with TaskVine: only that is played.

TaskVine's part is to bring a call and its inputs into a sandbox, and its answer and outputs back: where an output is
missing it makes no answer, which costs the worker.
"""

import base64
import os
import select
import shutil
import threading
from types import SimpleNamespace

from vine_player import Player

from ctxflow import ContextExecutor
from ctxflow.executors.executor import WorkerStaging
from ctxflow.executors.protocol import events_of, is_late
from ctxflow.executors.taskvine.manager_messages import DeclareFile, SubmitCall, Undeclare
from ctxflow.executors.taskvine.vine_hosts import UnkeptFiles, VineHosts
from ctxflow.executors.taskvine.vine_workers import VineCalls, VineWorker
from ctxflow.host.library_messages import CallFinished
from ctxflow.host.messages import Listen
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites.engine_kinds import Capabilities


class Manager:
    """What the manager's process does with what it is told."""

    def __init__(self, player):
        self.player = player
        self.files = {}  # Key -> path.
        self.sent = []  # The paths of inputs that had to go to the worker.
        self._cached = set()
        self._calls = {}  # TaskVine's number -> the engine's, sandbox, outputs.

    def send(self, message):
        if isinstance(message, DeclareFile):
            self.files[message.key] = message.path
        elif isinstance(message, Undeclare):
            del self.files[message.key]
            self._cached.discard(message.key)
        elif isinstance(message, SubmitCall):
            inputs = {name: self._read(key) for name, key in message.inputs.items()}
            name = "=" + base64.b64encode(message.body).decode()
            if len(message.body) > 1500:
                name, inputs = "@", {**inputs, "call": message.body}
            task = self.player.send(name=name, files=inputs)
            self._calls[task] = message.number, self.player.sandbox(task), message.outputs

    def _read(self, key):
        if key not in self._cached:
            self._cached.add(key)
            self.sent.append(self.files[key])
        with open(self.files[key], "rb") as file:
            return file.read()

    def answers(self):
        """What the worker has answered: the engine's number and the answer, once."""
        while select.select([self.player._in], [], [], 0)[0]:
            task, _ = map(int, self.player.message().split())
            number, sandbox, outputs = self._calls.pop(task)
            for name, key in outputs.items():
                shutil.move(os.path.join(sandbox, name), self.files[key])  # TaskVine wants them all.
            with open(os.path.join(sandbox, ".taskvine.stdout"), "rb") as file:
                answer = base64.b64decode(file.read())
            shutil.rmtree(sandbox)
            yield number, answer


class PlayedEngine:
    """One such worker, with the engine's own calls, messages and files."""

    capabilities = Capabilities(remote=True, stages=True)

    def __init__(self, directory):
        self.directory = str(directory)
        self.events = []
        self._lock = threading.RLock()

    def tiers(self):
        return [ev.TierSpec("played", 1, 1)]

    def start(self, run):
        self.run, self.leftovers = run, UnkeptFiles()
        self.player = Player(self.directory)
        self.player.message()
        self.manager = Manager(self.player)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK)
        self.worker = VineWorker("", "played", "", 0.0, "played", joined=True)
        calls = VineCalls(self.manager, self.player.key, lambda worker: None)
        no_files = SimpleNamespace(
            places=lambda worker, context: {}, forget=lambda worker, context: [], proven=lambda: False
        )
        none_made = SimpleNamespace(bring=lambda *given: False, sent=lambda worker, context: {})
        parts = (calls, no_files, none_made, None, {"": self.worker})
        self.messages = VineHosts(run, *parts, self._heard, self.events.append)
        self._calls = calls
        calls.make(self.worker, [Listen()], self._overheard)
        self.events.append(ev.WorkerJoined(run.clock(), ev.WorkerSpec("", tier="played")))

    def _overheard(self, worker, reports):
        self._heard(worker, reports)
        self._calls.make(worker, [Listen()], self._overheard)

    def _heard(self, worker, reports):
        for report in reports:
            if isinstance(report, CallFinished) and report.rest:
                self.leftovers.tell(report.app, report.rest)
            if not is_late(report, worker.keys):
                self.events += events_of(self.run.clock(), worker.name, report, worker.host)

    def execute(self, commands, payloads=None):
        with self._lock:
            before = []
            for command in commands:
                if not isinstance(command, cmd.Acquire):
                    self.messages.tell(self.worker, command, payloads, before)
            self.messages.send(self.worker, before)

    def forget(self, functions):
        with self._lock:
            self.messages.forget(self.worker, functions)

    def poll(self, timeout):
        if not self.events:
            select.select([self.player._in, self._wake_read], [], [], timeout)
        with self._lock:
            for number, answer in self.manager.answers():
                self._calls.answered(number, answer)
            happened, self.events[:] = list(self.events), []
        return happened

    def wake(self):
        os.write(self._wake_write, b".")

    def stop(self):
        self.player.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


class PlayedExecutor(ContextExecutor):
    """An executor on it."""

    def __init__(self, directory, staging=None):
        self.directory = directory
        super().__init__(storage_access=[staging or WorkerStaging()])

    def _make_engine(self):
        return PlayedEngine(self.directory)
