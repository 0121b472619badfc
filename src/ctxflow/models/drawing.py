"""Choose the next token of rows from a model's scores: the likeliest, or one that is drawn by the row's own numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctxflow.models.results import Sampling

LARGEST_BELOW_ONE = 1 - 2**-22


def drawn(
    scores: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
) -> torch.Tensor:
    """Draw a token for each row, by inverse-transform sampling over the tokens in the vocabulary's order.

    A row's number u picks the token at which the running sum of its probabilities passes u. So what a row draws does
    not depend on the rows beside it.

    :param scores: shape (rows, tokens).
    :param draws: each row's number; like the others of shape (rows, 1).
    :param top_p, top_k: as `Sampling`; None where no row has one.
    :returns: shape (rows, 1).
    """
    probabilities = torch.softmax(scores.float() / temperature, dim=-1)
    if top_k is not None or top_p is not None:
        probabilities = probabilities * _kept(probabilities, top_p, top_k)
    sums = probabilities.cumsum(dim=-1)
    found = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
    return found.clamp_(max=scores.shape[1] - 1)


def _kept(probabilities: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None) -> torch.Tensor:
    """Return which tokens top_k and top_p leave, in the vocabulary's order; shape as `probabilities`."""
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ranked.shape[1], device=ranked.device)[None]
        keep &= (rank < top_k) | (top_k == 0)
        ranked = ranked * keep
        ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    if top_p is not None:
        before = ranked.cumsum(dim=-1) - ranked
        keep &= (before < top_p) | (top_p >= 1)
    keep[:, 0] = True  # The likeliest, also where top_p is 0 in this type.
    return torch.zeros_like(keep).scatter_(1, order, keep)


def column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return values as a tensor of shape (rows, 1)."""
    return torch.tensor(values, device=device)[:, None]


def parameters(
    sampling: Sequence[Sampling], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the temperatures, top_p and top_k of rows as `drawn` takes them; a greedy row's temperature is 1."""
    return (
        column([1.0 if row.greedy else row.temperature for row in sampling], device),
        column([row.top_p for row in sampling], device) if any(row.top_p < 1 for row in sampling) else None,
        column([row.top_k for row in sampling], device) if any(row.top_k for row in sampling) else None,
    )
