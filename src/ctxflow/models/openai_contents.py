"""What is wrong with what a request of OpenAI's form is about: messages, images, sound, calls of tools. Pure.

Contents come with the request or not at all: what would be fetched from an address, or read from a file, is refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.errors import article

DEEPEST = 100
"""Levels of objects and lists, beyond what any request has."""


def shown(value: Any) -> str:
    """Return a value as messages have it, shortened.

    >>> shown(None), shown("x" * 80)[-5:]
    ('missing', 'xx...')
    """
    try:
        text = "missing" if value is None else repr(value)
    except (RecursionError, ValueError):  # Of more levels, or digits, than Python writes.
        text = article(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."


MOST_VALUES = 2**18
"""Values in one field, beyond what any request has; each takes time, and many times its text in memory."""


def text_problem(value: Any, what: str) -> str | None:
    """Return what is wrong with a value as a whole: half a surrogate pair in a text, too many levels, or values."""
    if _holds_more(value, MOST_VALUES):
        return f"{what} holds too much: give at most {MOST_VALUES:,} values"
    try:
        number = _half(value, 0)
    except RecursionError:
        return f"{what} is nested too deeply"
    return None if number is None else f"{what} is no valid Unicode: character {number} is half of a pair"


def _holds_more(value: Any, most: int) -> bool:
    """Return whether there are more values than so many in lists and objects, however deep."""
    rest, count = [value], 0
    while rest and count <= most:
        inner = rest.pop()
        if isinstance(inner, (list, dict)):
            count += len(inner)
            values = inner.values() if isinstance(inner, dict) else inner
            rest += [each for each in values if isinstance(each, (list, dict))] if count <= most else ()
    return count > most


def _half(value: Any, level: int) -> int | None:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return error.start
        return None
    if not isinstance(value, (Mapping, list)):
        return None
    if level == DEEPEST:
        raise RecursionError
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return next((found for each in parts if (found := _half(each, level + 1)) is not None), None)


# --- messages

_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning"}
)
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_HARMLESS = frozenset({"cache_control", "detail"})
_MOST_IN_MESSAGES = 100_000  # Each is looked at, and goes through the model's template.
_FOLLOWED = re.compile(r"^\s*(?:[A-Za-z][A-Za-z0-9+.-]*:|[/\\~.])|://")


def messages_problem(value: Any, what: str, media: bool) -> str | None:
    """Return what is wrong with a conversation.

    :param media: whether the backend takes images, sound and films.

    >>> picture = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    >>> print(messages_problem([{"role": "user", "content": [picture]}], "messages", media=True).partition(":")[0])
    the content of messages[0] has an image at an address, and nothing is fetched
    """
    if not isinstance(value, list) or not value:
        return f"{what} is {shown(value)}, not a list of messages"
    if _holds_more(value, _MOST_IN_MESSAGES):
        return f"{what} hold too much: give at most {_MOST_IN_MESSAGES:,} values, shorter conversations"
    images: list[int] = []
    for number, message in enumerate(value):
        if (wrong := _message_problem(message, f"{what}[{number}]", media, images)) is not None:
            return wrong
    if len(images) > _MOST_IMAGES:
        return f"{what} have {len(images):,} images: give {_MOST_IMAGES} at most"
    if sum(images) > _MOST_PIXELS_TOGETHER:
        return f"{what} have images of {sum(images):,} pixels: give {_MOST_PIXELS_TOGETHER:,} together at most"
    return None


def _message_problem(message: Any, what: str, media: bool, images: list[int]) -> str | None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f"{what} is no message: it needs a role and a content"
    if (wrong := text_problem(message, f"the content of {what}")) is not None:
        return wrong
    for key in message:
        each = message[key]
        if key not in _KEYS and each is not None and not _is_empty(each):
            scalar = isinstance(each, (int, float)) or (isinstance(each, str) and not _FOLLOWED.search(each))
            if not scalar or key in _MEDIA or key == "audio":
                return f"{what} has {key!r}, which is not known there: leave it out"
        elif key in _KEYS - {"content", "tool_calls"} and not isinstance(each, (str, type(None))):
            return f"the {key} of {what} is {shown(each)}, not text"
    if (wrong := _calls_problem(message.get("tool_calls"), what)) is not None:
        return wrong
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"the content of {what} is {shown(content)}, not text"
    return next((wrong for part in content if (wrong := _part_problem(part, what, media, images)) is not None), None)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, Mapping)) and not value


def without_empty(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation without the empty lists and objects that answers have in fields that say nothing then.

    >>> without_empty([{"role": "assistant", "content": "Paris.", "annotations": [], "refusal": None}])
    [{'role': 'assistant', 'content': 'Paris.', 'refusal': None}]
    """
    found = []
    for message in messages:
        kept = {key: each for key, each in message.items() if key in _KEYS or not _is_empty(each)}
        if isinstance(kept.get("content"), list):
            kept["content"] = [
                {key: each for key, each in part.items() if not _is_empty(each)} if isinstance(part, Mapping) else part
                for part in kept["content"]
            ]
        found.append(kept)
    return found


