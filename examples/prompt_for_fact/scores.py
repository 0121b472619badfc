"""From answers to figures: accuracy with its interval, the best pair, the evaluation file. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from claims import Claim

Z_95 = 1.959963984540054


def wilson(correct: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion.

    :param z: the normal quantile, 1.96 for a 95 % interval.
    :returns: its lower and upper end; (0, 1) for no observations.
    :raises ValueError: unless 0 <= correct <= n.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.

    >>> [round(end, 3) for end in wilson(50, 100)]
    [0.404, 0.596]
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} is no proportion")
    if n == 0:
        return 0.0, 1.0
    share = correct / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (middle - half) / scale, (middle + half) / scale
    return 0.0 if correct == 0 else low, 1.0 if correct == n else high


@dataclass(frozen=True)
class Score:
    """How many of n answers were right."""

    correct: int
    n: int

    @property
    def accuracy(self) -> float | None:
        """The share that is right, None of nothing."""
        return self.correct / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson(self.correct, self.n)

    def __str__(self) -> str:
        """Write the accuracy and its interval in percent.

        >>> print(Score(50, 100))
        50.0 % [40.4, 59.6]
        """
        if self.accuracy is None:
            return "-"
        low, high = self.interval
        return f"{100 * self.accuracy:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def beats(score: Score, other: Score) -> bool:
    """Whether one accuracy is above another with intervals that do not meet.

    >>> beats(Score(70, 100), Score(33, 100)), beats(Score(40, 100), Score(33, 100))
    (True, False)
    """
    return score.interval[0] > other.interval[1]


@dataclass(frozen=True)
class PairResult:
    """What one (model, template) pair scored.

    :ivar model: the model's name, as it was asked for.
    :ivar note: what a reader must know of the model, such as "random weights"; mostly "".
    :ivar dev: on the split that the best pair is chosen by.
    :ivar test: on the split that is reported.
    :ivar control: empty claims that were answered NOT ENOUGH INFO, which is right: nothing was claimed.
    :ivar unanswered: claims without an answer; they count as wrong.
    """

    model: str
    note: str
    template: str
    dev: Score
    test: Score
    control: Score
    unanswered: int


def score_of(claims: Sequence[Claim], answers: Mapping[str, str | None], split: str) -> Score:
    """Score the answers to the claims of one split; a claim without an answer counts as wrong."""
    asked = [claim for claim in claims if claim.split == split]
    return Score(sum(answers.get(claim.key) == claim.label for claim in asked), len(asked))


def score_pair(
    model: str, note: str, template: str, claims: Sequence[Claim], answers: Mapping[str, str | None]
) -> PairResult:
    """Score one pair.

    :param answers: the label by `Claim.key`, None for an item that is dead.
    """
    return PairResult(
        model,
        note,
        template,
        dev=score_of(claims, answers, "dev"),
        test=score_of(claims, answers, "test"),
        control=score_of(claims, answers, "control"),
        unanswered=sum(answers.get(claim.key) is None for claim in claims),
    )


def baseline_score(claims: Sequence[Claim], label: str, split: str = "test") -> Score:
    """What the same label for every claim scores."""
    return score_of(claims, {claim.key: label for claim in claims}, split)


def ranked(results: Iterable[PairResult]) -> list[PairResult]:
    """The pairs from best to worst: by the dev split, so that the test split's figure stays an honest one."""

    def rank(result: PairResult) -> tuple[float, str, str]:
        score = result.dev if result.dev.n else result.test
        return -(score.accuracy or 0.0), result.model, result.template

    return sorted(results, key=rank)


def evaluation(
    results: Sequence[PairResult], baseline: Score, baseline_label: str, claims_digest: str
) -> dict[str, Any]:
    """What `evaluation.json` holds: the error of each model and template, with n and the 95 % interval."""
    return {
        "example": "prompt_for_fact",
        "claims": claims_digest,
        "confidence": 0.95,
        "baseline": {"label": baseline_label, **_error(baseline)},
        "best": _named(ranked(results)[0]) if results else None,
        "evaluations": [
            {
                **_named(result),
                "dev": _error(result.dev),
                **_error(result.test),
                "unanswered": result.unanswered,
            }
            for result in ranked(results)
        ],
    }


def _named(result: PairResult) -> dict[str, Any]:
    note = {"note": result.note} if result.note else {}
    return {"model": result.model, "template": result.template, **note}


def _error(score: Score) -> dict[str, Any]:
    if score.accuracy is None:
        return {"error": None, "n": 0, "interval": None}
    low, high = score.interval
    return {
        "error": round(1 - score.accuracy, 6),
        "n": score.n,
        "interval": [round(1 - high, 6), round(1 - low, 6)],
    }
