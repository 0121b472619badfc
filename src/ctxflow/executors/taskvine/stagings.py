"""Brings contexts' files to workers: the orders of `worker_transfers.Tree` become calls, whose answers it is told.

There is a tree for each group of hosts that reach one another; a host's group is found out when its first worker joins.
A folder travels as a tar archive. What a worker finds in its host's cache is not sent. At level "none" the manager
sends the files to each worker anew, without the tree or the cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping

from ctxflow.executors.contract import ContextPayload, RunServices
from ctxflow.executors.protocol import failure_of
from ctxflow.executors.taskvine.manager_messages import DeclareFile, DeclareTemp, Undeclare
from ctxflow.executors.taskvine.manager_process import PackedEnvironment, Setup
from ctxflow.executors.taskvine.vine_workers import Reports, VineCalls, VineWorker
from ctxflow.executors.taskvine.worker_transfers import Cancel, Fetch, How, Link, Order, PeerGroups, Seed, Tree
from ctxflow.files import digest_now
from ctxflow.host.messages import (
    FetchFile,
    FileCached,
    FileDone,
    FileFailed,
    ForgetFile,
    LinkFile,
    OpenEnvironment,
    ReachPeer,
    SeedFile,
    TakeKept,
)
from ctxflow.scheduler import events as ev

Done = Callable[[ev.Failure | None], None]
logger = logging.getLogger("ctxflow")


class _File:
    """A file or folder that workers need.

    :ivar path: where it is on this machine.
    :ivar key: by which the manager knows it.
    :ivar sent: what is sent for it, once it is ready: itself, or a folder's archive. :ivar content: the digest of that.
    :ivar context: the name of the first context that needed it, "" for an environment.
    :ivar input: its name in the sandbox of a call that takes it, from TaskVine's log to the report; `output`: likewise.
    :ivar waiting: who wants it as soon as it is ready, and by which name in its cache.
    """

    def __init__(self, path: str, digest: str, context: str) -> None:
        self.path, self.digest, self.context = path, digest, context
        self.kind = "tar" if os.path.isdir(path) else "file"
        self.key = f"file {digest}"
        self.sent: str | None = None if self.kind == "tar" else path
        self.content = digest
        self.input, self.output = f"ctxflow-in-{digest}", f"ctxflow-out-{digest}"
        self.waiting: list[tuple[VineWorker, str]] = []

    def temp(self, group: int, generation: int) -> str:
        """Return the key of the temp file that one generation's seed makes of it for a group of hosts."""
        return f"temp {self.digest} {group} {generation}"

    def fetch(self, name: str) -> FetchFile:
        """Return the instruction to take it into a worker's cache by a name."""
        return FetchFile(name, self.content, self.path, self.kind, self.input, keep=name == self.digest)


@dataclasses.dataclass(eq=False)
class _Want:
    """What a worker still lacks of a context (or environment), and what follows when it lacks nothing."""

    missing: set[str]
    done: Done


@dataclasses.dataclass(eq=False)
class _Trial:
    """A host that is tried with others: by which worker, with which, and what is to follow for its workers."""

    worker: VineWorker
    peer: VineWorker | None = None
    waiting: list[tuple[VineWorker, Callable[[], None]]] = dataclasses.field(default_factory=list)


