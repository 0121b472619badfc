"""Turn prompts and conversations into tokens: checks, chat templates, and what becomes of an input that is too long.

A model reads all of an input, or what a cut left of it; or the input is refused, with both numbers. Needs no torch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ctxflow.errors import article
from ctxflow.models.results import LARGEST, InputTooLong, MissingPackageError, Sampling, check_choice, per_row

Message = Mapping[str, Any]


def check_texts(values: Iterable[Any], what: str = "prompts") -> list[str]:
    """Return the values as a list, when all of them are strings that a tokenizer can take.

    :raises TypeError: for one string in place of a list, or something that is no string, saying where.
    :raises ValueError: for a string with halves of surrogate pairs, which is no text.

    >>> check_texts(["a", 3])
    Traceback (most recent call last):
    ...
    TypeError: prompts[1] is an int, not a string: give text for each
    """
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{what} is one {type(values).__name__}: give a list of strings")
    texts = list(values)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"{what}[{place}] is {article(kind)}, not a string: give text for each")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{what}[{place}] is no valid Unicode: character {error.start} is half of a surrogate pair; "
                "decode the input with errors='replace'"
            ) from None
    return texts


def context_length(config: Any) -> int | None:
    """Return tokens that a model of this configuration can read and write together, None if it does not say."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def rotary_limit(config: Any) -> int | None:
    """Return how many tokens a model may see at a time before it turns the positions of all of them otherwise.

    Models of LongRoPE (Phi-3.5, Phi-4-mini) or dynamic scaling do so by the longest row of a pass. None for others.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    whole = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in (whole, *whole.values()):  # Some have parameters for each type of layer.
        kind = str(each.get("rope_type") or each.get("type")) if isinstance(each, Mapping) else ""
        if kind in ("longrope", "su"):
            own = each.get("original_max_position_embeddings")
            return own or getattr(text, "original_max_position_embeddings", None)
        if "dynamic" in kind:
            return context_length(config)
    return None


def tokenize(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Return the token ids of each text; one without any gets the start token, as a model must read something."""
    if not texts:
        return []
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, **options)["input_ids"]
    starts = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    start = next((token for token in starts if token is not None), 0)
    return [list(ids) or [start] for ids in encoded]


FALLBACK_STOP = "\n\nUser:"
"""Where an answer ends without a chat template: the model begins to write the user's next turn."""


