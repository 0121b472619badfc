"""TORTA's allocation policy trained by PPO, with optimal transport as supervision (Algorithm 2), in one file.

The loss is Eq. 5: PPO's, and two constraints on the policy's mean, where they have a gradient: the distance from
transport (L_eps) and how much smaller than a reactive method's the switching cost is (L_s), with weights that grow
while they are violated. The paper leaves its hyper-parameters open: ours are the constants below.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxflow.policies.torta.macro import FEATURES, LEAST, MOST_PULL, Layers, Networks
from ctxflow.policies.torta.transport import capped, costs
from ctxflow.simulator.experiments import TrainingRequest
from ctxflow_papers.torta import predictor_training
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.environment import Allocations
from ctxflow_papers.torta.experiments import torta
from ctxflow_papers.torta.forecasting import write
from ctxflow_papers.torta.methods import Torta
from ctxflow_papers.torta.settings import LOADS, MOST_OF_REGION, NETWORK_WEIGHT, POWER_WEIGHT, START_HOUR
from ctxflow_papers.torta.world import TASKS_PER_SLOT, world

EPS, S = 0.15, 2.5
"""The targets of Algorithm 2."""
EPS_0, S_0 = 0.15, 2.5
GAMMA_0, DELTA_0, ALPHA = 1.0, 1.0, 1.0
GROWTH, MOST_WEIGHT = 1.5, 50.0
"""Weights grow by 1.5 while a target is missed (Algorithm 2), and no farther than this."""
ROLLOUT, EPOCHS, MINIBATCHES = 40, 4, 4
DISCOUNT, TRACE, CLIP, VALUE, ENTROPY = 0.95, 0.9, 0.2, 0.5, 1e-3
RATE, RATE_DECAY, DECAY_EVERY = 3e-4, 0.995, 100
"""Adam's rate and its decay every 100 episodes (Appendix B-A)."""
HIDDEN = 32
RUNS = 3
TRAINING_SEEDS = 1000
"""The first seed of training; tests have those under it."""


class Actor(torch.nn.Module):  # type: ignore[misc]
    """Gates and pulls: `gating.outputs`, with a standard deviation to explore by."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN)
        )
        self.head = torch.nn.Sequential(
            torch.nn.Linear(2 * HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2)
        )
        self.deviation = torch.nn.Parameter(torch.tensor([-1.0, -2.0]))
        with torch.no_grad():
            self.head[-1].weight.mul_(0.05)
            self.head[-1].bias.zero_()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(n, R, 2) from (n, R, FEATURES)."""
        hidden = torch.relu(self.body(features))
        pooled = hidden.mean(dim=1, keepdim=True).expand_as(hidden)
        return self.head(torch.cat([hidden, pooled], dim=-1))


class Critic(torch.nn.Module):  # type: ignore[misc]
    """The value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 2 * HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(2 * HIDDEN, 2 * HIDDEN),
            torch.nn.ReLU(),
        )
        self.head = torch.nn.Linear(2 * HIDDEN, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(n,) from (n, R, FEATURES)."""
        return self.head(self.body(features).mean(dim=1)).squeeze(-1)


