"""From prompts and conversations to tokens: checks, chat templates. Duck-typed, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxflow.models.errors import MissingPackageError
from ctxflow.wording import article

Message = Mapping[str, Any]


def check_texts(values: Iterable[Any], what: str = "prompts") -> list[str]:
    """The values as a list, when all of them are strings that a tokenizer can take.

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
    """Tokens that a model of this configuration can read and write together, None if it does not say."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def tokenize(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """The token ids of each text; one without any gets the start token, as a model must read something."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]
    start = next(
        (i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None),
        0,
    )
    return [list(ids) or [start] for ids in encoded]


FALLBACK_STOP = "\n\nUser:"
"""Where an answer ends without a chat template: the model begins to write the user's next turn."""


def check_conversations(conversations: Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """The conversations as a list.

    :raises TypeError: for a single one.
    """
    if isinstance(conversations, (str, bytes, Mapping)):
        raise TypeError("conversations is a single one: give a list of lists of messages")
    return list(conversations)


def render_chat(
    tokenizer: Any, conversations: Iterable[Sequence[Message]], options: Mapping[str, Any] | None = None
) -> list[str]:
    """Each conversation as the text that the model continues, by the tokenizer's chat template.

    Without a template the turns are written out as "User: ..." and "Assistant: ...", blank lines between
    them.

    :param conversations: lists of messages, each a mapping with "role" and "content"; content is text or, as
        in OpenAI's format, a list of parts of type "text".
    :param options: further variables for the template, such as `tools` or `enable_thinking`.
    :raises TypeError, ValueError: for what is no conversation, or one that the template refuses, saying
        where.
    """
    texts = []
    for place, conversation in enumerate(check_conversations(conversations)):
        messages = messages_of(conversation, f"conversations[{place}]")
        if not getattr(tokenizer, "chat_template", None):
            texts.append(_plain(messages))
            continue
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(options or {})
            )
        except ImportError:
            raise MissingPackageError.about("jinja2", extra="batch") from None
        except Exception as error:  # A template is a program of the model's author: it raises what it likes.
            raise ValueError(
                f"the model's chat template refuses conversations[{place}] ({type(error).__name__}: {error}):"
                " change its roles or contents"
            ) from None
        texts.append(text)
    return check_texts(texts, "conversations")


def messages_of(conversation: Any, place: str = "the conversation") -> list[dict[str, Any]]:
    """A conversation's messages, each with its content as text.

    :raises TypeError: for what is no conversation, saying where.
    """
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


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise TypeError(f"the content of {place} is not text: give a string, or parts of type 'text'")
    return "".join(part["text"] for part in parts)


def _plain(messages: Sequence[Message]) -> str:
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])
