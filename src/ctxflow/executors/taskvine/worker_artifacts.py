"""What builds made, from the workers that built to those that will: by way of the driver, and then as files go.

A worker says under which key it keeps what building a context made (host/artifacts.py). The first to say so is asked
for it as one file, whose digest is in its sealed answer; workers on machines that are alike get that file along the
tree of hosts before they build. Whether it fits is decided there, by the same key. Later runs find it in the user's own
cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ctxflow.executors.contract import ContextPayload, RunServices
from ctxflow.executors.taskvine.manager_messages import DeclareFile, Undeclare
from ctxflow.executors.taskvine.manager_process import Setup
from ctxflow.executors.taskvine.stagings import Stagings
from ctxflow.executors.taskvine.vine_workers import Reports, VineCalls, VineWorker
from ctxflow.files import digest_now
from ctxflow.host.artifacts import USER_BYTES, user_folder
from ctxflow.host.host_cache import HostCache
from ctxflow.host.local_files import link_or_copy
from ctxflow.host.messages import ArtifactsFailed, ArtifactsMade, FileSent, SendArtifacts
from ctxflow.scheduler import events as ev

logger = logging.getLogger("ctxflow")
_MOST_BYTES = 500 * 10**6  # TaskVine's manager does nothing else while a worker sends it a file.
_GROWN = 1.1  # What is larger by this takes the place of what was there before: a first call has compiled, perhaps.
_MOST_TRIES = 3
_T = TypeVar("_T")
_ENTRY = re.compile(r"packed-([0-9a-f]{16})-([0-9a-f]{16})-(artifacts-[0-9a-f]{32})-([0-9a-f]+)-(\d+)")


@dataclasses.dataclass
class _Artifacts:
    """Those of one context for machines that are alike.

    :ivar key: under which workers look for them. :ivar digest, size: of the file.
    :ivar path: of the file in the run's directory; "" while it is in the user's cache alone.
    """

    key: str
    digest: str
    size: int
    path: str = ""


@dataclasses.dataclass(eq=False)
class _Kind:
    """What is known of one context on machines that are alike.

    :ivar marks: digests of the context's id and of what the machines are. :ivar name: of the context's function.
    :ivar there: by key.
    :ivar made: what each worker says that it keeps. :ivar taking: the worker that is sending.
    :ivar opening: whether files are being opened; `waiting`: what is called after that.
    """

    marks: tuple[str, str]
    name: str = ""
    there: dict[str, _Artifacts] = dataclasses.field(default_factory=dict)
    made: dict[str, tuple[VineWorker, ArtifactsMade]] = dataclasses.field(default_factory=dict)
    taking: str = ""
    tries: int = 0
    opening: bool = False
    waiting: list[Callable[[], object]] = dataclasses.field(default_factory=list)

    def entry(self, artifacts: _Artifacts) -> str:
        """Return by what the user's cache knows some of them."""
        return "-".join(("packed", *self.marks, artifacts.key, artifacts.digest, str(artifacts.size)))


