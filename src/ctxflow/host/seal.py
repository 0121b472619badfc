"""Seals on what passes between the driver and a worker: a keyed digest, so that each knows it is the other's.

TaskVine's password keeps out who does not know it, but whoever reaches a worker's transfer port can have that answer
challenges (docs/security.md). So a worker's answers are looked at, and calls are carried out, only with a seal by a
key that is made of the password and never leaves the memory of the processes. What does not live here: what is said.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

SIZE = 16
_NUMBER = 8
_CALL, _ANSWER = b"ctxflow call", b"ctxflow answer"  # What goes one way is never good for the other.


def key_of(password: bytes) -> bytes:
    """Return the key that a run's password stands for."""
    return blake2b(password, digest_size=32, person=b"ctxflow seal").digest()


class Once:
    """Which calls a worker has had: none counts twice, in whatever order they come.

    Their numbers are a worker's own, 1 and up, so that few are ever missing.

    >>> once = Once()
    >>> [once.take(number) for number in (1, 3, 2, 3, 2, 4)]
    [True, True, True, False, False, True]
    """

    def __init__(self) -> None:
        self._highest = 0
        self._missing: set[int] = set()

    def take(self, number: int) -> bool:
        """Return whether a call is new."""
        if number > self._highest:
            self._missing.update(range(self._highest + 1, number))
            self._highest = number
            return True
        if number in self._missing:
            self._missing.remove(number)
            return True
        return False


def seal_call(key: bytes, worker: str, number: int, frames: bytes) -> bytes:
    """Return a call as it travels: good for this worker alone, and once, by its number.

    >>> key = key_of(b"secret")
    >>> open_call(key, "w1", seal_call(key, "w1", 7, b"frames"))
    (7, b'frames')
    """
    rest = number.to_bytes(_NUMBER, "big") + frames
    return _tag(key, _CALL, worker.encode(), rest) + rest


def open_call(key: bytes, worker: str, call: bytes) -> tuple[int, bytes]:
    """Return the number of a call, and its frames.

    :raises ValueError: if it is not the driver's, or not for this worker.
    """
    tag, rest = call[:SIZE], call[SIZE:]
    if not hmac.compare_digest(tag, _tag(key, _CALL, worker.encode(), rest)):
        raise ValueError("it has not the seal of this worker's run")
    return int.from_bytes(rest[:_NUMBER], "big"), rest[_NUMBER:]


def seal_answer(key: bytes, call: bytes, reports: bytes) -> bytes:
    """Return an answer as it travels: good for this call alone.

    :param call: as it travelled, or at least its first `SIZE` bytes.
    """
    return _tag(key, _ANSWER, call[:SIZE], reports) + reports


def open_answer(key: bytes, call: bytes, answer: bytes) -> bytes | None:
    """Return the reports of an answer, None if it is not this call's, from a worker that has the key.

    >>> key, call = key_of(b"secret"), b"0123456789abcdef"
    >>> open_answer(key, call, seal_answer(key, call, b"reports")), open_answer(key, call, b"forged")
    (b'reports', None)
    """
    tag, reports = answer[:SIZE], answer[SIZE:]
    return reports if hmac.compare_digest(tag, _tag(key, _ANSWER, call[:SIZE], reports)) else None


def _tag(key: bytes, direction: bytes, about: bytes, data: bytes) -> bytes:
    prefix = len(about).to_bytes(_NUMBER, "big") + about
    digest = blake2b(prefix, digest_size=SIZE, key=key, person=direction)
    digest.update(data)
    return digest.digest()
