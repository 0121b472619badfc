"""What the models answer, as plain data, and their errors: a driver can read both without a model library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ctxflow.errors import CtxflowError
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

    :ivar label: the label with the highest score.
    :ivar scores: label -> its score: the log-probability, per token if the classifier is length-normalised.
    :ivar log_probabilities: label -> natural log of the probability that exactly its tokens follow the
        prompt.
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


class InputTooLong(CtxflowError, ValueError):
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
