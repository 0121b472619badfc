"""A host's part in artifacts (artifacts.py): when a library process gets what was kept, and when what it made is."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ctxflow.host.artifact_keys import folders_of, key_of
from ctxflow.host.artifacts import ArtifactStore, LibraryArtifacts, NotKept, StillChanging, stamps
from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_process import LibraryProcess, now
from ctxflow.host.messages import ArtifactsFailed, ArtifactsMade

_LOOK_SECONDS = (0.0, 5.0, 60.0)  # After a first call: later ones, of other sizes, may compile too.
_BUSY_SECONDS = 0.1
_FINISH_SECONDS = 1.5


class InBackground(Protocol):
    """Does something in a thread, and passes its result on in the thread of the selector."""

    def __call__(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Begin."""


class KeptArtifacts:
    """Those of one host's library processes.

    :param store: where they are kept; None where none are.
    :ivar tell: takes what the driver is to know; None where they go to no other host.
    :ivar note: what did not go well, for the next report of a context that is built.
    """

    def __init__(self, store: ArtifactStore | None, in_background: InBackground) -> None:
        self.store, self.note = store, ""
        self.tell: Callable[[ArtifactsMade | ArtifactsFailed], None] | None = None
        self._in_background = in_background
        self._running: dict[str, threading.Event] = {}  # What is done last about a key.
        self._going: set[str] = set()  # Keys that are being forgotten.
        self._large: set[str] = set()  # Keys of which nothing is kept any more.
        self._bad: set[str] = set()  # Digests of what came from another host, and did harm.

    def begin(self, load: BuildContext, scratch: str) -> tuple[BuildContext, dict[str, str], LibraryArtifacts | None]:
        """Return what to tell a library process that is about to start, the variables it gets, and what to note of it.

        :param scratch: its directory.
        """
        if load.artifacts is None or self.store is None:
            return load, {}, None
        places, variables = folders_of(load, scratch)
        own = [place for name, place in places.items() if name in load.artifacts and place in variables.values()]
        new = {name: place for name, place in places.items() if not os.path.lexists(place)}
        outside = [place for place in new.values() if not place.startswith(scratch + os.sep)]
        for place in own:
            os.makedirs(place, 0o700, exist_ok=True)
        key = key_of(load)
        took, sent = None, ""
        if not load.fresh and key not in self._going:
            digest, archive = load.sent.get(key, ("", ""))
            if self.store.has(key):
                took = self.store.folder, key, new
            elif digest and digest not in self._bad:
                took, sent = (archive, digest, new), digest
        its = LibraryArtifacts(load, key, places, outside, took is not None, sent)
        return dataclasses.replace(load, kept=took, packed=bool(sent)), variables, its

    def built(self, library: LibraryProcess, said: str) -> str:
        """Keep what a build made; return what to report of artifacts.

        :param said: what the library process says came of taking some.
        """
        its = library.artifacts
        if its is not None:
            its.offered = said == "used"
            if said.startswith("spoiled") and its.sent:
                self._bad.add(its.sent)
            its.looks = [now()]
        note, self.note = self.note, ""
        return said if said.startswith("spoiled") else note or said

    def called(self, library: LibraryProcess, failed: bool) -> None:
        """Keep what a first call made, and look again some time later; of one that failed forget what it began with."""
        its = library.artifacts
        if its is None:
            return
        if failed:
            self._forget(its)
        else:
            its.proven = True
            its.looks = [now() + each for each in _LOOK_SECONDS]
            self._look(its)

    def failed(self, library: LibraryProcess, why: str) -> BuildContext | None:
        """Forget what a library process began with that has failed; return the load to be tried once more, if it is.

        :param why: in a few words.
        """
        its = library.artifacts
        if its is None or not its.offered or its.proven:
            return None
        self._forget(its)
        for place in its.made:
            shutil.rmtree(place, ignore_errors=True)
        if library.ready:
            return None
        self.note = f"failed: what an earlier build made is not used any more, since a build with it failed ({why})"
        return dataclasses.replace(its.load, fresh=True, began=None, waited=0.0)

    def _forget(self, its: LibraryArtifacts) -> None:
        if its.offered and self.store is not None:
            store, its.offered, its.looks = self.store, False, []
            if its.sent:
                self._bad.add(its.sent)
                if self.tell is not None:
                    self.tell(ArtifactsFailed(its.load.context, its.key, its.sent))
            self._going.add(its.key)
            keeping = self._running.get(its.key)

            def work() -> None:
                if keeping is not None:  # Else it would be put there again.
                    keeping.wait()
                store.forget(its.key)

            self._do(its.key, work, lambda done: self._going.discard(its.key))

    def due(self, libraries: Collection[LibraryProcess]) -> float:
        """Return when to call `check`, by the host's clock."""
        found = (each.artifacts for each in libraries)
        return min((its.looks[0] for its in found if its is not None and its.looks), default=float("inf"))

    def check(self, libraries: Collection[LibraryProcess], time: float) -> None:
        """Look for what is to be kept."""
        for library in libraries:
            its = library.artifacts
            if its is not None and its.looks and its.looks[0] <= time:
                self._look(its)

    def _look(self, its: LibraryArtifacts) -> None:
        del its.looks[0]
        store = self.store
        if store is None or its.key in self._large:
            return
        if its.key in self._running:  # What it has changed since is seen after that.
            its.looks.insert(0, now() + _BUSY_SECONDS)
            return

        def work() -> NotKept | bool:
            if (seen := stamps(its.places)) == its.seen:
                return False
            try:
                store.keep(its.key, its.places, f"artifacts of {its.load.name}")
            except NotKept as error:
                return error
            its.seen = seen
            return True

        def then(found: NotKept | bool) -> None:
            """Take what there is now, whether that is new, or why it is not kept."""
            if isinstance(found, StillChanging):
                its.looks.insert(0, now() + _BUSY_SECONDS)
            elif isinstance(found, NotKept):
                self._large.add(its.key)
                self.note = f"not kept: what building {its.load.name} made is not kept for the next build ({found})"
            elif found and self.tell is not None:
                self.tell(ArtifactsMade(its.load.context, its.key, sum(size for size, *_ in its.seen.values())))

        self._do(its.key, work, then)

    def _do(self, key: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do something in the background, and note that it is being done."""
        self._running[key] = done = threading.Event()

        def run() -> Any:
            try:
                return work()
            finally:
                done.set()

        def after(result: Any) -> None:
            if self._running.get(key) is done:
                del self._running[key]
            then(result)

        self._in_background(run, after)

    def wait(self, until: float) -> None:
        """Wait for what is being kept, by the host's clock."""
        for done in list(self._running.values()):
            done.wait(max(0.0, until - now()))

    def finish(self, libraries: Collection[LibraryProcess]) -> None:
        """Have what is being kept, or is just to be, reach the disk, or give it up."""
        deadline = now() + _FINISH_SECONDS
        self.wait(deadline)
        self._running.clear()
        self.check(libraries, now() + 2 * _BUSY_SECONDS)
        self.wait(deadline)
        if self.store is not None:
            self.store.close()
