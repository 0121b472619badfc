"""The inputs of a map: items, from a table's rows or from iterables side by side, and how they are pulled.

What is there, or is read from a file, is pulled on the thread that reads the map; what may keep it waiting, on a thread
of its own. So a generator may be slow, or wait for results of the very map that it feeds: the results that are there
are yielded meanwhile.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import inspect
import io
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from ctxflow.app_options import MappedApp, Options
from ctxflow.errors import DependencyFailed, article, closest, short
from ctxflow.executors.pending import Failed
from ctxflow.option_values import refuse
from ctxflow.rows.readers import open_table
from ctxflow.rows.source import IN_MAP, RowError, Table, columns_for, item_maker
from ctxflow.rows.tables import values_of


@dataclasses.dataclass(frozen=True)
class MapInputs:
    """What a map goes through.

    :ivar items: the parameters of each item; a row that cannot be used is a `Failed`.
    :ivar count: how many there are, None where only reading tells.
    :ivar may_wait: whether the next one may be long in coming: of generators and other iterators.
    """

    items: Iterator[Any]
    count: int | None
    may_wait: bool = False


def inputs_of(app: MappedApp, inputs: Sequence[Any], columns: Any, by_index: bool = False) -> MapInputs:
    """Return the items of one table's rows, or of iterables side by side; see `BatchApp.map`.

    :param by_index: whether an item is known by its place, which has to be the same in another run.
    :raises TypeError: for what is no sequence of items, or if they do not fit the app.
    :raises ValueError: for a table that cannot be read, or lacks a column.
    """
    chosen = _chosen(columns)
    for given in inputs:
        _check(given, by_index)
    tables = [open_table(given) for given in inputs]
    if len(tables) == 1 and tables[0] is not None:
        table = tables[0]
        count = count_of(inputs[0], table)
        items = _table_items(table, _columns_of(app, table, chosen))
        return MapInputs(items, count, count is None and not isinstance(inputs[0], (str, os.PathLike)))
    if any(tables):
        raise TypeError("a table's rows are whole items: give it alone, or give its columns side by side")
    if chosen:
        raise TypeError("columns= names those of a table: leave it out where values are given")
    app.check_width(len(inputs))
    counts = [count for count in map(count_of, inputs) if count is not None]
    known = min(counts) if len(counts) == len(inputs) else None
    return MapInputs(zip(*map(values_of, inputs), strict=False), known, len(counts) < len(inputs))


def count_of(given: Any, table: Table | None = None) -> int | None:
    """Return how many items there are in something, None where only reading tells."""
    if hasattr(type(given), "__next__"):  # What an iterator has left is not known, such as another map's.
        return None
    total = getattr(table, "total", None)  # Of a file, where it says so.
    if total is not None or isinstance(given, (str, os.PathLike)):
        return total
    if hasattr(given, "num_rows") and not hasattr(given, "__len__"):  # A record batch of pyarrow's.
        return int(given.num_rows)
    try:
        return len(given)
    except TypeError:  # An iterator, or one that has no length but in name, such as an array of no dimension.
        return None


def _check(given: Any, by_index: bool) -> None:
    """Refuse what is no sequence of items, or surely not the one that was meant.

    :raises TypeError: saying what to give.
    """
    kind = type(given).__name__
    if isinstance(given, (str, os.PathLike)):
        return
    advice = ""
    if isinstance(given, (bytes, bytearray, memoryview)):
        advice = "bytes are one value, not a sequence of items: give a list of them, or a path as text"
    elif isinstance(given, io.IOBase) or (hasattr(given, "readline") and hasattr(given, "read")):
        advice = (
            f"an open file ({article(kind)}) would give its lines, header and line ends among them: give its path, or "
            '(line.rstrip("\\n") for line in file)'
        )
    elif isinstance(given, Mapping) and not hasattr(given, "column_names"):
        advice = (
            f"{article(kind)} would give its keys alone: give list(d), d.values() or d.items(); a dict of columns as "
            "pandas.DataFrame(d)"
        )
    elif isinstance(given, Future):
        advice = "a future is one value to come, not a sequence of items: give its result()"
    elif hasattr(given, "__aiter__") and not hasattr(given, "__iter__"):
        advice = f"{article(kind)} is read with `async for`, which a map cannot do: collect its items in a list first"
    elif by_index and isinstance(given, (set, frozenset)):
        advice = (
            f"{article(kind)} has another order in each run, and resume= knows items by their places: give "
            'sorted(...), or write resume_by="content"'
        )
    elif inspect.isgeneratorfunction(given):
        advice = f"{given.__name__} is a function that makes a generator: call it, as in {given.__name__}(...)"
    else:
        try:
            if not hasattr(type(given), "__next__"):  # An iterator is left alone.
                iter(given)
        except TypeError as error:
            advice = f"{short(given)} is no sequence of items ({error}): give a list, a generator, a table or a path"
    if advice:
        raise TypeError(f"map cannot go through this: {advice}")


def _chosen(columns: Any) -> list[str]:
    chosen = [columns] if isinstance(columns, str) else columns
    if not isinstance(chosen, (list, tuple)) or not all(isinstance(each, str) for each in chosen):
        raise refuse("columns", columns, 'a list of names of columns, such as ["claim"]', TypeError)
    return list(chosen)


def _columns_of(app: MappedApp, table: Table, chosen: Sequence[str]) -> tuple[str, ...]:
    columns = columns_for(app.__name__, app.parameters, chosen, table.columns(), table.name, IN_MAP)
    app.check_width(len(columns) or len(app.parameters[:1]))
    return columns


def _table_items(table: Table, columns: Sequence[str]) -> Iterator[Any]:
    make = item_maker(columns)
    for rows in table.chunks(columns=tuple(dict.fromkeys(columns))):
        for row in rows:
            try:
                if isinstance(row.values, RowError):
                    raise row.values
                yield make(row.values)
            except RowError as error:
                yield Failed(RowError(f"{table.place(row.number)}: {error}"))


def unknown_option(app: MappedApp, name: str) -> TypeError:
    """Return the error for what is neither an option of a map nor a constant of the app, saying where to write it."""
    called = app.__name__
    if name in app.parameters:
        return TypeError(
            f"{name} is a parameter of which each item of {called} has a value of its own: give an iterable for it, or "
            f"make it a constant: def {called}(..., *, {name}=...)"
        )
    if name in _OF_APPS:
        return TypeError(f"{name} is an option of the app, not of map: write {called}.using({name}=...).map(...)")
    if name in ("chunksize", "chunk_size"):
        return TypeError(
            f"map has no {name}, for batches are formed as workers come free: leave it out, or fix their size with "
            f"{called}.using(batch_size=...).map(...)"
        )
    meant = closest(name, [*_OF_MAPS, *app.constants, *_OF_APPS])
    hint = f"; did you mean {meant!r}?" if meant else ""
    return TypeError(f"{called}.map has no option {name!r}{app.constants_hint()}{hint}")


_OF_MAPS = ("columns", "resume", "resume_by", "on_error", "order", "window", "progress")
_OF_APPS = tuple(field.name for field in dataclasses.fields(Options))


class Here:
    """Items that are there, or are read from a file: they are pulled by whoever reads the map.

    :ivar here: whether `take` waits for them itself.
    :ivar eager: whether the map should take some whenever it can, not only when it has room for many.
    :ivar over: whether all has been taken that there is.
    :ivar error: what they ended with, if it was no end.
    """

    here = True

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.error: BaseException | None = None
        self.over = False
        self.eager = False  # They come so slowly that time was up.

    def take(self, room: int, count: int, deadline: float) -> list[Any]:
        """Return up to so many, fewer if time is up; the clock is looked at ever more seldom while they come fast."""
        taken: list[Any] = []
        step, count = 1, min(room, count)
        while len(taken) < count and not self.over:
            self.eager = time.monotonic() > deadline
            if self.eager:
                break
            wanted, before = min(step, count - len(taken)), len(taken)
            try:
                taken.extend(itertools.islice(self._items, wanted))  # What came before an error stays.
            except Exception as error:
                self.error = error
            self.over = len(taken) < before + wanted
            step *= 2
        return taken

    def wait(self) -> bool:
        """Return whether time was up: nothing wakes the map."""
        return self.eager

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Ahead:
    """Items that a thread takes from an iterator, as far ahead as the map asks, whose thread calls all but `close`.

    Its attributes are those of `Here`.

    :param items: runs in the context variables of who makes this.
    :param wake: called when items have come that were waited for.
    """

    here = False

    def __init__(self, items: Iterator[Any], wake: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.over = False
        self.eager = False  # Not all has been taken that was asked for.
        self._items = items
        self._wake = wake
        self._come: collections.deque[Any] = collections.deque()
        self._given = 0  # To the map.
        self._asked = 0  # May have been taken, in all.
        self._ended = False
        self._end_seen = False
        self._awaited = False
        self._paused = True
        self._resume: queue.SimpleQueue[None] = queue.SimpleQueue()  # Finalizers may put something there.
        self._settled = threading.Event()  # All that was asked for at first has come.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._take_all,), name="ctxflow-inputs", daemon=True)

    def take(self, room: int, count: int, deadline: float) -> list[Any]:
        """Return up to so many that have come, and have as many taken as there is room for beyond these.

        The first time, wait until those have come, no longer than there is time.
        """
        come = self._come
        self._asked = self._given + room
        if self._paused and room > len(come):
            if not self._thread.ident:
                self._thread.start()
            self._resume.put(None)
        if not self._given:
            self._settled.wait(max(0.0, deadline - time.monotonic()))
        ended = self._ended  # Before it is seen what has come.
        taken = [come.popleft() for _ in range(min(room, count, len(come)))]
        self._given += len(taken)
        self.eager = self._asked > self._given
        self.over = ended and not come
        return taken

    def wait(self) -> bool:
        """Return whether something has come, or, once, that no more will; else have the map woken when it does."""
        self._awaited = True
        ended, seen = self._ended, self._end_seen
        self._end_seen = ended
        return bool(self._come) or (ended and not seen)

    def close(self) -> None:
        """Take no more. Waits for nothing: an iterator that blocks keeps its thread until it goes on."""
        self._asked = -1
        self._resume.put(None)

    def _take_all(self) -> None:
        append, pulled = self._come.append, 0
        try:
            if not self._may_go_on(pulled):
                return
            for item in self._items:
                append(item)
                pulled += 1
                if self._awaited:
                    self._awaited = False
                    self._wake()
                if pulled >= self._asked and not self._may_go_on(pulled):
                    return
        except BaseException as error:  # It is the map's reader to whom it happens.
            self.error = error
        finally:
            self._items = iter(())  # Which closes a generator, on the thread that it ran on.
            self._ended = True
            self._settled.set()
            self._wake()

    def _may_go_on(self, pulled: int) -> bool:
        """Wait until more is asked for; False if nothing ever will be."""
        while 0 <= self._asked <= pulled:
            self._settled.set()
            self._paused = True
            if 0 <= self._asked <= pulled:
                self._resume.get()
        self._paused = False
        return self._asked >= 0


Item = tuple[Any, ...]


def may_hold_futures(items: Sequence[Item | Failed]) -> bool | None:
    """Return whether there may be a future among the values of some items, told quickly.

    :returns: None for as much as False, if there are rows that failed among the items.

    >>> may_hold_futures([("a", 1), ("b", 2)]), may_hold_futures([(Future(),)])
    (False, True)
    """
    try:
        kinds = set(map(type, itertools.chain.from_iterable(items)))  # type: ignore[arg-type]
    except TypeError:  # A row that failed has no values.
        return may_hold_futures([item for item in items if type(item) is not Failed]) or None
    return any(kind is tuple or issubclass(kind, Future) for kind in kinds)


class Aside:
    """Items that wait for futures among their values, or in tuples among these; found by their index.

    :param wake: called when one may be ready, by whichever thread.
    :ivar waiting: those that wait, by index.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.waiting: dict[int, Item] = {}
        self._done: collections.deque[int] = collections.deque()  # Of these a future is done.

    def put(self, index: int, item: Item) -> Item | Failed | None:
        """Return an item with its futures' results, a `Failed` if one failed; None, and wait, if some are not done."""
        waited = [future for future in _futures(item) if not future.done()]
        if not waited:
            return _resolved(item)
        self.waiting[index] = item

        def done(future: Future[Any]) -> None:
            self._done.append(index)
            self._wake()

        for future in waited:
            future.add_done_callback(done)
        return None

    def ready(self) -> Iterator[tuple[int, Item | Failed]]:
        """Yield items that wait no more, as `put` gives them."""
        while self._done:
            index = self._done.popleft()
            item = self.waiting.get(index)
            if item is not None and all(future.done() for future in _futures(item)):
                del self.waiting[index]
                yield index, _resolved(item)


def _futures(item: Item) -> list[Future[Any]]:
    found = []
    for value in item:
        if isinstance(value, Future):
            found.append(value)
        elif type(value) is tuple:
            found += [part for part in value if isinstance(part, Future)]
    return found


def _resolved(item: Item) -> Item | Failed:
    """Return an item whose futures are all done, with their results."""
    for future in _futures(item):
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        if error is not None:
            reason = (
                "was cancelled" if isinstance(error, CancelledError) else f"failed: {type(error).__name__}: {error}"
            )
            failure = DependencyFailed(f"a future among the values of this item {reason}")
            failure.__cause__ = error
            return Failed(failure, item)
    return tuple([_value(value) for value in item])


def _value(value: Any) -> Any:
    if isinstance(value, Future):
        return value.result()
    if type(value) is tuple:
        return tuple([part.result() if isinstance(part, Future) else part for part in value])
    return value
