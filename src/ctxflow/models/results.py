"""What models are asked and answer, as plain data that needs no model library: parameters, answers and errors."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxflow.errors import CtxflowError, ItemRefused, article, counted
from ctxflow.installing import how_to_install


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a model wrote for one prompt.

    :ivar text: the new text alone, without the prompt, special tokens and the stop string.
    :ivar prompt_tokens: tokens that the model read.
    :ivar completion_tokens: tokens that the model wrote, the end-of-text token among them.
    :ivar finish_reason: "stop" (end-of-text token or stop string) or "length" (`max_new_tokens`).
    :ivar truncated: whether the prompt was too long and was cut, as `too_long` said.
    :ivar original_prompt_tokens: the tokens that it had before; None where nothing was cut.

    >>> Generation("Paris", prompt_tokens=7, completion_tokens=2, finish_reason="stop").text
    'Paris'
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    truncated: bool = False
    original_prompt_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Classification:
    """Which of the labels a model finds likeliest after one prompt.

    :ivar label: the one with the highest score.
    :ivar scores: label -> its score: the log-probability, per token if the classifier is length-normalised.
    :ivar log_probabilities: label -> natural log of the probability that exactly its tokens follow the prompt.
    :ivar prompt_tokens: tokens that the model read.
    :ivar truncated, original_prompt_tokens: as `Generation`.
    """

    label: str
    scores: Mapping[str, float]
    log_probabilities: Mapping[str, float]
    prompt_tokens: int
    truncated: bool = False
    original_prompt_tokens: int | None = None

    @property
    def probabilities(self) -> dict[str, float]:
        """The scores as probabilities that sum to one over the labels (softmax).

        >>> logs = {"yes": -1.0, "no": -1.0}
        >>> answer = Classification("yes", scores=logs, log_probabilities=logs, prompt_tokens=3)
        >>> answer.probabilities
        {'yes': 0.5, 'no': 0.5}
        """
        highest = max(self.scores.values())
        weights = {label: math.exp(score - highest) for label, score in self.scores.items()}
        total = sum(weights.values())
        return {label: weight / total for label, weight in weights.items()}


class ModelNotFoundError(CtxflowError, LookupError):
    """No model is reachable under the name that was given; the message says what to do."""


class WrongModelError(CtxflowError, ValueError):
    """A model cannot do what it is to do; the message says what it is, and what it can do."""


class InputTooLong(ItemRefused):
    """An input has more tokens than fit, and was not to be cut.

    :ivar what: the input, for messages.
    :ivar tokens: how many it has; `limit`, how many fit; `why`, what sets the limit.

    >>> print(str(InputTooLong("the prompt", 600, 256, "the model reads 256 at most")).partition(":")[0])
    the prompt has 600 tokens, but 256 fit (the model reads 256 at most)
    """

    def __init__(self, what: str, tokens: int, limit: int, why: str) -> None:
        self.what, self.tokens, self.limit, self.why = what, tokens, limit, why
        has = f"{what} has {tokens} token{'' if tokens == 1 else 's'}"
        if limit > 0:
            remedy = 'shorten it, or have it cut, with too_long="cut-start" or "cut-end" (ctxflow batch: --too-long)'
            super().__init__(f"{has}, but {limit} fit ({why}): {remedy}")
        else:
            super().__init__(f"{has}, but there is no room for any ({why}): give less")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.tokens, self.limit, self.why)

    def named(self, what: str) -> InputTooLong:
        """Return the same error about an input of another name."""
        return type(self)(what, self.tokens, self.limit, self.why)


class MissingPackageError(CtxflowError, ImportError):
    """A library that a model needs is not installed; the message says how to install it.

    >>> print(str(MissingPackageError.about("torch", extra="transformers")).partition(":")[0])
    torch must be installed where this context is built
    """

    @classmethod
    def about(cls, *packages: str, extra: str, why: ImportError | None = None) -> MissingPackageError:
        """Return the error for packages that an extra of ctxflow brings.

        :param why: what the import said.
        """
        said = f" ({why})" if why else ""
        return cls(
            f"{' and '.join(packages)}{said} must be installed where this context is built: "
            f"{how_to_install(*packages, extra=extra)}"
        )


class OutOfMemoryError(CtxflowError, MemoryError):
    """One row alone does not fit in the device's memory."""