def check_conversations(conversations: Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return the conversations as a list; raise `TypeError` for a single one."""
    if isinstance(conversations, (str, bytes, Mapping)):
        raise TypeError("conversations is a single one: give a list of lists of messages")
    return list(conversations)


def render_chat(
    tokenizer: Any, conversations: Iterable[Sequence[Message]], options: Mapping[str, Any] | None = None
) -> list[str]:
    """Return each conversation as the text that the model continues, by the tokenizer's chat template.

    Without a template the turns are written out as "User: ..." and "Assistant: ...", blank lines between them.

    :param conversations: lists of messages, each a mapping with "role" and "content"; content is text or, as
        in OpenAI's format, a list of parts of type "text".
    :param options: further variables for the template, such as `tools` or `enable_thinking`.
    :raises TypeError, ValueError: for what is no conversation, or one that the template refuses, saying where.
    """
    texts = []
    for place, conversation in enumerate(check_conversations(conversations)):
        messages = [_with_arguments(each) for each in messages_of(conversation, f"conversations[{place}]")]
        if not getattr(tokenizer, "chat_template", None):
            turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
            texts.append("\n\n".join([*turns, "Assistant:"]))
            continue
        try:
            chosen = {"tokenize": False, "add_generation_prompt": True, **(options or {})}
            texts.append(tokenizer.apply_chat_template(messages, **chosen))
        except ImportError:
            raise MissingPackageError.about("jinja2", extra="batch") from None
        except Exception as error:  # A template is a program of the model's author: it raises what it likes.
            raise ValueError(
                f"the model's chat template refuses conversations[{place}] ({type(error).__name__}: {error}):"
                " change its roles or contents"
            ) from None
    return check_texts(texts, "conversations")


def messages_of(conversation: Any, place: str = "the conversation") -> list[dict[str, Any]]:
    """Return a conversation's messages, each with its content as text; raise `TypeError` for what is none."""
    if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence) or not conversation:
        raise TypeError(
            f"{place} is no conversation: give a list of messages like {{'role': 'user', 'content': '...'}}"
        )
    messages = []
    for number, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"{place}[{number}] is no message: give a mapping with 'role' and 'content'")
        messages.append({**message, "content": _content(message.get("content"), f"{place}[{number}]")})
    return messages


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls of tools have their arguments as objects: templates write those as JSON."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(each) for each in calls]} if isinstance(calls, list) else message


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _content(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise TypeError(f"the content of {place} is not text: give a string, or parts of type 'text'")
    return "".join(part["text"] for part in parts)


TOO_LONG = ("error", "cut-start", "cut-end")
Answer = TypeVar("Answer")


class Tokens(NamedTuple):
    """An input as the model reads it."""

    ids: list[int]
    original: int | None = None  # How many tokens it had, where some were cut off.
    text: str | None = None  # For a model that tokenizes by itself.

    @property
    def truncated(self) -> bool:
        """Whether something was cut off."""
        return self.original is not None


Read = Tokens | InputTooLong
"""What the model reads of an input, or why it reads nothing."""


class TokenRoom(NamedTuple):
    """How many tokens of an input fit, None for any number, and why no more."""

    tokens: int | None
    why: str


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
    """Read inputs for one language model.

    :param length: tokens that the model reads and writes together, None if there is no limit.
    :param max_input_tokens: what the user allows, None for what fits.
    :param too_long: what becomes of longer inputs, one of `TOO_LONG`.
    """

    def __init__(self, tokenizer: Any, length: int | None, max_input_tokens: int | None, too_long: str) -> None:
        check_choice("too_long", too_long, TOO_LONG)
        self.tokenizer = tokenizer
        self.too_long = too_long
        self._length = length
        self._max_input_tokens = max_input_tokens

    def prompts(self, prompts: Iterable[str], parameters: Mapping[str, Any]) -> tuple[list[Read], list[Sampling]]:
        """Return what is read of prompts, and how each is continued; errors as `check_texts` and `per_row`."""
        texts = check_texts(prompts)
        sampling = per_row(len(texts), **parameters)
        return self.texts(tokenize(self.tokenizer, texts), self._rooms(sampling)), sampling

    def chats(
        self,
        conversations: Iterable[Sequence[Message]],
        options: Mapping[str, Any] | None,
        parameters: Mapping[str, Any],
    ) -> tuple[list[Read], list[Sampling]]:
        """Return the same of conversations; `options` are further variables for the template."""
        those = check_conversations(conversations)
        sampling = [row.stopping_at(self.chat_stops) for row in per_row(len(those), **parameters)]
        return self.conversations(those, self._rooms(sampling), options), sampling

    def room(self, reserved: int, whose: str) -> TokenRoom:
        """Return how many tokens of an input fit before those that are reserved for `whose`."""
        fitting = None if self._length is None else self._length - reserved
        if fitting is None or (self._max_input_tokens is not None and self._max_input_tokens < fitting):
            return TokenRoom(self._max_input_tokens, f"max_input_tokens={self._max_input_tokens}")
        return TokenRoom(
            fitting, f"the model reads and writes {self._length} tokens together, of which {reserved} are for {whose}"
        )

    def reserved(self, asked: int | None) -> int:
        """Return how many tokens to keep free for an answer: one without a limit, or some where inputs are cut."""
        if asked is not None:
            return asked
        return 1 if self.too_long == "error" else min(Sampling.max_new_tokens, max(1, (self._length or LARGEST) // 2))

    def _rooms(self, sampling: Iterable[Sampling]) -> list[TokenRoom]:
        return [self.room(row.max_new_tokens, "max_new_tokens") for row in sampling]

    def texts(self, encoded: Sequence[list[int]], rooms: Sequence[TokenRoom]) -> list[Read]:
        """Return what is read of texts; a special token in front stays there."""
        special = set(self.tokenizer.all_special_ids)
        return [self.fitted(ids, room, first=int(ids[0] in special)) for ids, room in zip(encoded, rooms, strict=True)]

    def fitted(self, ids: list[int], room: TokenRoom, first: int) -> Read:
        """Return what is read of a text, of which so many tokens in front stay there in any case."""
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
        rooms: Sequence[TokenRoom],
        options: Mapping[str, Any] | None = None,
        tidy: Callable[[str], str] = str,
    ) -> list[Read]:
        """Return what is read of conversations, written out by the model's chat template.

        Those that are too long are cut by whole turns (a user's message and what answers it): the oldest first, or
        with "cut-end" the newest before the last. System messages and the last turn stay; if those alone are too long,
        the text of the last turn's longest message is cut.

        :param tidy: what is done to the text before it is tokenized.
        :raises TypeError, ValueError: as `render_chat`.
        """
        # A template adds special tokens itself.
        special = not getattr(self.tokenizer, "chat_template", None)

        def encode(those: Sequence[Sequence[Message]]) -> list[list[int]]:
            texts = [tidy(text) for text in render_chat(self.tokenizer, those, options)]
            return tokenize(self.tokenizer, texts, add_special_tokens=special)

        read: list[Read] = []
        for conversation, ids, room in zip(conversations, encode(conversations), rooms, strict=True):
            if room.tokens is None or len(ids) <= room.tokens:
                read.append(Tokens(ids))
                continue
            fitted = self.shortened(messages_of(conversation), room, lambda each: encode([each])[0])
            wrong = InputTooLong("the conversation", len(ids), room.tokens, room.why)
            read.append(wrong if fitted is None else Tokens(fitted[1], len(ids)))
        return read

    def shortened(
        self, messages: list[dict[str, Any]], room: TokenRoom, encode: Callable[[Sequence[Message]], list[int]]
    ) -> tuple[list[dict[str, Any]], list[int]] | None:
        """Return as much of a conversation that is too long as fits, and its tokens; None if it is not to be cut.

        :param messages: with texts as contents; `encode` gives a conversation's tokens.
        """
        limit = room.tokens
        if self.too_long == "error" or limit is None or limit < 1:
            return None
        most = len(_turns(messages)) - 1
        found = without_turns(messages, most, self.too_long)
        fewest = encode(found)
        if len(fewest) > limit:
            return self._with_less_text(found, limit, encode)
        low, high = 0, most  # Without `low` turns it is too long, without `high` it fits.
        while high - low > 1:
            middle = (low + high) // 2
            ids = encode(left := without_turns(messages, middle, self.too_long))
            if len(ids) <= limit:
                high, found, fewest = middle, left, ids
            else:
                low = middle
        return found, fewest

    def _with_less_text(
        self, messages: list[dict[str, Any]], limit: int, encode: Callable[[Sequence[Message]], list[int]]
    ) -> tuple[list[dict[str, Any]], list[int]] | None:
        """Return a conversation with less of its last turn's longest message, and its tokens; None if none fits."""
        turns = _turns(messages)
        if not turns:
            return None
        place = max(turns[-1], key=lambda number: len(messages[number]["content"]))
        message = messages[place]
        text: str = message["content"]
        spans = self._spans(text)
        kept, ids, left = len(spans), encode(messages), messages
        while len(ids) > limit:
            kept -= len(ids) - limit
            if kept < 1:
                return None
            less = text[spans[-kept][0] :] if self.too_long == "cut-start" else text[: spans[kept - 1][1]]
            left = [*messages[:place], {**message, "content": less}, *messages[place + 1 :]]
            ids = encode(left)
        return left, ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where a text's tokens begin and end in it; about there, for a tokenizer that does not know."""
        if getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return [(int(begin), int(end)) for begin, end in offsets["offset_mapping"]]
        [ids] = tokenize(self.tokenizer, [text], add_special_tokens=False)
        bounds = [len(text) * number // len(ids) for number in range(len(ids) + 1)]
        return list(itertools.pairwise(bounds))


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """Return the numbers of each turn's messages: a user's, and all up to the next; system messages are of no turn."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        if message["role"] in ("system", "developer"):
            continue
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(number)
    return turns


def without_turns(messages: Sequence[Message], count: int, too_long: str) -> list[Any]:
    """Return the messages without so many turns: the oldest, or with "cut-end" the newest before the last.

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
    """Return each input's answer, in their order, or its error.

    :param run: takes the numbers of the inputs that are read, gives an answer for each, in their order.
    :param on_error: "raise" raises the first error before anything runs, "return" puts errors in answers' places.
    :param what: the inputs' name, for messages.
    :raises InputTooLong: with "raise", naming the input.
    """
    check_choice("on_error", on_error, ("raise", "return"))
    numbers = []
    for number, each in enumerate(read):
        if isinstance(each, Tokens):
            numbers.append(number)
        elif on_error == "raise":
            raise each.named(f"{what}[{number}]")
    answers = iter(run(numbers))
    return (next(answers) if isinstance(each, Tokens) else each for each in read)
