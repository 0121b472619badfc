"""Account for the time of a run's workers, from the event log: every second of every worker, once."""

from __future__ import annotations

import dataclasses
from typing import Any

PARTS = (
    "useful", "evicted", "lost", "failed", "unneeded", "unfinished", "sending", "loading", "staging", "idle",
)  # fmt: skip
"""What a worker's time can have gone into:

- useful: calls whose answers were taken, as long as they ran on the worker (of others, until their last answer);
- evicted, lost: calls that an eviction, or any other loss, of their worker ended; failed: calls that failed;
- unneeded: calls that were stopped, or that others had answered first, or whose items were cancelled; and chunks of
  sessions that were made again;
- unfinished: calls that ran when the log ended;
- sending: calls on their way to the worker, and their answers on the way back (for workers of one slot);
- loading: contexts being built while no call runs; staging: files being brought while nothing is built or runs;
- idle: none of these.
"""


@dataclasses.dataclass
class AccountGroup:
    """The workers of one tier that have the same GPUs. Times in seconds on the run's clock, of workers.

    :ivar gpus: that each of them has; 0 for workers without.
    :ivar presence: (time, +1 or -1) for every worker that joined or went.
    :ivar seconds: what their time went into, one figure for each of `PARTS`.
    :ivar items: that they answered first, by app; `app_seconds`, what of the useful time went into those.
    :ivar tokens: that models read and wrote for these answers, None where nobody counted; `cached_tokens`: of their
        prompts, those that engines found in their caches.
    """

    tier: str
    gpu_model: str | None
    gpus: int
    joined: int = 0
    hosts: set[str] = dataclasses.field(default_factory=set)
    presence: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    connected: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    items: dict[str, int] = dataclasses.field(default_factory=dict)
    app_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: float | None = None
    cached_tokens: int | None = None

    def add_items(self, app: str, taken: int, tokens: int | None, count: int) -> None:
        """Count answers that were taken, of `count` items for which models read and wrote so many tokens."""
        self.items[app] = self.items.get(app, 0) + taken
        self.app_seconds.setdefault(app, 0.0)
        if tokens is not None:
            self.tokens = (self.tokens or 0.0) + tokens * taken / count

    @property
    def kind(self) -> tuple[str | None, int]:
        """What decides how fast these workers are, as far as is known."""
        return self.gpu_model, self.gpus


@dataclasses.dataclass
class Accounts:
    """The groups of a run's workers, and when its work began and ended.

    :ivar begin: when the first items were submitted, None if none were; `end`: when the last were answered.
    """

    groups: list[AccountGroup] = dataclasses.field(default_factory=list)
    begin: float | None = None
    end: float | None = None


@dataclasses.dataclass
class _Call:
    app: str
    items: int
    context: str
    share: float  # What the worker's clock of shares showed when it began, or answered last.
    useful: float = 0.0  # Of its part of the worker's time until then; the rest of it is `unneeded`.
    unneeded: float = 0.0


class _Worker:
    """A connected worker: what it does now, and since when.

    A moment in which several calls run belongs to each of them in equal parts. `share` is the part that a call that
    always ran would have had, so that a call's part of the worker's time is what `share` grew by meanwhile.
    """

    def __init__(self, group: AccountGroup, slots: int, now: float) -> None:
        self.group = group
        self.slots = slots
        self.joined = self.last = now
        self.share = 0.0
        self.calls: dict[int, _Call] = {}
        self.loading: set[str] = set()
        self.staging: set[str] = set()

    def advance(self, now: float) -> None:
        """Add the time since the last call to what the worker did meanwhile."""
        elapsed = max(0.0, now - self.last)
        self.last += elapsed
        if self.calls:
            self.share += elapsed / len(self.calls)
        else:
            self.group.seconds["loading" if self.loading else "staging" if self.staging else "idle"] += elapsed

    def part(self, call: _Call) -> float:
        """Return a call's part of the worker's time since it was asked last."""
        part, call.share = self.share - call.share, self.share
        return part


