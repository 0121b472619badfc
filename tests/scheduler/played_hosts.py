"""Hosts with faults and a scheduler, in virtual time: what each does with what it is told, and what came of it all."""

import dataclasses
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line

GPU_ERROR = ev.Failure("exception", "RuntimeError", "CUDA error: uncorrectable ECC error", machine=True)
ORDINARY = ev.Failure("exception", "ValueError", "bad row")


@dataclasses.dataclass
class Host:
    """How a host behaves.

    :ivar fails: (time, worker's number on the host, the pool's generator) -> why a call fails there, else None.
    :ivar item_seconds: of a row; `fail_seconds`, of a call that fails (None: as of one that does not).
    :ivar build_seconds: of its contexts.
    :ivar builds: (time, generator) -> why a context fails there, else None.
    :ivar models: the GPU model of each worker, if they have GPUs.
    :ivar lives: seconds after which a worker there is lost without notice, on average; another joins two seconds later.
    :ivar only: the app for which calls fail there, if it is one alone.
    """

    name: str
    workers: int = 3
    fails: Callable[..., ev.Failure | None] = lambda now, number, rng: None
    item_seconds: float = 0.1
    fail_seconds: float | None = 0.01
    build_seconds: float = 2.0
    builds: Callable[..., ev.Failure | None] = lambda now, rng: None
    build_fail_seconds: float = 0.1
    joins: float = 0.0
    models: tuple[str, ...] = ()
    lives: float = math.inf
    only: str = ""
    tier: str = "default"


def black_hole(name, since=0.0, failure=GPU_ERROR, **options):
    return Host(name, fails=lambda now, number, rng: failure if now >= since else None, **options)


