"""What a model reads of an input: all of it, or, where it is too long, an error with both numbers or what a cut left.

What does not live here: how texts and conversations become tokens (prompts.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ctxflow.models.errors import InputTooLong
from ctxflow.models.prompts import FALLBACK_STOP, Message, messages_of, render_chat, tokenize
from ctxflow.models.sampling import Sampling

TOO_LONG = ("error", "cut-start", "cut-end")
ON_ERROR = ("raise", "return")
Answer = TypeVar("Answer")


class Tokens(NamedTuple):
    """An input as the model reads it: its token ids, and how many it had where some were cut off."""

    ids: list[int]
    original: int | None = None

    @property
    def truncated(self) -> bool:
        """Whether something was cut off."""
        return self.original is not None


Read = Tokens | InputTooLong
"""What the model reads of an input, or why it reads nothing."""


class Room(NamedTuple):
    """How many tokens of an input fit, None for any number, and why no more."""

    tokens: int | None
    why: str


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices.

    :raises ValueError: naming them.

    >>> check_choice("too_long", "cut", TOO_LONG)
    Traceback (most recent call last):
    ...
    ValueError: too_long='cut' is unknown: give one of 'error', 'cut-start', 'cut-end'
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: give one of {', '.join(map(repr, choices))}")


def cut(ids: list[int], limit: int, too_long: str, *, first: int = 0, last: int = 0) -> list[int]:
    """Return `limit` of the tokens: the first `first`, the last `last`, and what fits of those between.

    :param too_long: "cut-start" leaves out the beginning of those between, "cut-end" their end.

    >>> cut([1, 10, 11, 12, 13], 3, "cut-start", first=1)
    [1, 12, 13]
    >>> cut([1, 10, 11, 12, 2], 3, "cut-end", first=1, last=1)
    [1, 10, 2]
    """
    free = limit - first - last
    if free < 1:  # So little room that the text comes before what surrounds it.
        first, last, free = 0, 0, limit
    between = ids[first : len(ids) - last]
    kept = between[-free:] if too_long == "cut-start" else between[:free]
    return [*ids[:first], *kept, *ids[len(ids) - last :]]


class Reader:
    """Reads inputs for one language model.

    :param length: tokens that the model reads and writes together, None if there is no limit.
    :param max_input_tokens: what the user allows, None for what fits.
    :param too_long: what becomes of longer inputs, one of `TOO_LONG`.
    :raises ValueError: for a choice that is none.
    """

    def __init__(self, tokenizer: Any, length: int | None, max_input_tokens: int | None, too_long: str) -> None:
        check_choice("too_long", too_long, TOO_LONG)
        self.tokenizer = tokenizer
        self.too_long = too_long
        self._length = length
        self._max_input_tokens = max_input_tokens

    def room(self, reserved: int, whose: str) -> Room:
        """How many tokens of an input fit before those that are reserved.

        :param whose: what they are reserved for, for messages.
        """
        fitting = None if self._length is None else self._length - reserved
        if fitting is None or (self._max_input_tokens is not None and self._max_input_tokens < fitting):
            return Room(self._max_input_tokens, f"max_input_tokens={self._max_input_tokens}")
        return Room(
            fitting, f"the model reads and writes {self._length} tokens together, of which {reserved} are for {whose}"
        )

    def rooms(self, sampling: Iterable[Sampling]) -> list[Room]:
        """The room before the new tokens of each row."""
        return [self.room(row.max_new_tokens, "max_new_tokens") for row in sampling]

    def texts(self, encoded: Sequence[list[int]], rooms: Sequence[Room]) -> list[Read]:
        """What is read of texts; a special token in front stays there."""
        special = set(self.tokenizer.all_special_ids)
        return [self._fitted(ids, room, first=int(ids[0] in special)) for ids, room in zip(encoded, rooms, strict=True)]

    def _fitted(self, ids: list[int], room: Room, first: int) -> Read:
        if room.tokens is None or len(ids) <= room.tokens:
            return Tokens(ids)
        if self.too_long == "error" or room.tokens < 1:
            return InputTooLong("the prompt", len(ids), room.tokens, room.why)
        return Tokens(cut(ids, room.tokens, self.too_long, first=first), len(ids))

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """The strings at which an answer in a conversation ends, beside the model's own tokens."""
        return () if getattr(self.tokenizer, "chat_template", None) else (FALLBACK_STOP,)

    def conversations(
        self,
        conversations: Sequence[Sequence[Message]],
        rooms: Sequence[Room],
        options: Mapping[str, Any] | None = None,
        tidy: Callable[[str], str] = str,
    ) -> list[Read]:
        """What is read of conversations, written out by the model's chat template, which adds special tokens itself.

        Those that are too long are cut by whole turns (a user's message and what answers it): the oldest first, or
        with "cut-end" the newest before the last. System messages and the last turn stay; if those alone are too long,
        the text of the last turn's longest message is cut.

        :param options: further variables for the template.
        :param tidy: what is done to the text before it is tokenized.
        :raises TypeError, ValueError: as `render_chat`.
        """
        special = not getattr(self.tokenizer, "chat_template", None)

        def encode(those: Sequence[Sequence[Message]]) -> list[list[int]]:
            texts = [tidy(text) for text in render_chat(self.tokenizer, those, options)]
            return tokenize(self.tokenizer, texts, add_special_tokens=special)

        read: list[Read] = []
        for conversation, ids, room in zip(conversations, encode(conversations), rooms, strict=True):
            if room.tokens is None or len(ids) <= room.tokens:
                read.append(Tokens(ids))
                continue
            fitted = None
            if self.too_long != "error" and room.tokens > 0:
                fitted = self._shortened(messages_of(conversation), room.tokens, lambda each: encode([each])[0])
            read.append(
                Tokens(fitted, len(ids))
                if fitted is not None
                else InputTooLong("the conversation", len(ids), room.tokens, room.why)
            )
        return read

    def _shortened(
        self, messages: list[dict[str, Any]], limit: int, encode: Callable[[Sequence[Message]], list[int]]
    ) -> list[int] | None:
        """The tokens of as much of a conversation as fits, None if nothing does."""
        most = len(_turns(messages)) - 1
        fewest = encode(left := without_turns(messages, most, self.too_long))
        if len(fewest) > limit:
            return self._with_less_text(left, limit, encode)
        low, high, found = 0, most, fewest  # Without `low` turns it is too long, without `high` it fits.
        while high - low > 1:
            middle = (low + high) // 2
            ids = encode(without_turns(messages, middle, self.too_long))
            if len(ids) <= limit:
                high, found = middle, ids
            else:
                low = middle
        return found

    def _with_less_text(
        self, messages: list[dict[str, Any]], limit: int, encode: Callable[[Sequence[Message]], list[int]]
    ) -> list[int] | None:
        """The tokens of a conversation whose last turn's longest message is cut, None if that does not help."""
        turns = _turns(messages)
        if not turns:
            return None
        place = max(turns[-1], key=lambda number: len(messages[number]["content"]))
        message = messages[place]
        text: str = message["content"]
        spans = self._spans(text)
        kept, ids = len(spans), encode(messages)
        while len(ids) > limit:
            kept -= len(ids) - limit
            if kept < 1:
                return None
            less = text[spans[-kept][0] :] if self.too_long == "cut-start" else text[: spans[kept - 1][1]]
            ids = encode([*messages[:place], {**message, "content": less}, *messages[place + 1 :]])
        return ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where a text's tokens begin and end in it; about there, for a tokenizer that does not know."""
        if getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return [(int(begin), int(end)) for begin, end in offsets["offset_mapping"]]
        [ids] = tokenize(self.tokenizer, [text], add_special_tokens=False)
        bounds = [len(text) * number // len(ids) for number in range(len(ids) + 1)]
        return list(itertools.pairwise(bounds))


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """The numbers of each turn's messages: a user's, and all up to the next; system messages are of no turn."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        if message["role"] in ("system", "developer"):
            continue
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(number)
    return turns


def without_turns(messages: Sequence[Message], count: int, too_long: str) -> list[Any]:
    """The messages without so many turns: the oldest, or with "cut-end" the newest before the last.

    >>> roles = ("system", "S"), ("user", "1"), ("assistant", "a"), ("user", "2")
    >>> talk = [{"role": role, "content": content} for role, content in roles]
    >>> [message["content"] for message in without_turns(talk, 1, "cut-start")]
    ['S', '2']
    """
    turns = _turns(messages)
    left_out = turns[:count] if too_long == "cut-start" else turns[len(turns) - 1 - count : len(turns) - 1]
    gone = {number for turn in left_out for number in turn}
    return [message for number, message in enumerate(messages) if number not in gone]


def answered(
    read: Sequence[Read], run: Callable[[list[int]], Iterable[Answer]], on_error: str, what: str
) -> Iterator[Answer | InputTooLong]:
    """Each input's answer, in their order, or its error.

    :param run: takes the numbers of the inputs that are read, gives an answer for each, in their order.
    :param on_error: "raise" raises the first error before anything runs, "return" puts errors in answers' places.
    :param what: the inputs' name, for messages.
    :raises InputTooLong: with "raise", naming the input.
    """
    check_choice("on_error", on_error, ON_ERROR)
    numbers = []
    for number, each in enumerate(read):
        if isinstance(each, Tokens):
            numbers.append(number)
        elif on_error == "raise":
            raise each.named(f"{what}[{number}]")
    return _merged(read, iter(run(numbers)))


def _merged(read: Sequence[Read], answers: Iterator[Answer]) -> Iterator[Answer | InputTooLong]:
    for each in read:
        yield next(answers) if isinstance(each, Tokens) else each
