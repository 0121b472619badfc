"""Whole jobs on engines whose pace depends on what is in flight, in virtual time: how long a policy's windows take.

A case is drawn by its number: the engines' shape, kinds of workers, lengths, evictions, notice. All policies meet the
same items and the same evictions; what is lost is queued first again.

    python tests/policies/jobs_in_flight.py [FIRST [CASES]]

prints the table of whole jobs in docs/batching.md, of so many cases of each group (24) from the first one on (3000).
"""

import collections
import dataclasses
import functools
import heapq
import math
import random
import statistics
import sys

from engine_in_flight import PROMPT, cliff, exponential, falling, flat, hard, hyperbolic, logarithmic, saturating

from ctxflow.policies.opportunistic import Opportunistic
from ctxflow.policies.simple import Fixed
from ctxflow.policies.throughput_curves import LEVELS
from ctxflow.testing.policy_scenes import Scene, SceneApp, SceneAttempt, SceneContext, SceneTier, SceneWorker

RISING = (saturating, hyperbolic, hard, exponential, logarithmic)
SHAPES = (*RISING, flat, falling, cliff)
RELOAD = 20.0
GIVEN_UP = 3.0
MOMENT = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """A job.

    :ivar rates: of each kind of worker; `kinds`: each worker's kind, and `paces`, how fast it is for that.
    :ivar tokens: the work of each item, and `told`, its tokens: those that are read cost less than those written.
    :ivar evictions: of a worker a second; `notice`: seconds, 0 without.
    :ivar until: the share of all tokens that ends the job: with evictions, what is last is luck.
    """

    number: int
    rates: tuple
    kinds: tuple
    paces: tuple
    tokens: tuple
    told: tuple
    evictions: float = 0.0
    notice: float = 0.0
    counted: bool = True
    until: float = 1.0
    name: str = ""


def lengths(chance, items, mean, spread):
    """The work of each item, and its tokens: answers are log-normal, prompts vary less."""
    variance = math.log1p(spread**2)
    drawn = (chance.lognormvariate(-variance / 2, math.sqrt(variance)) for _ in range(items))
    written = [max(1, round(mean * min(10.0, each))) for each in drawn]
    read = [round(mean * chance.lognormvariate(-0.32, 0.8)) for _ in range(items)]
    return tuple(w + PROMPT * r for w, r in zip(written, read, strict=True)), tuple(
        map(sum, zip(written, read, strict=True))
    )


def draw(number, group):
    """Return a case of a group: `few` items on one worker, `many`, or `evicted`."""
    chance = random.Random(f"{group} {number}")
    shape = SHAPES[number % len(SHAPES)]
    knee = 2 ** chance.uniform(0, 8.5)
    spread = chance.choice([0.5, 1.0, 1.5])
    if group == "few":
        return Case(
            number, (shape(knee),), (0,), (1.0,), *lengths(chance, chance.choice([64, 128, 256]), 100, spread),
            name=f"{shape.__name__}({knee:.1f})",
        )  # fmt: skip
    workers = chance.choice([1, 2, 4])
    several = workers > 1 and chance.random() < 0.4
    rates = [shape(knee)]
    if several:
        factor, slower = chance.choice([0.5, 2.0]), chance.uniform(0.4, 1.0)
        other = shape(knee * factor)
        rates.append(lambda n: slower * other(n))
    kinds = tuple(n % len(rates) for n in range(workers))
    items = round(2 ** chance.uniform(10.5, 13.3)) if group == "evicted" else round(2 ** chance.uniform(11, 14))
    evicted = group == "evicted"
    name = f"{shape.__name__}({knee:.1f})x{workers}{'k' if several else ''}"
    return Case(
        number, tuple(rates), kinds, tuple(math.exp(chance.gauss(0, 0.03)) for _ in range(workers)),
        *lengths(chance, items, 400 if evicted else 100, spread),
        2 ** -chance.uniform(5.9, 9.9) if evicted else 0.0,
        chance.choice([0.0, 0.0, 5.0, 30.0]) if evicted else 0.0,
        chance.random() < 0.75, 0.9 if evicted else 1.0, name,
    )  # fmt: skip


class PerKind(Fixed):
    """A fixed window for each kind."""

    def __init__(self, windows):
        super().__init__()
        self._of = {kind: Fixed(window=window) for kind, window in windows.items()}

    def window(self, view, app, worker):
        return self._of[worker.gpu_model].window(view, app, worker)


@dataclasses.dataclass
class Engine:
    worker: object
    kind: int
    slot: int
    pace: float
    dies: float
    told: float
    each: float = 0.0
    now: float = 0.0
    heap: list = dataclasses.field(default_factory=list)


