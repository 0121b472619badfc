"""A host's part in artifacts (artifacts.py): when a library process gets what was kept, and when what it made is."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ctxflow.host.artifacts import ArtifactStore, LibraryArtifacts, NotKept, folders_of, key_of, stamps
from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_process import LibraryProcess, now

_LOOK_AGAIN_SECONDS = (5.0, 60.0)  # After a first call: later ones, of other sizes, may compile too.
_FINISH_SECONDS = 1.5


class InBackground(Protocol):
    """Does something in a thread, and passes its result on in the thread of the selector."""

    def __call__(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Begin."""


class KeptArtifacts:
    """Those of one host's library processes.

    :param store: where they are kept; None where none are.
    :ivar note: what did not go well, for the next report of a context that is built.
    """

    def __init__(self, store: ArtifactStore | None, in_background: InBackground) -> None:
        self.store, self.note = store, ""
        self._in_background = in_background
        self._running: set[threading.Event] = set()
        self._large: set[str] = set()  # Keys of which nothing is kept any more.

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
        offered = not load.fresh and self.store.has(key)
        return (
            dataclasses.replace(load, kept=(self.store.folder, key, new) if offered else None),
            variables,
            LibraryArtifacts(load, key, places, outside, offered),
        )

    def built(self, library: LibraryProcess, said: str) -> str:
        """Keep what a build made; return what to report of artifacts.

        :param said: what the library process says came of taking some.
        """
        its = library.artifacts
        if its is not None:
            its.offered = said == "used"
            its.look_at = now()
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
            its.look_at = now()
            self._look(its)
            self._again(its, _LOOK_AGAIN_SECONDS)

    def _again(self, its: LibraryArtifacts, seconds: Collection[float]) -> None:
        its.later = [now() + each for each in seconds]
        its.look_at = its.later.pop(0)

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
        self.note = f"failed: what an earlier build made is not used any more, for a build with it failed ({why})"
        return dataclasses.replace(its.load, fresh=True, began=None, waited=0.0)

    def _forget(self, its: LibraryArtifacts) -> None:
        if its.offered and self.store is not None:
            its.offered = False
            self._do(functools.partial(self.store.forget, its.key), lambda done: None)

    def due(self, libraries: Collection[LibraryProcess]) -> float:
        """Return when to call `check`, by the host's clock."""
        found = (each.artifacts for each in libraries)
        return min((its.look_at for its in found if its is not None and not its.busy), default=float("inf"))

    def check(self, libraries: Collection[LibraryProcess], time: float) -> None:
        """Look for what is to be kept."""
        for library in libraries:
            its = library.artifacts
            if its is not None and not its.busy and its.look_at <= time:
                self._look(its)

    def _look(self, its: LibraryArtifacts) -> None:
        its.look_at = its.later.pop(0) if its.later else float("inf")
        store = self.store
        if store is None or its.key in self._large:
            return
        if its.busy:  # What it has changed since is seen after that.
            its.look_at = min(its.look_at, now())
            return
        its.busy = True

        def work() -> tuple[dict[str, Any], str]:
            seen = stamps(its.places)
            if seen == its.seen:
                return seen, ""
            try:
                store.keep(its.key, its.places, f"artifacts of {its.load.name}")
            except NotKept as error:
                return seen, str(error)
            return seen, ""

        def then(done: tuple[dict[str, Any], str]) -> None:
            its.busy = False
            its.seen, why = done
            if why:
                self._large.add(its.key)
                self.note = f"not kept: what building {its.load.name} made is not kept for the next build: {why}"

        self._do(work, then)

    def _do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        done = threading.Event()
        self._running.add(done)

        def run() -> Any:
            try:
                return work()
            finally:
                done.set()

        def after(result: Any) -> None:
            self._running.discard(done)
            then(result)

        self._in_background(run, after)

    def wait(self, until: float) -> None:
        """Wait for what is being kept, by the host's clock."""
        for done in list(self._running):
            done.wait(max(0.0, until - now()))

    def finish(self) -> None:
        """Have what is being kept reach the disk, or give it up."""
        self.wait(now() + _FINISH_SECONDS)
        if self.store is not None:
            self.store.close()