class Range(NamedTuple):
    """The numbers that a generation parameter may be.

    :ivar wanted: says what to give.
    :ivar above: whether the least itself is none of them.
    """

    least: float
    most: float
    wanted: str
    above: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is one of them; one that is none (NaN) never is."""
        return self.least <= value <= self.most and not (self.above and value == self.least)


LARGEST = 2**31 - 1
"""The largest count that is given to an engine: many keep counts in 32 bits."""

RANGES = {
    "max_new_tokens": Range(1, LARGEST, f"1 or more, up to {LARGEST}"),
    "temperature": Range(0, 1e6, "0 (greedy) or more, up to 1,000,000"),
    "top_p": Range(0, 1, "a number over 0, up to 1 (all tokens)", above=True),
    "top_k": Range(0, LARGEST, f"1 or more, up to {LARGEST}, or 0 for all tokens"),
    "seed": Range(-(2**63), 2**63 - 1, "a whole number of 64 bits, or None"),
}
"""What generation parameters may be, by name."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The generation parameters of one prompt.

    :ivar max_new_tokens: the most tokens to write, at least 1.
    :ivar temperature: 0 takes the likeliest token each time (greedy); above, the logits are divided by it.
    :ivar top_p: sample among the fewest likeliest tokens whose probabilities sum to at least this, in (0, 1].
    :ivar top_k: sample among that many likeliest tokens, 0 for all.
    :ivar seed: the same seed and prompt give the same text; None draws anew each time.
    :ivar stop: strings that end the text when they appear in it.
    :raises ValueError, TypeError: for a number out of its range, or a value of another type.

    >>> Sampling(temperature=-1)
    Traceback (most recent call last):
    ...
    ValueError: temperature=-1 is out of range: give 0 (greedy) or more, up to 1,000,000
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
        if self.seed is not None:
            _check("seed", self.seed, int, "a whole number or None")
        for name, known in RANGES.items():
            value = getattr(self, name)
            if value is not None and not known.holds(value):
                raise ValueError(f"{name}={value!r} is out of range: give {known.wanted}")
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

    :raises ValueError, TypeError: for a list of another length, an unknown parameter, and as `Sampling`.

    >>> [row.max_new_tokens for row in per_row(2, max_new_tokens=[5, 9], temperature=0.5)]
    [5, 9]
    >>> per_row(2, stop="###")[1].stop
    ('###',)
    """
    if unknown := sorted(set(parameters) - set(GENERATION)):
        raise TypeError(f"{unknown[0]} is no generation parameter: there are {', '.join(GENERATION)}")
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


class Uniforms:
    """The numbers in [0, 1) by which a row's tokens are drawn, from its seed and its prompt alone.

    So what a row samples does not depend on which rows share its batch, and a retried batch gives the same
    text. Different prompts under one seed draw independently.

    >>> Uniforms(Sampling(seed=1), [5, 6])[300] == Uniforms(Sampling(seed=1), [5, 6])[300]
    True
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        if sampling.seed is None:
            self._generator = np.random.default_rng()
        else:
            content = f"{sampling.seed}:{','.join(map(str, prompt_ids))}"
            digest = hashlib.sha256(content.encode()).digest()
            self._generator = np.random.default_rng(int.from_bytes(digest, "big"))
        self._drawn = np.empty(0, dtype=np.float32)

    def __getitem__(self, number: int) -> float:
        """Return the number for a token."""
        while number >= self._drawn.size:  # As many as are needed: a row may stop long before its limit.
            more = self._generator.random(self._drawn.size or 256, dtype=np.float32)
            self._drawn = np.append(self._drawn, more)
        return float(self._drawn[number])


def as_base64(vector: Sequence[float] | NDArray[np.float32]) -> str:
    """Return a vector as OpenAI's encoding_format "base64" has it.

    >>> as_base64([1.0, 0.5])
    'AACAPwAAAD8='
    """
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ValueError` for a value that is none of the choices.

    >>> check_choice("too_long", "cut", ("error", "cut-start", "cut-end"))
    Traceback (most recent call last):
    ...
    ValueError: too_long='cut' is unknown: give one of 'error', 'cut-start', 'cut-end'
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: give one of {', '.join(map(repr, choices))}")
