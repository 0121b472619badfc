"""Fitting and keeping the small classifiers (heads) that turn a sentence encoder into a verifier."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from claims import LABELS, Claim
from templates import Template
from verifier import Head, Vectors, features

STRENGTH = 0.003
"""The inverse strength of the ridge penalty; chosen once on the shipped claims' dev split."""


def texts_to_embed(claims: Sequence[Claim], templates: Sequence[Template]) -> list[str]:
    """Every text that the templates make of the claims, once each, in a fixed order."""
    texts: dict[str, None] = {}
    for template in templates:
        for claim in claims:
            texts.update(dict.fromkeys(template.texts(claim.text, claim.evidence)))
    return list(texts)


def fit_head(claims: Sequence[Claim], template: Template, vectors: Mapping[str, Vectors]) -> Head:
    """Fit the head of one template: logistic regression with a ridge penalty on standardised features.

    The problem is convex and is solved closely, so that the head does not depend on how the vectors came.

    :param vectors: the vector of each text of `texts_to_embed`.
    :raises ValueError: if the claims hold a single label, from which nothing can be learned.
    """
    from sklearn.linear_model import LogisticRegression

    if len({claim.label for claim in claims}) < 2:
        raise ValueError(
            f"the training split holds {len(claims)} claims with fewer than two labels: give more claims, or "
            'rows with "split": "train"'
        )
    filled = [template.texts(claim.text, claim.evidence) for claim in claims]
    parts = [np.stack([vectors[text] for text in texts]) for texts in zip(*filled, strict=True)]
    rows = features(parts).astype(np.float64)
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    spread[spread == 0] = 1.0
    targets = np.array([LABELS.index(claim.label) for claim in claims])
    fitted = LogisticRegression(C=STRENGTH, tol=1e-6, max_iter=5000).fit((rows - mean) / spread, targets)
    coefficients, intercepts = fitted.coef_, fitted.intercept_
    if len(fitted.classes_) == 2:
        coefficients = np.vstack([-coefficients, coefficients]) / 2
        intercepts = np.concatenate([-intercepts, intercepts]) / 2
    weights = np.zeros((len(LABELS), rows.shape[1]))
    offsets = np.full(len(LABELS), -np.inf)
    weights[fitted.classes_] = coefficients / spread
    offsets[fitted.classes_] = intercepts - (coefficients / spread) @ mean
    return Head(weights.astype(np.float32), offsets.astype(np.float32))


def save_head(head: Head, path: Path) -> None:
    """Write a head to a file, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez(file, weights=head.weights, offsets=head.offsets)
    partial.replace(path)


def load_head(path: Path) -> Head | None:
    """Read a head back; None if there is none, or none that is whole."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return Head(arrays["weights"], arrays["offsets"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None
