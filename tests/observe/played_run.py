"""The event log of a run on three tiers that another user squeezes, played by the real scheduler in virtual time."""

import heapq
import itertools
import random

from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line

SPEEDS = {"a10": 0.06, "titan-x": 0.1, "quadro": 0.18}  # Seconds an item.
SQUEEZE, RELIEF = 250.0, 500.0


class Played:
    """A run of 8 workers that are squeezed to 2 for a while, and evicted now and then besides.

    :param lines: gets the event log.
    """

    def __init__(self, lines, items=40_000, seed=1):
        chosen = {
            "routing": "context-affinity", "batching": {"policy": "fixed", "size": 100}, "placement": "everywhere",
            "preemption": "none", "scaling": "fixed",
        }  # fmt: skip
        self.scheduler = Scheduler(Policies(**{family: make(family, choice) for family, choice in chosen.items()}))
        self.lines, self.random = lines, random.Random(seed)
        self.due, self.order = [], itertools.count()
        self.names, self.jobs = itertools.count(1), {}
        for tier, most in (("a10", 3), ("titan-x", 3), ("quadro", 2)):
            self.tell(ev.TierOffered(0.0, ev.TierSpec(tier, 0, most, gpus=1)))
        self.tell(ev.ContextDeclared(0.0, ev.ContextSpec("c", "encoder", gpus=1)))
        self.tell(ev.AppDeclared(0.0, ev.AppSpec("v", "verify", "c")))
        self.tell(ev.ItemsSubmitted(0.0, "v", range(items)))

    @property
    def state(self):
        return self.scheduler.state

    def later(self, seconds, make_event):
        heapq.heappush(self.due, (self.state.now + seconds, next(self.order), make_event))

    def tell(self, event):
        commands = self.scheduler.handle(event)
        self.lines.append(line(event, commands) + "\n")
        for command in commands:
            self.obey(command)

    def obey(self, command):
        if isinstance(command, cmd.Acquire):
            for _ in range(command.workers):
                self.ask(command.tier, self.random.uniform(5, 60))
        elif isinstance(command, cmd.Load):
            self.later(25.0, lambda now: ev.ContextReady(now, command.worker, "c", 25.0))
        elif isinstance(command, cmd.Run):
            seconds = 0.5 + len(command.items) * SPEEDS[self.state.workers[command.worker].tier]
            seconds *= self.random.lognormvariate(0, 0.1)
            self.later(seconds, lambda now: ev.BatchFinished(now, command.worker, command.attempt, seconds))

    def ask(self, tier, wait):
        """A job is asked for, which starts after some time, unless the pool is squeezed then."""

        def start(now):
            if SQUEEZE <= now < RELIEF:
                self.ask(tier, RELIEF - now + self.random.uniform(0, 90))
                return None
            number = next(self.names)
            worker = f"{number}.0"
            self.later(2.0, lambda now: ev.WorkerJoined(now, ev.WorkerSpec(worker, f"node{number % 5}", tier, gpus=1)))
            mean = {"a10": 500.0, "titan-x": 1500.0, "quadro": 4000.0}[tier]
            self.later(2.0 + self.random.expovariate(1 / mean), lambda now: self.evict(worker))
            return ev.JobStarted(now, tier, worker, wait)

        self.later(wait, start)

    def evict(self, name):
        worker = self.state.workers.get(name)
        if worker is None:
            return None
        self.ask(worker.tier, self.random.uniform(5, 60))
        self.tell(ev.JobEvicted(self.state.now, worker.tier, name, "preempted by another user's job"))
        return ev.WorkerLost(self.state.now, name, evicted=True)

    def squeeze(self, now):
        for name in list(self.state.workers)[2:]:
            self.tell(self.evict(name))
        self.tell(ev.JobHeld(now, "titan-x", "77.0", "the job's memory usage exceeded its request"))

    def play(self):
        """To the last answer; gives the scheduler's state then."""
        self.later(SQUEEZE, self.squeeze)
        while self.state.open:
            time, _, make_event = heapq.heappop(self.due)
            self.state.now = max(self.state.now, time)
            event = make_event(time)
            if event is not None:
                self.tell(event)
        self.scheduler.validate()
        return self.state
