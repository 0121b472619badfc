"""The policies of each family that need no tuning: routing, placement, sessions, batching and scaling, and `none`.

How the scaling policy `queue-proportional` counts, and where that is simpler than the truth:

- *Calls.* An app's queue is divided by the size of the batch that the worker connected longest would get now; its
  running batches are a call each. What a short queue is shared out into therefore counts as calls.
- *Speed.* All workers count alike, whatever their GPU: `calls_per_worker` is the only knob.
- *Who may run what.* Calls of apps that the same tiers may run are counted together (`helpers.divided`).
- *Prices* order the tiers, and are not weighed against waiting: a tier without a price comes after those with one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ctxflow.policies.helpers import (
    SESSIONS,
    FreeSlots,
    Peak,
    QueueShares,
    active,
    divided,
    is_ready,
    loads,
    outstanding,
    seekers,
    sessions_of_worker,
    tiers_for,
    urgency,
)
from ctxflow.policies.load_or_wait import LoadOrWait
from ctxflow.policies.protocols import Assignment, PlaceRequest, Plan, Trial, Verdict, View
from ctxflow.policies.stragglers import SlowWorkersBatches
from ctxflow.policies.views import AppView, WorkerView

# --- routing

MOST_IN_VAIN = 8  # Workers whose contexts are not worth giving way: the next ones' would not be either.
MOST_UNABLE = 64  # Workers that may not load what waits, in a decision; those after them are asked once a second.


class ContextAffinity:
    """Work goes where its context is; what these workers do not get done in the time of a load spreads over others.

    A free worker that holds the context of a waiting app takes that app's work. Workers left over are shared
    among the apps for which a load pays (`load_or_wait.LoadOrWait`), most items per holding worker first; each takes
    the worker that holds least, so that the fewest contexts are built and unloaded. Who must be drained for it comes
    last.
    """

    @functools.cached_property
    def _choice(self) -> LoadOrWait:  # Made when it is needed: those who inherit from this class need not call it.
        return LoadOrWait()

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose by priority, then by affinity."""
        ordered = sorted(ready, key=urgency) if len(ready) > 1 else ready
        slots = FreeSlots(view)
        left = {app.id: app.backlog for app in ready}
        chosen: list[Assignment] = []
        all_asked = False
        for drained in (False, True):
            for app in ordered:
                if not slots.total:
                    return chosen
                chosen += self._given(app, view.free_holders(app.context), left, slots, drained)
            for app in ready:  # To wake a context takes less than to build it elsewhere.
                chosen += self._given(app, view.free_parked(app.context), left, slots, drained)
            if not slots.total:
                break
            # Where calls overlap, who has the context has got what its window had room for.
            waiting = {
                app.id: app
                for app in ready
                if left[app.id] > 0
                and app.unclaimed > 0
                and not (app.overlaps and view.holders(app.context) >= len(view.workers))
            }
            if waiting:
                all_asked = self._choice.look(view) or all_asked
                chosen += self._spread(view, waiting, left, slots, drained, math.inf if all_asked else MOST_UNABLE)
            if not view.in_flight:
                break  # There is nobody to drain.
        return chosen

    def _given(
        self, app: AppView, workers: Iterable[WorkerView], left: dict[str, int], slots: FreeSlots, drained: bool
    ) -> Iterator[Assignment]:
        """Assign calls of an app to workers in turn while any are left: to those drained for it, or to the others."""
        while workers:
            again = []
            for worker in workers:
                if left[app.id] <= 0 or not slots.total:
                    return
                able = slots.left[worker.id] > 0 and slots.view.can_run(app, worker)
                if able and slots.view.drains(app, worker) == drained:
                    left[app.id] -= slots.take(app, worker)
                    yield Assignment(worker.id, app.id)
                    if slots.left[worker.id] > 0 and not app.overlaps:  # What overlaps has all of a window at once.
                        again.append(worker)
            workers = again

    def _spread(
        self,
        view: View,
        waiting: dict[str, AppView],
        left: dict[str, int],
        slots: FreeSlots,
        drained: bool,
        most_unable: float,
    ) -> Iterator[Assignment]:
        """Give apps to workers that do not hold their contexts, and build them, where that pays.

        :param most_unable: workers that may load none of them, after which no others are asked.
        """
        choice = self._choice
        work: dict[str, float] = {}  # Context -> seconds of a worker's time that wait for it.
        for app in waiting.values():
            left[app.id] = min(left[app.id], app.unclaimed)
            work[app.context] = work.get(app.context, 0.0) + left[app.id] * choice.item_seconds(view, app)
        refused = {name for name, app in waiting.items() if self._refused(app, slots)}
        waiting = {
            name: app for name, app in waiting.items() if name in refused or choice.pays(view, app, work[app.context])
        }
        if not waiting:
            return
        holders = {app.id: view.holders(app.context) for app in waiting.values()}
        in_vain = unable = 0
        for worker in view.free_by_load():
            if unable >= most_unable:
                return
            if slots.left[worker.id] <= 0:
                continue
            able = [
                a
                for a in waiting.values()
                if left[a.id] > 0 and view.can_run(a, worker) and view.drains(a, worker) == drained
            ]
            paying = [
                a for a in able if a.id in refused or choice.pays(view, a, work[a.context], view.gives_way(a, worker))
            ]
            if not paying:
                in_vain += bool(able)
                unable += not able
                if in_vain == MOST_IN_VAIN or not any(left[name] > 0 for name in waiting):
                    return
                continue
            app = min(paying, key=lambda a: (urgency(a)[:2], -left[a.id] / (holders[a.id] + 1), a.order))
            items, seconds = slots.take(app, worker), choice.item_seconds(view, app)
            left[app.id] -= items
            work[app.context] -= items * seconds if seconds < math.inf else 0.0
            choice.begins(view, app.context)
            yield Assignment(worker.id, app.id)
            holders[app.id] += 1

    @staticmethod
    def _refused(app: AppView, slots: FreeSlots) -> bool:
        """Return whether a worker that holds an app's context and has room may not run what waits: it failed there."""
        view, context = slots.view, app.context
        for worker in view.free_holders(context):
            if slots.left[worker.id] > 0 and not worker.in_flight(context) and not view.can_run(app, worker):
                return True
        return False


