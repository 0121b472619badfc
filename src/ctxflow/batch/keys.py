"""Rows known by 64-bit keys: sets of millions of them in 8 bytes each, looked up a chunk at a time.

A row's key is its number, or the hash of its id. Among 10 million ids two share a hash with a probability of
3 in a million; the second would be taken for a repetition of the first. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
_IDS = 1 << 63


def id_key(identifier: str) -> int:
    """The key of a row with an id: its highest bit is set, which tells it from a row's number.

    >>> id_key("request-1") >> 63
    1
    """
    hashed = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") | _IDS


def row_digest(item: tuple[Any, ...], kept: Mapping[str, Any]) -> bytes:
    """8 bytes by which to tell whether a row is what it was: of what was asked of it, and of the columns kept.

    >>> row_digest(("a",), {}) == row_digest(("a",), {}), row_digest(("a",), {}) == row_digest(("a",), {"id": 1})
    (True, False)
    """
    if len(item) == 1 and type(item[0]) is str and not kept:  # By far the most frequent, and twice as fast.
        text = item[0].encode("utf-8", "surrogatepass")
    else:
        text = repr((item, kept) if kept else item).encode()
    return hashlib.blake2b(text, digest_size=8).digest()


def as_keys(numbers: Iterable[int]) -> Keys:
    """Numbers as an array of keys."""
    return np.array(list(numbers), dtype=np.uint64)


def contained(keys: Keys, among: Keys) -> NDArray[np.bool_]:
    """For each key whether it is in a sorted array.

    >>> contained(as_keys([1, 2, 3]), as_keys([2, 9])).tolist()
    [False, True, False]
    """
    if not among.size:
        return np.zeros(keys.size, dtype=bool)
    places = np.minimum(np.searchsorted(among, keys), among.size - 1)
    found: NDArray[np.bool_] = among[places] == keys
    return found


class SeenKeys:
    """The keys seen so far, as a few sorted runs of falling sizes.

    >>> seen = SeenKeys()
    >>> seen.add(as_keys([5, 7, 5])).tolist(), seen.add(as_keys([7, 8])).tolist()
    ([False, False, True], [True, False])
    """

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def take(self, keys: Keys) -> None:
        """Take over keys that are sorted, without a copy of them."""
        if keys.size:
            self._runs.insert(0, keys)

    def add(self, keys: Keys) -> NDArray[np.bool_]:
        """Add keys; tells for each whether it was seen before, in an earlier chunk or earlier in this one."""
        unique, firsts = np.unique(keys, return_index=True)
        repeated = np.ones(keys.size, dtype=bool)
        repeated[firsts] = False
        for run in self._runs:
            repeated |= contained(keys, run)
        self._runs.append(unique)
        while len(self._runs) > 1 and 2 * self._runs[-1].size >= self._runs[-2].size:
            last = self._runs.pop()
            merged = np.concatenate([self._runs.pop(), last])
            merged.sort(kind="stable")
            self._runs.append(merged)
        return repeated
