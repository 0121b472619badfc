"""Say how a batch job or a program's run stands: progress, rates, its status file, and whether it has ended.

`Rates` makes rates and the time left from counts; it is pure: time comes in. A status file is JSON that its owner
rewrites about once a second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import socket
import time
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.causes import ShortfallCause
from ctxflow.files import written_whole
from ctxflow.ownership import birth_of, lives


@dataclasses.dataclass(frozen=True)
class Progress:
    """A batch job, or a program's run, at a moment; all of it is plain data, and the keys of a status file.

    :ivar unit: what is counted: "rows" of a job, "items" of a program.
    :ivar done: rows that have a result, of this run and earlier ones; `dead` likewise.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar running: rows that are queued or at a worker.
    :ivar read: rows read in this run.
    :ivar total: rows of the input, None while that is not known; `guessed` if it is an estimate.
    :ivar seconds: since this run began.
    :ivar rate: rows a second now; `rate_overall`, over this run.
    :ivar tokens: that models read and wrote in this run, None where that is not counted them.
    :ivar left: seconds that the rest takes, None while that is not known; likely (some 95%) between `left_low` and
        `left_high`.
    :ivar workers: how many there are, None before the first is needed.
    :ivar tiers: name -> workers that "joined" and are there, that were "asked" for (None: not said), and the tier's
        "gpu_hours", "worker_hours" and "cost" (None: no price) so far, and the "reason" why fewer joined, or "".
    :ivar causes: why less runs than was asked for: the fields of `ctxflow.causes.ShortfallCause`.
    :ivar contexts: name -> how many workers are "staging", "loading" or "waking" it, or have it "warm" or "parked".
    :ivar evictions: workers that were taken back; `crashes`, library processes that died; `loads`, contexts built.
    :ivar gpu_hours: GPUs of workers, times the hours they were connected; `worker_hours` likewise.
    :ivar cost: by the tiers' prices; None unless all that gave workers have one.
    :ivar sessions: how many open sessions are "running", "waiting" for a worker, "migrating", "idle" or "suspended";
        empty where there never was one.
    :ivar chunks: that sessions made; `chunks_per_s` now; `migrations`, how often one went from worker to worker.
    :ivar limits: of GPU-hours and cost: the "scope" ("run", "factory", "user"), the "measure" ("gpu_hours", "cost"),
        what is "used" and the "limit".
    :ivar newest_dead: the place and the reason of the newest dead letter of this run, or "".
    """

    unit: str = "rows"
    done: int = 0
    dead: int = 0
    done_now: int = 0
    dead_now: int = 0
    running: int = 0
    read: int = 0
    total: int | None = None
    guessed: bool = False
    seconds: float = 0.0
    rate: float = 0.0
    rate_overall: float = 0.0
    tokens: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_overall: float | None = None
    left: float | None = None
    left_low: float | None = None
    left_high: float | None = None
    workers: int | None = None
    tiers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    contexts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    evictions: int = 0
    crashes: int = 0
    loads: int = 0
    gpu_hours: float = 0.0
    worker_hours: float = 0.0
    cost: float | None = None
    sessions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    chunks: int = 0
    migrations: int = 0
    chunks_per_s: float = 0.0
    limits: Sequence[Mapping[str, Any]] = ()
    causes: Sequence[Mapping[str, Any]] = ()
    newest_dead: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Progress:
        """Return what a status file says."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    @property
    def rest(self) -> int | None:
        """Rows that are left, None while that is not known."""
        return None if self.total is None else max(0, self.total - self.done - self.dead)

    @property
    def counts_rows(self) -> bool:
        """Whether there are rows or items to show: a program of sessions alone has none."""
        return not self.sessions or self.read > 0

    @property
    def by_state(self) -> dict[str, int]:
        """How many workers are in which state of a context, over all contexts."""
        found: collections.Counter[str] = collections.Counter()
        for counts in self.contexts.values():
            found.update(counts)
        return dict(found)


