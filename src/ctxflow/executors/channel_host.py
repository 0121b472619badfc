"""A worker's context host on the other end of a socket pair, on a machine whose disk the driver sees too.

What the embedded engine does with its workers, for the engines of others: `ChannelHost` carries out the commands that
name a worker, and turns what its host reports into events (`examples/engine` shows its use).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import site
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from ctxflow.executors.contract import CallPayload, ContextPayload, Payloads
from ctxflow.executors.protocol import LearnedModules, call_message, events_of, is_late, plain_message
from ctxflow.host import library_messages
from ctxflow.host import messages as msg
from ctxflow.host.call_surroundings import state_path
from ctxflow.host.forking import HOST, CannotFork, Zygote
from ctxflow.host.linux import ChildProcess, ended_within, python_path
from ctxflow.host.local_files import cached, start_guard
from ctxflow.host.wire import Channel, pack
from ctxflow.ownership import belongs_here, lead_nowhere
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

HOSTS_OF = "CTXFLOW_HOSTS_OF"
"""The variable of hosts, and of what they start, by which a `HostGuard` finds them: its folder."""
_KILL_SECONDS = 2.0
_END_THEM = """
import sys
from ctxflow.host import linux, local_files
linux.kill_marked(sys.argv[1], sys.argv[2], 5.0)
local_files.clear(sys.argv[2])
"""


class HostGuard:
    """Ends hosts that outlive this process, some seconds after it: one that is stopped cannot see to that itself.

    :param folder: what they have as the variable `HOSTS_OF`; it is removed then.
    :raises OSError: if the machine has no room for it (processes, descriptors).
    """

    def __init__(self, folder: str) -> None:
        words = [sys.executable, "-c", _END_THEM, HOSTS_OF, folder]
        self._process = start_guard('sleep 8; exec "$@"', words, {**os.environ, **python_path()})
        belongs_here(self)

    def forked(self) -> None:
        """Have a child of this process not keep it waiting."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            lead_nowhere(self._process.stdin.fileno())

    def close(self) -> None:
        """End it: the hosts are gone; again is no error."""
        self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        ended_within(self._process, _KILL_SECONDS)


def start_host(
    folder: str,
    logs: str,
    output: IO[bytes],
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    zygote: Zygote | None = None,
) -> tuple[ChildProcess, Channel]:
    """Start a context host in a session of its own, which ends with this process.

    :param folder: its scratch folder, which it makes and removes.
    :param logs: where what its library processes print is kept.
    :param output: what it prints itself goes there.
    :param prefix: a command that becomes the host, such as `["nice", "-n", "5"]`.
    :param environment: all its variables, this process's if None.
    :param directory: where it runs, this process's current directory if None.
    :param zygote: what it is forked from if that can be done, and a copy of which its library processes are forked
        from; without a `prefix`, and with its `environment`. Else it is spawned.
    :raises OSError: if the machine has no room for it (processes, descriptors); nothing is left then.
    """
    with contextlib.ExitStack() as ours:
        near, far = socket.socketpair()
        ours.callback(near.close)
        with far:
            process = _forked(zygote, folder, logs, far.fileno(), output, environment or os.environ, directory)
            process = process or subprocess.Popen(
                [*prefix, sys.executable, "-m", "ctxflow.host", str(far.fileno()), folder, logs, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno()],
                env=environment,
                cwd=directory,
                start_new_session=True,  # Ctrl-C is the driver's; and the worker can be ended as a whole.
            )
        ours.pop_all()
    return process, Channel(near)


def _forked(
    zygote: Zygote | None,
    folder: str,
    logs: str,
    line: int,
    output: IO[bytes],
    environment: Mapping[str, str],
    directory: str | None,
) -> ChildProcess | None:
    """Fork a context host, if that can be done."""
    if zygote is None or not zygote.ready:
        return None
    words: list[str | int] = [0, folder, logs, str(os.getpid())]
    path = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        return zygote.fork(HOST, words, environment, directory or os.getcwd(), path, [line, output.fileno()])
    except CannotFork as error:
        if zygote.ended:  # What it may have forked has this folder, until it finds the line closed.
            raise OSError(str(error)) from error
        return None


