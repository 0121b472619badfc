"""Say how the next token is chosen, per row of a batch: checked parameters as plain data.

The arithmetic on logits is in generate.py; a row here is one prompt of a batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.errors import article, counted


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The generation parameters of one prompt.

    :ivar max_new_tokens: the most tokens to write, at least 1.
    :ivar temperature: 0 takes the likeliest token each time (greedy); above, the logits are divided by it.
    :ivar top_p: sample among the fewest likeliest tokens whose probabilities sum to at least this, in (0, 1].
    :ivar top_k: sample among that many likeliest tokens, 0 for all.
    :ivar seed: the same seed and prompt give the same text; None draws anew each time.
    :ivar stop: strings that end the text when they appear in it.
    :raises ValueError: for a number out of its range.
    :raises TypeError: for a value of another type.

    >>> Sampling(temperature=-1)
    Traceback (most recent call last):
    ...
    ValueError: temperature=-1 is out of range: give 0 (greedy) or more
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k"):
            _check(name, getattr(self, name), int, "a whole number")
        for name in ("temperature", "top_p"):
            _check(name, getattr(self, name), (int, float), "a number")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is out of range: give 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} is out of range: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is out of range: give a number over 0, up to 1 (all tokens)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is out of range: give 1 or more, or 0 for all tokens")
        if self.seed is not None:
            _check("seed", self.seed, int, "a whole number or None")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise TypeError(f"stop={self.stop!r} holds something that is no string, or an empty one: give strings")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time; a temperature near 0 means that too."""
        return self.temperature < 1e-5

    def stopping_at(self, stops: Sequence[str]) -> Sampling:
        """Return the same with further stop strings."""
        return dataclasses.replace(self, stop=(*self.stop, *stops))


GENERATION = tuple(field.name for field in dataclasses.fields(Sampling))
"""The names of generation parameters."""


def _check(name: str, value: Any, kind: type | tuple[type, ...], needed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} is {article(type(value).__name__)}: give {needed}")


def per_row(count: int, **parameters: Any) -> list[Sampling]:
    """Return the sampling of each of `count` prompts, from values for all or lists with a value for each.

    `stop` for all is a string or a list of strings; for each, a list of such lists.

    :raises ValueError: for a list whose length is not `count`, or a value out of range.
    :raises TypeError: for an unknown parameter or a value of another type.

    >>> [row.max_new_tokens for row in per_row(2, max_new_tokens=[5, 9], temperature=0.5)]
    [5, 9]
    >>> per_row(2, stop="###")[1].stop
    ('###',)
    """
    if unknown := sorted(set(parameters) - {field.name for field in dataclasses.fields(Sampling)}):
        known = ", ".join(field.name for field in dataclasses.fields(Sampling))
        raise TypeError(f"{unknown[0]} is no generation parameter: there are {known}")
    columns = {name: _column(name, value, count) for name, value in parameters.items()}
    return [Sampling(**{name: column[row] for name, column in columns.items()}) for row in range(count)]


def _column(name: str, value: Any, count: int) -> list[Any]:
    if name == "stop":
        if value is None or isinstance(value, str):
            return [_strings(value)] * count
        if all(isinstance(part, str) for part in value):
            return [tuple(value)] * count
        value = [_strings(part) for part in value]
    elif isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        return [value] * count
    if len(value) != count:
        values, prompts = counted(len(value), "value"), counted(count, "prompt")
        raise ValueError(f"{name} has {values} for {prompts}: give one for each, or one for all")
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def uniforms(sampling: Sampling, prompt_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return one number in [0, 1) for each token that a row may sample, from its seed and its prompt alone.

    So what a row samples does not depend on which rows share its batch, and a retried batch gives the same
    text. Different prompts under one seed draw independently.

    :param prompt_ids: the prompt's tokens.
    :returns: shape (max_new_tokens,).

    >>> bool((uniforms(Sampling(seed=1), [5, 6]) == uniforms(Sampling(seed=1), [5, 6])).all())
    True
    """
    if sampling.seed is None:
        generator = np.random.default_rng()
    else:
        content = f"{sampling.seed}:{','.join(map(str, prompt_ids))}"
        generator = np.random.default_rng(int.from_bytes(hashlib.sha256(content.encode()).digest(), "big"))
    return generator.random(sampling.max_new_tokens, dtype=np.float32)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices.

    :raises ValueError: naming them.

    >>> check_choice("too_long", "cut", ("error", "cut-start", "cut-end"))
    Traceback (most recent call last):
    ...
    ValueError: too_long='cut' is unknown: give one of 'error', 'cut-start', 'cut-end'
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: give one of {', '.join(map(repr, choices))}")
