"""What happened in a conversation of the example: who said what, when and where it was made."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict


@dataclasses.dataclass(frozen=True)
class Speech:
    """A chunk: six words, when they came, and the worker that carried the session then."""

    user: str
    text: str
    at: float
    worker: str | None


class Happenings:
    """All of it, in order; from any thread.

    :param began: of the clock that all times are of.
    :ivar speeches: by user. :ivar turns: by user: (time, question). :ivar notes: (time, user or "", what).
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.speeches: dict[str, list[Speech]] = defaultdict(list)
        self.turns: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self.notes: list[tuple[float, str, str]] = []
        self._lock = threading.Lock()

    def asked(self, user: str, question: str) -> None:
        """A user asked something."""
        with self._lock:
            self.turns[user].append((time.monotonic(), question))

    def heard(self, speech: Speech) -> None:
        """A user got words."""
        with self._lock:
            before = self.speeches[user][-1] if self.speeches[user := speech.user] else None
            self.speeches[user].append(speech)
            if before is not None and before.worker and speech.worker and before.worker != speech.worker:
                self.notes.append((speech.at, user, f"{before.worker} -> {speech.worker}"))

    def note(self, user: str, what: str) -> None:
        """Something else happened to a user's session."""
        with self._lock:
            self.notes.append((time.monotonic(), user, what))

    def evicted(self, worker: str | None) -> None:
        """A worker was taken away."""
        if worker is not None:
            self.note("", f"{worker} was taken away")

    @property
    def users(self) -> list[str]:
        """Who asked anything."""
        return list(self.turns)

    @property
    def first(self) -> float:
        """When the first words came; models are built before."""
        return min((speech.at for each in self.speeches.values() for speech in each[:1]), default=self.began)

    @property
    def chunks(self) -> int:
        """How many there were."""
        return sum(map(len, self.speeches.values()))

    def count(self, word: str) -> int:
        """How many notes say something."""
        return sum(word in what for _, _, what in self.notes)
