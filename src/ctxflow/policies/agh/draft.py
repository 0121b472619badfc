"""An allocation while a heuristic builds it: what runs where, what is sent where, and what of each limit is used up.

Routes are placed and removed with all sums kept up to date; the places where a query type could go are found at once,
with M1's or M3's configuration, (7) and (8). At the end: packing into storage that does not hold all.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, Deployment, Route
from ctxflow.policies.agh.problem import Bools, Constants, Floats, Ints

NOTHING = 1e-9  # A share under this is none.
_LEAST = 1e-12
IDLE = -1


@dataclasses.dataclass(frozen=True)
class Mechanisms:
    """The paper's three mechanisms, each of which can be switched off (Table 3).

    :ivar select: M1. Without it a new deployment takes the smallest configuration, whatever its memory and delay.
    :ivar rank: M2. Without it places are ranked by their cost (7) alone, however little they could serve.
    :ivar upgrade: M3. Without it an active deployment is used as it is, however slow it is for the query type.
    """

    select: bool = True
    rank: bool = True
    upgrade: bool = True


class Choices:
    """What M1 chooses for each query type on each idle pair: computed once for a problem.

    :ivar config: (I, J, K) the configuration's number, -1 if there is none.
    :ivar rent, delay, spare: (I, J, K) of that configuration: dollars, seconds, GB.
    """

    def __init__(self, arrays: Constants, mechanisms: Mechanisms) -> None:
        self.arrays, self.mechanisms = arrays, mechanisms
        _, models, tiers, _ = arrays.shape
        affordable = arrays.rent[:, None] * arrays.gpus <= arrays.budget
        affordable &= arrays.gpus <= arrays.stock[:, None]
        if mechanisms.select:
            self.possible: Bools = arrays.fits & affordable
            good = self.possible & (arrays.delay <= arrays.max_delay[:, None, None, None])
        else:
            allowed = arrays.allowed & affordable
            self.possible = np.broadcast_to(allowed, (models, *allowed.shape))
            good = np.broadcast_to(self.possible, arrays.delay.shape)
        self.config: Ints = np.where(good.any(axis=-1), good.argmax(axis=-1), IDLE)
        chosen = np.maximum(self.config, 0)
        self.gpus = arrays.gpus[chosen]
        self.rent: Floats = arrays.rent * self.gpus
        self.delay: Floats = np.take_along_axis(arrays.delay, chosen[..., None], axis=-1)[..., 0]
        j, k = np.ogrid[:models, :tiers]
        self.spare: Floats = arrays.spare_gb[j, k, chosen]
        self.error = np.maximum(arrays.error, _LEAST)
        self.data = np.maximum(arrays.data_gb, _LEAST)
        self.work = np.maximum(arrays.work, _LEAST)
        self.kv = np.maximum(arrays.kv_gb, _LEAST)
        self.finite_stock = bool(np.isfinite(arrays.stock).any())


@dataclasses.dataclass
class Destinations:
    """Where a query type could go: arrays over models and tiers.

    :ivar config: (J, K) the configuration that it would take there, -1 for nowhere.
    :ivar share: (J, K) the most of it that could go there: x-bar of (8), also limited by (5c) and (5f) to (5h).
    :ivar rent: (J, K) dollars for GPUs that are not there yet.
    :ivar delay: (J, K) seconds.
    """

    config: Ints
    share: Floats
    rent: Floats
    delay: Floats


class Draft:
    """The state of a construction; the sums are updated by `place` and `remove`.

    :ivar config: (J, K) the active configuration, -1 where nothing runs.
    :ivar routes: for each query type, the share sent to each (model, tier).
    :ivar unserved: (I,).
    :ivar delay, error: (I,) used of the limits.
    :ivar work, kv: (J, K) used of throughput and memory.
    :ivar stored: GB of models and data.
    :ivar rent: dollars for all GPUs.
    """

    def __init__(self, choices: Choices) -> None:
        arrays = choices.arrays
        types, models, tiers, _ = arrays.shape
        self.choices, self.arrays = choices, arrays
        self.config: Ints = np.full((models, tiers), IDLE)
        self.routes: list[dict[tuple[int, int], float]] = [{} for _ in range(types)]
        self.unserved = np.ones(types)
        self.delay, self.error = np.zeros(types), np.zeros(types)
        self.work, self.kv = np.zeros((models, tiers)), np.zeros((models, tiers))
        self.used = np.zeros(tiers)
        self.stored, self.rent = 0.0, 0.0

    def copy(self) -> Draft:
        """Return an independent copy."""
        other = Draft.__new__(Draft)
        other.__dict__.update(self.__dict__)
        for name in ("config", "unserved", "delay", "error", "work", "kv", "used"):
            setattr(other, name, getattr(self, name).copy())
        other.routes = [dict(routes) for routes in self.routes]
        return other

    @property
    def storage_dollars(self) -> float:
        """Return the cost of storing models and data together."""
        return self.stored * self.arrays.hours * self.arrays.storage_price

    @property
    def total(self) -> float:
        """Return the objective (5a)."""
        arrays = self.arrays
        penalties = arrays.delay_dollars @ self.delay + arrays.unserved_dollars @ self.unserved
        return self.rent + self.storage_dollars + float(penalties)

    def activate(self, j: int, k: int, config: int) -> None:
        """Run a model on a tier, or change how many GPUs it has there."""
        arrays, before = self.arrays, int(self.config[j, k])
        gpus = int(arrays.gpus[config]) if config != IDLE else 0
        more = gpus - (int(arrays.gpus[before]) if before != IDLE else 0)
        self.rent += more * float(arrays.rent[k])
        self.used[k] += more
        self.config[j, k] = config
        if IDLE not in (before, config):
            for i, routes in enumerate(self.routes):
                if share := routes.get((j, k)):
                    self.delay[i] += share * (arrays.delay[i, j, k, config] - arrays.delay[i, j, k, before])

    def place(self, i: int, j: int, k: int, config: int, share: float) -> None:
        """Route a share of a query type to a pair, in this configuration."""
        if config != self.config[j, k]:
            self.activate(j, k, config)
        known = self.routes[i].get((j, k), 0.0)
        if not known:
            self.stored += float(self.arrays.weights_gb[j])
        self.routes[i][j, k] = known + share
        self._add(i, j, k, share)

    def remove(self, i: int, j: int, k: int) -> float:
        """Remove a query type's route, and the deployment if it was the last; return its share."""
        share = self.routes[i].pop((j, k))
        self.stored -= float(self.arrays.weights_gb[j])
        self._add(i, j, k, -share)
        if not any((j, k) in routes for routes in self.routes):
            self.activate(j, k, IDLE)
            self.work[j, k] = self.kv[j, k] = 0.0
        return share

    def _add(self, i: int, j: int, k: int, share: float) -> None:
        arrays = self.arrays
        self.unserved[i] = max(0.0, self.unserved[i] - share)
        self.delay[i] += share * arrays.delay[i, j, k, self.config[j, k]]
        self.error[i] += share * arrays.error[i, j, k]
        self.work[j, k] += share * arrays.work[i, j, k]
        self.kv[j, k] += share * arrays.kv_gb[i, j, k]
        self.stored += share * float(arrays.data_gb[i])

    def places(self, i: int, wanted: float) -> Destinations:
        """Return all places where a query type could go, and how much of the share wanted: M1, M3 and (8)."""
        choices, arrays = self.choices, self.arrays
        free = choices.mechanisms
        config, delay = choices.config[i].copy(), choices.delay[i].copy()
        rent, spare, gpus = choices.rent[i].copy(), choices.spare[i], choices.gpus[i]
        room = np.maximum(0.0, arrays.max_delay[i] - self.delay[i]) / np.maximum(delay, _LEAST)
        if not free.select:
            room[:] = np.inf
        j, k = np.nonzero(self.config >= 0)
        if len(j):
            gpus, spare = gpus.copy(), spare.copy()
            chosen, now = self._for_active(i, j, k), self.config[j, k]
            config[j, k], gpus[j, k] = chosen, arrays.gpus[chosen]
            rent[j, k] = arrays.rent[k] * (arrays.gpus[chosen] - arrays.gpus[now])
            delay[j, k], spare[j, k] = arrays.delay[i, j, k, chosen], arrays.spare_gb[j, k, chosen]
            if free.upgrade:
                room[j, k] = max(0.0, arrays.max_delay[i] - self.delay[i]) / np.maximum(delay[j, k], _LEAST)
            else:
                room[j, k] = np.inf
        share = np.minimum(room, wanted, out=room)
        np.minimum(share, max(0.0, arrays.max_error[i] - self.error[i]) / choices.error[i], out=share)
        weights = np.broadcast_to(arrays.weights_gb[:, None], share.shape)
        if self.routes[i]:
            weights = weights.copy()
            for pair in self.routes[i]:
                weights[pair] = 0.0
        np.minimum(share, (arrays.storage - self.stored - weights) / choices.data[i], out=share)
        stored = arrays.hours * arrays.storage_price
        left = arrays.budget - self.rent - self.storage_dollars - rent - stored * weights
        np.minimum(share, left / max(stored * choices.data[i], _LEAST), out=share)
        np.minimum(share, (arrays.capacity * gpus - self.work) / choices.work[i], out=share)
        if free.select:
            np.minimum(share, (spare - self.kv) / choices.kv[i], out=share)
        if choices.finite_stock:
            share[:, :][rent > arrays.rent * (arrays.stock - self.used) + NOTHING] = 0.0
        share[config < 0] = 0.0
        return Destinations(config, share, rent, delay)

    def _for_active(self, i: int, j: Ints, k: Ints) -> Ints:
        """Return the configuration for a query type on active pairs: the present one, M3's, or -1 for none."""
        arrays, now = self.arrays, self.config[j, k]
        limit, delays = arrays.max_delay[i], arrays.delay[i, j, k]
        slow = delays[np.arange(len(j)), now] > limit
        if not slow.any() or not self.choices.mechanisms.upgrade:
            return now
        larger = (arrays.gpus > arrays.gpus[now][:, None]) & (delays <= limit) & self.choices.possible[j, k]
        upgrade = np.where(larger.any(axis=1), larger.argmax(axis=1), IDLE)
        for n in np.flatnonzero(slow & (upgrade != IDLE)):
            if not self._acceptable(int(j[n]), int(k[n]), int(upgrade[n])):
                upgrade[n] = IDLE
        return np.where(slow, upgrade, now)

    def _acceptable(self, j: int, k: int, config: int) -> bool:
        """Return whether the present routes there stay within their delay in another configuration."""
        arrays, now = self.arrays, self.config[j, k]
        for i, routes in enumerate(self.routes):
            if share := routes.get((j, k)):
                later = self.delay[i] + share * (arrays.delay[i, j, k, config] - arrays.delay[i, j, k, now])
                if later > max(float(arrays.max_delay[i]), float(self.delay[i])) + NOTHING:
                    return False
        return True

    def within_limits(self) -> bool:
        """Return whether budget, storage, stock, throughput, memory, delays and errors hold: (5c), (5f) to (5j)."""
        arrays = self.arrays
        j, k = np.nonzero(self.config >= 0)
        config, slack = self.config[j, k], 1 + NOTHING
        return bool(
            self.rent + self.storage_dollars <= arrays.budget * slack
            and self.stored <= arrays.storage * slack
            and (self.used <= arrays.stock).all()
            and (self.work[j, k] <= arrays.capacity[k] * arrays.gpus[config] * slack).all()
            and (self.kv[j, k] <= arrays.spare_gb[j, k, config] + NOTHING).all()
            and (self.delay <= arrays.max_delay * slack).all()
            and (self.error <= arrays.max_error * slack + 1e-12).all()
        )

    def allocation(self) -> Allocation:
        """Return what was built."""
        arrays = self.arrays
        deployments = tuple(
            Deployment(j, k, int(arrays.tensor[c]), int(arrays.pipeline[c]), int(arrays.gpus[c]))
            for j, k in np.argwhere(self.config >= 0).tolist()
            for c in (self.config[j, k],)
        )
        routes = tuple(
            Route(i, j, k, float(share)) for i, each in enumerate(self.routes) for (j, k), share in sorted(each.items())
        )
        served = [min(1.0, sum(each.values())) for each in self.routes]
        return Allocation(deployments, routes, tuple(1.0 - share for share in served))


