"""Read a run's history from its event log, in one pass and little memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ctxflow.observe.accounts import AccountsReader
from ctxflow.observe.history import AppHistory, ContextLoads, History, HostFigures, TierHistory
from ctxflow.observe.load_times import LoadTimesReader
from ctxflow.observe.measures import SeenItems


def read_history(lines: Iterable[str]) -> History:
    """Return the history that an event log records.

    Takes time in proportion to the log, and memory for a byte an item and some for every worker there was. The log
    of a run that is going on, or was killed, may end in the middle of a line.

    :param lines: the lines of events.jsonl, with their ends.
    :raises ValueError: for a line that is no line of an event log, saying which.
    """
    reader = _Reader()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
            if number > 1 or "run" not in record:
                reader.take(record["event"], record["commands"])
            else:  # The first line says how the run decides.
                reader.history.simulated = bool(record["run"].get("simulated"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not text.endswith("\n"):  # The last, which was torn.
                continue
            raise ValueError(
                f"line {number} is no line of an event log ({error}): is this the run's events.jsonl?"
            ) from None
    reader.end()
    return reader.history


_SHOWN = 60  # Characters of what distinguishes names.
_ALIKE = 20  # If more are the same at the beginning, they are left out.


def told_apart(
    those: Mapping[str, AppHistory] | Mapping[str, ContextLoads], contexts: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a name for each app or context by which it differs from all others; `contexts` are those of apps."""
    alike: dict[str, list[str]] = {}
    for id, each in those.items():
        alike.setdefault(each.name, []).append(id)
    names = {}
    for name, ids in alike.items():
        given = [str(those[id].spec.get("constants") or "") for id in ids] if len(ids) > 1 else [""]
        shown = [f"{name} ({_from_difference(text, given)})" if text else name for text in given]
        if len(set(shown)) < len(shown) and contexts is not None:
            by = [contexts.get(str(those[id].spec.get("context")), "") for id in ids]
            if len(set(by)) > 1:
                shown = [f"{text} by {each}" if each else text for text, each in zip(shown, by, strict=True)]
        for n, (id, text) in enumerate(zip(ids, shown, strict=True), 1):
            names[id] = f"{text} #{n}" if shown.count(text) > 1 else text
    return names


def _from_difference(text: str, others: Iterable[str]) -> str:
    """Return the part of a text by which it differs from the others, as far as there is room."""
    common = max((_alike(text, other) for other in others if other != text), default=0)
    begin = common - 4 if common > _ALIKE else 0
    part = text[begin : begin + _SHOWN]
    return ("..." if begin else "") + part + ("..." if begin + _SHOWN < len(text) else "")