class SharedDisk:
    """What a run's workers have on a disk that all of them see, and the messages that name it.

    :param cache: the folder of the files that workers share.
    :param directory: where contexts are built, and calls run.
    :ivar learned: what contexts import; whoever hears of one that is built passes that on.
    """

    def __init__(self, cache: str, directory: str) -> None:
        self._cache = cache
        self._directory = directory
        self.learned = LearnedModules()

    def stage(self, context: ContextPayload, folder: str) -> msg.StageFiles:
        """Return the message to bring a context's files to the worker whose scratch folder is `folder`."""
        return msg.StageFiles(context.id, context.files, self._cache_of(context, folder), link=context.level != ev.NONE)

    def build(self, context: ContextPayload, folder: str, key: str, line: str = "") -> library_messages.BuildContext:
        """Return the message to build a context there; `key` and `line` are the message's."""
        cache = self._cache_of(context, folder)
        another = os.environ.get("CTXFLOW_PYTHON")  # It has packages of its own.
        return library_messages.BuildContext(
            context.id,
            key,
            context.name,
            files={name: cached(digest, path, cache) for name, (path, digest) in context.files.items()},
            environment=context.environment,
            timeout=context.timeout,
            memory=context.memory,
            line=line,
            directory=self._directory,
            path=[path or self._here() for path in sys.path if not (another and _installed(path))],
            states=_states(folder),
            preload=self.learned.of(context),
            park=context.park,
            artifacts=context.artifacts,
            body=context.recipe,
        )

    def remove(self, context: ContextPayload, folder: str) -> msg.EndLibrary:
        """Return the message to end a context there, and to remove the files that are its own."""
        return msg.EndLibrary(context.id, self._cache_of(context, folder))

    def carry(self, command: cmd.Carry, now: float, source: str | None, target: str) -> ev.Event:
        """Move a session's frozen state between two workers, by their scratch folders; return what came of it.

        :param source: None if that worker is gone.
        """
        places = (command.worker, command.session, command.made)
        try:
            if source is None:
                raise OSError(f"the worker {command.source} is gone")
            paths = [state_path(_states(folder), command.session, command.made) for folder in (source, target)]
            os.makedirs(os.path.dirname(paths[1]), exist_ok=True)
            os.rename(*paths)
        except OSError as error:
            reason = f"the state of a session cannot be brought to its worker: {error}"
            return ev.StateLost(now, *places, reason)
        return ev.StateArrived(now, *places)

    def _cache_of(self, context: ContextPayload, folder: str) -> str:
        """Return where a context's files go: to the cache of all workers, unless nothing of it is to be kept."""
        return os.path.join(folder, "files", context.id) if context.level == ev.NONE else self._cache

    def _here(self) -> str:
        """Return the driver's current directory, from which it imports in a notebook; it may have been removed."""
        try:
            return os.getcwd()
        except OSError:
            return self._directory


def _states(folder: str) -> str:
    """Return where the frozen states of a worker's sessions are."""
    return os.path.join(folder, "sessions")


