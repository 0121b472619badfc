"""The parts of a load's time in its library process: its start, imports, what the context's code names, and the rest.

At every moment the time goes to the part that was entered last and is still open, on whichever thread; to none of them,
to `build`. So parts exclude each other and add up, however they are nested.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap  # What `import` statements and `importlib.import_module` end in.
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

PROCESS, IMPORTS, BUILD = "process", "imports", "build"
_MOST_MARKS = 20_000  # Beyond them parts are not entered any more: code that names one in a loop.
_MOST_PARTS = 16  # The largest are told, the others are of the rest.

Mark: TypeAlias = tuple[float, int, str]
"""When a part was entered, its number, and its name; when it was left, the same number, and ""."""


def parts_of(marks: Iterable[Mark], began: float, ended: float) -> dict[str, float]:
    """Return the seconds of each part between two times, all together as long as these are apart.

    :param marks: in any order; those outside the two times count as at the nearer one.

    >>> parts_of([(1.0, 1, "weights"), (2.0, 2, "imports"), (4.5, 2, ""), (5.0, 1, "")], 0.0, 6.0)
    {'build': 2.0, 'weights': 1.5, 'imports': 2.5}
    """
    parts = {BUILD: 0.0}
    entered: dict[int, str] = {}
    last = began
    for at, number, name in (*sorted(marks, key=lambda mark: mark[0]), (ended, 0, "")):
        now = min(max(at, last), ended)
        part = next(reversed(entered.values()), BUILD)
        parts[part] = parts.get(part, 0.0) + now - last
        last = now
        if name:
            entered[number] = name
        else:
            entered.pop(number, None)
    return parts


class LoadParts:
    """Notes the parts of the load of this process, from `begin` to `end`; threads may enter and leave parts meanwhile.

    An import counts where its module is not there yet, and with all that it imports: nothing is done for these.

    :param began: when the host was asked for the process, by `time.monotonic`, which is the machine's; None for now.
    :param waited: seconds from then on in which a zygote imported for it.
    """

    def __init__(self, began: float | None = None, waited: float = 0.0) -> None:
        now = time.monotonic()
        self._began = now if began is None else min(began, now)
        imported = min(self._began + waited, now)
        self._numbers = itertools.count(1)
        # Appended to alone, which needs no lock: not by threads, nor by finalizers and handlers that import, nor in a
        # process that is forked meanwhile.
        self._marks: list[Mark] = [(self._began, 0, IMPORTS), (imported, 0, "")] if waited else []
        self._marks += [(imported, 0, PROCESS), (now, 0, "")]
        self._ended = False
        self._import: Callable[[str, Any], Any] | None = None

    def begin(self) -> None:
        """Time imports from now on."""
        self._import = getattr(bootstrap, "_find_and_load", None)
        if self._import is not None:
            self._hook()

    def end(self) -> tuple[float, dict[str, float]]:
        """Time nothing more; return the load's seconds, and those of its parts, to the microsecond."""
        ended = time.monotonic()
        self._ended = True
        if self._import is not None:
            bootstrap._find_and_load = self._import  # type: ignore[attr-defined]
        found = parts_of(self._marks, self._began, ended)
        rest = found.pop(BUILD)
        told = sorted(found, key=lambda part: -found[part])[:_MOST_PARTS]
        rest += sum(seconds for part, seconds in found.items() if part not in told)
        parts = {part: round(found[part], 6) for part in found if part in told}
        return ended - self._began, {**parts, BUILD: round(rest, 6)}

    def enter(self, name: str) -> int:
        """Enter a part; return its number, with which it is left."""
        if len(self._marks) >= _MOST_MARKS:
            return 0
        number = next(self._numbers)
        self._marks.append((time.monotonic(), number, name))
        return number

    def leave(self, number: int) -> None:
        """Leave a part, of those that are open whichever it is."""
        if number and not self._ended:
            self._marks.append((time.monotonic(), number, ""))

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a part that is over, as somebody else measured it, by `time.monotonic`."""
        if began < ended and not self._ended and len(self._marks) < _MOST_MARKS:
            number = next(self._numbers)
            self._marks += [(began, number, name), (ended, number, "")]

    def _hook(self) -> None:
        bootstrap._find_and_load = self._timed_import  # type: ignore[attr-defined]

    def _timed_import(self, name: str, import_: Any) -> Any:
        """Do in the place of Python's own what finds and loads a module; `importlib` asks for one that is there too."""
        load = self._import
        assert load is not None
        if self._ended or name in sys.modules:
            return load(name, import_)
        number = self.enter(IMPORTS)
        bootstrap._find_and_load = load  # type: ignore[attr-defined] # What it imports costs nothing.
        try:
            return load(name, import_)
        finally:
            self.leave(number)
            if not self._ended:
                self._hook()
