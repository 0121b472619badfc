"""The servers of many runs at once, and how they serve a slot's tasks: the micro layer, vectorised over regions.

A *lane* is one region of one run. Within a slot lanes do not touch each other, so the n-th task of every lane is placed
in one step of numpy, in the order of arrival, on arrival: what `ctxflow.policies.torta` decides for one task and one
region (a test holds the two beside each other). A server does one task after the other; a task whose model it lacks
waits for the switch, and the models unused for longest leave.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from ctxflow.policies.torta.quantities import Bools, Floats, Ints
from ctxflow_papers.torta.settings import FOOTPRINT, GPUS, KINDS, POPULARITY, UNSUITED
from ctxflow_papers.torta.world import (
    FOOTPRINTS,
    KIND_OF_MODEL,
    MODELS,
    World,
    start_seconds,
    stop_seconds,
    switch_seconds,
)

COMPUTE, MEMORY, WATTS = (np.array([getattr(gpu, name) for gpu in GPUS]) for name in ("tflops", "memory", "watts"))
SUITS = np.array([gpu.suits for gpu in GPUS])
FITS = np.array([[kind.weights * FOOTPRINT <= gpu.memory for gpu in GPUS] for kind in KINDS])
SWITCH, START, STOP = switch_seconds(), start_seconds(), stop_seconds()
ABSENT = -np.inf


@dataclasses.dataclass
class Arrivals:
    """The tasks of a slot, sorted by lane and time: N of each.

    :ivar lane: where. :ivar time: when they get there. The rest is as in `demand.Tasks`.
    """

    lane: Ints
    time: Floats
    kind: Ints
    model: Ints
    seconds: Floats
    tflops: Floats


@dataclasses.dataclass
class Placed:
    """What became of a slot's tasks: N of each, seconds. A task that no server of its lane takes has `server` -1."""

    server: Ints
    waiting: Floats
    loading: Floats
    inference: Floats


@dataclasses.dataclass
class Step:
    """What a rule sees of the n lanes that have a task now, one each; all but the tasks are (n, S).

    :ivar allowed: servers that are active and that the model fits on. :ivar suited: those made for its type of task.
    :ivar backlog: seconds of work that each has. :ivar used: when its model was last needed there, -inf if absent.
    :ivar free: when each is or was without work. :ivar tflops: (n,) what the task asks for, `now` (n,) when.
    """

    now: Floats
    kind: Ints
    seconds: Floats
    tflops: Floats
    allowed: Bools
    suited: Bools
    backlog: Floats
    used: Floats
    free: Floats
    compute: Floats
    watts: Floats
    switch: Floats
    turn: Ints


class Rule(Protocol):
    """Which server of its lane takes a task: (n,) numbers; what is not allowed is never taken if anything is."""

    def __call__(self, step: Step) -> Ints:
        """Choose."""