class LeastLoaded:
    """The most urgent work goes to the worker that runs the least, whatever it holds.

    A window counts by the share of it that is taken, and is drained only for what nobody else could take.
    """

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose the worker with the fewest calls, then the longest free."""
        slots = FreeSlots(view)
        for app in sorted(ready, key=urgency):
            left = app.backlog
            for worker in slots.least_first(app, lambda w: slots.used[w.id]):
                if left <= 0:
                    break
                left -= slots.take(app, worker)
                yield Assignment(worker.id, app.id)


class RoundRobin:
    """Apps in turn, workers in turn, those free longest first: the baseline that knows nothing but what is loaded.

    But a window is not drained for an app's turn while its own apps wait, unless no worker has that app's context.

    :param keep: whether an app's turn goes to free workers that hold its context first; without it each free slot gets
        the next app in turn, and loads what that needs.
    """

    def __init__(self, keep: bool = False) -> None:
        self._turn = 0
        self._keep = keep

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Give each free slot the next app in turn."""
        left = {app.id: app.backlog for app in ready}
        slots = FreeSlots(view)
        able = {app.id: {worker.id for worker in slots.able(app)} for app in ready}
        for held in (True, False) if self._keep else (False,):
            for worker in list(view.free.values()):
                while slots.left[worker.id] > 0:
                    apps = [a for a in ready if left[a.id] > 0 and worker.id in able[a.id] and view.can_run(a, worker)]
                    if held:
                        apps = [a for a in apps if a.context in worker.contexts and not view.drains(a, worker)]
                    apps = [a for a in apps if not (view.drains(a, worker) and view.holders(a.context))] or apps
                    if not apps:
                        break
                    app = apps[self._turn % len(apps)]
                    self._turn += 1
                    left[app.id] -= slots.take(app, worker)
                    yield Assignment(worker.id, app.id)


# --- what no choice is made in, and where sessions go


class Everywhere:
    """Every context may be loaded on every tier, within the site's bounds."""

    def plan(self, view: View) -> Plan:
        """Return the plan without limits."""
        return _ANYWHERE


_ANYWHERE = Plan()