def nearest(draft: Draft, options: Ints, span: Ints | None = None) -> list[int]:
    """Return the options (of O, 3) that are a draft's deployments, or next to them in GPUs.

    :param span: (O,) how many GPUs an option may have more than its configuration; none by default.
    """
    found, gpus = [], draft.arrays.gpus
    for j, k in np.argwhere(draft.config >= 0):
        here = np.flatnonzero((options[:, 0] == j) & (options[:, 1] == k))
        if len(here):
            fewest, wanted = gpus[options[here, 2]], gpus[draft.config[j, k]]
            most = fewest if span is None else fewest + span[here]
            found.append(int(here[(np.maximum(fewest - wanted, 0) + np.maximum(wanted - most, 0)).argmin()]))
    return found


PAIRS = 4000  # With more changes of two types at once, only changes of one are tried.
ROUNDS = 32  # Changes made, at most: a bound on time.


def filled(value: Floats, size: Floats, room: Floats) -> Floats:
    """Return (N, I) the share of each item in the best filling of N knapsacks, whose items may be cut.

    :param value: (N, I) of an item whole; one that is worth nothing is left out.
    :param size: (N, I) of an item whole. :param room: (N,).

    >>> filled(np.array([[4.0, 3.0, -1.0]]), np.array([[2.0, 1.0, 1.0]]), np.array([2.0])).tolist()
    [[0.5, 1.0, 0.0]]
    """
    size = np.where(value > 0, size, 0.0)
    density = np.where(value > 0, value / np.maximum(size, _LEAST), -1.0)
    order = np.argsort(-density, axis=1, kind="stable")
    sizes = np.take_along_axis(size, order, axis=1)
    left = room[:, None] - (np.cumsum(sizes, axis=1) - sizes)
    part = np.where(sizes > _LEAST, np.clip(left / np.maximum(sizes, _LEAST), 0.0, 1.0), 1.0)
    found = np.empty_like(part)
    np.put_along_axis(found, order, part, axis=1)
    return np.where(value > 0, found, 0.0)