def allocated(decided: torch.Tensor, transport: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`gating.allocated` in torch, where all regions are there."""
    gate = torch.sigmoid(decided[..., 0].clamp(-50, 50))[..., None]
    aim = (transport + LEAST) * (MOST_PULL * torch.tanh(decided[..., 1])).exp()[..., None, :]
    return (1 - gate) * before + gate * aim / aim.sum(dim=-1, keepdim=True)


@dataclasses.dataclass
class Batch:
    """A rollout, (slots, n, ...)."""

    features: torch.Tensor
    transport: torch.Tensor
    before: torch.Tensor
    action: torch.Tensor
    chance: torch.Tensor
    value: torch.Tensor
    reward: torch.Tensor
    last: torch.Tensor


@dataclasses.dataclass
class Progress:
    """How training stands.

    :ivar share: of the time. :ivar eps: mean distance from transport. :ivar s: the reactive switching cost over ours.
    """

    share: float
    episodes: int
    reward: float
    eps: float
    s: float


class Trainer:
    """PPO on the environments of some topologies in turn."""

    def __init__(self, topologies: Sequence[str], seed: int, method: Torta, slots: int) -> None:
        torch.manual_seed(seed)
        self.actor, self.critic = Actor(), Critic()
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=RATE, eps=1e-5)
        self.environments = [
            Allocations(name, range(RUNS), LOADS, slots, dataclasses.replace(method)) for name in topologies
        ]
        self.gamma, self.delta, self.episodes, self.seed = GAMMA_0, DELTA_0, 0, seed
        self.eps, self.s, self.reward = math.nan, math.nan, math.nan
        self.reactive = [reactive_switching(name, TRAINING_SEEDS + seed) for name in topologies]

    def episode(self, until: float) -> None:
        """An episode of the next environment, an update after each rollout."""
        number = self.episodes % len(self.environments)
        environment = self.environments[number]
        observation, _ = environment.reset(seed=TRAINING_SEEDS + self.seed + RUNS * self.episodes)
        ended = False
        while not ended and time.monotonic() < until:
            batch, observation, ended = self._rollout(environment, observation)
            self._update(batch, number)
        self.episodes += 1
        if self.episodes % DECAY_EVERY == 0:
            for group in self.optimizer.param_groups:
                group["lr"] *= RATE_DECAY

    def _rollout(self, environment: Allocations, observation: NDArray[Any]) -> tuple[Batch, NDArray[Any], bool]:
        steps: list[tuple[torch.Tensor, ...]] = []
        ended = False
        while len(steps) < ROLLOUT and not ended:
            features, transport, before = split(observation)
            with torch.no_grad():
                mean, value = self.actor(features), self.critic(features)
                normal = torch.distributions.Normal(mean, self.actor.deviation.exp())
                action = normal.sample()
                shares = allocated(action, transport, before)
            observation, reward, _, over, _ = environment.step(shares.numpy())
            ended = bool(over.all())
            chance = normal.log_prob(action).mean(dim=(1, 2))
            steps.append(
                (features, transport, before, action, chance, value, torch.tensor(reward, dtype=torch.float32))
            )
        with torch.no_grad():
            last = self.critic(split(observation)[0])
        seen, transports, befores, actions, chances, values, rewards = map(torch.stack, zip(*steps, strict=True))
        return Batch(seen, transports, befores, actions, chances, values, rewards, last), observation, ended

    def _update(self, batch: Batch, number: int) -> None:
        advantage = torch.zeros_like(batch.reward)
        following, gain = batch.last, torch.zeros_like(batch.last)
        for slot in reversed(range(len(batch.reward))):
            error = batch.reward[slot] + DISCOUNT * following - batch.value[slot]
            advantage[slot] = gain = error + DISCOUNT * TRACE * gain
            following = batch.value[slot]
        target = (advantage + batch.value).flatten()
        advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).flatten()
        flat = [
            each.flatten(0, 1) for each in (batch.features, batch.transport, batch.before, batch.action, batch.chance)
        ]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(target)).chunk(MINIBATCHES):
                chosen = [each[rows] for each in (*flat, advantage, target)]
                loss = self._loss(chosen, self.reactive[number])
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_([*self.actor.parameters(), *self.critic.parameters()], 0.5)
                self.optimizer.step()
        self._weigh(flat, number)
        self.reward = batch.reward.mean().item()

    def _loss(self, chosen: Sequence[torch.Tensor], reactive: float) -> torch.Tensor:
        """Eqs. 4 and 5. The probability is of a mean number, so that a ratio means the same for all sizes."""
        features, transport, before, action, chance, advantage, target = chosen
        mean = self.actor(features)
        normal = torch.distributions.Normal(mean, self.actor.deviation.exp())
        ratio = (normal.log_prob(action).mean(dim=(1, 2)) - chance).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        value = ((self.critic(features) - target) ** 2).mean()
        eps, s = constraints(allocated(mean, transport, before), transport, before, reactive)
        far = torch.relu(eps - EPS) / EPS_0
        hasty = torch.relu(S - s) / S_0
        entropy = self.actor.deviation.sum()
        return -clipped + VALUE * value - ENTROPY * entropy + self.gamma * far + self.delta * hasty

    def _weigh(self, flat: Sequence[torch.Tensor], number: int) -> None:
        """gamma and delta: exponential in what is missed (Appendix B-B), and grown while it is."""
        features, transport, before = flat[:3]
        with torch.no_grad():
            shares = allocated(self.actor(features), transport, before)
            eps, s = (each.item() for each in constraints(shares, transport, before, self.reactive[number]))
        self.eps = eps if math.isnan(self.eps) else 0.8 * self.eps + 0.2 * eps
        self.s = s if math.isnan(self.s) else 0.8 * self.s + 0.2 * s
        self.gamma = _grown(self.gamma, ALPHA * max(0.0, self.eps - EPS), GAMMA_0)
        self.delta = _grown(self.delta, ALPHA * max(0.0, S - self.s), DELTA_0)

    def networks(self, predictor: Layers, about: dict[str, object]) -> Networks:
        """What was learnt."""
        return Networks(
            predictor, predictor_training.layers(self.actor.body), predictor_training.layers(self.actor.head), about
        )


def constraints(
    shares: torch.Tensor, transport: torch.Tensor, before: torch.Tensor, reactive: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """eps, the mean of |A_t - P*_t|, and s, K_0 over the mean of |A_t - A_{t-1}|^2."""
    eps = (((shares - transport) ** 2).sum(dim=(1, 2)) + 1e-12).sqrt().mean()
    return eps, reactive / (((shares - before) ** 2).sum(dim=(1, 2)).mean() + 1e-6)


def reactive_switching(topology: str, seed: int, slots: int = 60) -> float:
    """K_0: the mean of |P_t - P_{t-1}|^2 of single-slot transport on each slot's counts, with all capacity free."""
    place = world(topology)
    changes = []
    for load in LOADS:
        counts = tasks_of(place, load, seed, slots).counts(place.regions)
        for kind in range(counts.shape[2]):
            room = place.servers[:, kind] * TASKS_PER_SLOT * MOST_OF_REGION
            price = place.price[START_HOUR]
            cost = costs(price, place.latency, place.transfer, POWER_WEIGHT, NETWORK_WEIGHT)
            plans = np.stack([capped(each, room, cost) for each in counts[:, :, kind]])
            changes.append(((plans[1:] - plans[:-1]) ** 2).sum(axis=(1, 2)).mean())
    return float(np.mean(changes))


def _grown(weight: float, missed: float, start: float) -> float:
    """More while a target is missed, at least by the exponential of by how much; less, down to its start, after."""
    grown = max(weight * GROWTH, start * math.exp(missed)) if missed > 0 else weight / GROWTH
    return min(max(grown, start), MOST_WEIGHT)


def split(observation: NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An observation's features, P* and A_{t-1}."""
    regions = observation.shape[1]
    found = torch.tensor(observation, dtype=torch.float32)
    return found[..., :FEATURES], found[..., FEATURES : FEATURES + regions], found[..., FEATURES + regions :]


def train(
    topologies: Sequence[str],
    minutes: float,
    seed: int = 0,
    method: Torta | None = None,
    slots: int = 160,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Networks:
    """Train predictor and policy for so many minutes; an interrupt (Ctrl-C) ends it early with the best so far.

    Best is what misses the two targets by the least, and of these what has the highest reward.
    """
    begun = time.monotonic()
    torch.set_num_threads(1)
    chosen = method or Torta()
    data = [predictor_training.windows(name, range(TRAINING_SEEDS, TRAINING_SEEDS + 3), slots) for name in topologies]
    predictor = predictor_training.train(data, max(int(300 * minutes), 20), seed)
    trainer = Trainer(topologies, seed, chosen, slots)
    until = begun + 60 * minutes
    about: dict[str, object] = {"topologies": list(topologies), "minutes": minutes, "seed": seed}
    best, score = trainer.networks(predictor, about), (math.inf, math.inf)
    try:
        while time.monotonic() < until:
            trainer.episode(until)
            missed = max(0.0, trainer.eps / EPS - 1) + max(0.0, 1 - trainer.s / S)
            mine = (round(missed, 2), -trainer.reward)
            if trainer.episodes % len(topologies) == 0 and mine <= score:
                reached = {"episodes": trainer.episodes, "eps": round(trainer.eps, 4), "s": round(trainer.s, 3)}
                best, score = trainer.networks(predictor, about | reached), mine
            share = min((time.monotonic() - begun) / (60 * minutes), 1.0)
            tell(Progress(share, trainer.episodes, trainer.reward, trainer.eps, trainer.s))
    except KeyboardInterrupt:
        pass
    return best


def write_trained(request: TrainingRequest) -> str:
    """Train as `ctxflow train torta` asks for it, write the networks, and return what was reached."""

    def tell(now: Progress) -> None:
        reached = [f"{name} {value:.3f}" for name, value in (("eps", now.eps), ("s", now.s)) if not math.isnan(value)]
        request.progress(now.share, ", ".join([f"episode {now.episodes}", *reached]))

    request.progress(0.0, "predictor")
    found = train(request.names, request.minutes, request.seed, torta(None), tell=tell)
    found.about["command"] = request.command
    write(found, request.output)
    reached = ", ".join(f"{name} {found.about[name]}" for name in ("episodes", "eps", "s") if name in found.about)
    return reached or "it ended before the first episode did: these networks are untrained"