_NOW_SECONDS, _NOW_STEPS = 10.0, 4
_KEPT_SECONDS, _STEP_SECONDS = 300.0, 1.0
_PARTS, _WIDTH = 8, 2.0  # The width in standard deviations.


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast a job goes at a moment; `Progress` describes each figure."""

    rate: float
    rate_overall: float
    tokens_per_s: float | None
    tokens_per_s_overall: float | None
    left: float | None
    left_low: float | None
    left_high: float | None


class Rates:
    """Rates now and overall, and the time left (eta) with its uncertainty, from counts as time goes on.

    *Now* is the last 10 seconds, or as far back as it takes to see answers come four times: large batches come
    seldom. Measuring begins with the first answer, not with the start: a context's load says nothing of the rest.

    *The time left* is the rest over the rate r of the last five minutes. Its uncertainty comes from the spread of the
    rates in eight equal parts of these minutes, each w seconds long; with their standard deviation s, the mean of
    eight is off by s / sqrt(8), and the mean of a rest that takes H seconds by s sqrt(w / H), if parts differ at
    random. So sigma^2 = s^2 (1 / 8 + w / H), and the bounds are the rest over r + 2 sigma and r - 2 sigma. What the
    last minutes do not show, such as workers that will join or be evicted, or longer rows to come, is not in it.
    """

    def __init__(self) -> None:
        # (seconds since the beginning, items, tokens) when answers came, a second apart or more.
        self._steps: collections.deque[tuple[float, int, int]] = collections.deque()

    def note(self, seconds: float, items: int, tokens: int | None) -> None:
        """Take in the seconds, answered items and tokens since the beginning; None for tokens that nobody counts."""
        if items == 0:
            return
        if self._steps:
            last, known, _ = self._steps[-1]
            if items == known or seconds - last < _STEP_SECONDS:
                return
        self._steps.append((seconds, items, tokens or 0))
        while len(self._steps) > _PARTS and self._steps[1][0] < seconds - _KEPT_SECONDS:
            self._steps.popleft()

    def pace(self, seconds: float, items: int, tokens: int | None, rest: int | None) -> Throughput:
        """Return the figures of a moment; `rest` are the items that are left, None if that is not known."""
        rate_overall = items / seconds if seconds > 0 else 0.0
        tokens_overall = None if tokens is None else tokens / seconds if seconds > 0 else 0.0
        rate, token_rate = rate_overall, tokens_overall
        since = self._since(seconds)
        if since is not None:
            passed = seconds - since[0]
            rate = (items - since[1]) / passed
            token_rate = None if tokens is None else (tokens - since[2]) / passed
        return Throughput(rate, rate_overall, token_rate, tokens_overall, *self._left(seconds, items, rest))

    def _since(self, seconds: float) -> tuple[float, int, int] | None:
        """Return the step from which on it is now; None if too little came to say."""
        steps = self._steps
        if len(steps) < 2 or seconds <= steps[0][0]:
            return None
        index = max(0, len(steps) - 1 - _NOW_STEPS)
        while index and seconds - steps[index][0] < _NOW_SECONDS:
            index -= 1
        return steps[index]

    def _left(self, seconds: float, items: int, rest: int | None) -> tuple[float | None, float | None, float | None]:
        if rest is not None and rest <= 0:
            return 0.0, 0.0, 0.0
        if rest is None or len(self._steps) < 2 or seconds <= self._steps[0][0]:
            return None, None, None
        begin, known, _ = self._steps[0]
        span = seconds - begin
        mean = (items - known) / span
        if mean <= 0:
            return None, None, None
        left = rest / mean
        if len(self._steps) < _PARTS:
            return left, None, None
        parts = self._parts(seconds, items)
        variance = sum((part - mean) ** 2 for part in parts) / (_PARTS - 1)
        sigma = math.sqrt(variance * (1 / _PARTS + span / _PARTS / left))
        slowest = mean - _WIDTH * sigma
        return left, rest / (mean + _WIDTH * sigma), rest / slowest if slowest > 0 else None

    def _parts(self, seconds: float, items: int) -> list[float]:
        """Return the rates in equal parts of the time that is kept."""
        import numpy as np

        times = [step[0] for step in self._steps] + [seconds]
        counts = [step[1] for step in self._steps] + [items]
        cuts = np.linspace(times[0], seconds, _PARTS + 1)
        found: list[float] = (np.diff(np.interp(cuts, times, counts)) / np.diff(cuts)).tolist()
        return found


STATUS = "status.json"
"""A run's status file, in its directory, for `ctxflow top` and `ctxflow status` beside any program."""
VERSION = 1
SILENT_SECONDS = 30.0
_GONE_SECONDS = 3.0
ENDED = ("done", "failed", "interrupted")
_LONG = ("tiers", "contexts", "causes", "limits", "sessions", "newest_dead")  # What a status can do without.