def _part_problem(part: Any, what: str, media: bool, images: list[int]) -> str | None:
    if not isinstance(part, Mapping):
        return f"{what} has content that is neither text nor an object: {shown(part)}"
    kind = part.get("type", "text")
    holder = _TEXTS.get(kind) if isinstance(kind, str) else None
    if holder is None and (not isinstance(kind, str) or kind not in (*_MEDIA, "input_audio")):
        able = ", ".join([*_TEXTS, *_MEDIA, "input_audio"] if media else _TEXTS)
        return f"{what} has content of type {shown(kind)}, not text: known are {able}"
    known = ("type", holder or kind, *_HARMLESS)
    others = [key for key in part if key not in known and part[key] is not None and not _is_empty(part[key])]
    if others:
        return f"the content of {what} has {others[0]!r}, which is not known there: leave it out"
    if holder is not None:
        text = part.get(holder)
        return None if isinstance(text, (str, type(None))) else f"the content of {what} is {shown(text)}, not text"
    if (wrong := _media_problem(part.get(kind), kind, what, images)) is not None or media:
        return wrong
    return (
        f"{what} has content that is not text ({kind}), which is not for the backend transformers: run it with "
        "--backend vllm or --backend server"
    )


def _media_problem(given: Any, kind: str, what: str, images: list[int]) -> str | None:
    if kind == "input_audio":
        return _audio_problem(given, what)
    if isinstance(given, Mapping):
        if others := [key for key in given if key not in ("url", "detail") and given[key] is not None]:
            return f"the {kind} of {what} has {others[0]!r}, which is not known there: leave it out"
        given = given.get("url")
    return data_problem(given, _MEDIA[kind], f"the content of {what}", images)


_DATA = re.compile(r"data:([a-z]+)/([A-Za-z0-9.+-]+)((?:;[A-Za-z0-9_=.+-]+)*?);base64,", re.ASCII)
# How data of each type begins. None goes without: decoders of sound and films guess what they are given, and some forms
# have them open other files, or the network. What is here begins no XML: neither <!--ftyp nor a mark of UTF-16.
_MP3 = rb"\xff[\xe2-\xe5\xf2-\xf5\xfa-\xfd]"  # Behind its tags.
_KINDS = {
    "image": {"png": rb"\x89PNG\r\n\x1a\n", "jpeg": rb"\xff\xd8\xff", "jpg": rb"\xff\xd8\xff", "gif": rb"GIF8[79]a",
              "webp": rb"RIFF....WEBP", "bmp": rb"BM"},
    "audio": {"wav": rb"RIFF....WAVE", "x-wav": rb"RIFF....WAVE", "wave": rb"RIFF....WAVE", "mpeg": _MP3, "mp3": _MP3,
              "ogg": rb"OggS", "flac": rb"fLaC"},
    "video": {"mp4": rb"\0\0..ftyp", "webm": rb"\x1aE\xdf\xa3", "jpeg": rb"\xff\xd8\xff"},
}  # fmt: skip
_ARTICLE = {"image": "an image", "audio": "sound", "video": "a film"}
_EXAMPLE = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}


