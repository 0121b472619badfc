"""Other contexts that may answer an app's items, and how often each is wrong.

What does not live here: how items are divided among them (policies/placement), and following that (scheduler/shares).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ctxflow.context import Context, ContextFunction
from ctxflow.option_values import number, refuse


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A context that may answer an app's items in place of its own: another model, or the same at another precision.

    The app's function gets whichever of them answers.

    :ivar error: the share of its answers that are wrong, 0 to 1.
    :ivar name: what results call it; by default the context's name, with a number where another has that too.
    :raises TypeError: if the context is no recipe.
    :raises ValueError: if the error is no share.
    """

    context: Context
    error: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.context, ContextFunction) or not isinstance(self.context, Context):
            raise TypeError(
                "an alternative is a recipe made by a @context function: Alternative(small(...), error=0.1)"
            )
        number("error", self.error, "the share of its answers that are wrong, 0 to 1", most=1)
        if not isinstance(self.name, str):
            raise refuse("name", self.name, "text: what results call this alternative", TypeError)


def check_alternatives(
    own: Context | None, error: float, alternatives: Sequence[Alternative], max_error: float | None
) -> None:
    """See that an app and its alternatives make sense together.

    Where no plan divides its items, all go to the app's own context: so that has to keep the limit by itself.

    :raises TypeError: without a context of the app's own.
    :raises ValueError: if the own context answers too much wrong.
    """
    if max_error is not None and error > max_error:
        raise ValueError(
            f"the app's own context has error={error:g}, above max_error={max_error:g}: make a better one the app's "
            "own, and this one an alternative"
        )
    if alternatives and own is None:
        raise TypeError("alternatives= stand in for an app's context: give the app one")


def names(own: Context, alternatives: Sequence[Alternative]) -> list[str]:
    """What results call an app's own context and its alternatives; they differ.

    >>> recipe = Context("model", print)
    >>> names(recipe, [Alternative(recipe), Alternative(recipe, name="int8")])
    ['model', 'model-2', 'int8']
    """
    found = [own.name]
    for each in alternatives:
        name = each.name or each.context.name
        found.append(f"{name}-{len(found) + 1}" if name in found else name)
    return found


def read_errors(path: str | Path) -> dict[str, float]:
    """The error of each model in an evaluation file, such as prompt_for_fact writes; of its best template.

    :raises OSError, ValueError, KeyError, TypeError: if it is no such file.

    >>> import json, tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     entries = [{"model": "small", "error": 0.3}, {"model": "small", "error": 0.25}]
    ...     json.dump({"evaluations": entries}, file), file.flush()
    ...     read_errors(file.name)
    (None, None)
    {'small': 0.25}
    """
    best: dict[str, float] = {}
    for entry in json.loads(Path(path).read_text(encoding="utf-8"))["evaluations"]:
        if entry["error"] is not None:
            best[entry["model"]] = min(float(entry["error"]), best.get(entry["model"], 1.0))
    return best
