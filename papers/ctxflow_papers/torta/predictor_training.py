"""Training TORTA's demand predictor: offline, on the demand of training seeds (Appendix B-A).

The loss is the paper's, the squared error with L2 regularisation of 1e-4, of demand over its own mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ctxflow.policies.torta.macro import Layers
from ctxflow.policies.torta.quantities import Floats
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.forecasting import AHEAD, SLOTS, features
from ctxflow_papers.torta.settings import LOADS
from ctxflow_papers.torta.world import world

HIDDEN = 48
BATCH, RATE, DECAY = 128, 1e-3, 1e-4


def windows(topology: str, seeds: Sequence[int], slots: int) -> tuple[Floats, Floats]:
    """(N, SLOTS, R) histories and (N, AHEAD, R) what came after them; each type of task by itself."""
    before, after = [], []
    for number, seed in enumerate(seeds):
        load = LOADS[number % len(LOADS)]
        counts = tasks_of(world(topology), load, seed, slots).counts(world(topology).regions).astype(np.float64)
        for kind in range(counts.shape[2]):
            series = counts[:, :, kind]
            for start in range(len(series) - SLOTS - AHEAD + 1):
                before.append(series[start : start + SLOTS])
                after.append(series[start + SLOTS : start + SLOTS + AHEAD])
    return np.stack(before), np.stack(after)


def train(
    data: Sequence[tuple[Floats, Floats]], steps: int, seed: int, tell: Callable[[float], None] = lambda done: None
) -> Layers:
    """Train on the windows of one topology or several."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(2 * SLOTS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, 2 * AHEAD),
    )  # fmt: skip
    with torch.no_grad():
        net[-1].weight.mul_(0.1), net[-1].bias.zero_()
    tensors = [tuple(torch.tensor(x, dtype=torch.float32) for x in (features(b), b, a)) for b, a in data]
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    chance = np.random.default_rng(seed)
    for step in range(steps):
        seen, before, after = tensors[step % len(tensors)]
        rows = torch.as_tensor(chance.integers(0, len(seen), BATCH))
        found = _combined(net(seen[rows]), before[rows])
        scale = before[rows].mean(dim=1, keepdim=True) + 1.0
        loss = (((found - after[rows]) / scale) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            tell(step / steps)
    return layers(net)


def _combined(outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`predictor.combined` in torch."""
    outputs = outputs.clamp(-3.0, 3.0).transpose(1, 2)
    recent = before.mean(dim=1)
    grown = recent[:, None, :] * outputs[:, :AHEAD].exp()
    weights = recent / recent.sum(dim=1, keepdim=True).clamp(min=1e-12)
    total = recent.sum(dim=1)[:, None] * (outputs[:, AHEAD:] * weights[:, None, :]).sum(dim=2).exp()
    return grown / grown.sum(dim=2, keepdim=True).clamp(min=1e-12) * total[..., None]


def layers(net: torch.nn.Sequential) -> Layers:
    """A network's numbers."""
    linear = [each for each in net if isinstance(each, torch.nn.Linear)]
    return Layers(
        tuple(each.weight.detach().numpy().T.astype(np.float64) for each in linear),
        tuple(each.bias.detach().numpy().astype(np.float64) for each in linear),
    )
