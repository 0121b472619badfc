"""What runs on the workers: the contexts that hold a model, and the apps that ask it.

The context of a sweep is a *model*: it is what takes seconds to build. The template is an input of each item,
so that all templates of a model share one library process on each worker. How the small classifiers are
fitted lives in heads.py, which runs on the person's own machine.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from claims import LABELS
from numpy.typing import NDArray
from templates import Template

from ctxflow import batch_app, context

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Head:
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
    """Make features of the vectors of a template's texts: u alone, or u, v, |u - v| and u * v.

    :param parts: one or two arrays of shape (items, dimension).
    :returns: shape (items, dimension) or (items, 4 * dimension).

    Source of the second: Conneau et al., Supervised Learning of Universal Sentence Representations, 2017.
    """
    if len(parts) == 1:
        return parts[0]
    u, v = parts
    return np.hstack([u, v, np.abs(u - v), u * v])


class EncoderVerifier:
    """A sentence encoder, with a head for each template."""

    def __init__(self, encoder: Any, templates: Mapping[str, Template], heads: Mapping[str, Head]) -> None:
        self.encoder, self.templates, self.heads = encoder, templates, heads

    def labels(self, template: str, claims: Sequence[str], evidences: Sequence[str]) -> list[str]:
        """Answer claims that are shown in one template."""
        filled = [self.templates[template].texts(c, e) for c, e in zip(claims, evidences, strict=True)]
        parts = [self.encoder.encode(texts) for texts in zip(*filled, strict=True)]
        return self.heads[template].labels(features(parts))


class LanguageModelVerifier:
    """A causal language model that answers with the label it finds likeliest."""

    def __init__(self, classifier: Any, templates: Mapping[str, Template]) -> None:
        self.classifier, self.templates = classifier, templates

    def labels(self, template: str, claims: Sequence[str], evidences: Sequence[str]) -> list[str]:
        """Answer claims that are shown in one template."""
        shown = self.templates[template]
        prompts = [shown.prompt(c, e) for c, e in zip(claims, evidences, strict=True)]
        return [answer.label for answer in self.classifier.classify(prompts, LABELS)]


@context
def encoder_vectors(encoder: Any, layers: int | None) -> Any:
    """Build an encoder whose vectors a head is fitted on."""
    return cut(encoder, layers)


@context
def encoder_verifier(
    encoder: Any, layers: int | None, templates: Mapping[str, Template], heads: Mapping[str, Head]
) -> EncoderVerifier:
    """Build a verifier from an encoder (a recipe, which is built first) and the heads fitted for it."""
    return EncoderVerifier(cut(encoder, layers), templates, heads)


@context
def language_model_verifier(classifier: Any, templates: Mapping[str, Template]) -> LanguageModelVerifier:
    """Build a verifier from a classifier by label likelihood (a recipe, which is built first)."""
    return LanguageModelVerifier(classifier, templates)


def cut(encoder: Any, layers: int | None) -> Any:
    """Keep the first layers of an encoder of BERT's family alone: less depth, more speed.

    :raises ValueError: if it has fewer layers, or is of another family.
    """
    if layers is not None:
        stack = getattr(getattr(encoder.loaded.model, "encoder", None), "layer", None)
        if stack is None or not 1 <= layers <= len(stack):
            has = "no stack of layers that is known here" if stack is None else f"{len(stack)} layers"
            raise ValueError(f"{encoder.loaded.name} cannot be cut to {layers} layers: it has {has}")
        encoder.loaded.model.encoder.layer = stack[:layers]
    return encoder


@batch_app(None)
def embed(encoder: Any, texts: list[str]) -> list[str]:
    """Turn texts into vectors, each as base64 of its float32 numbers, so that a results file can hold it."""
    return [pack(vector) for vector in encoder.encode(texts)]


@batch_app(None)
def verify(verifier: Any, templates: list[str], claims: list[str], evidences: list[str]) -> list[str]:
    """Answer claims, each shown in the template that is named beside it; one label per item, in order."""
    answers: list[str] = [""] * len(claims)
    for name in dict.fromkeys(templates):
        rows = [i for i, template in enumerate(templates) if template == name]
        labels = verifier.labels(name, [claims[i] for i in rows], [evidences[i] for i in rows])
        for i, label in zip(rows, labels, strict=True):
            answers[i] = label
    return answers


def pack(vector: Vectors) -> str:
    """Write a vector as text, exactly."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def unpack(text: str) -> Vectors:
    """Read a vector that `pack` wrote.

    >>> unpack(pack(np.array([0.5, -1.0], dtype=np.float32))).tolist()
    [0.5, -1.0]
    """
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