class LeastLoadedSessions:
    """A session goes to the worker with the fewest sessions that have something to do, and stays there.

    At equal numbers to one that has its context, then to the one with the fewest slots in use: a step waits for calls
    in flight there. Nobody waits for a context to be built that another worker has: where one without it will have two
    sessions fewer, a session makes its first chunks where it is ready, and moves once it is built; where it is one, it
    stays there. Afterwards it moves only where its worker is to go, or may not carry it any more.
    """

    def __init__(self) -> None:
        self._moving: dict[int, str] = {}  # Session -> the worker that is to build its context.

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return a worker for each session that needs one, and for those whose first chunks were made elsewhere."""
        waiting = seekers(view)
        if not waiting and not self._moving:
            return {}
        counts = loads(view)
        placed = self._moved(view, counts)
        for session in waiting:
            able = [worker for name in counts if view.can_carry(session, worker := view.workers[name])]
            if able:
                best = min(able, key=lambda w: (counts[w.id], not is_ready(w, session.context), w.slots_used))
                ready = [worker for worker in able if is_ready(worker, session.context)]
                now = min(ready, key=lambda w: (counts[w.id], w.slots_used), default=best)
                if counts[now.id] < counts[best.id] + _FEWER:
                    best = now
                elif now is not best:
                    self._moving[session.id] = best.id
                counts[best.id] += 1
                placed[session.id] = now.id
        return placed

    def _moved(self, view: View, counts: dict[str, int]) -> dict[int, str | None]:
        """Return where those go now that were placed elsewhere meanwhile, and count them there."""
        placed: dict[int, str | None] = {}
        for number, worker in list(self._moving.items()):
            session = view.sessions.get(number)
            if session is not None and session.state == "migrating":
                continue  # Its state is still on its way to where it makes its first chunks.
            del self._moving[number]
            if session is not None and session.state == "placed" and worker in counts and session.worker in counts:
                counts[session.worker] -= 1
                counts[worker] += 1
                placed[number] = worker
        return placed


_FEWER = 2
"""Sessions that a worker has fewer than one where the context is ready, so that it is to build it for the next."""


class NoPreemption:
    """Preempt nobody."""

    reserves = False
    patience = grace = idle = 0.0

    def victims(self, view: View, request: PlaceRequest) -> None:
        """Return nobody."""
        return


class NoQuarantine:
    """Every host is trusted, whatever happens there."""

    probation = 0.0

    def observe(self, view: View, trial: Trial) -> None:
        """Keep nothing."""

    def doubts(self, view: View, worker: WorkerView, app: AppView) -> bool:
        """Return False, always."""
        return False

    def judge(self, view: View) -> Sequence[Verdict]:
        """Return nobody."""
        return ()


# --- batches

GROWTH = 2  # A step serves at most so many times as many sessions as a step that met the target did.
WINDOW = 64  # Items in flight on a worker, where nobody says otherwise.
MOST_SESSIONS = 64  # Of a step, where nobody says otherwise.


class Fixed:
    """Batches of `size` items, or of what the app asks for.

    A short queue is shared out evenly, so that no worker idles while another holds a full batch, unless
    `share` is off. Nothing waits for a batch to fill, unless `linger` says for how long. Once nothing is queued, idle
    workers run once more what is on workers that are far slower.

    :param size: items a batch where the app does not say.
    :param linger: seconds that a queue shorter than a batch may wait for more.
    :param share: whether a short queue is divided by the workers connected.
    :param window: items of an app whose calls overlap that a worker has in flight at a time. An engine for one GPU
        rarely gains more than a few per cent beyond the default, and an eviction loses what is in flight.
    :raises ValueError: for a size or a window below 1, or a negative linger.
    """

    def __init__(self, size: int = 100, linger: float = 0.0, share: bool = True, window: int = WINDOW) -> None:
        if window < 1:
            raise ValueError("window is the number of items in flight on a worker: give 1 or more")
        if size < 1:
            raise ValueError("size is the number of items in a batch: give 1 or more")
        if linger < 0:
            raise ValueError("linger is a number of seconds: give 0 or more")
        self._size = size
        self.linger = linger
        self._share = share
        self._most = MOST_SESSIONS
        self._window = window
        self._shares = QueueShares()
        self._stragglers = SlowWorkersBatches()

    def size(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the fixed size, less where the queue is short."""
        wish = app.batch_size or self._size
        since = app.waiting_since
        if self.linger and app.backlog < wish and since is not None and view.now < since + self.linger:
            return 0
        if not self._share:
            return wish
        # -(-a // b) is the ceiling of a / b.
        return min(wish, -(-app.backlog // len(view.workers)))

    def duplicate(self, view: View, worker: WorkerView) -> int | None:
        """Return the batch that will take longest, if it is on a far slower worker, and this one is done sooner."""
        return self._stragglers.for_worker(view, worker)

    def window(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the fixed window, less where what is left does not fill those of all workers."""
        if not self._share or app.backlog >= self._window * len(view.workers):
            return self._window
        return min(self._window, self._shares.share(view, app, worker))

    def coalesced(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return K, as steps of the worker were measured to take."""
        return coalesced(app, worker, self._most)


class Coalescing(Fixed):
    """Steps of as many sessions as the chunk target allows; batches of items as `fixed` makes them.

    K, the most sessions of a step, is measured: the largest number with which steps were seen to meet the target, and
    up to twice that where the time of a step promises that they will. An app without a chunk target has all its ready
    sessions in one step, up to `most`.

    Other batching policies coalesce sessions so too, with the defaults.

    :param most: sessions of a step, at most.
    :raises ValueError: for a number below 1.
    """

    def __init__(
        self,
        most: int = MOST_SESSIONS,
        size: int = 100,
        linger: float = 0.0,
        share: bool = True,
        window: int = WINDOW,
    ) -> None:
        super().__init__(size, linger, share, window)
        if most < 1:
            raise ValueError("most is the number of sessions that a step may serve: give 1 or more")
        self._most = most


def coalesced(app: AppView, worker: WorkerView, most: int = MOST_SESSIONS) -> int:
    """Return K of an app on a worker: all its ready sessions, up to `most`, where the app has no chunk target."""
    if app.chunk_target is None:
        return most
    return min(most, measured(worker.step_seconds(app.id), app.chunk_target))


def measured(seconds: Mapping[int, float], target: float) -> int:
    """Return K by the measured seconds of steps with so many sessions.

    >>> measured({}, 0.2), measured({1: 0.15}, 0.2), measured({1: 0.05, 2: 0.06}, 0.2), measured({1: 0.3}, 0.2)
    (1, 1, 4, 1)
    >>> measured({1: 0.05, 4: 0.16, 5: 0.21}, 0.2)
    4
    """
    met = [count for count, each in seconds.items() if each <= target]
    if not met:
        return 1
    largest = max(met)
    missed = [count for count, each in seconds.items() if each > target and count > largest]
    # A step with twice the sessions takes at most twice as long, or no longer than the line through two says.
    smaller = [count for count in seconds if count < largest]
    each = seconds[largest] / largest
    if smaller:
        other = max(smaller)
        each = max(1e-9, (seconds[largest] - seconds[other]) / (largest - other))
    promised = largest + int((target - seconds[largest]) / each + 1e-9)
    limit = min([GROWTH * largest, *(count - 1 for count in missed)])
    return max(largest, min(promised, limit))


# --- how many workers


class FixedWorkers:
    """As many workers of every tier, all the time.

    :param workers: workers a tier, within its bounds; None for the most that the site allows.
    :raises ValueError: for a negative number.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 0:
            raise ValueError("workers is how many to hold: give 0 or more")
        self._workers = workers

    def target(self, view: View) -> Mapping[str, int]:
        """Return the same number whatever the load."""
        wish = self._workers
        return {
            name: tier.maximum if wish is None else max(tier.minimum, min(tier.maximum, wish))
            for name, tier in view.tiers.items()
        }


class QueueProportional:
    """One worker for every so many calls that are queued or running, asked for everywhere at once.

    Sessions that have something to do want a worker for every so many that one was measured to serve.

    Every tier that can run the calls is asked for all that is not connected yet, since an opportunistic one may never
    give its workers. When less is wanted than is connected, the cheapest tiers are kept.

    Guarantees, for given workers: a longer queue never lowers what any tier is asked for, as far as batches do not
    shrink with it; without anything outstanding each tier is asked for its minimum once `linger` seconds are over.

    :param calls_per_worker: calls, queued or running, for which one worker is held.
    :param linger: seconds for which fewer workers must be wanted before any is given back.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there to size one for.
    :raises ValueError: for a number that makes no sense.
    """

    releases_idle = True

    def __init__(self, calls_per_worker: float = 4, linger: float = 60.0, batch_size: int = 100) -> None:
        if not (math.isfinite(calls_per_worker) and calls_per_worker > 0):
            raise ValueError("calls_per_worker is how many calls a worker is held for: give more than 0")
        if not linger >= 0:
            raise ValueError("linger is a number of seconds: give 0 or more")
        if batch_size < 1:
            raise ValueError("batch_size is the number of items in a call: give 1 or more")
        self._calls_per_worker = calls_per_worker
        self._linger = linger
        self._batch_size = batch_size
        self._peaks: dict[frozenset[str], Peak] = {}

    def target(self, view: View) -> Mapping[str, int]:
        """Return what each tier is asked for: what is used of its workers, and all that nobody has given yet."""
        now: dict[frozenset[str], float] = {}  # Workers wanted by the tiers that will do.
        sessions = active(view)
        for app, calls in outstanding(view, self._batch_size).items():
            group = tiers_for(view, view.apps[app])
            wanted = calls / self._calls_per_worker
            if app in sessions:
                wanted += len(sessions[app]) / sessions_of_worker(view, view.apps[app], SESSIONS)
            now[group] = now.get(group, 0.0) + wanted
        # What other tiers may run since there is another plan is counted there.
        self._peaks = {group: self._peaks.get(group) or Peak() for group in now}
        most = {group: self._peaks[group].over(wanted, view.now, self._linger) for group, wanted in now.items()}
        return divided(view, most)
