"""Bind what a row may write to a JSON schema, a regular expression or choices, by the library llguidance.

At each token a mask says which may come next, so that what was written when a row ends is valid whatever the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ctxflow.models.results import MissingPackageError


def _json() -> Any:
    """Return how JSON is written: a model that is not sure would write white space for ever, where it may."""
    return {"whitespace_flexible": False}


class Grammars:
    """The constraints of one tokenizer; grammars that were compiled are kept.

    :param size: tokens that the model scores.
    :param ends: the tokens that end a text.
    :raises MissingPackageError: where llguidance is not installed.
    :raises ValueError: for a tokenizer that it does not know.
    """

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingPackageError.about("llguidance", extra="transformers", why=error) from error
        self._library = llguidance
        own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        eos = [*ends, *own][:1] if len(ends) < 2 else list(ends)
        # A model scores more tokens than its tokenizer has, where they were rounded up.
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=eos or None)
        self._compiled = functools.lru_cache(maxsize=128)(self._compile)

    def constraint(self, kind: str, value: Any) -> _Matched:
        """Return a new constraint.

        :param kind: "json" (a schema, as an object or text), "json_object", "regex" or "choice" (texts).
        :raises ValueError: for one that the library cannot make, with its words.
        """
        if kind == "json_object":
            kind, value = "json", {"type": "object"}
        text = value if isinstance(value, str) else json.dumps(value)
        return _Matched(self._compiled(kind, text).deep_copy())

    def _compile(self, kind: str, text: str) -> Any:
        matcher = self._library.LLMatcher
        if kind == "json":
            grammar = matcher.grammar_from_json_schema(text, overrides=_json())
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(text)
        else:
            grammar = self._library.grammar_from("choice", text)
        made = matcher(self._tokenizer, grammar, log_level=0)
        if made.is_error():
            raise ValueError(_first_line(made.get_error()))
        return made


class _Matched:
    """A constraint as `ctxflow.models.running_batch.Constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, tokens: int) -> torch.Tensor:
        """Return which of so many tokens may come next, as bools."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))
        bits = np.unpackbits(mask, bitorder="little")[:tokens].astype(bool)
        return torch.from_numpy(np.pad(bits, (0, tokens - len(bits))))

    def take(self, token: int) -> bool:
        """Go on behind a token; return whether nothing more may come."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


def _first_line(text: str) -> str:
    return text.strip().split("\n", maxsplit=1)[0]