def data_problem(url: Any, kind: str, what: str, images: list[int] | None = None) -> str | None:
    """Return what is wrong with an image (or "audio", "video") that is to be in the request itself.

    :param url: as it stands in the request; only data URLs in base64 of a known type, which begin as those do, pass.
    :param images: gets an image's number of pixels.

    >>> data_problem("data:image/gif;base64,R0lGODlhAQABAAAAACw=", "image", "it")
    >>> data_problem("data:image/png;base64,R0lGODlh", "image", "it")
    'it has an image that says image/png, and does not begin as those do: it is broken, or of another type'
    """
    noun, known = _ARTICLE[kind], _KINDS[kind]
    written = f"data:{_EXAMPLE[kind]};base64,..."
    if not isinstance(url, str):
        return f"{what} has {noun} that is {shown(url)}: give it as {written}"
    if not url.startswith("data:"):
        where = (
            "in a file, and none is read"
            if url.startswith(("file:", "/", ".", "~"))
            else ("at an address, and nothing is fetched")
        )
        return f"{what} has {noun} {where}: put it into the request, as {written}"
    found = _DATA.match(url)
    if found is None:
        return f"{what} has {noun} whose data URL begins {shown(url[:30])}: write it as {written}"
    if found[1] != kind or found[2].lower() not in known:
        types = ", ".join(f"{kind}/{each}" for each in known)
        return f"{what} has {noun} of the type {found[1]}/{found[2]}: known are {types}"
    said, named = f"{what} has {noun}", f"{found[1]}/{found[2]}"
    wrong, data = _decoded(url[found.end() :], known[found[2].lower()], named, said)
    if wrong is not None or kind != "image":
        return wrong
    pixels = pixels_of(data)
    if not pixels:
        return f"{said} of a size that cannot be read: it is broken, make the request again"
    if pixels > _MOST_PIXELS:
        return f"{said} of {pixels:,} pixels: give {_MOST_PIXELS:,} at most"
    if images is not None:
        images.append(pixels)
    return None


