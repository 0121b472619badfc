"""What the models answer, as plain data: no model library is imported, so that a driver can read results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


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