def packed(
    taken: Ints, most: Floats, saved: Floats, data: Floats, fixed: Floats, weights: Floats, storage: float
) -> tuple[Ints, Floats]:
    """Return better ways and shares than those given: change one type's way, or two at once, as long as that saves.

    It is a multiple-choice knapsack whose items may be cut: a type's way stores models whole, and data as served.

    :param taken: (I,) the way of each type; way 0 serves nothing.
    :param most: (I, W) the largest share that a way can serve.
    :param saved: (I, W) dollars saved by serving all of a type so, the storing of its data paid.
    :param data: (I,) GB of a type's data. :param fixed, weights: (W,) dollars and GB of a way's models.
    :param storage: GB for all. :returns: (I,) ways and shares.

    >>> ways, shares = packed(np.array([1, 0]), np.array([[0, 1.0], [0, 1.0]]), np.array([[0, 3.0], [0, 9.0]]),
    ...     np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.array([0.0, 1.0]), storage=3.0)
    >>> ways.tolist(), shares.tolist()
    ([0, 1], [0.0, 1.0])
    """
    types, width = most.shape
    every = np.arange(types)
    value, size = most * saved, most * data[:, None]

    def judged(tries: Ints) -> tuple[Floats, Floats]:
        """Return the dollars (N,) that N assignments (N, I) of ways save, and the shares (N, I) that are served."""
        room = storage - weights[tries].sum(axis=1)
        part = filled(value[every, tries], size[every, tries], np.maximum(room, 0.0))
        gain = (part * value[every, tries]).sum(axis=1) - fixed[tries].sum(axis=1)
        return np.where(room >= 0, gain, -np.inf), part

    def neighbours() -> Ints:
        single = np.tile(taken, (types, width, 1))
        single[every, :, every] = np.arange(width)
        found = [single.reshape(-1, types)]
        if (types * width) ** 2 <= PAIRS:
            both = np.tile(found[0], (types, width, 1, 1))
            both[every, :, :, every] = np.arange(width)[None, :, None]
            found.append(both.reshape(-1, types))
        return np.concatenate(found)

    gain, part = judged(taken[None])
    for _ in range(ROUNDS):
        tries = neighbours()
        gains, parts = judged(tries)
        best = int(gains.argmax())
        if gains[best] <= gain[0] + 1e-9:
            break
        taken, gain, part = tries[best], gains[best, None], parts[best, None]
    return taken, np.asarray(part[0] * most[every, taken], dtype=np.float64)
