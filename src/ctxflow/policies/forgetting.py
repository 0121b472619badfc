"""What policies have noted of apps, contexts and workers that a run has forgotten.

What does not live here: when a run forgets something (scheduler/retiring.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

Key = TypeVar("Key")


def _itself(key: Any) -> Any:
    return key


def forget(table: dict[Key, Any], known: Collection[Any], of: Callable[[Key], Any] = _itself) -> None:
    """Take out of a policy's own table what the run does not know any more, once that is most of it.

    :param of: what an entry's key is about.

    >>> table = dict.fromkeys(range(100), "noted")
    >>> forget(table, {1, 2})
    >>> table
    {1: 'noted', 2: 'noted'}
    """
    if len(table) > 2 * len(known) + 64:
        for key in [key for key in table if of(key) not in known]:
            del table[key]