def owner() -> dict[str, Any]:
    """Return who writes: keys by which a reader sees whether this process still lives."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "born": birth_of(os.getpid())}


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Write a status file of this process's own at once or not at all, so that a reader never sees half of it.

    Where the disk is full, the last one takes the place of what is there, cut to what fits.
    """
    ended = status.get("state") in ENDED
    try:
        # The last word is to outlive a power cut; the others are news for a second.
        with written_whole(path, sync=ended, alone=True) as file:
            file.write((json.dumps(status, indent=1) + "\n").encode())
    except OSError as error:
        if not ended or error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwritten(path, status):
            raise


def _overwritten(path: Path, status: Mapping[str, Any]) -> bool:
    """Write a status over the bytes of the file that is there, which takes no room; return whether it fits."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        for left_out in ((), _LONG):
            text = json.dumps({key: value for key, value in status.items() if key not in left_out}).encode()
            if len(text) <= room:
                file.write(text.ljust(room))
                return True
    return False


def load_status(path: Path, folder: int | None = None) -> dict[str, Any] | None:
    """Return what a status file says; None if there is none, or none of this version with values of the right types.

    :param folder: the descriptor of the folder that the path is relative to.
    """
    try:
        with open(path, encoding="utf-8", opener=functools.partial(_open_unwaited, dir_fd=folder)) as file:
            status = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(status, dict) or status.get("version") != VERSION:
        return None
    if not all(has_type(status[name], kind) for name, kind in _types().items() if name in status):
        return None
    within = [(tier, _OF_A_TIER) for tier in status.get("tiers", {}).values()]
    within += [(limit, _OF_A_LIMIT) for limit in status.get("limits", ())]
    if not all(has_type(each.get(name), kind) for each, kinds in within for name, kind in kinds.items()):
        return None
    try:
        for cause in status.get("causes", ()):
            ShortfallCause.of(cause)
    except TypeError:
        return None
    return {"state": "", "output": "", "run": "", **status}


def _open_unwaited(path: str, flags: int, dir_fd: int | None) -> int:
    return os.open(path, flags | os.O_NONBLOCK, dir_fd=dir_fd)  # Should it be a pipe.


_FACTS: dict[str, Any] = {
    "state": str, "reason": str, "updated": float, "pid": int, "host": str, "born": str | None, "run": str,
    "output": str,
}  # fmt: skip
_OF_A_TIER: dict[str, Any] = {
    "joined": int, "asked": int | None, "cost": float | None, "reason": str | None, "gpu_hours": float,
    "worker_hours": float,
}  # fmt: skip
_OF_A_LIMIT: dict[str, Any] = {"scope": str, "measure": str, "used": float, "limit": float}
_LARGEST = 1 << 63


@functools.cache
def _types() -> dict[str, Any]:
    """Return the types of a status file's values, as JSON has them."""
    return {**typing.get_type_hints(Progress), **_FACTS}


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON has a type; a number that is not finite has none.

    >>> has_type({"a": 1}, Mapping[str, int]), has_type(None, int | None), has_type(True, int), has_type(1e300, float)
    (True, True, False, False)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(has_type(value, each) for each in inner)
    if origin is collections.abc.Mapping:
        return isinstance(value, dict) and all(has_type(each, inner[1]) for each in value.values())
    if origin is collections.abc.Sequence:
        return isinstance(value, list) and all(has_type(each, inner[0]) for each in value)
    if kind in (int, float):
        return type(value) in (int, kind) and -_LARGEST < value < _LARGEST
    return kind is Any or isinstance(value, kind)


def condition(status: Mapping[str, Any], now: float | None = None) -> str:
    """Return the state that a status file records, or what became of an owner that cannot rewrite it any more.

    :param now: the time, in seconds since 1970.
    :returns: the file's "state" ("starting", "running", "done", "failed", "interrupted"); "died" if its process is
        gone from this host without a last word; "silent" if it was not rewritten for 30 s, by a process that hangs,
        or on a host, or in a container, that cannot be seen from here.
    """
    state = str(status.get("state"))
    if state in ENDED:
        return state
    age = (time.time() if now is None else now) - float(status.get("updated") or 0.0)
    # A file that was written this moment has a live owner, even one whose number means nothing here (a container's).
    if abs(age) > _GONE_SECONDS and status.get("host") == socket.gethostname():
        try:
            alive = lives(int(status["pid"]), status.get("born"))
        except (KeyError, ValueError, TypeError, AttributeError):
            alive = False
        if alive is False:
            return "died"
    return "silent" if age > SILENT_SECONDS else state


