"""What runs on the workers: the apps that ask a model, and the vectors, features and heads they work with.

The context of a sweep is a *model*: it is what takes seconds to build. The template, and the head that was
fitted for it, are constants of a call, so that all templates of a model share one library process on each
worker, and the fitting too. How heads are fitted lives in heads.py, which runs on the person's own machine.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import claims as claims_module
import cloudpickle
import numpy as np
import templates
from claims import LABELS
from numpy.typing import NDArray
from templates import WORDS, Template

from ctxflow import batch_app, context

if TYPE_CHECKING:
    from ctxflow.models import LabelClassifier, SentenceEncoder

# Workers on other machines have none of these files: what is in them travels with the calls.
for _module in (claims_module, templates, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)

Vectors = NDArray[np.float32]


class Head(NamedTuple):
    """The small classifier on top of a sentence encoder: one row of weights and one offset per label.

    :ivar weights: shape (labels, features).
    :ivar offsets: shape (labels,).
    """

    weights: Vectors
    offsets: Vectors

    def labels(self, features: Vectors) -> list[str]:
        """Choose the label of each row of features."""
        logits = features @ self.weights.T + self.offsets
        return [LABELS[i] for i in logits.argmax(axis=1)]


def features(parts: Sequence[Vectors]) -> Vectors:
    """Make features of the vectors of a template's texts: u alone, or |u - v| and u * v.

    :param parts: one or two arrays of shape (items, dimension).
    :returns: shape (items, dimension) or (items, 2 * dimension).

    Source of the second: Conneau et al., Supervised Learning of Universal Sentence Representations, 2017,
    less u and v themselves, which do not say how the two texts stand to each other.
    """
    if len(parts) == 1:
        return parts[0]
    u, v = parts
    return np.hstack([np.abs(u - v), u * v])


@context
def first_layers(model: str, layers: int) -> SentenceEncoder:
    """Build a sentence encoder that keeps its first layers alone: less depth, more speed.

    :raises ValueError: if it has fewer layers, or is not of BERT's family.
    """
    from ctxflow.models import SentenceEncoder

    encoder = SentenceEncoder(model)
    stack = getattr(getattr(encoder.loaded.model, "encoder", None), "layer", None)
    if stack is None or not 1 <= layers <= len(stack):
        has = "no stack of layers that is known here" if stack is None else f"{len(stack)} layers"
        raise ValueError(f"{model} cannot be cut to {layers} layers: it has {has}")
    encoder.loaded.model.encoder.layer = stack[:layers]
    return encoder


@batch_app(None)
def embed(encoder: SentenceEncoder, texts: list[str]) -> list[str]:
    """Turn texts into vectors, each as base64 of its float32 numbers, so that a results file can hold it."""
    return [pack(vector) for vector in encoder.encode(texts)]


@batch_app(None)
def verify_by_encoder(
    encoder: SentenceEncoder, claims: list[str], evidences: list[str], *, template: Template, head: Head
) -> list[str]:
    """Answer claims with a sentence encoder and the head that was fitted for the template."""
    filled = [template.texts(claim, evidence) for claim, evidence in zip(claims, evidences, strict=True)]
    parts = [encoder.encode(texts) for texts in zip(*filled, strict=True)]
    return head.labels(features(parts))


@batch_app(None)
def verify_by_likelihood(
    classifier: LabelClassifier, claims: list[str], evidences: list[str], *, template: Template
) -> list[str]:
    """Answer claims with a causal language model: the label that it finds likeliest after the prompt."""
    prompts = [template.prompt(claim, evidence) for claim, evidence in zip(claims, evidences, strict=True)]
    return [WORDS[answer.label] for answer in classifier.classify(prompts, WORDS)]


def pack(vector: Vectors) -> str:
    """Write a vector as text, exactly."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def unpack(text: str) -> Vectors:
    """Read a vector that `pack` wrote.

    >>> unpack(pack(np.array([0.5, -1.0], dtype=np.float32))).tolist()
    [0.5, -1.0]
    """
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