class Pool:
    """Rows answered by hosts, until all are answered or dead.

    :param bad_rows: that fail wherever they are.
    :param longer: row -> how many times as long as others it takes.
    :param other_rows: of another app, with the same context.
    :param evictions: workers taken back a second, each host of whom another joins two seconds later.
    """

    def __init__(
        self,
        hosts,
        rows=2000,
        size=10,
        retries=0,
        seed=0,
        bad_rows=(),
        evictions=0.0,
        limits=None,
        batch=True,
        other_rows=0,
        longer=None,
        **chosen,
    ):
        self.scheduler = Scheduler(
            Policies.chosen({"batching": {"policy": "fixed", "size": size}, **chosen}), limits or Limits(), seed
        )
        self.hosts = {host.name: host for host in hosts}
        self.rng = random.Random(seed)
        self.now, self._order = 0.0, itertools.count()
        self._due = []
        self.dead, self.done, self.runs = {}, Counter(), Counter()
        self.notes, self.excluded, self.released = [], [], []
        self.bad_rows, self.longer = set(bad_rows), longer or {}
        self.workers, self._incarnations = {}, itertools.count()
        self.makespan = None
        self.rows = rows + other_rows
        self._over = set()  # Attempts that were ended.
        self._first, self._told = first_line(self.scheduler, simulated=True), []
        for tier in dict.fromkeys(host.tier for host in hosts):
            there = sum(host.workers for host in hosts if host.tier == tier)
            self.tell(ev.TierOffered(0.0, ev.TierSpec(tier, 0, there)))
        self.tell(ev.ContextDeclared(0.0, ev.ContextSpec("model", "model")))
        self.tell(ev.AppDeclared(0.0, ev.AppSpec("verify", "verify", "model", retries=retries, batch=batch)))
        self.tell(ev.ItemsSubmitted(0.0, "verify", range(rows)))
        if other_rows:
            self.tell(ev.AppDeclared(0.0, ev.AppSpec("other", "other", "model", retries=retries, batch=batch)))
            self.tell(ev.ItemsSubmitted(0.0, "other", range(rows, rows + other_rows)))
        for host in hosts:
            for number in range(host.workers):
                self.at(host.joins, self.join, host, number)
        self.at(1.0, self.tick)
        if evictions:
            self.at(self.rng.expovariate(evictions), self.evict, evictions)

    # --- time

    def at(self, time, act, *values):
        heapq.heappush(self._due, (time, next(self._order), act, values))

    def run(self, until=100_000.0, check=True):
        """Play; gives itself."""
        while self._due and self._due[0][0] <= until and self.scheduler.state.open:
            self.now, _, act, values = heapq.heappop(self._due)
            act(*values)
            if check and next(self._order) % 50 == 0:
                self.scheduler.validate()
        self.scheduler.validate()
        assert not self.done or max(self.done.values()) == 1, "a row was answered twice"
        assert not self.done.keys() & self.dead.keys()
        if not self.scheduler.state.open:
            assert len(self.done) + len(self.dead) == self.rows, "a row was lost"
            self.makespan = self.now
        return self

    def tick(self):
        self.tell(ev.Tick(self.now))
        self.at(self.now + 1.0, self.tick)

    def tell(self, event):
        commands = self.scheduler.handle(event)
        self._told.append((event, commands))
        for command in commands:
            self.obey(command)
        wake = self.scheduler.next_wake
        if wake is not None and wake > self.now:
            self.at(wake, lambda: self.tell(ev.Tick(self.now)))

    # --- workers

    def join(self, host, number):
        name = f"{host.name}/{number}/{next(self._incarnations)}"
        self.workers[name] = (host, number)
        model = host.models[number] if host.models else None
        devices = (f"{host.name}-{number}",) if model else ()
        spec = ev.WorkerSpec(name, host=host.name, tier=host.tier, gpu_model=model, devices=devices)
        self.tell(ev.WorkerJoined(self.now, spec))
        if host.lives < math.inf:
            self.at(self.now + self.rng.expovariate(1 / host.lives), self.crash, name)

    def crash(self, name):
        if name in self.workers:
            host, number = self.workers.pop(name)
            self.tell(ev.WorkerLost(self.now, name))
            self.at(self.now + 2.0, self.join, host, number)

    def evict(self, rate):
        if self.workers:
            name = self.rng.choice(sorted(self.workers))
            host, number = self.workers.pop(name)
            self.tell(ev.WorkerLost(self.now, name, evicted=True))
            self.at(self.now + 2.0, self.join, host, number)
        self.at(self.now + self.rng.expovariate(rate), self.evict, rate)

    def obey(self, command):
        if isinstance(command, cmd.Deliver):
            self.done.update(command.items)
        elif isinstance(command, cmd.Bury):
            self.dead.update(dict.fromkeys(command.items, command.failure))
        elif isinstance(command, cmd.Note):
            self.notes.append((self.now, command.text))
        elif isinstance(command, cmd.Exclude):
            self.excluded.append((self.now, tuple(command.hosts)))
        elif isinstance(command, cmd.Release):
            self.released.append((self.now, command.worker))
            self.at(self.now + 0.1, self.go, command.worker)
        elif isinstance(command, cmd.Abandon):
            self._over.add(command.attempt)
        elif isinstance(command, cmd.Load) and command.worker in self.workers:
            host, _ = self.workers[command.worker]
            failure = host.builds(self.now, self.rng)
            seconds = host.build_seconds if failure is None else host.build_fail_seconds
            self.at(self.now + seconds, self.built, command.worker, command.context, failure)
        elif isinstance(command, cmd.Run) and command.worker in self.workers:
            self.begin(command)

    def go(self, name):
        if self.workers.pop(name, None) is not None:
            self.tell(ev.WorkerLost(self.now, name, evicted=True))

    def built(self, worker, context, failure):
        if worker not in self.workers:
            return
        if failure is None:
            self.tell(ev.ContextReady(self.now, worker, context, self.workers[worker][0].build_seconds))
        else:
            host = self.workers[worker][0].name
            self.tell(
                ev.ContextFailed(self.now, worker, context, dataclasses.replace(failure, worker=worker, host=host))
            )

    def begin(self, run):
        host, number = self.workers[run.worker]
        self.runs[host.name] += len(run.items)
        failure = host.fails(self.now, number, self.rng) if host.only in ("", run.app) else None
        seconds = host.fail_seconds
        if failure is None or seconds is None:
            bad = [n for n, item in enumerate(run.items) if item in self.bad_rows]
            failure = ORDINARY if bad else failure
            tried = run.items[: bad[0] + 1] if bad else run.items
            seconds = sum(self.longer.get(item, 1.0) for item in tried) * host.item_seconds
        seconds *= self.rng.uniform(0.8, 1.2)
        self.at(self.now + seconds, self.end, run, seconds, failure)

    def end(self, run, seconds, failure):
        if run.worker not in self.workers or run.attempt in self._over:
            return
        if failure is None:
            self.tell(ev.BatchFinished(self.now, run.worker, run.attempt, seconds))
        else:
            host = self.workers[run.worker][0].name
            failure = dataclasses.replace(failure, worker=run.worker, host=host)
            crashed = failure.kind == "crash"
            self.tell(ev.BatchFailed(self.now, run.worker, run.attempt, failure, lost_context=crashed))

    @property
    def log(self):
        return [each + "\n" for each in (self._first, *(line(*told) for told in self._told))]

    @property
    def lost_rows(self):
        """The dead that a good host could have answered."""
        return sorted(self.dead.keys() - self.bad_rows)