class StatusReader:
    """A status file that is read repeatedly: one that changes has a live owner, whatever the clock that dates it.

    :ivar status: what it said last, dated by this machine's clock once it has changed.
    """

    def __init__(self, path: Path, status: dict[str, Any]) -> None:
        self.path, self.status = path, status
        self._said = status.get("updated")
        self._changed: float | None = None

    def look(self) -> dict[str, Any]:
        """Read it again."""
        status = load_status(self.path)
        if status is None:
            return self.status
        if status.get("updated") != self._said:
            self._said, self._changed = status.get("updated"), time.monotonic()
        if self._changed is not None:
            status["updated"] = time.time() - (time.monotonic() - self._changed)
        self.status = status
        return status

    def settle(self, seconds: float = 2.5) -> dict[str, Any]:
        """Read it again, if it seems silent, after it was to be rewritten: only its clock may be off."""
        if condition(self.status) == "silent":
            time.sleep(seconds)
            self.look()
        return self.status


_OVER = (*ENDED, "died")


@dataclasses.dataclass(frozen=True)
class KnownRun:
    """A run's folder.

    :ivar state: as `condition` returns it; "silent" where its driver is on another machine and cannot be asked.
    :ivar updated: when it said so last, in seconds since 1970.
    :ivar size: of all that is in the folder, in bytes.
    :ivar output: the output of the batch job that it was of, "" for another program's run.
    :ivar identity: of the folder, by which one that took its place is recognised.
    :ivar own: whether the folder is this user's.
    """

    folder: Path
    state: str
    updated: float
    size: int
    output: str
    identity: tuple[int, int]
    own: bool

    @property
    def is_over(self) -> bool:
        """Whether its driver is gone."""
        return self.state in _OVER


def known_runs(base: Path) -> list[KnownRun]:
    """Return the runs that wrote to `runs/TIME-PID/LABEL` below a folder, the oldest first; links are not followed."""
    found = [run for folder in _folders(base / "runs") for run in _runs_in(folder)]
    return sorted(found, key=lambda run: run.updated)


def removable(runs: list[KnownRun], older_than: float) -> list[KnownRun]:
    """Return this user's that are over, and have been for so many seconds."""
    then = time.time() - older_than
    return [run for run in runs if run.own and run.is_over and run.updated <= then]


def remove(run: KnownRun) -> bool:
    """Remove a run's folder, and the one above it if nothing is left in that; False if the run goes on after all.

    The folder is opened once, so that no process can put another in its place meanwhile.
    """
    with contextlib.ExitStack() as stack:
        above = _open_folder(str(run.folder.parent), stack)
        folder = _open_folder(run.folder.name, stack, above)
        found = os.fstat(folder)
        status = load_status(Path(STATUS), folder)
        same = (found.st_dev, found.st_ino) == run.identity and found.st_uid == os.geteuid()
        if not same or status is None or condition(status) not in _OVER:
            return False
        for where, folders, files, inside in os.fwalk(".", topdown=False, dir_fd=folder):
            for name in (*folders, *files):
                if (where, name) != (".", STATUS):
                    _remove_entry(name, inside)
        os.unlink(STATUS, dir_fd=folder)  # The last of all: what is left of it otherwise is known to be a run's.
        os.rmdir(run.folder.name, dir_fd=above)
    with contextlib.suppress(OSError):  # Something else is in it.
        run.folder.parent.rmdir()
    return True


def _open_folder(path: str, stack: contextlib.ExitStack, above: int | None = None) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    stack.callback(os.close, descriptor)
    return descriptor


def _remove_entry(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=folder)


def _folders(parent: Path) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield from sorted(found)


def _runs_in(folder: Path) -> Iterator[KnownRun]:
    for place in _folders(folder):
        status = load_status(place / STATUS)
        if status is None or not status["run"]:
            continue
        try:
            found = os.lstat(place)
        except OSError:  # It is gone.
            continue
        identity, own = (found.st_dev, found.st_ino), found.st_uid == os.geteuid()
        state, updated = condition(status), status.get("updated", 0.0)
        yield KnownRun(place, state, updated, _size(place), status["output"], identity, own)


def _size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
