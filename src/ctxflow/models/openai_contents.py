"""What is wrong with the parts of a request of OpenAI's form: messages, images, tools, JSON schemas. Pure.

Contents come with the request or not at all: what would be fetched from an address, or read from a file, is refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_DEEPEST = 100  # Levels of objects and lists, beyond what any request has.


def shown(value: Any) -> str:
    """Return a value as messages have it, shortened.

    >>> shown(None), shown("x" * 80)[-5:]
    ('missing', 'xx...')
    """
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text_problem(value: Any, what: str) -> str | None:
    """Return what is wrong with the texts in a value: half a surrogate pair, or more levels than any request has."""
    try:
        number = _half(value, 0)
    except RecursionError:
        return f"{what} is nested too deeply"
    return None if number is None else f"{what} is no valid Unicode: character {number} is half of a pair"


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
    if level == _DEEPEST:
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
    for number, message in enumerate(value):
        if (wrong := _message_problem(message, f"{what}[{number}]", media)) is not None:
            return wrong
    return None


def _message_problem(message: Any, what: str, media: bool) -> str | None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return f"{what} is no message: it needs a role and a content"
    if (wrong := text_problem(message, f"the content of {what}")) is not None:
        return wrong
    for key in message:
        each = message[key]
        if key not in _KEYS and each is not None:
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
    return next((wrong for part in content if (wrong := _part_problem(part, what, media)) is not None), None)


def _part_problem(part: Any, what: str, media: bool) -> str | None:
    if not isinstance(part, Mapping):
        return f"{what} has content that is neither text nor an object: {shown(part)}"
    kind = part.get("type", "text")
    holder = _TEXTS.get(kind) if isinstance(kind, str) else None
    if holder is None and (not isinstance(kind, str) or kind not in (*_MEDIA, "input_audio")):
        able = ", ".join([*_TEXTS, *_MEDIA, "input_audio"] if media else _TEXTS)
        return f"{what} has content of type {shown(kind)}, not text: known are {able}"
    others = [key for key in part if key not in ("type", holder or kind, *_HARMLESS) and part[key] is not None]
    if others:
        return f"the content of {what} has {others[0]!r}, which is not known there: leave it out"
    if holder is not None:
        text = part.get(holder)
        return None if isinstance(text, (str, type(None))) else f"the content of {what} is {shown(text)}, not text"
    if (wrong := _media_problem(part.get(kind), kind, what)) is not None or media:
        return wrong
    return (
        f"{what} has content that is not text ({kind}), which is not for the backend transformers: run it with "
        "--backend vllm or --backend server"
    )


def _media_problem(given: Any, kind: str, what: str) -> str | None:
    if kind == "input_audio":
        return _audio_problem(given, what)
    if isinstance(given, Mapping):
        if others := [key for key in given if key not in ("url", "detail") and given[key] is not None]:
            return f"the {kind} of {what} has {others[0]!r}, which is not known there: leave it out"
        given = given.get("url")
    return data_problem(given, _MEDIA[kind], f"the content of {what}")


_DATA = re.compile(r"data:([a-z]+)/([A-Za-z0-9.+-]+)((?:;[A-Za-z0-9_=.+-]+)*?);base64,", re.ASCII)
# How data of each type begins. None goes without: decoders of sound and films guess what they are given, and some forms
# have them open other files, or the network.
_MP3 = rb"ID3|\xff[\xe0-\xff]"
_KINDS = {
    "image": {"png": rb"\x89PNG\r\n\x1a\n", "jpeg": rb"\xff\xd8\xff", "jpg": rb"\xff\xd8\xff", "gif": rb"GIF8[79]a",
              "webp": rb"RIFF....WEBP", "bmp": rb"BM"},
    "audio": {"wav": rb"RIFF....WAVE", "x-wav": rb"RIFF....WAVE", "wave": rb"RIFF....WAVE", "mpeg": _MP3, "mp3": _MP3,
              "ogg": rb"OggS", "flac": rb"fLaC"},
    "video": {"mp4": rb"....ftyp", "webm": rb"\x1aE\xdf\xa3", "jpeg": rb"\xff\xd8\xff"},
}  # fmt: skip
_ARTICLE = {"image": "an image", "audio": "sound", "video": "a film"}
_EXAMPLE = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}


def data_problem(url: Any, kind: str, what: str) -> str | None:
    """Return what is wrong with an image (or "audio", "video") that is to be in the request itself.

    :param url: as it stands in the request; only data URLs in base64 of a known type, which begin as those do, pass.

    >>> data_problem("data:image/png;base64,iVBORw0KGgo=", "image", "it")
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
    return _base64_problem(url[found.end() :], known[found[2].lower()], f"{found[1]}/{found[2]}", f"{what} has {noun}")