def _alike(one: str, other: str) -> int:
    """Return how many letters two texts begin with that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (mine, its) in pairs if mine != its), min(len(one), len(other)))


class _Reader:
    """Add up the history of a log, event by event."""

    def __init__(self) -> None:
        self.history = History()
        # By worker; also of those that are gone, whose answers may come late.
        self._tier_of: dict[str, TierHistory] = {}
        self._host_of: dict[str, HostFigures] = {}  # By worker, likewise.
        self._joined_at: dict[str, float] = {}
        self._noticed_ones: set[str] = set()
        self._released: set[str] = set()
        self._running: dict[str, dict[int, tuple[str, int]]] = {}  # Worker -> attempt -> its app, and how many items.
        self._answered: dict[int, int] = {}  # Attempt -> how many items it has answered one by one.
        self._ran, self._closed = SeenItems(), SeenItems()
        self._accounts = AccountsReader(self.history.accounts)
        self._load_times = LoadTimesReader()
        self._takes = {
            "WorkerJoined": self._joined,
            "WorkerLost": self._lost,
            "EvictionNotice": self._noticed,
            "TierOffered": self._offered,
            "JobStarted": self._job,
            "JobEvicted": self._job,
            "JobHeld": self._job,
            "JobFailed": self._job_failed,
            "ItemsSubmitted": self._submitted,
            "ItemsCancelled": self._cancelled,
            "BatchFinished": self._ended,
            "ItemsFinished": self._answered_some,
            "BatchEnded": self._ended,
            "BatchFailed": self._failed,
            "StepFinished": self._ended,
            "AppDeclared": self._app,
            "ContextDeclared": self._context,
            "ContextStaged": self._staged,
            "ContextReady": self._ready,
            "ContextWoken": self._woken,
            "ContextFailed": self._context_failed,
        }

    def take(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        """Take an event, with the commands that it led to."""
        history = self.history
        time: float = event["time"]
        take = self._takes.get(event["is"])
        if take is not None:
            take(event)
        self._accounts.take(event, commands)
        parts = self._load_times.take(event, commands)
        if parts is not None:
            for times in (history.load_times, self._loads_of(event["context"]).times):
                times.add(parts, event.get("started", ""))
        for command in commands:
            kind = command["is"]
            if kind == "Run":
                self._run(command)
            elif kind == "Deliver":
                self._deliver(time, event, command)
            elif kind == "DeliverChunk":
                history.chunks += 1
                for tier in (history.workers, self._tier_of[event["worker"]]):
                    tier.chunks.add(time, 1)
            elif kind == "Release":
                self._released.add(command["worker"])
            elif kind == "Bury":
                buried = self._close(command["items"])
                history.items.dead += buried
                history.causes.bury(command["failure"], buried)
            elif kind == "Place":
                history.plans.append((time, command))
            elif kind == "Quarantine":
                history.quarantines.append((time, command))
                named = command["until"] > time  # Else it was only told to be slow.
                history.by_host.setdefault(command["host"], HostFigures()).quarantines += named
        history.events += 1
        history.duration = max(history.duration, time)

    def end(self) -> None:
        """End the history: those who are connected were so until the log's end."""
        end = self.history.duration
        self._accounts.end(end)
        for worker, joined in self._joined_at.items():
            for group in (self.history.workers, self._tier_of[worker]):
                group.stays.append(end - joined)
        for group in (self.history.workers, *self.history.tiers.values()):
            since, now = group.counts[-1]
            group.worker_seconds += now * (end - since)
        contexts, apps = self.history.contexts, self.history.apps
        for id, name in told_apart(contexts).items():
            contexts[id].name = name
        for id, name in told_apart(apps, {id: each.name for id, each in contexts.items()}).items():
            apps[id].name = name

    def _close(self, ranges: list[list[int]]) -> int:
        return sum(self._closed.add(first, end) for first, end in ranges)

    # --- commands

    def _run(self, command: dict[str, Any]) -> None:
        count = sum(end - first for first, end in command["items"])
        self.history.items.run_again += count - sum(self._ran.add(first, end) for first, end in command["items"])
        self._running.setdefault(command["worker"], {})[command["attempt"]] = (command["app"], count)

    def _deliver(self, time: float, event: dict[str, Any], command: dict[str, Any]) -> None:
        count = self._close(command["items"])
        self.history.items.done += count
        for tier in (self.history.workers, self._tier_of.get(event.get("worker", ""))):
            if tier is not None:
                tier.items_done += count
                tier.done.add(time, count)

    # --- workers

    def _joined(self, event: dict[str, Any]) -> None:
        worker = event["worker"]
        history = self.history
        tier = self._tier_of[worker["id"]] = self._tier(worker["tier"])
        self._joined_at[worker["id"]] = event["time"]
        history.hosts.add(worker["host"])
        host = self._host_of[worker["id"]] = history.by_host.setdefault(worker["host"], HostFigures())
        host.joined += 1
        for group in (history.workers, tier):
            group.joined += 1
            group.connected(event["time"], 1)

    def _lost(self, event: dict[str, Any]) -> None:
        worker, time = event["worker"], event["time"]
        self._running.pop(worker, None)
        joined = self._joined_at.pop(worker, None)
        if joined is None:
            return
        # As the scheduler counts: what was given back was not taken, whatever became of it then.
        returned = worker in self._released
        evicted = not returned and (event["evicted"] or worker in self._noticed_ones)
        if not returned:
            self.history.losses.append((time, evicted))
        self._host_of[worker].evicted += evicted
        self._host_of[worker].lost += not evicted and not returned
        for group in (self.history.workers, self._tier_of[worker]):
            group.lost += 1
            group.evicted += evicted
            group.returned += returned
            group.connected(time, -1)
            (group.lifetimes if evicted else group.stays).append(time - joined)

    def _noticed(self, event: dict[str, Any]) -> None:
        self.history.notices += 1
        self._noticed_ones.add(event["worker"])

    # --- tiers and their jobs

    def _tier(self, name: str) -> TierHistory:
        if name not in self.history.tiers:
            self.history.tiers[name] = TierHistory()
        return self.history.tiers[name]

    def _offered(self, event: dict[str, Any]) -> None:
        self._tier(event["tier"]["name"])

    def _job(self, event: dict[str, Any]) -> None:
        for group in (self.history.workers, self._tier(event["tier"])):
            if event["is"] == "JobHeld":
                group.held[event["reason"]] = group.held.get(event["reason"], 0) + 1
            elif event["is"] == "JobEvicted":
                group.jobs_evicted += 1
            else:
                group.jobs_started += 1
                if event["waited"] is not None:
                    group.waits.add(event["waited"])

    def _job_failed(self, event: dict[str, Any]) -> None:
        self.history.by_host.setdefault(event["host"], HostFigures()).jobs_failed += 1

    # --- items and calls

    def _submitted(self, event: dict[str, Any]) -> None:
        self.history.items.submitted += sum(end - first for first, end in event["items"])

    def _cancelled(self, event: dict[str, Any]) -> None:
        self.history.items.cancelled += self._close(event["items"])

    def _app_of(self, app: str) -> AppHistory:
        if app not in self.history.apps:  # Not with setdefault, which would make histograms for every call.
            self.history.apps[app] = AppHistory(app)
        return self.history.apps[app]

    def _attempt(self, event: dict[str, Any]) -> tuple[str, int] | None:
        """Return the app and the number of items of a call that has ended, None if it is not known, or was over."""
        return self._running.get(event["worker"], {}).pop(event["attempt"], None)

    def _answered_some(self, event: dict[str, Any]) -> None:
        self._answered[event["attempt"]] = event["first"] + event["count"]

    def _ended(self, event: dict[str, Any]) -> None:
        """Record the end of a call; one that answered its items one by one may have ended before the last."""
        if event["is"] == "StepFinished":  # Of sessions, which have no items.
            self._on(event).calls += 1
            return
        attempt, items = self._attempt(event), self._answered.pop(event["attempt"], 0)
        if attempt is None:
            return
        self._on(event).calls += 1
        if event["is"] == "BatchFinished":
            items = attempt[1]
        elif not items:
            return
        app = self._app_of(attempt[0])
        app.calls += 1
        app.items += items
        app.call_seconds.add(event["seconds"])
        app.item_seconds.add(event["seconds"] / max(items, 1))

    def _on(self, event: dict[str, Any]) -> HostFigures:
        """Return where it happened."""
        return self._host_of.get(event["worker"], HostFigures())

    def _failed(self, event: dict[str, Any]) -> None:
        attempt, kind = self._attempt(event), event["failure"]["kind"]
        if attempt is not None and kind != "cancelled":
            self.history.causes.call(event["failure"])
            self._on(event).failed += 1
            failed = self._app_of(attempt[0]).failed
            failed[kind] = failed.get(kind, 0) + 1

    # --- declarations and contexts

    def _app(self, event: dict[str, Any]) -> None:
        app = self._app_of(event["app"]["id"])
        app.name, app.spec = event["app"]["name"], event["app"]

    def _context(self, event: dict[str, Any]) -> None:
        if event["context"]["id"]:  # The empty one stands for calls that need none.
            loads = self._loads_of(event["context"]["id"])
            loads.name, loads.spec = event["context"]["name"], event["context"]

    def _loads_of(self, context: str) -> ContextLoads:
        return self.history.contexts.setdefault(context, ContextLoads(context or "(no context)"))

    def _staged(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).staged += 1

    def _ready(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).load_seconds.add(event["seconds"])

    def _woken(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).wake_seconds.add(event["seconds"])

    def _context_failed(self, event: dict[str, Any]) -> None:
        self._loads_of(event["context"]).failed += 1
        self._on(event).contexts_failed += 1
        self.history.causes.context(event["failure"])