class AccountsReader:
    """Fill empty accounts from a log, event by event."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self._groups: dict[tuple[str, str | None, int], AccountGroup] = {}
        self._workers: dict[str, _Worker] = {}
        self._noticed: set[str] = set()
        self._released: set[str] = set()

    def take(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        """Take an event, with the commands that it led to."""
        kind, now = event["is"], event["time"]
        if kind == "WorkerJoined":
            self._joined(event["worker"], now)
        elif kind == "ItemsSubmitted":
            if self.accounts.begin is None:
                self.accounts.begin = now
        elif "worker" in event:
            self._of_worker(kind, event, commands, now)
        for command in commands:
            name = command["is"]
            if name in ("Run", "Step"):
                self._run(command, now)
            elif name in ("Stage", "Load", "Wake", "Unload", "Abandon"):
                self._order(name, command, now)
            elif name == "Deliver":
                self.accounts.end = now
            elif name == "Release":
                self._released.add(command["worker"])

    def end(self, now: float) -> None:
        """End the accounts: those who are connected were so until the log's end."""
        for name in list(self._workers):
            self._gone(name, now, "unfinished")

    # --- events

    def _joined(self, spec: dict[str, Any], now: float) -> None:
        key = (spec["tier"], spec.get("gpu_model"), spec.get("gpus", 0))
        if key not in self._groups:
            self._groups[key] = AccountGroup(*key)
            self.accounts.groups.append(self._groups[key])
        group = self._groups[key]
        self._gone(spec["id"], now, "lost")  # Of the same name: its loss was not reported.
        group.joined += 1
        group.hosts.add(spec["host"])
        group.presence.append((now, 1))
        self._workers[spec["id"]] = _Worker(group, spec.get("slots", 1), now)

    def _of_worker(self, kind: str, event: dict[str, Any], commands: list[dict[str, Any]], now: float) -> None:
        name = event["worker"]
        worker = self._workers.get(name)
        if worker is None:
            return
        if kind == "WorkerLost":
            # As the scheduler counts: what was given back was not taken, whatever became of it then.
            evicted = name not in self._released and (event["evicted"] or name in self._noticed)
            self._gone(name, now, "evicted" if evicted else "lost")
        elif kind in ("BatchFinished", "ItemsFinished", "BatchEnded", "StepFinished"):
            self._answered(worker, event, commands, now)
        elif kind == "BatchFailed":
            failure = event["failure"]  # Of another call, where only the library process went with that.
            unneeded = failure["kind"] == "cancelled" and failure["error"] == "CallInterrupted"
            why = "unneeded" if unneeded else "failed"
            self._ended(worker, event["attempt"], now, why)
        elif kind in ("ContextStaged", "ContextReady", "ContextFailed", "ContextWoken", "ParkFailed"):
            worker.advance(now)
            worker.staging.discard(event["context"])
            if kind != "ContextStaged":
                worker.loading.discard(event["context"])
        elif kind == "EvictionNotice":
            self._noticed.add(name)

    def _gone(self, name: str, now: float, why: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        for number in list(worker.calls):
            self._ended(worker, number, now, why)
        worker.advance(now)
        worker.group.connected += worker.last - worker.joined
        if why != "unfinished":
            worker.group.presence.append((now, -1))

    def _ended(self, worker: _Worker, number: int, now: float, why: str) -> None:
        """Record that a call ended before its time; what it has answered counts."""
        worker.advance(now)
        call = worker.calls.pop(number, None)
        if call is not None:
            worker.group.seconds[why] += worker.part(call)
            _settle(worker.group, call, 1.0)

    def _answered(self, worker: _Worker, event: dict[str, Any], commands: list[dict[str, Any]], now: float) -> None:
        """Record that a call answered some items, or all, or has no more to answer."""
        worker.advance(now)
        number = event["attempt"]
        call = worker.calls.get(number)
        if call is None:
            return
        if event["is"] == "StepFinished":
            made = sum("made" in outcome for outcome in event["outcomes"])
            new = sum(command["is"] == "DeliverChunk" for command in commands)
            _take(call, worker.part(call), new / made if made else 1.0)  # Without chunks it was about states.
        elif event["is"] != "BatchEnded":
            count = event["count"] if event["is"] == "ItemsFinished" else call.items
            taken = sum(_count(c["items"]) for c in commands if c["is"] == "Deliver" and c["attempt"] == number)
            _take(call, worker.part(call), min(1.0, taken / count) if count else 0.0)
            if taken:
                worker.group.add_items(call.app, taken, event.get("tokens"), count)
                if (cached := event.get("cached_tokens")) is not None:
                    worker.group.cached_tokens = (worker.group.cached_tokens or 0) + cached
        if event["is"] != "ItemsFinished":
            del worker.calls[number]
            whole = call.useful + call.unneeded + worker.part(call)
            # With more slots, how long it waited for another call there is not known.
            ran = min(whole, event["seconds"]) if worker.slots == 1 else whole
            worker.group.seconds["sending"] += whole - ran
            answered = call.useful + call.unneeded
            if answered:
                _settle(worker.group, call, ran / answered)
            else:
                worker.group.seconds["unneeded"] += ran

    # --- commands

    def _run(self, command: dict[str, Any], now: float) -> None:
        worker = self._workers.get(command["worker"])
        if worker is not None:
            self._ended(worker, command["attempt"], now, "unneeded")  # Of the same number: its end was not reported.
            items = _count(command["items"])
            worker.calls[command["attempt"]] = _Call(command["app"], items, command["context"], worker.share)

    def _order(self, name: str, command: dict[str, Any], now: float) -> None:
        worker, context = self._workers.get(command["worker"]), command["context"]
        if worker is None:
            return
        worker.advance(now)
        if name in ("Stage", "Load", "Wake"):
            (worker.staging if name == "Stage" else worker.loading).add(context)
        elif name == "Unload":
            worker.staging.discard(context)
            worker.loading.discard(context)
        else:  # To stop a call costs the library process, and with it whatever else it ran.
            for number in [n for n, call in worker.calls.items() if n == command["attempt"] or call.context == context]:
                self._ended(worker, number, now, "unneeded")


def _count(ranges: list[list[int]]) -> int:
    return sum(end - first for first, end in ranges)


def _take(call: _Call, part: float, taken: float) -> None:
    """Move a part of a call's time to answers, of which this share was accepted."""
    call.useful += part * taken
    call.unneeded += part * (1 - taken)


def _settle(group: AccountGroup, call: _Call, scale: float) -> None:
    """Settle an ended call: this much of what led to its answers goes to where it belongs."""
    group.seconds["useful"] += scale * call.useful
    group.seconds["unneeded"] += scale * call.unneeded
    if call.app in group.app_seconds:
        group.app_seconds[call.app] += scale * call.useful
