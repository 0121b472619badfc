"""Engines whose throughput depends on what is in flight, in virtual time, whose windows a policy is asked for."""

import heapq
import math
import random
from dataclasses import dataclass, field

from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneAttempt, SceneContext, SceneTier, SceneWorker

RATE = 2000.0  # Work a second at best.
PROMPT = 0.1  # The work of a token that is read, in tokens that are written.


def saturating(knee, bend=1.7):
    return lambda n: RATE * (n / knee) / (1 + (n / knee) ** bend) ** (1 / bend)


def hyperbolic(knee):
    return lambda n: RATE * n / (n + knee)


def hard(knee):
    return lambda n: RATE * min(1, n / knee)


def exponential(knee):
    return lambda n: RATE * (1 - math.exp(-n / knee))


def logarithmic(knee):
    return lambda n: RATE * math.log1p(n / knee)


def flat(knee):
    return lambda n: RATE


def falling(knee):
    return lambda n: RATE * (n / knee if n <= knee else 1 / (1 + 0.3 * math.log2(n / knee)))


def cliff(knee):
    """Rising, until the memory does not suffice for more."""
    return lambda n: saturating(knee, 2.0)(n) * (0.55 if n > max(2, 3 * knee) else 1)


SHAPES = (saturating, hyperbolic, hard, exponential, logarithmic, flat, falling, cliff)


@dataclass
class Engine:
    """One worker's engine: all in flight share its time evenly; each has done so much work as the clock `each` says."""

    worker: SceneWorker
    pace: float
    dies: float
    each: float = 0.0
    now: float = 0.0
    heap: list = field(default_factory=list)


@dataclass
class Run:
    """Items without end on workers that are evicted at a rate, `length` times as long as usual.

    :ivar windows: (items that had ended, window) each time that it changed.
    """

    rate: object
    policy: object
    seed: int = 0
    spread: float = 1.0
    counted: bool = True
    workers: int = 1
    evictions: float = 0.0
    length: float = 1.0
    drift: float = 0.0
    bears: int | None = None
    tier: str = "default"

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.app = SceneApp("ask", "model", backlog=10**9, overlaps=True, concurrency=self.bears)
        tiers = {self.tier: SceneTier(self.tier)}
        self.scene = Scene(apps={"ask": self.app}, tiers=tiers)
        self.engines, self.items, self.done, self.tokens = {}, 0, 0, 0.0
        self.windows, self.lifetimes, self.lived = [], [], 0.0
        self.lost = []  # Work and tokens of items that were in flight where a worker was evicted: they run again.
        for _ in range(self.workers):
            self._join()

    def _join(self):
        now = self.scene.now
        name = f"w{self.items}-{len(self.lifetimes)}-{len(self.engines)}"
        worker = SceneWorker(name, self.tier, joined=now, contexts={"model": SceneContext("model")})
        dies = now + self.chance.expovariate(self.evictions) if self.evictions else math.inf
        self.scene.workers[name] = worker
        self.engines[name] = Engine(worker, math.exp(self.chance.gauss(0, 0.03)), dies, now=now)

    def _speed(self, engine):
        """Work a second of one item in flight."""
        flying = len(engine.heap)
        return self.rate(flying) * engine.pace / flying

    def _fill(self, engine):
        while len(engine.heap) < min(self.bears or 10**6, self.policy.window(self.scene, self.app, engine.worker)):
            self.items += 1
            if self.lost:
                work, tokens = self.lost.pop()
            else:
                read = 100 * self.length * self.chance.lognormvariate(-0.32, 0.8)
                written = 60 * self.length * self.chance.lognormvariate(-(self.spread**2) / 2, self.spread)
                work, tokens = PROMPT * read + written, read + written
            heapq.heappush(engine.heap, (engine.each + work, self.items, tokens, work))
            attempt = SceneAttempt(self.items, "ask", engine.worker.id, [self.items], self.scene.now)
            engine.worker.running[self.items] = attempt
            engine.worker.flying["model"] = len(engine.heap)

    def go_on(self, items):
        """Let so many more items end."""
        end = self.done + items
        while self.done < end:
            for engine in self.engines.values():
                self._fill(engine)
            engine = min(self.engines.values(), key=self._next)
            now = self._next(engine)
            if engine.dies <= now:
                self._evict(engine)
                continue
            engine.each, engine.now = engine.heap[0][0], now
            self.scene.now = max(self.scene.now, now)
            _, number, tokens, _ = heapq.heappop(engine.heap)
            began = engine.worker.running.pop(number).started
            engine.worker.flying["model"] = len(engine.heap)
            self.done += 1
            self.tokens += tokens
            if self.drift and self.chance.random() < 0.01:
                engine.pace = math.exp(self.chance.gauss(0, self.drift))
            if hasattr(self.policy, "finished"):
                told = int(tokens) if self.counted else None
                self.policy.finished(self.scene, self.app, engine.worker, now - began, told)
            window = self.policy.window(self.scene, self.app, engine.worker)
            if not self.windows or self.windows[-1][1] != window:
                self.windows.append((self.done, window))
        return self

    def _next(self, engine):
        return min(engine.dies, engine.now + (engine.heap[0][0] - engine.each) / self._speed(engine))

    def _evict(self, engine):
        now = self.scene.now = max(self.scene.now, engine.dies)
        self.lifetimes.append(now - engine.worker.joined)
        self.lived += self.lifetimes[-1]
        tier = self.scene.tiers[self.tier]
        alive = sum(now - w.joined for w in self.scene.workers.values())
        tier.lifetimes, tier.eviction_rate = self.lifetimes, len(self.lifetimes) / max(self.lived + alive, 1e-9)
        self.lost += [(work, tokens) for _, _, tokens, work in engine.heap]
        del self.engines[engine.worker.id], self.scene.workers[engine.worker.id]
        self._join()

    @property
    def window(self):
        """The window at last."""
        return self.windows[-1][1]