class Stagings:
    """Brings a run's files to workers, and reports events. Its owner locks, and calls `serve` when it was woken.

    :param wake: makes the owner call `serve` soon, from any thread.
    :param peers: whether workers send files to those of other hosts.
    """

    def __init__(
        self,
        run: RunServices,
        calls: VineCalls,
        setup: Setup,
        report: Callable[[ev.Event], None],
        wake: Callable[[], None],
        peers: bool = True,
    ) -> None:
        self._run, self._calls, self._setup = run, calls, setup
        self._report, self._wake = report, wake
        self._groups = PeerGroups(peers)
        self._trees: dict[int, Tree] = {}  # By group.
        self._trials: dict[str, _Trial] = {}  # By host.
        self._on: dict[str, dict[str, VineWorker]] = {}  # Host -> its workers.
        self._files: dict[str, _File] = {}
        self._workers: dict[str, VineWorker] = {}
        self._wants: dict[str, list[_Want]] = {}  # By worker.
        self._fetching: dict[tuple[str, str], int] = {}  # Worker, digest -> the call that fetches it.
        self._holders: dict[str, str] = {}  # Path in a cache -> the worker whose it is.
        self._packing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ctxflow-pack")
        self._packed: list[tuple[_File, str | None]] = []  # Archives that are ready, or why not.
        self._told: set[tuple[str, str]] = set()  # Host, and what was told of its cache.

    def stage(self, worker: VineWorker, context: ContextPayload) -> None:
        """Bring a context's files to a worker, and report it."""

        def done(failure: ev.Failure | None) -> None:
            now = self._run.clock()
            if failure is None:
                self._report(ev.ContextStaged(now, worker.name, context.id))
            else:
                self._report(ev.ContextFailed(now, worker.name, context.id, failure))

        files = {self._name(worker, context, file[1]): file for file in context.files.values()}
        self._bring(worker, files, context.name, done)

    def places(self, worker: VineWorker, context: ContextPayload) -> Mapping[str, tuple[str, str]]:
        """Return how a `load` names a context's files: parameter -> digest and path on this machine."""
        return {name: (self._name(worker, context, digest), path) for name, (path, digest) in context.files.items()}

    def forget(self, worker: VineWorker, context: ContextPayload) -> list[ForgetFile]:
        """Return the instructions that remove a context's files from a worker."""
        names = {self._name(worker, context, digest) for _, digest in context.files.values()}
        worker.forgotten[context.id] = worker.forgotten.get(context.id, 0) + 1
        return [ForgetFile(name) for name in names]

    def open_environment(
        self, worker: VineWorker, packed: PackedEnvironment, then: Callable[[str | None], None]
    ) -> None:
        """Bring a packed environment to a worker and open it; `then` is called with what is wrong, or None."""

        def opened(_: VineWorker, reports: Reports) -> None:
            for report in reports:
                if isinstance(report, (FileDone, FileFailed)):
                    then(report.trouble.message if isinstance(report, FileFailed) else None)

        def staged(failure: ev.Failure | None) -> None:
            if failure is not None:
                then(failure.message)
                return
            self._calls.make(worker, [OpenEnvironment(packed.digest, packed.path)], opened)

        self._bring(worker, {packed.digest: (packed.path, packed.digest)}, "", staged)

    def bring_rest(self, worker: VineWorker) -> None:
        """Bring a worker the modules that its program lacks, since something there imports one."""
        path, digest = self._setup.rest, self._setup.rest_digest
        if any(digest in want.missing for want in self._wants.get(worker.name, [])):
            return

        def done(failure: ev.Failure | None) -> None:
            if failure is not None:
                logger.warning("what calls on %s import of ctxflow cannot be sent: %s", worker.host, failure.message)

        self._bring(worker, {digest: (path, digest)}, "", done)

    def bring(self, worker: VineWorker, path: str, digest: str, context: str, done: Done) -> None:
        """Bring a worker a file that a context does not name itself; `done` is called with what went wrong, or None."""
        self._bring(worker, {digest: (path, digest)}, context, done)

    @staticmethod
    def _name(worker: VineWorker, context: ContextPayload, digest: str) -> str:
        """Return a file's name in a worker's cache: at level none another one for each context and each time."""
        if context.level != ev.NONE:
            return digest
        # So that removing one is never taken for removing the next.
        return f"{digest}-{context.id}-{worker.forgotten.get(context.id, 0)}"

    def _bring(self, worker: VineWorker, files: Mapping[str, tuple[str, str]], context: str, done: Done) -> None:
        """Bring files to a worker; nothing follows where it is gone.

        :param files: name in the worker's cache -> path here, and digest; those with other names bypass the tree.
        :param context: the name of the context that needs them.
        """
        if not worker.answers:
            return
        for path, _ in files.values():
            if not os.path.exists(path):
                message = f"there is no file {path} to stage: see that it is there as long as the run lasts"
                done(ev.Failure("exception", "FileNotFoundError", message, worker=worker.name))
                return
        self._enter(worker, lambda: self._bring_now(worker, files, context, done))

    def _bring_now(self, worker: VineWorker, files: Mapping[str, tuple[str, str]], context: str, done: Done) -> None:
        missing = {name for name in files if not self._tree(worker).has(worker.name, name)}
        if not missing:
            done(None)
            return
        self._wants.setdefault(worker.name, []).append(_Want(missing, done))
        for name in sorted(missing):
            path, digest = files[name]
            if worker.kept and name == digest:
                self._take_kept(worker, path, digest, context)
            else:
                self._send(worker, name, path, digest, context)

    def _take_kept(self, worker: VineWorker, path: str, digest: str, context: str) -> None:
        """Have a worker look in its host's cache first: what is there need not be sent, nor packed."""

        def answered(worker: VineWorker, reports: Reports) -> None:
            there = next((report for report in reports if isinstance(report, FileCached)), None)
            if there is None:
                if (failure := _failure(worker, reports)) is not None:
                    self._tell_of_cache(worker, failure.message)
                self._send(worker, digest, path, digest, context)
                return
            self._setup.note({"is": "kept", "time": self._run.clock(), "worker": worker.name, "digest": digest})
            self._holders[there.path] = worker.name
            self._order(self._tree(worker).found(worker.name, worker.place, digest, there.path))
            self._settle(worker.name, digest, None)

        self._calls.make(worker, [TakeKept(digest, path)], answered)

    def _tell_of_cache(self, worker: VineWorker, trouble: str) -> None:
        if (worker.host, trouble) not in self._told:
            self._told.add((worker.host, trouble))
            logger.warning("on %s: %s", worker.host, trouble)

    def _send(self, worker: VineWorker, name: str, path: str, digest: str, context: str) -> None:
        """Have a worker sent a file, by a name in its cache."""
        file = self._files.get(digest)
        if file is None:
            file = _File(path, digest, context)
            try:
                self._prepare(file)
            except OSError as error:  # It was removed at this moment.
                message = f"a file to stage cannot be read ({error}): see that it is there as long as the run lasts"
                failure = ev.Failure("exception", type(error).__name__, message, worker=worker.name)
                self._settle(worker.name, name, failure)
                return
            self._files[digest] = file
        if file.sent is None:
            file.waiting.append((worker, name))
        else:
            self._want(worker, file, name)

    def _want(self, worker: VineWorker, file: _File, name: str) -> None:
        if name != file.digest:
            self._deliver(worker, file, name)
        else:
            self._order(self._tree(worker).want(worker.name, worker.place, file.digest))

    def _prepare(self, file: _File) -> None:
        if file.sent is not None:
            self._declare(file, file.sent)
            return

        def pack() -> None:
            target = self._archive(file)
            try:
                with tarfile.open(target, "w", dereference=True) as archive:
                    for name in sorted(os.listdir(file.path)):
                        archive.add(os.path.join(file.path, name), name)
                file.content = digest_now(target)
                self._packed.append((file, None))
            except Exception as error:
                self._packed.append((file, f"{file.path} cannot be packed for the workers: {error}"))
            self._wake()

        self._packing.submit(pack)

    def _declare(self, file: _File, path: str) -> None:
        file.sent = path
        name, size = os.path.basename(file.path.rstrip("/")), os.path.getsize(path)
        line = {"is": "file", "time": self._run.clock(), "digest": file.digest}
        self._setup.note({**line, "name": name, "bytes": size, "context": file.context})
        self._calls.link.send(DeclareFile(file.key, path))

    def serve(self) -> None:
        """Continue with the archives that are ready."""
        while self._packed:
            file, problem = self._packed.pop(0)
            waiting, file.waiting = file.waiting, []
            if problem is None:
                self._declare(file, self._archive(file))
            else:
                del self._files[file.digest]
            for worker, name in waiting:
                if worker.name not in self._workers:
                    continue
                if problem is None:
                    self._want(worker, file, name)
                else:
                    failure = ev.Failure("exception", "OSError", problem, worker=worker.name)
                    self._settle(worker.name, name, failure)

    def _order(self, orders: Iterable[Order]) -> None:
        for order in orders:
            worker, file = self._workers.get(order.worker), self._files[order.digest]
            if worker is None:
                continue
            if isinstance(order, Seed):
                self._seed(worker, file, order.generation)
            elif isinstance(order, Fetch):
                self._fetch(worker, file, order.generation)
            elif isinstance(order, Link):
                self._link(worker, file, order.path)
            elif isinstance(order, Cancel):
                number = self._fetching.pop((worker.name, file.digest), None)
                if number is not None:
                    self._calls.cancel(number)

    def _seed(self, worker: VineWorker, file: _File, generation: int) -> None:
        group = self._group(worker)
        temp = file.temp(group, generation)
        self._calls.link.send(Undeclare(file.temp(group, generation - 1)))
        self._calls.link.send(DeclareTemp(temp))

        def answered(worker: VineWorker, reports: Reports) -> None:
            failure = _failure(worker, reports)
            if failure is None:
                self._order(self._tree(worker).seeded(worker.name, file.digest, generation))
            else:
                self._failed(worker, file, "seed", generation, failure)

        inputs, outputs = {file.input: file.key}, {file.output: temp}
        self._calls.make(worker, [SeedFile(file.input, file.output)], answered, inputs, outputs)

    def _fetch(self, worker: VineWorker, file: _File, generation: int) -> None:
        begun = self._run.clock()

        def answered(worker: VineWorker, reports: Reports) -> None:
            self._fetching.pop((worker.name, file.digest), None)
            failure = _failure(worker, reports)
            if failure is not None:
                self._failed(worker, file, "fetch", generation, failure)
                return
            seconds = self._run.clock() - begun
            self._note("fetched", worker, file, seconds=seconds)
            self._arrived(worker, file, reports, generation)

        inputs = {file.input: file.temp(self._group(worker), generation)}
        self._fetching[worker.name, file.digest] = self._calls.make(worker, [file.fetch(file.digest)], answered, inputs)

    def _deliver(self, worker: VineWorker, file: _File, name: str) -> None:
        """Have the manager send a file to a worker alone."""

        def answered(worker: VineWorker, reports: Reports) -> None:
            self._settle(worker.name, name, _failure(worker, reports))

        inputs = {file.input: file.key}
        self._calls.make(worker, [file.fetch(name)], answered, inputs)

    def _link(self, worker: VineWorker, file: _File, path: str) -> None:
        def answered(worker: VineWorker, reports: Reports) -> None:
            if _failure(worker, reports) is not None:
                self._order(self._tree(worker).failed(worker.name, file.digest, "link"))
                return
            self._note("linked", worker, file, **{"from": self._holders.get(path, "")})
            self._arrived(worker, file, reports)

        self._calls.make(worker, [LinkFile(file.digest, file.path, path)], answered)

    def _arrived(self, worker: VineWorker, file: _File, reports: Reports, generation: int | None = None) -> None:
        cached = next(report for report in reports if isinstance(report, FileCached))
        path = cached.path
        if cached.unkept is not None:
            self._tell_of_cache(worker, cached.unkept)
        self._holders[path] = worker.name
        self._order(self._tree(worker).arrived(worker.name, file.digest, path, generation))
        self._settle(worker.name, file.digest, None)

    def _failed(self, worker: VineWorker, file: _File, how: How, generation: int, failure: ev.Failure) -> None:
        self._order(self._tree(worker).failed(worker.name, file.digest, how, generation))
        self._settle(worker.name, file.digest, failure)

    def _settle(self, worker: str, digest: str, failure: ev.Failure | None) -> None:
        """Note that a file is there, or will not be; continue what waited for nothing else."""
        for want in list(self._wants.get(worker, [])):
            want.missing.discard(digest)
            if failure is not None or not want.missing:
                self._wants[worker].remove(want)
                want.done(failure)

    def joined(self, worker: VineWorker) -> None:
        """Note that a worker may get files."""
        self._enter(worker, lambda: None)
        listens = f"{worker.ip}:{worker.transfer_port}" if worker.transfer_port else ""
        line = {"is": "worker", "time": self._run.clock(), "worker": worker.name, "host": worker.host}
        self._setup.note({**line, "address": worker.address, "listens": listens})

    def lost(self, worker: VineWorker) -> None:
        """Forget a worker that is gone."""
        if self._workers.pop(worker.name, None) is None:
            return
        self._setup.note({"is": "lost", "time": self._run.clock(), "worker": worker.name})
        self._wants.pop(worker.name, None)
        for key in [key for key in self._fetching if key[0] == worker.name]:
            del self._fetching[key]
        for path in [path for path, holder in self._holders.items() if holder == worker.name]:
            del self._holders[path]
        if (group := self._groups.of(worker.host)) is not None:
            self._order(self._trees[group].lost(worker.name))
        self._leave(worker)

    # --- who reaches whom

    def proven(self) -> bool:
        """Return whether all workers reach one another, as far as they were tried, and there are several hosts."""
        return self._groups.proven and not self._trials

    def reach(self, one: VineWorker, other: VineWorker) -> bool:
        """Return whether two workers are known to reach each other."""
        return self._groups.of(one.host) == self._groups.of(other.host) is not None

    def _group(self, worker: VineWorker) -> int:
        group = self._groups.of(worker.host)
        assert group is not None, "its host was tried before"
        return group

    def _tree(self, worker: VineWorker) -> Tree:
        return self._trees[self._group(worker)]

    def _enter(self, worker: VineWorker, then: Callable[[], None]) -> None:
        """Do something once the group of a worker's host is known."""
        host = worker.host
        self._workers[worker.name] = self._on.setdefault(host, {})[worker.name] = worker
        if self._groups.of(host) is not None:
            then()
            return
        trial = self._trials.get(host)
        if trial is not None:
            trial.waiting.append((worker, then))
            return
        self._trials[host] = _Trial(worker, waiting=[(worker, then)])
        self._try(host)

    def _try(self, host: str) -> None:
        """Have a worker of a host, and one of the next group, connect to each other; else the host is alone."""
        trial = self._trials[host]
        worker = trial.worker
        peer = trial.peer = self._peer_for(worker)
        if peer is None:
            self._settle_host(host, self._groups.found(host))
            return
        answers: list[str] = []  # What went wrong, "" for nothing.

        def answered(one: VineWorker, reports: Reports) -> None:
            if self._trials.get(host) is not trial or trial.worker is not worker or trial.peer is not peer:
                return  # One of them was lost meanwhile.
            failure = _failure(one, reports)
            done = any(isinstance(report, FileDone) for report in reports)
            answers.append(failure.message if failure is not None else "" if done else f"{one.host} did not try")
            if len(answers) < 2:
                return
            if any(answers):
                self._groups.apart(host, peer.host)
                text = "workers on %s and %s cannot send each other files, and get them from this machine: %s"
                logger.warning(text, host, peer.host, "; ".join(filter(None, answers)))
                self._try(host)
            else:
                self._settle_host(host, self._groups.join(host, peer.host))

        for one, other in ((worker, peer), (peer, worker)):
            port = other.transfer_port or 0
            self._calls.make(one, [ReachPeer(f"{other.host}:{port}", other.ip, port)], answered)

    def _peer_for(self, worker: VineWorker) -> VineWorker | None:
        """Return a worker of the next host that one's host is to be tried with, None if there is none."""
        for host in self._groups.candidates(worker.host) if worker.listens else ():
            for peer in self._on[host].values():
                if peer.listens:
                    return peer
        return None

    def _settle_host(self, host: str, group: int) -> None:
        self._trees.setdefault(group, Tree())
        for _, then in self._trials.pop(host).waiting:
            then()

    def _leave(self, worker: VineWorker) -> None:
        """Forget a worker that is gone, and its host with the last; go on with the trials in which it had part."""
        host = worker.host
        del self._on[host][worker.name]
        if not self._on[host]:
            del self._on[host]
            if (group := self._groups.leave(host)) is not None:
                for digest, generation in self._trees.pop(group).generations():
                    self._calls.link.send(Undeclare(self._files[digest].temp(group, generation)))
        for tried, trial in list(self._trials.items()):
            trial.waiting = [(each, then) for each, then in trial.waiting if each is not worker]
            if not trial.waiting:
                del self._trials[tried]
            elif worker is trial.worker or worker is trial.peer:
                trial.worker = trial.waiting[0][0]
                self._try(tried)

    def _note(self, kind: str, worker: VineWorker, file: _File, **more: object) -> None:
        line = {"is": kind, "time": self._run.clock(), "worker": worker.name, "digest": file.digest}
        self._setup.note({**line, **more})

    def close(self) -> None:
        """Cancel the packing of archives, and remove those that were made."""
        self._packing.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            if file.kind == "tar":
                with contextlib.suppress(OSError):
                    os.unlink(self._archive(file))

    def _archive(self, file: _File) -> str:
        return self._setup.path(f"{file.digest}.tar")


def _failure(worker: VineWorker, reports: Reports) -> ev.Failure | None:
    """Return what went wrong in a worker, if it did."""
    for report in reports:
        if isinstance(report, FileFailed):
            return failure_of(report.trouble, worker.name, worker.host)
    return None