def _decoded(text: str, mark: bytes, named: str, said: str) -> tuple[str | None, bytes]:
    """Return what is wrong with data in base64, which are to begin in a way, and the data."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        return f"{said} that is not base64 ({str(error).lower()}): it is broken, make the request again", b""
    if not data:
        return f"{said} without any data: it is broken, make the request again", data
    if not re.compile(mark, re.DOTALL).match(data, _tags_end(data) if mark is _MP3 else 0):
        return f"{said} that says {named}, and does not begin as those do: it is broken, or of another type", data
    return None, data


def _tags_end(data: bytes) -> int:
    """Return where ID3 tags end, which decoders pass over, whatever is behind them."""
    place = 0
    while data.startswith(b"ID3", place) and len(data) >= place + 10:
        size = functools.reduce(lambda high, byte: high << 7 | byte & 0x7F, data[place + 6 : place + 10], 0)
        place += 10 + size + (10 if data[place + 5] & 0x10 else 0)
    return place


_MOST_IMAGES = 250
_MOST_PIXELS = 50_000_000
_MOST_PIXELS_TOGETHER = 200_000_000


def pixels_of(data: bytes) -> int:
    """Return how many pixels an image's header says that it has: a PNG's, JPEG's, GIF's, WebP's or BMP's; 0 if none.

    >>> pixels_of(b"GIF89a" + bytes([3, 0, 2, 0, 0, 0, 0]))
    6
    """
    try:
        for begins, read in _SIZES.items():
            if data.startswith(begins):
                width, height = read(data)
                return abs(width * height)
    except (struct.error, IndexError):  # It ends too soon.
        pass
    return 0


def _size_of_png(data: bytes) -> tuple[int, int]:
    place, width, height = 8, 0, 0
    while len(data) >= place + 8:
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind in (b"IDAT", b"IEND"):
            break
        if kind == b"IHDR":  # Of several, decoders may take any.
            found = struct.unpack_from(">II", data, place + 8)
            width, height = max(width, found[0]), max(height, found[1])
        place += 12 + length
    return width, height


def _size_of_jpeg(data: bytes) -> tuple[int, int]:
    place, width, height = 2, 0, 0
    while data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # What fills up.
            place += 1
        elif marker in (0x01, *range(0xD0, 0xD8)):  # Without a length.
            place += 2
        elif marker in (0xD9, 0xDA):  # The end, or what is drawn.
            break
        else:
            if marker in range(0xC0, 0xD0) and marker not in (0xC4, 0xC8, 0xCC):
                found = struct.unpack_from(">HH", data, place + 5)
                height, width = max(height, found[0]), max(width, found[1])
            place += 2 + struct.unpack_from(">H", data, place + 2)[0]
    return width, height


def _size_of_gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    place = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[place : place + 1] == b"!":  # What is said before the first image, in blocks.
        place += 2
        while size := data[place]:
            place += 1 + size
        place += 1
    if data[place : place + 1] == b"," and len(data) >= place + 9:  # An image may be larger than the screen.
        left, top, wide, high = struct.unpack_from("<HHHH", data, place + 1)
        width, height = max(width, left + wide), max(height, top + high)
    return width, height


def _size_of_webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[place : place + 3], "little") for place in (24, 27))
        return width + 1, height + 1
    if kind == b"VP8L":
        [bits] = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _size_of_bmp(data: bytes) -> tuple[int, int]:
    [header] = struct.unpack_from("<I", data, 14)
    return struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)


_SIZES: dict[bytes, Callable[[bytes], tuple[int, int]]] = {
    b"\x89PNG": _size_of_png, b"\xff\xd8": _size_of_jpeg, b"GIF8": _size_of_gif, b"RIFF": _size_of_webp,
    b"BM": _size_of_bmp,
}  # fmt: skip


def _audio_problem(given: Any, what: str) -> str | None:
    kinds = _KINDS["audio"]
    if not isinstance(given, Mapping) or set(given) - {"data", "format"} or not isinstance(given.get("data"), str):
        return f"the input_audio of {what} is {shown(given)}: give an object of its data, in base64, and its format"
    if not isinstance(given.get("format"), str) or given["format"] not in kinds:
        return f"the input_audio of {what} is of the format {shown(given.get('format'))}: known are {', '.join(kinds)}"
    wrong, _ = _decoded(given["data"], kinds[given["format"]], given["format"], f"the content of {what} has sound")
    return wrong


# --- tools


def _calls_problem(value: Any, what: str) -> str | None:
    """Return what is wrong with the calls of tools that a message tells of."""
    for call in value if isinstance(value, list) else [] if value is None else [value]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            return f"the tool_calls of {what} have {shown(call)}: give objects of the type function"
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), (str, Mapping)):
            return f"the tool_calls of {what} have {shown(function)}: give each function's name and arguments"
        if isinstance(text := function["arguments"], str) and _nests_too_deeply(text):
            return f"the arguments in tool_calls of {what} are nested too deeply"
    return None


def _nests_too_deeply(text: str) -> bool:
    """Return whether JSON text has more levels than any request has; what is no JSON has none."""
    try:
        return text_problem(json.loads(text), "") == " is nested too deeply"
    except RecursionError:
        return True
    except ValueError:
        return False


def call_missing(body: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Return why an answer is none: it lacks the call of a tool that the body demands; None if it does not.

    Engines whose models have no form for calls pass over the demand.

    >>> said = {"choices": [{"message": {"content": "No."}, "finish_reason": "length"}]}
    >>> call_missing({"tool_choice": "required"}, said)
    "the answer calls no tool, as tool_choice = 'required' demands: it ended at max_tokens, so raise that"
    """
    wanted = body.get("tool_choice")
    if wanted in (None, "none", "auto"):
        return None
    for choice in answer.get("choices", ()):
        if not choice.get("message", {}).get("tool_calls"):
            what = f"the answer calls no tool, as tool_choice = {shown(wanted)} demands"
            if choice.get("finish_reason") == "length":
                return f"{what}: it ended at max_tokens, so raise that"
            return f"{what}: give a model whose chat template has tools, or --backend vllm with its tool_call_parser"
    return None


def answers_missing(body: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Return why an answer is none: it has fewer choices than the body's `n`; None if it has enough.

    >>> answers_missing({"n": 3}, {"choices": [{"text": "One"}]})
    "1 answer came where the body's n = 3: what was asked passes over n; leave it out, or run it with --backend vllm"
    """
    prompt, wanted = body.get("prompt"), body.get("n") or 1
    texts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else 1
    there = len(answer.get("choices", ()))
    if not isinstance(wanted, (int, float)):  # Servers may pass over what they cannot take.
        wanted = 1
    if "choices" not in answer or there >= wanted * texts:
        return None
    came = "1 answer" if there == 1 else f"{there} answers"
    return (
        f"{came} came where the body's n = {wanted}: what was asked passes over n; leave it out, or run it with "
        "--backend vllm"
    )
