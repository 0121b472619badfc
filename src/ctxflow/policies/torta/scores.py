"""How well a task fits a server (TORTA, Eqs. 7 to 10), for all tasks and servers at once.

Eq. 7 is w1 * hardware + w2 * load + w3 * locality. Its first and last terms do not change while tasks are given out;
they are the matrix of `fit`. The load term does, and `micro` keeps it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.torta.quantities import Floats, Recent, Servers, Tasks, amounts

MISMATCH = 0.5
"""Eq. 8's Type_match where the architecture is not the right one."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of Eqs. 7 and 10. The paper prints none of them; these are ours.

    :ivar hardware: w1.
    :ivar load: w2.
    :ivar locality: w3.
    :ivar same_model: w_m, what the same model counts.
    :ivar similar_input: w_c, what the cosine of two inputs counts.
    :ivar forgetting: lambda, per second.
    """

    hardware: float = 1.0
    load: float = 1.0
    locality: float = 1.0
    same_model: float = 1.0
    similar_input: float = 0.0
    forgetting: float = 1 / 300


def fit(tasks: Tasks, servers: Servers, recent: Recent | None, now: float, weights: Weights | None = None) -> Floats:
    """Compute Eq. 7 without its load term: (N, S), finite.

    :param recent: None if nothing has run yet.
    :param now: seconds, on the clock of `recent`.
    """
    chosen = weights or Weights()
    score = chosen.hardware * hardware(tasks, servers)
    if recent is not None and len(recent.server) and chosen.locality:
        score += chosen.locality * locality(tasks, recent, len(servers.compute), now, chosen)
    return score


def hardware(tasks: Tasks, servers: Servers) -> Floats:
    """Compute Eq. 8: (N, S) between 0 and 1. A task that asks for nothing is served fully by any server.

    >>> figures = (np.array([x]) for x in (50.0, 24.0, 4.0, 0.0, 0.0))
    >>> servers = Servers(*figures, np.array([4]), np.array([[True, False]]))
    >>> asked = np.array([100.0, 25.0])
    >>> tasks = Tasks(asked, np.array([12.0, 48.0]), np.array([0, 1]), np.zeros(2, int), asked, asked)
    >>> hardware(tasks, servers).tolist()
    [[0.5], [0.25]]
    """
    score = _covered(servers.compute, tasks.compute) * _covered(servers.memory, tasks.memory)
    score *= np.where(servers.suits.T[tasks.kind], 1.0, MISMATCH)
    return score


def _covered(offered: Floats, asked: Floats) -> Floats:
    """Return min(1, offered / asked) for each pair."""
    there, wanted = amounts(offered)[None, :], amounts(asked)[:, None]
    enough = there >= wanted
    return np.asarray(np.where(enough, 1.0, there / np.where(enough, 1.0, wanted)), dtype=np.float64)


def load(held: Floats, capacity: Floats) -> Floats:
    """Compute Eq. 9: exp(-(utilisation + queue) / capacity), with both in tasks; a server without capacity scores 0.

    :param held: (S,) work under way and tasks that wait.

    >>> load(np.array([0.0, 1.0, 1.0]), np.array([2.0, 2.0, 0.0])).round(3).tolist()
    [1.0, 0.607, 0.0]
    """
    room = amounts(capacity)
    ratio = np.divide(amounts(held), room, out=np.full(len(room), np.inf), where=room > 0)
    return np.asarray(np.exp(-ratio), dtype=np.float64)


def locality(tasks: Tasks, recent: Recent, servers: int, now: float, weights: Weights | None = None) -> Floats:
    """Compute Eq. 10: (N, S), the similarity of each task to what each server ran lately, by age.

    As printed it is a sum, so how much counts as recent is the caller's choice; and a time in the future counts as
    now. Similarity is linear in an input of length one, so a server's inputs are added up before they are compared.

    :param servers: how many servers there are.

    >>> recent = Recent(np.array([1, 1]), np.array([7, 8]), np.array([0.0, 0.0]))
    >>> one = np.ones(1)
    >>> locality(Tasks(one, one, np.array([0]), np.array([7]), one, one), recent, 2, 0.0).tolist()
    [[0.0, 1.0]]
    """
    chosen = weights or Weights()
    fresh = np.exp(-chosen.forgetting * amounts(now - recent.time))
    models, number = np.unique(np.concatenate([recent.model, tasks.model]), return_inverse=True)
    held = np.zeros((len(models), servers))
    np.add.at(held, (number[: len(recent.model)], recent.server), fresh)
    score = chosen.same_model * held[number[len(recent.model) :]]
    if chosen.similar_input and tasks.embedding is not None and recent.embedding is not None:
        inputs = np.zeros((servers, recent.embedding.shape[1]))
        np.add.at(inputs, recent.server, _unit(recent.embedding) * fresh[:, None])
        score += chosen.similar_input * (_unit(tasks.embedding) @ inputs.T)
    return np.asarray(score, dtype=np.float64)


def _unit(vectors: Floats) -> Floats:
    """Return the vectors with length one each; what is no vector at all is similar to nothing."""
    known = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0.0)
    largest = np.abs(known).max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(known, largest, out=np.zeros_like(known), where=largest > 0)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(np.divide(scaled, length, out=scaled, where=length > 0), dtype=np.float64)
