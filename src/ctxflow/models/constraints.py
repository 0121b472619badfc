"""Bind what a row may write to a JSON schema, a regular expression or choices, by the library llguidance.

At each token a mask says which may come next, so that what was written when a row ends is valid whatever the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ctxflow.models.results import MissingPackageError


def _json() -> Any:
    """Return how JSON is written: a model that is not sure would write white space for ever, where it may."""
    return {"whitespace_flexible": False}


class Grammars:
    """The constraints of one tokenizer; the grammars that were compiled last are kept, and what is wrong with others.

    Each is compiled once, in a thread, beside others: others that ask for it meanwhile wait for the same.

    :param size: tokens that the model scores.
    :param ends: the tokens that end a text.
    """

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        self._given = tokenizer, size, ends
        self._made: Any = None  # The tokenizer as the library has it.
        self._making = threading.Lock()
        self._compiled: dict[tuple[str, bytes], asyncio.Future[Any]] = {}

    async def constraints(self, kind: str, value: Any, count: int) -> list[_Matched]:
        """Return so many new constraints.

        :param kind: "json" (a schema, as an object or text), "json_object", "regex" or "choice" (texts).
        :raises MissingPackageError: where llguidance is not installed.
        :raises ValueError: for one that the library cannot make, with its words, or a tokenizer that it does not know.
        """
        if kind == "json_object":
            kind, value = "json", {"type": "object"}
        text = value if isinstance(value, str) else json.dumps(value)
        key = kind, hashlib.sha256(text.encode()).digest()
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = asyncio.ensure_future(asyncio.to_thread(self._compile, kind, text))
            if len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
        try:
            found = await asyncio.shield(compiled)
        except Exception:
            self._compiled.pop(key, None)
            raise
        if isinstance(found, str):
            raise ValueError(found)
        return await asyncio.to_thread(_copies, found, count)

    def _compile(self, kind: str, text: str) -> Any:
        """Return a matcher, or what is wrong."""
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingPackageError.about("llguidance", extra="transformers", why=error) from error
        try:
            with _panics_as_errors():
                with self._making:
                    self._made = self._made or self._tokenizer(from_tokenizer)
                matcher = llguidance.LLMatcher
                if kind == "json":
                    grammar = matcher.grammar_from_json_schema(text, overrides=_json())
                elif kind == "regex":
                    grammar = matcher.grammar_from_regex(text)
                else:
                    grammar = llguidance.grammar_from("choice", text)
                made = matcher(self._made, grammar, log_level=0)
                made.compute_bitmask()  # The first takes long, and is kept for all copies.
                return _first_line(made.get_error()) if made.is_error() else made
        except ValueError as error:
            return _first_line(str(error))

    def _tokenizer(self, from_tokenizer: Any) -> Any:
        tokenizer, size, ends = self._given
        own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        eos = [*ends, *own][:1] if len(ends) < 2 else list(ends)
        # A model scores more tokens than its tokenizer has, where they were rounded up.
        return from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=eos or None)


_KEPT = 128


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise `ValueError` for what the library fails at, its panics included, which are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(_first_line(str(error)) or type(error).__name__) from error
        raise


def _copies(matcher: Any, count: int) -> list[_Matched]:
    with _panics_as_errors():
        return [_Matched(matcher.deep_copy()) for _ in range(count)]


class _Matched:
    """A constraint as `ctxflow.models.running_batch.Constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, tokens: int) -> torch.Tensor:
        """Return which of so many tokens may come next, as bools."""
        with _panics_as_errors():
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little")[:tokens].astype(bool)
        return torch.from_numpy(np.pad(bits, (0, tokens - len(bits))))

    def take(self, token: int) -> bool:
        """Go on behind a token; return whether nothing more may come."""
        with _panics_as_errors():
            self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))


def _first_line(text: str) -> str:
    return text.strip().split("\n", maxsplit=1)[0]