class ArtifactTransfers:
    """Brings what builds made to other workers. Its owner locks, and calls `serve` when it was woken.

    :param wake: makes the owner call `serve` soon, from any thread.
    """

    def __init__(
        self, run: RunServices, calls: VineCalls, setup: Setup, stagings: Stagings, wake: Callable[[], None]
    ) -> None:
        self._run, self._calls, self._setup, self._stagings, self._wake = run, calls, setup, stagings, wake
        self._kinds: dict[tuple[str, str], _Kind] = {}  # By their marks.
        self._brought: set[tuple[str, str]] = set()  # Worker and digest.
        self._coming: dict[tuple[str, str], list[Callable[[], None]]] = {}  # What follows when it has come, or not.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ctxflow-artifacts")
        self._done: list[Callable[[], None]] = []
        self._told: set[str] = set()
        self._folder = user_folder()
        self._cache: HostCache | None = None
        self._behind(self._open, self._opened)

    # --- to workers

    def bring(self, worker: VineWorker, context: ContextPayload, then: Callable[[], None] | None = None) -> bool:
        """Bring a worker what builds of a context made on machines like its own; return whether that takes time.

        :param then: called then when all of it is there, or cannot be had.
        """
        if context.artifacts is None or not worker.alike:
            return False
        kind = self._kind(context.id, worker)
        kind.name = context.name
        if self._unopened(kind):
            self._open_files(kind, lambda: self._send(kind, worker, then) or (then or _nothing)())
            return True
        return self._send(kind, worker, then)

    def sent(self, worker: VineWorker, context: ContextPayload) -> Mapping[str, tuple[str, str]]:
        """Return what a worker has of it, as `BuildContext.sent` says it."""
        if context.artifacts is None or not worker.alike:
            return {}
        there = self._kind(context.id, worker).there.values()
        return {each.key: (each.digest, each.path) for each in there if (worker.name, each.digest) in self._brought}

    def _send(self, kind: _Kind, worker: VineWorker, then: Callable[[], None] | None) -> bool:
        """Send a worker the files that it lacks; return whether that takes time: then `then` is called after it."""
        lacking = [each for each in kind.there.values() if (worker.name, each.digest) not in self._brought]
        rest, takes_time = {each.digest for each in lacking}, False

        def follow(digest: str) -> None:
            rest.discard(digest)
            if not rest and takes_time and then is not None:
                then()

        for each in lacking:
            waiting = self._coming.get((worker.name, each.digest))
            follows = functools.partial(follow, each.digest)
            if waiting is not None:
                waiting.append(follows)
            else:
                self._coming[worker.name, each.digest] = [follows]
                done = functools.partial(self._came, kind, worker, each)
                self._stagings.bring(worker, each.path, each.digest, kind.name, done)
        takes_time = bool(rest)
        return takes_time

    def _came(self, kind: _Kind, worker: VineWorker, artifacts: _Artifacts, failure: ev.Failure | None) -> None:
        if failure is None:
            self._brought.add((worker.name, artifacts.digest))
        else:
            self._tell(f"what building {kind.name} made elsewhere cannot be sent: {failure.message}")
        for follows in self._coming.pop((worker.name, artifacts.digest), ()):
            follows()

    # --- from workers

    def heard(self, worker: VineWorker, report: ArtifactsMade | ArtifactsFailed) -> None:
        """Take what a worker keeps, if that is news; send nobody any more what did harm on one."""
        kind = self._kind(report.context, worker)
        if isinstance(report, ArtifactsMade):
            kind.made[worker.name] = worker, report
        elif (there := kind.there.get(report.key)) is not None and there.digest == report.digest:
            del kind.there[report.key]
            self._forget(kind.entry(there))
        self._take(kind)

    def _take(self, kind: _Kind) -> None:
        """Have a worker send what it keeps, if one has something better than there is."""
        if kind.taking or kind.tries >= _MOST_TRIES:
            return
        for worker, report in list(kind.made.values()):
            there = kind.there.get(report.key)
            if there is not None and report.size <= _GROWN * there.size:
                del kind.made[worker.name]
            elif report.size > _MOST_BYTES:
                del kind.made[worker.name]
                what = f"what building {kind.name} made, {report.size / 1e9:.1f} GB"
                self._tell(f"{what}, is too large to be sent to other hosts")
            else:
                self._ask(kind, worker, report)
                return

    def _ask(self, kind: _Kind, worker: VineWorker, report: ArtifactsMade) -> None:
        """Have a worker send what it keeps."""
        kind.taking = worker.name
        number = self._calls.number()
        key, path = f"artifacts {number}", self._setup.path(f"artifacts-{number}.tar")
        self._calls.link.send(DeclareFile(key, path))

        def answered(worker: VineWorker, reports: Reports) -> None:
            self._calls.link.send(Undeclare(key))
            sent = next((each for each in reports if isinstance(each, FileSent)), None)
            if sent is None:
                self._taken(kind, report, worker, None)
                return
            artifacts = _Artifacts(report.key, sent.digest, sent.size, path)
            self._behind(
                functools.partial(self._verified, artifacts, kind), functools.partial(self._taken, kind, report, worker)
            )

        self._calls.make(worker, [SendArtifacts(report.key, "artifacts")], answered, outputs={"artifacts": key})

    def _verified(self, artifacts: _Artifacts, kind: _Kind) -> _Artifacts | None:
        """Return a file that has come, if it is what was sent; keep it for later runs."""
        path = artifacts.path
        try:
            if os.path.getsize(path) != artifacts.size or digest_now(path) != artifacts.digest:
                raise ValueError("what came is not what was sent")
            artifacts.path = self._path(kind, artifacts)
            os.replace(path, artifacts.path)
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        with contextlib.suppress(OSError):  # Else this run alone has it.
            if self._cache is None and self._folder is not None:
                self._cache = HostCache(self._folder, USER_BYTES)
            if self._cache is not None:
                made = artifacts.path
                name = f"artifacts of {kind.name}"
                self._cache.put(kind.entry(artifacts), lambda copy: link_or_copy(made, copy), name, artifacts.size)
        return artifacts

    def _taken(self, kind: _Kind, report: ArtifactsMade, worker: VineWorker, artifacts: _Artifacts | None) -> None:
        if kind.taking == worker.name:
            kind.taking = ""
        if artifacts is not None:
            old = kind.there.get(artifacts.key)
            if old is not None and old.digest != artifacts.digest:
                self._forget(kind.entry(old))
            kind.tries, kind.there[artifacts.key] = 0, artifacts
            note = {"is": "artifacts", "time": self._run.clock(), "worker": worker.name, "context": kind.name}
            self._setup.note({**note, "digest": artifacts.digest, "bytes": artifacts.size})
        else:
            kind.tries += 1
            if kind.made.get(worker.name) == (worker, report):
                del kind.made[worker.name]
        self._take(kind)  # There may be more meanwhile.

    # --- what an earlier run has left

    def _open(self) -> list[tuple[str | Any, ...]]:
        """Open the user's cache, if there is one, and return what it has."""
        if self._folder is None or not os.path.isdir(self._folder):
            return []
        try:
            self._cache = HostCache(self._folder, USER_BYTES, make=False)
            entries = self._cache.entries()
        except OSError:  # There is none for this user, or it cannot be used: nothing needs it.
            return []
        return [match.groups() for entry in entries if (match := _ENTRY.fullmatch(entry.key))]

    def _opened(self, found: list[tuple[str | Any, ...]]) -> None:
        for context, machine, key, digest, size in found:  # The last used first.
            kind = self._kinds.setdefault((context, machine), _Kind((context, machine)))
            kind.there.setdefault(key, _Artifacts(key, digest, int(size)))

    @staticmethod
    def _unopened(kind: _Kind) -> list[_Artifacts]:
        return [each for each in kind.there.values() if not each.path]

    def _open_files(self, kind: _Kind, then: Callable[[], object]) -> None:
        """Have the files that are in the user's cache alone also be the run's; `then` is called after that."""
        kind.waiting.append(then)
        if kind.opening:
            return
        kind.opening = True

        def work() -> list[tuple[_Artifacts, str]]:
            found: list[tuple[_Artifacts, str]] = []
            for each in self._unopened(kind):
                try:
                    path = self._path(kind, each)
                    kept = None if self._cache is None else self._cache.get(kind.entry(each), each.digest)
                    if kept is not None:
                        link_or_copy(kept, path)
                        found.append((each, path))
                except (OSError, ValueError):  # It is gone, or spoiled, or there is no room: it is built again.
                    continue
            return found

        def opened(found: list[tuple[_Artifacts, str]]) -> None:
            kind.opening = False
            for each, path in found:
                each.path = path
            kind.there = {key: each for key, each in kind.there.items() if each.path}
            waiting, kind.waiting = kind.waiting, []
            for call in waiting:
                call()

        self._behind(work, opened)

    # --- the rest

    def _kind(self, context: str, worker: VineWorker) -> _Kind:
        marks = _mark(context), _mark(worker.alike)
        return self._kinds.setdefault(marks, _Kind(marks))

    def _path(self, kind: _Kind, artifacts: _Artifacts) -> str:
        place = self._setup.path(f"made-{artifacts.digest[:12]}")
        os.makedirs(place, 0o700, exist_ok=True)
        return os.path.join(place, f"artifacts-of-{kind.name or 'a-context'}.tar")

    def _forget(self, entry: str) -> None:
        def work() -> None:
            if self._cache is not None:
                with contextlib.suppress(OSError):
                    self._cache.drop(entry)

        self._behind(work, _nothing)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)

    def _behind(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Do something that reads or writes files, and have `serve` pass its result on."""

        def run() -> None:
            result = work()
            self._done.append(lambda: then(result))
            self._wake()

        with contextlib.suppress(RuntimeError):  # It is closed.
            self._thread.submit(run)

    def serve(self) -> None:
        """Go on with what is ready."""
        while self._done:
            self._done.pop(0)()

    def lost(self, worker: VineWorker) -> None:
        """Forget a worker that is gone."""
        self._brought = {pair for pair in self._brought if pair[0] != worker.name}
        self._coming = {pair: follow for pair, follow in self._coming.items() if pair[0] != worker.name}
        for kind in self._kinds.values():
            kind.made.pop(worker.name, None)
            if kind.taking == worker.name:
                kind.taking = ""
                self._take(kind)

    def close(self) -> None:
        """Keep what has come for later runs."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()


def _nothing(*_: object) -> None:
    pass


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