class Job:
    """A case under a policy: `seconds` until all is done (infinite where given up), and each kind's windows."""

    def __init__(self, case, policy, limit=math.inf):
        self.case, self.policy = case, policy
        self.chances = [random.Random(f"{case.number} {slot}") for slot in range(len(case.kinds))]
        self.queue = collections.deque(range(len(case.tokens)))
        self.app = SceneApp("ask", "model", backlog=len(self.queue), overlaps=True)
        self.tier = SceneTier("default")
        self.scene = Scene(apps={"ask": self.app}, tiers={"default": self.tier})
        self.engines, self.names, self.left = {}, 0, case.until * sum(case.tokens)
        self.windows, self.held = {}, collections.defaultdict(float)
        self.lifetimes, self.lived = [], 0.0
        self.joins = [(0.0, slot) for slot in range(len(case.kinds))]
        learns = hasattr(policy, "finished")
        scene = self.scene
        while self.left > MOMENT:
            engine = min(self.engines.values(), key=self._next, default=None)
            now = self._next(engine) if engine else math.inf
            if self.joins and self.joins[0][0] <= now:
                scene.now, slot = heapq.heappop(self.joins)
                self._join(slot)
            elif now >= engine.dies:
                scene.now = now
                self._evict(engine)
            elif now >= engine.told and engine.worker.noticed is None:
                self._go_on(engine, now)
                engine.worker.noticed = now
            else:
                self._go_on(engine, now)
                _, number, item = heapq.heappop(engine.heap)
                began = engine.worker.running.pop(number).started
                self.app.running -= 1
                engine.worker.flying["model"] = len(engine.heap)
                self.left -= case.tokens[item]
                if learns:
                    told = case.told[item] if case.counted else None
                    policy.finished(scene, self.app, engine.worker, now - began, told)
                self._fill(engine)
            if scene.now > limit:
                scene.now = math.inf
                break
        self.seconds = scene.now

    def _go_on(self, engine, now):
        engine.each += (now - engine.now) * self._speed(engine)
        engine.now = self.scene.now = now

    def _speed(self, engine):
        flying = len(engine.heap)
        return self.case.rates[engine.kind](flying) * engine.pace / flying if flying else 0.0

    def _next(self, engine):
        end = engine.dies if engine.worker.noticed is not None else engine.told
        if not engine.heap:
            return end
        return min(end, engine.now + max(0.0, engine.heap[0][0] - engine.each) / self._speed(engine))

    def _join(self, slot):
        now, kind = self.scene.now, self.case.kinds[slot]
        self.names += 1
        worker = SceneWorker(f"w{self.names}", joined=now, gpu_model=str(kind))
        worker.contexts["model"] = SceneContext("model")
        lives = self.chances[slot].expovariate(self.case.evictions) if self.case.evictions else math.inf
        told = now + lives
        engine = Engine(worker, kind, slot, self.case.paces[slot], told + self.case.notice, told, now=now)
        self.scene.workers[worker.id] = worker
        self.engines[worker.id] = engine
        self._fill(engine)

    def _fill(self, engine):
        worker = engine.worker
        if worker.noticed is not None:
            return
        window = self.policy.window(self.scene, self.app, worker)
        if self.queue:
            seen = self.windows.setdefault(worker.gpu_model, [])
            if not seen or seen[-1] != window:
                seen.append(window)
        while self.queue and len(engine.heap) < window:
            item = self.queue.popleft()
            self.app.running += 1
            self.names += 1
            heapq.heappush(engine.heap, (engine.each + self.case.tokens[item], self.names, item))
            worker.running[self.names] = SceneAttempt(self.names, "ask", worker.id, [item], self.scene.now)
            worker.flying["model"] = len(engine.heap)
            self.app.backlog = len(self.queue)

    def _evict(self, engine):
        now = self.scene.now
        self.lifetimes.append(now - engine.worker.joined)
        self.lived += self.lifetimes[-1]
        alive = sum(now - w.joined for w in self.scene.workers.values()) - self.lifetimes[-1]
        self.tier.lifetimes, self.tier.eviction_rate = self.lifetimes, len(self.lifetimes) / (self.lived + alive)
        del self.engines[engine.worker.id], self.scene.workers[engine.worker.id]
        self.app.running -= len(engine.heap)
        for _, _, item in sorted(engine.heap, reverse=True):
            self.queue.appendleft(item)
        self.app.backlog = len(self.queue)
        heapq.heappush(self.joins, (now + RELOAD, engine.slot))


def sweep(case, levels=LEVELS):
    """The fastest fixed window, and its seconds: every third first, then those beside the best."""

    @functools.cache
    def seconds(number):
        limit = GIVEN_UP * min(found.values(), default=math.inf)
        found[number] = Job(case, Fixed(window=levels[number]), limit).seconds
        return found[number]

    found = {}
    middle = len(levels) // 2
    for number in sorted(range(0, len(levels), 3), key=lambda n: abs(n - middle)):
        seconds(number)
    best = min(found, key=found.get)
    for number in (best - 2, best - 1, best + 1, best + 2):
        if 0 <= number < len(levels):
            seconds(number)
    best = min(found, key=found.get)
    return levels[best], found[best]


def compare(case, policy=None):
    """What share of the best fixed window's speed the job had, and the windows that it ended with; and those."""
    job = Job(case, policy or Opportunistic())
    best, seconds = sweep(case)
    learners = {key[2]: learner for key, learner in job.policy._learners.items()}
    last = {kind: learner.window for kind, learner in learners.items()}
    chosen = Job(case, PerKind(last), 20 * seconds).seconds
    changes = max(learner.changes for learner in learners.values())
    return seconds / job.seconds, seconds / chosen, best, last, changes


def told(name, shares):
    """A row of the table."""
    enough = sum(share >= 0.97 for share in shares) / len(shares)
    return f"| {name} | {min(shares):.2f} | {statistics.median(shares):.2f} | {enough:.0%} |".replace("%", " %")


def main(first=3000, cases=24):
    """Print the table of docs/batching.md."""
    for group in ("few", "many", "evicted"):
        jobs, windows, *_ = zip(*(compare(draw(number, group)) for number in range(first, first + cases)), strict=True)
        print(told(f"{group}: the job's time", jobs), told(f"{group}: the window at its end", windows), sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
