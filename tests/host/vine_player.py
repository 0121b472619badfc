"""Plays a vine_worker's part for a library program: pipes, sandboxes, SIGCHLD."""

import base64
import os
import pickle
import select
import signal
import subprocess
import sys

import cloudpickle
from message_heads import frame
from message_heads import reports as opened

from ctxflow.host.linux import python_path
from ctxflow.host.vine_protocol import SEAL_BYTES, key_of, open_answer, seal_call
from ctxflow.recipe import Context
from waiting import SECONDS, DeadlinePassed, exited, patience, report

LIBRARY = [sys.executable, "-m", "ctxflow.host.vine_library"]


class Player:
    """A library program, and the TaskVine calls that it was given."""

    def __init__(self, directory, command=LIBRARY, environment=None, inherited=()):
        self.directory = str(directory)
        self.signals = 0
        self._before = signal.signal(signal.SIGCHLD, self._signalled)
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        appended = {
            "in-pipe-fd": their_in,
            "out-pipe-fd": their_out,
            "task-id": 3,
            "library-cores": 2,
            "function-slots": 2,
            "worker-pid": os.getpid(),
        }
        words = [word for name, value in appended.items() for word in (f"--{name}", str(value))]
        sandbox = os.path.join(self.directory, "libr.3")
        os.makedirs(sandbox, exist_ok=True)
        self.key = bytes.fromhex(os.environ.get("CTXFLOW_KEY", "")) or key_of(b"")
        self.name = os.environ.get("CTXFLOW_WORKER_NAME", "")
        given = {**os.environ, **python_path(), "CTXFLOW_WORKER_DIRECTORY": self.directory, **(environment or {})}
        self.process = subprocess.Popen(
            [*command, *words], pass_fds=[their_in, their_out, *inherited], env=given, cwd=sandbox
        )
        os.close(their_in)
        os.close(their_out)
        self._buffer = b""
        self._tasks = 10
        self._calls = 0
        self._answers = {}
        self._seals = {}

    def _signalled(self, number, stack):
        self.signals += 1

    def message(self, within=SECONDS):
        """The next message on the pipe."""
        while True:
            length, found, rest = self._buffer.partition(b"\n")
            if found and len(rest) >= int(length):
                self._buffer = rest[int(length) :]
                return rest[: int(length)].decode()
            if not select.select([self._in], [], [], patience(within))[0]:
                raise DeadlinePassed(report("an answer of the library", patience(within)))
            block = os.read(self._in, 1 << 16)
            if not block:
                raise EOFError
            self._buffer += block

    def send(self, *frames, name=None, sandbox=None, files=None):
        """Start a TaskVine call, and give its number."""
        sealed = self.seal(b"".join(frames)) if frames else self._seals.get(self._tasks + 1, b"")
        self._tasks += 1
        sandbox = f"{sandbox or self.directory}/func.{self._tasks}"
        os.makedirs(sandbox)
        for file, content in (files or {}).items():
            with open(os.path.join(sandbox, file), "wb") as opened:
                opened.write(content)
        self._seals[self._tasks] = sealed
        name = name or "=" + base64.b64encode(sealed).decode()
        text = f"{self._tasks} {name} {sandbox} {sandbox}/.taskvine.stdout".encode()
        os.write(self._out, b"%d\n%s" % (len(text), text))
        self._answers[self._tasks] = sandbox
        return self._tasks

    def seal(self, frames):
        """The content of the next call."""
        sealed = self._seals[self._tasks + 1] = seal_call(self.key, self.name, self._tasks + 1, frames)
        return sealed

    def answer(self, task, within=SECONDS):
        """The exit status and the reports of a call; other calls' answers are kept."""
        while isinstance(sandbox := self._answers[task], str):
            done, status = map(int, self.message(within).split())
            with open(os.path.join(self._answers[done], ".taskvine.stdout"), "rb") as file:
                answer = base64.b64decode(file.read(), validate=True)
            reports = open_answer(self.key, self._seals[done], answer)
            self._answers[done] = int(status), opened(answer[SEAL_BYTES:] if reports is None else reports)
        del self._answers[task]
        return sandbox

    def answered(self, task):
        """Whether a call was answered, as far as has been read."""
        return not isinstance(self._answers[task], str)

    def sandbox(self, task):
        return self._answers[task]

    def ask(self, do, body=b"", **head):
        """Carry one instruction out, which reports once."""
        status, reports = self.answer(self.send(frame({"do": do, **head}, body)))
        assert status == 0
        ((report, data),) = reports
        return report, data

    def load(self, function=None, *args, context="c", key="k", **head):
        """A load's frame."""
        given = {"name": "made", "files": {}, "environment": {}, "timeout": None, "memory": None, "path": []}
        recipe = Context("made", function, args, files={}).dumps() if function else b""
        return frame({"do": "load", **given, "context": context, "key": key, **head}, recipe)

    def call(self, function, *columns, context="c", **head):
        """The frames of a function and of a call of it, and the call's number."""
        self._calls += 1
        given = {"call": self._calls, "context": context, "style": "batch", "insert": False}
        return (
            frame({"do": "function", "function": f"f{self._calls}"}, cloudpickle.dumps(function)),
            frame({"do": "call", **given, "function": f"f{self._calls}", **head}, pickle.dumps(columns)),
        )

    def hang_up(self):
        """Close the pipe, as a vine_worker does that ends."""
        os.close(self._out)
        self._out = -1

    def close(self):
        if self._out >= 0:
            self.hang_up()
        exited(self.process)
        os.close(self._in)
        signal.signal(signal.SIGCHLD, self._before)