class Lanes:
    """The servers of L lanes, S at most each.

    :ivar gpu: (L, S). :ivar there: (L, S) whether it is there and has not failed. :ivar on: active or starting.
    :ivar begun, ready: when the last start began and ended. :ivar free: when the work it was given ends.
    :ivar used: (M, L, S) when each model was last needed there, -inf where it is absent.
    :ivar turn: (L,) round-robin's.
    """

    def __init__(self, world: World, runs: int) -> None:
        self.gpu = np.tile(world.gpu, (runs, 1))
        self.there = np.tile(world.there, (runs, 1))
        self.on = self.there.copy()
        self.begun = np.full(self.gpu.shape, -np.inf)
        self.ready = np.full(self.gpu.shape, -np.inf)
        self.free = np.zeros(self.gpu.shape)
        self.turn = np.zeros(len(self.gpu), dtype=np.int64)
        self.used = np.full((MODELS, *self.gpu.shape), ABSENT)
        self.suits = SUITS[self.gpu]
        self.fits = FITS[:, self.gpu]
        room = MEMORY[self.gpu]
        for model in range(MODELS):  # At the start each holds what suits it, the popular model first.
            held = (KIND_OF_MODEL[model] == self.suits) & (room >= FOOTPRINTS[model])
            self.used[model][held] = 0.0
            room = room - held * FOOTPRINTS[model]

    def serve(self, tasks: Arrivals, rule: Rule, patience: float = np.inf) -> Placed:
        """Place a slot's tasks, in the order of their arrival; one that would wait for longer is given up."""
        count = len(tasks.lane)
        placed = Placed(np.full(count, -1), *(np.zeros(count) for _ in range(3)))
        if not count:
            return placed
        lanes, first, many = np.unique(tasks.lane, return_index=True, return_counts=True)
        order = np.argsort(-many, kind="stable")
        lanes, first, many = lanes[order], first[order], many[order]
        view = _Sorted(self, lanes)
        remaining = len(lanes)
        for turn in range(int(many[0])):
            while many[remaining - 1] <= turn:
                remaining -= 1
            self._place(tasks, first[:remaining] + turn, view, rule, patience, placed)
        view.write_back(self, lanes)
        return placed

    def _place(self, tasks: Arrivals, which: Ints, view: _Sorted, rule: Rule, patience: float, placed: Placed) -> None:
        """One task of each of the first lanes of a view."""
        n = len(which)
        rows = view.rows[:n]
        now, kind, model, tflops = tasks.time[which], tasks.kind[which], tasks.model[which], tasks.tflops[which]
        free = view.free[:n]
        step = Step(
            now,
            kind,
            tasks.seconds[which],
            tflops,
            view.open_to(kind, rows, now),
            view.suits[:n] == kind[:, None],
            np.maximum(free - now[:, None], 0.0),
            view.used[model, rows],
            free,
            view.compute[:n],
            view.watts[:n],
            view.switch[model, rows],
            view.turn,
        )
        server = rule(step)
        possible = step.allowed[rows, server] & (step.backlog[rows, server] <= patience)
        if not possible.all():
            rows, which, server = rows[possible], which[possible], server[possible]
            now, kind, model, tflops = now[possible], kind[possible], model[possible], tflops[possible]
        absent = step.used[rows, server] == ABSENT
        waiting = step.backlog[rows, server]
        loading = np.where(absent, SWITCH[view.gpu[rows, server], model], 0.0)
        slower = np.maximum(tflops / step.compute[rows, server], 1.0)
        inference = tasks.seconds[which] * slower * np.where(step.suited[rows, server], 1.0, UNSUITED)
        end = now + waiting + loading + inference
        view.free[rows, server] = end
        view.used[model, rows, server] = end
        if absent.any():
            view.make_room(rows[absent], server[absent], model[absent])
        placed.server[which], placed.waiting[which] = server, waiting
        placed.loading[which], placed.inference[which] = loading, inference

    def start(self, chosen: Bools, now: float, preheated: Ints | None = None) -> Floats:
        """Start servers; what each takes in seconds, (L, S).

        :param chosen: (L, S). :param preheated: (L, S) the model that each loads as it starts, None for none.
        """
        seconds = START[self.gpu]
        self.used[:, chosen] = ABSENT
        if preheated is not None:
            lanes, servers = np.nonzero(chosen)
            models = preheated[lanes, servers]
            seconds = seconds + SWITCH[self.gpu, preheated]
            self.used[models, lanes, servers] = now + seconds[lanes, servers]
        self.on |= chosen
        self.begun[chosen] = now
        self.ready[chosen] = now + seconds[chosen]
        self.free[chosen] = self.ready[chosen]
        return np.where(chosen, seconds, 0.0)

    def stop(self, chosen: Bools) -> Floats:
        """Stop servers; what each takes in seconds, (L, S)."""
        self.on &= ~chosen
        self.used[:, chosen] = ABSENT
        return np.where(chosen, STOP[self.gpu], 0.0)


class _Sorted:
    """The lanes with tasks, those with the most first, so that those that still have some are the first ones."""

    def __init__(self, lanes: Lanes, order: Ints) -> None:
        self.rows = np.arange(len(order))
        self.gpu, self.free, self.turn = lanes.gpu[order], lanes.free[order], lanes.turn[order]
        self.used, self.ready = lanes.used[:, order], lanes.ready[order]
        self.suits, self.compute = lanes.suits[order], COMPUTE[lanes.gpu[order]]
        self.switch = SWITCH.T[:, self.gpu]
        self.watts = WATTS[lanes.gpu[order]] / WATTS.max()
        self.allowed = lanes.fits[:, order] & (lanes.on & lanes.there)[order]

    def open_to(self, kind: Ints, rows: Ints, now: Floats) -> Bools:
        """Where a task may go: servers that are ready; those that are starting only where none is."""
        active = self.allowed[kind, rows]
        ready = active & (self.ready[rows] <= now[:, None])
        return np.asarray(np.where(ready.any(axis=1, keepdims=True), ready, active), dtype=np.bool_)

    def write_back(self, lanes: Lanes, order: Ints) -> None:
        lanes.free[order], lanes.turn[order], lanes.used[:, order] = self.free, self.turn, self.used

    def make_room(self, rows: Ints, servers: Ints, models: Ints) -> None:
        """The models that were unused for longest leave, until the new ones fit."""
        times = self.used[:, rows, servers]
        room = MEMORY[self.gpu[rows, servers]]
        for _ in range(MODELS):
            full = (FOOTPRINTS[:, None] * (times != ABSENT)).sum(axis=0) > room
            if not full.any():
                break
            present = np.where(times == ABSENT, np.inf, times)
            present[models, np.arange(len(models))] = np.inf  # The new one stays.
            oldest = present.argmin(axis=0)
            times[oldest[full], np.flatnonzero(full)] = ABSENT
        self.used[:, rows, servers] = times


POPULAR = np.tile(np.array(POPULARITY), len(KINDS))