def _base64_problem(text: str, mark: bytes, named: str, said: str) -> str | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        return f"{said} that is not base64 ({str(error).lower()}): it is broken, make the request anew"
    if not data:
        return f"{said} without any data: it is broken, make the request anew"
    if not re.match(mark, data, re.DOTALL):
        return f"{said} that says {named}, and does not begin as those do: it is broken, or of another type"
    return None


def _audio_problem(given: Any, what: str) -> str | None:
    kinds = _KINDS["audio"]
    if not isinstance(given, Mapping) or set(given) - {"data", "format"} or not isinstance(given.get("data"), str):
        return f"the input_audio of {what} is {shown(given)}: give an object of its data, in base64, and its format"
    if not isinstance(given.get("format"), str) or given["format"] not in kinds:
        return f"the input_audio of {what} is of the format {shown(given.get('format'))}: known are {', '.join(kinds)}"
    said = f"the content of {what} has sound"
    return _base64_problem(given["data"], kinds[given["format"]], given["format"], said)


# --- tools


def _calls_problem(value: Any, what: str) -> str | None:
    """Return what is wrong with the calls of tools that a message tells of."""
    for call in value if isinstance(value, list) else [] if value is None else [value]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            return f"the tool_calls of {what} have {shown(call)}: give objects of the type function"
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), (str, Mapping)):
            return f"the tool_calls of {what} have {shown(function)}: give each function's name and arguments"
    return None


def tools_problem(value: Any) -> str | None:
    """Return what is wrong with the tools that a model may call; none but functions, whose callers run them."""
    if not isinstance(value, list):
        return "give a list of tools"
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            return f"tools[{number}] is of type {shown(kind)}, and only functions are known, which the asker runs"
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            return f"tools[{number}] has no function with a name"
        if set(tool) - {"type", "function"} or set(function) - {"name", "description", "parameters", "strict"}:
            return f"tools[{number}] has more than a function's name, description, parameters and strict"
        parameters = function.get("parameters")
        if parameters is not None and (wrong := schema_problem(parameters)) is not None:
            return f"the parameters of tools[{number}] are {wrong}"
    return None


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
    texts = len(body["prompt"]) if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str) else 1
    wanted, there = body.get("n") or 1, len(answer.get("choices", ()))
    if "choices" not in answer or there >= wanted * texts:
        return None
    came = "1 answer" if there == 1 else f"{there} answers"
    return (
        f"{came} came where the body's n = {wanted}: what was asked passes over n; leave it out, or run it with "
        "--backend vllm"
    )


# --- what answers are bound to