class ChannelHost:
    """A worker: carries out the commands that name it, and returns its host's reports as events.

    Not thread-safe: the engine locks. All messages go through the host, also those of calls.

    :param spec: what `WorkerJoined` is to say of it.
    :param folder: its scratch folder.
    :param channel: to its host; `selector` watches it from now on, with this object as the key's data.
    :ivar joined: whether its host has started. :ivar released: whether it was told to leave.
    :ivar noticed: whether it has notice that it will be taken away.
    :ivar stuck: why its host cannot go on, "" if it can.

    >>> near, far = map(Channel, socket.socketpair())
    >>> selector, disk = selectors.DefaultSelector(), SharedDisk("/scratch/cache", "/home/ann")
    >>> worker = ChannelHost(ev.WorkerSpec("w1"), "/scratch/w1", near, selector, disk)
    >>> far.send_frame(pack(msg.HostStarted(4321, "3.11")))
    True
    >>> [type(event).__name__ for event in worker.hear(2.0)], worker.joined
    (['WorkerJoined'], True)
    >>> worker.tell(cmd.Release("w1"), Payloads())
    >>> far.receive()
    [(['LeaveWorker'], b'')]
    >>> for each in (worker, far, selector):
    ...     each.close()
    """

    def __init__(
        self, spec: ev.WorkerSpec, folder: str, channel: Channel, selector: selectors.BaseSelector, disk: SharedDisk
    ) -> None:
        self.spec, self.folder, self.channel = spec, folder, channel
        self.joined = self.released = self.noticed = False
        self.stuck = ""
        self._selector, self._disk = selector, disk
        self._parts: set[str] = set()  # The functions and constants that it has.
        self._keys: dict[str, str] = {}  # Context -> the key of its latest build.
        self._builds = 0
        self._calls: dict[int, str] = {}  # Unanswered calls and their contexts.
        selector.register(channel, selectors.EVENT_READ, self)

    @property
    def gone(self) -> bool:
        """Whether its host has ended, or is of no more use: end what is left of it."""
        return self.channel.closed or bool(self.stuck)

    def tell(self, command: cmd.Command, payloads: Payloads) -> None:
        """Carry out a command that names it, but `Carry`."""
        if isinstance(command, cmd.Run):
            self._run(command, payloads.calls[command.attempt])
        elif isinstance(command, cmd.Load):
            self._builds += 1
            key = self._keys[command.context] = str(self._builds)
            self._forget_calls(command.context)
            self._send(self._disk.build(payloads.contexts[command.context], self.folder, key))
        elif isinstance(command, cmd.Stage):
            self._send(self._disk.stage(payloads.contexts[command.context], self.folder))
        elif (message := plain_message(command)) is not None:
            if isinstance(message, msg.EndLibrary):
                self._keys.pop(message.context, None)
                self._forget_calls(message.context)
            if isinstance(command, cmd.Unload) and command.files:
                message = self._disk.remove(payloads.contexts[command.context], self.folder)
            self.released |= isinstance(message, msg.LeaveWorker)
            self._send(message)

    def _run(self, command: cmd.Run, payload: CallPayload) -> None:
        for part in payload.new_parts(self._parts):
            self._parts.add(part.name)
            self._send(library_messages.GivePart(part.name, part.body))
        self._calls[command.attempt] = command.context
        self._send(call_message(command, payload, self._keys.get(command.context)))

    def _forget_calls(self, context: str) -> None:
        """Drop the calls of a context whose library process ends without answering them."""
        self._calls = {call: of for call, of in self._calls.items() if of != context}

    def carry(self, command: cmd.Carry, now: float, source: ChannelHost | None) -> ev.Event:
        """Bring it a session's state from another worker, None if that is gone; return what came of it."""
        return self._disk.carry(command, now, None if source is None else source.folder, self.folder)

    def forget(self, names: Collection[str]) -> None:
        """Have it keep these functions and constants no more."""
        if known := self._parts.intersection(names):
            self._parts -= known
            self._send(library_messages.ForgetParts(sorted(known)))

    def release_idle(self) -> None:
        """Have it leave if it has notice and runs nothing; called once the scheduler has heard of the notice."""
        if self.noticed and not self._calls and not self.released:
            self.released = True
            self._send(msg.LeaveWorker())

    def hear(self, now: float) -> list[ev.Event]:
        """Return the events of what its host has reported; goes on with what could not be sent at once."""
        self.channel.flush()
        self._watch()
        events: list[ev.Event] = []
        for head, body in self.channel.receive():
            events += self._events(now, msg.FROM_HOST.open(head, body))
        return events

    def _events(self, now: float, report: msg.FromHost) -> Sequence[ev.Event]:
        if is_late(report, self._keys):
            return ()
        if isinstance(report, msg.HostStarted):
            self.joined = True
            return [ev.WorkerJoined(now, self.spec)]
        if isinstance(report, (library_messages.CallFinished, library_messages.CallRaised)):
            self._calls.pop(report.call, None)
        elif isinstance(report, msg.LibraryDied):
            for call in report.calls:
                self._calls.pop(call, None)
        elif isinstance(report, msg.WorkerStuck):
            self.stuck = report.reason
        elif isinstance(report, library_messages.ContextBuilt):
            self._disk.learned.learn(report)
        self.noticed |= isinstance(report, msg.NoticeGiven)
        return events_of(now, self.spec.id, report)

    def close(self) -> None:
        """Hear of it no more; a host whose channel is closed ends."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self.channel)
        self.channel.close()

    def _send(self, message: msg.ToHost) -> None:
        if not self.channel.send_frame(pack(message)):  # `hear` sends the rest when there is room.
            self._watch()

    def _watch(self) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.channel.pending else 0)
        self._selector.modify(self.channel, wanted, self)


def _installed(path: str) -> bool:
    """Return whether an entry of `sys.path` belongs to this very Python: another has such folders of its own."""
    standard = os.path.dirname(os.__file__)
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    return path in packages or path.startswith(standard) or (path.endswith(".zip") and "python3" in path)
