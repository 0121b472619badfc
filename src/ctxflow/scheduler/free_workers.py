"""The workers that could take a call, and tables of them by what they hold: none is looked for among all."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from ctxflow.policies.views import WorkerView
from ctxflow.scheduler.worker_state import Shown, Worker, hide, show

# The first of these is found at once; of a dictionary, only after as many as were removed before it.
Line = OrderedDict[str, WorkerView]


class FreeTables:
    """The free workers, longest free first.

    :ivar workers: all of them; `shown`: as policies see them; `slots`: the free slots of all.
    :ivar ready: context -> those on which it is ready; `parked`: likewise.
    :ivar by_load: how many contexts a worker holds -> those that hold so many.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.shown: Shown[str, WorkerView] = Shown()
        self.slots = 0
        self.ready: defaultdict[str, Line] = defaultdict(OrderedDict)
        self.parked: defaultdict[str, Line] = defaultdict(OrderedDict)
        self.by_load: defaultdict[int, Line] = defaultdict(OrderedDict)

    def offer(self, worker: Worker) -> None:
        """Add a free worker, or bring the tables up to date with one."""
        name, shown, contexts = worker.id, worker.shown, worker.contexts
        self.slots += worker.free_slots - worker.offered
        if not worker.offered:
            self.workers[name] = worker
            show(self.shown, name, shown)
            self.by_load[len(contexts)][name] = shown
        elif worker.load_offered != len(contexts):
            del self.by_load[worker.load_offered][name]
            self.by_load[len(contexts)][name] = shown
        worker.offered, worker.load_offered = worker.free_slots, len(contexts)
        for context, held in contexts.items():
            if held.state == "ready":
                self.ready[context][name] = shown
            elif context in self.ready:
                self.ready[context].pop(name, None)
        for context in worker.parked:
            self.parked[context][name] = shown

    def withdraw(self, worker: Worker) -> None:
        """Take out a worker that is not free any more."""
        name = worker.id
        self.slots -= worker.offered
        worker.offered = 0
        del self.workers[name]
        if not self.workers:  # Else they keep the size that they had once, and each iteration passes all of it.
            self.workers.clear()
            dict.clear(self.shown)
            for tables in (self.by_load, self.ready, self.parked):
                tables.clear()
            return
        hide(self.shown, name)
        del self.by_load[worker.load_offered][name]
        for lines, contexts in ((self.ready, worker.contexts), (self.parked, worker.parked)):
            for context in contexts:
                if context in lines:
                    lines[context].pop(name, None)

    def drop(self, worker: Worker, context: str) -> None:
        """Note that a worker holds a context no longer, nor has it ready; `RunState.update_free` follows."""
        if context in self.ready:
            self.ready[context].pop(worker.id, None)

    def unpark(self, worker: Worker, context: str) -> bool:
        """Forget that a worker has a context parked; return whether it had."""
        if context in self.parked:
            self.parked[context].pop(worker.id, None)
        return worker.parked.pop(context, None) is not None

    def forget(self, context: str) -> None:
        """Forget a context that no worker has."""
        self.ready.pop(context, None)
        self.parked.pop(context, None)