def format_problem(value: Any) -> str | None:
    """Return what is wrong with a response_format.

    >>> format_problem({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}})
    "its schema is no JSON schema: 'strin' is not valid under any of the given schemas (at type)"
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("text", "json_object"):
        return None if set(value) == {"type"} else f"give nothing beside the type {kind}"
    if kind != "json_schema":
        return "give an object of the type text, json_object or json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or set(value) != {"type", "json_schema"} or inner.get("schema") is None:
        return "give a json_schema with a name and a schema beside the type"
    if others := set(inner) - {"name", "description", "schema", "strict"}:
        return f"its json_schema has {min(others)!r}, which is not known there"
    wrong = schema_problem(inner["schema"])
    return None if wrong is None else f"its schema is {wrong}"


_IMPORT = re.compile(r"%\s*import\s+(?!common\b)")


def constraint_problem(kind: str, value: Any) -> str | None:
    """Return what is wrong with what an answer is bound to: of kind "json", "regex", "choice", "grammar"."""
    if kind == "json_object":
        return None if value is True else "give true for json_object"
    if kind == "choice":
        right = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
        return None if right else "give a list of texts to choose among, none of them empty"
    if kind in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            return f"give the {kind} as text"
        return "a grammar imports nothing" if kind == "grammar" and _IMPORT.search(value) else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "its schema is no JSON"
    wrong = schema_problem(value)
    return None if wrong is None else f"its schema is {wrong}"


def schema_problem(schema: Any) -> str | None:
    """Return why something is no JSON schema that stands for itself; None if it is.

    What it refers to lies in it: a schema at an address is not fetched.

    >>> schema_problem({"$ref": "https://example.org/schema.json"})
    "one with a $ref to 'https://example.org/schema.json', which lies outside of it: put that into the schema"
    """
    if not isinstance(schema, Mapping):
        return f"no JSON schema: {shown(schema)} is no object"
    try:
        text = json.dumps(schema, sort_keys=True)
        return _known_problem(text)
    except RecursionError:
        return "no JSON schema that can be read: it is nested too deeply"
    except (ValueError, TypeError) as error:
        return f"no JSON schema: {error}"


@functools.lru_cache(maxsize=512)
def _known_problem(text: str) -> str | None:
    """Return what is wrong with a schema; most rows of a job have the same."""
    schema = json.loads(text)
    return _reference_problem(schema, schema, 0) or _metaschema_problem(schema)


def _reference_problem(part: Any, whole: Any, level: int) -> str | None:
    if level > _DEEPEST:
        raise RecursionError
    if isinstance(part, list):
        return next((wrong for each in part if (wrong := _reference_problem(each, whole, level + 1))), None)
    if not isinstance(part, dict):
        return None
    for key, value in part.items():
        if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
            if not value.startswith("#"):
                return f"one with a {key} to {shown(value)}, which lies outside of it: put that into the schema"
            if value != "#" and not (_points(whole, value) if value.startswith("#/") else _anchored(whole, value[1:])):
                return f"one with a {key} to {shown(value)}, and nothing is there"
        elif key == "$id" and level and isinstance(value, str) and not value.startswith("#"):
            return f"one with a part of an address of its own, {shown(value)}: leave that $id out"
        elif (wrong := _reference_problem(value, whole, level + 1)) is not None:
            return wrong
    return None


def _points(schema: Any, pointer: str) -> bool:
    for part in pointer[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return False
    return True


def _anchored(part: Any, name: str) -> bool:
    """Return whether a schema has an anchor of that name somewhere."""
    if isinstance(part, list):
        return any(_anchored(each, name) for each in part)
    if not isinstance(part, dict):
        return False
    named = (part.get("$anchor"), part.get("$dynamicAnchor"), str(part.get("$id")).removeprefix("#"))
    return name in named or any(_anchored(each, name) for each in part.values())


def _metaschema_problem(schema: Any) -> str | None:
    try:
        from jsonschema import Draft202012Validator, FormatChecker, SchemaError
        from jsonschema.validators import validator_for
    except ImportError:  # An engine says then what is wrong with it.
        return None
    try:
        # Without formats: patterns are not of Python's dialect, by which it would judge them.
        validator_for(schema, default=Draft202012Validator).check_schema(schema, format_checker=FormatChecker(()))
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        return f"no JSON schema: {error.message[:200]}" + (f" (at {where})" if where else "")
    return None
