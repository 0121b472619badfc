"""What goes to an engine of requests of OpenAI's form, and what does not, whatever else is in them."""

import base64
import copy
import io
import json
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.models.openai_contents import pixels_of
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS
from ctxflow.models.openai_requests import (
    BACKENDS,
    CONTENTS,
    FIELDS,
    IGNORED,
    TURNING_OFF,
    as_before,
    as_sent,
    hazard,
    refusal,
)
from ctxflow.models.openai_schemas import schema_problem

pytest.importorskip("jsonschema")

# A PNG of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PNG = f"data:image/png;base64,{PIXEL}"
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}}},
    "$defs": {"part": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    "required": ["kind"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


TAG = b"ID3\4\0\0\0\0\1\2" + bytes(130)  # Of 1 * 128 + 2 bytes behind its header.


def data(kind, content):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def sound(form, content):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": form}}


def chat(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts) or "Hello"}], **fields}


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def why(body, backend="vllm", endpoint=CHAT, names=None):
    return refusal(endpoint, body, backend, names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_is_taken_as_openai_gives_it(backend):
    said = {"role": "assistant", "content": "Paris.", "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None, "new": {}}  # fmt: skip
    part = {"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": None}
    body = {"messages": [said, {"role": "assistant", "content": [part], "tool_calls": []}]}
    assert why(body, backend) is None
    first, second = as_sent(CHAT, body, backend)["messages"]
    assert first == {key: value for key, value in said.items() if key not in ("annotations", "new")}
    assert second["content"] == [{"type": "output_text", "text": "Sure.", "logprobs": None}]
    for more in ({"annotations": [{"url": "https://example.org"}]}, {"audio": {"id": "a"}}, {"image_url": "a"}):
        assert "is not known there: leave it out" in why({"messages": [{**said, **more}]}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_regex": "[a-z]+"},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"], "json": None}},
        {"logprobs": True, "top_logprobs": 3, "n": 4},
        {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "stop": ["x"]},
        {"max_completion_tokens": 5, "user": "u", "metadata": {"a": "https://example.org"}, "store": False},
        {"chat_template_kwargs": {"enable_thinking": False, "today": "https://example.org is only text"}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "presence_penalty": 0, "logit_bias": {}},
        {"model": "whatever", "stream": False, "response_format": None, "modalities": ["text"]},
    ],
)
def test_what_every_backend_can_do_passes(backend, fields):
    body = chat(**fields)
    before = copy.deepcopy(body)
    assert why(body, backend) is None
    sent = as_sent(CHAT, body, backend)
    assert body == before and sent["messages"] == body["messages"] and "model" not in sent and "stream" not in sent
    assert why(sent, backend) is None, "what is sent passes itself"


@pytest.mark.parametrize("backend", ["vllm", "server"])
@pytest.mark.parametrize(
    "body",
    [
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}),
        chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
        chat({"type": "text", "text": "What is it?"}, image(PNG, detail="low")),
        chat({"type": "image_url", "image_url": PNG}),
        chat(sound("wav", b"RIFF\0\0\0\0WAVE"), sound("mp3", TAG + b"\xff\xfb\x90"), sound("mp3", b"\xff\xfb\x90")),
        chat({"type": "video_url", "video_url": {"url": data("video/mp4", b"\0\0\0\x18ftypisom")}}),
        chat(guided_json={"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "string"}}}, min_p=0.1),
        chat(presence_penalty=1, frequency_penalty=-1.5, logit_bias={"5": -100}, repetition_penalty=1.1, min_p=0.1),
        chat(guided_grammar='root ::= "a"'),
        chat(reasoning_effort="low", include_reasoning=True, ignore_eos=True, min_tokens=3),
    ],
)
def test_what_engines_can_do_names_them_where_transformers_is_the_backend(backend, body):
    assert why(body, backend) is None
    sentence = why(body, "transformers")
    assert sentence.endswith("run it with --backend vllm or --backend server")


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", "(?<name>a)"])
def test_patterns_are_of_their_own_dialect_and_not_of_pythons(pattern):
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}, "patternProperties": {pattern: {}}}
    for backend in BACKENDS:
        assert why(chat(guided_json=schema), backend) is None


def test_a_server_gets_fields_of_its_own_and_nothing_that_it_would_follow():
    picture = image("http://169.254.169.254/latest")
    assert hazard(CHAT, chat(image(PNG), mirostat=2, response_format={"type": "own"}, n=2)) is None
    assert hazard(CHAT, {}) is None and hazard(COMPLETIONS, {"prompt": "file:///etc/passwd"}) is None
    assert "an image at an address" in hazard(CHAT, chat(picture))
    assert "have an engine load" in hazard(CHAT, chat(mm_processor_kwargs={}))
    assert "have an engine fetch" in hazard(CHAT, chat(kv_transfer_params={"remote_host": "a"}))
    assert "names no adapter" in hazard(COMPLETIONS, {"prompt": "a", "lora": [{"id": 0}]})
    assert "chat_template" in hazard(CHAT, chat(chat_template_kwargs={"chat_template": "a"}))


def test_completions_and_embeddings():
    assert why({"prompt": "One", "echo": True, "logprobs": 2}, endpoint=COMPLETIONS) is None
    assert why({"prompt": [1, 2, 3]}, endpoint=COMPLETIONS) is None
    assert "several texts" in why({"prompt": ["One", "Two"]}, "transformers", COMPLETIONS)
    assert "run it with --backend server" in why({"prompt": "One", "suffix": "Two"}, "vllm", COMPLETIONS)
    assert why({"input": ["One", "Two"]}, "transformers", EMBEDDINGS) is None
    assert "of tokens is not for the backend transformers" in why({"input": [1, 2]}, "transformers", EMBEDDINGS)
    assert "dimensions = 5 is not for the backend" in why({"input": "One", "dimensions": 5}, "transformers", EMBEDDINGS)
    assert "give one of float, base64" in why({"input": "One", "encoding_format": "hex"}, "vllm", EMBEDDINGS)
    for backend in BACKENDS:
        assert why({"input": "One", "encoding_format": "base64"}, backend, EMBEDDINGS) is None
        assert why({"prompt": ["One"]}, backend, COMPLETIONS) is None
    assert as_sent(COMPLETIONS, {"prompt": ["One"]}, "transformers") == {"prompt": "One"}
    assert as_sent(COMPLETIONS, {"prompt": ["One"]}, "vllm") == {"prompt": ["One"]}
    assert "is for answers of text" in why({"input": "One", "guided_choice": ["a"]}, "vllm", EMBEDDINGS)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "no JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "no JSON schema: .* no object"),
        ({"response_format": {"type": "json_schema"}}, "give a json_schema with a name and a schema"),
        ({"response_format": {"type": "structural_tag"}}, "give an object of the type text"),
        ({"response_format": "json"}, "give an object of the type text"),
        ({"guided_json": {"$ref": "#/$defs/none"}}, "nothing is there"),
        ({"guided_json": {"$ref": "#none", "$defs": {"a": {"$anchor": "some"}}}}, "nothing is there"),
        ({"guided_json": {"a": {"$id": "http://127.0.0.1/x", "$ref": "#/b"}}}, "an address of its own, 'http://127"),
        ({"guided_json": "{"}, "its schema is no JSON"),
        ({"structured_outputs": {"choice": []}}, "a list of texts to choose among"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "give one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "'structural_tag' is none of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "binds its answer twice"),
        ({"guided_grammar": "%import ./other.lark"}, "imports nothing"),
        ({"tools": [{"type": "web_search"}]}, "only functions are known"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]}, "no JSON schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "names none of its tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "is not supported"),
        ({"tool_choice": "auto"}, "needs tools beside it"),
        ({"top_logprobs": 2}, "needs logprobs = true"),
        ({"logprobs": 3}, "give true or false"),
        ({"n": 0}, "give a whole number from 1 to 128"),
        ({"temperature": "hot"}, "temperature = 'hot' is not supported: give a number from 0"),
        ({"temperature": float("nan")}, "give a number from 0"),
        ({"max_tokens": True}, "give a whole number from 1"),
        ({"stop": {"a": 1}}, "give a string or a list of strings"),
        ({"logit_bias": {"five": 1}}, "an object of at most 1,000 tokens' numbers"),
        ({"stream": True}, "stream = True is not supported: leave it out"),
        ({"stream_options": {"include_usage": True}}, "is for answers that are streamed"),
        ({"functions": []}, "write tools"),
        ({"audio": {"voice": "alloy"}}, "asks for speech"),
        ({"temprature": 1}, "not known, and nothing is passed on unknown"),
        ({"stop": "\ud800"}, "the body's stop is no valid Unicode: character 0"),
        ({"stop": ["a"] * 101}, "give at most 100 strings"),
        ({"stop": "a" * 257}, "of at most 256 characters each"),
        ({"top_k": 2**63}, "give a whole number from -1 to 2147483647"),
        ({"max_tokens": 10**30}, "give a whole number from 1 to 2147483647"),
        ({"temperature": 10**400}, "give a number from 0 to 1e"),
        ({"repetition_penalty": 1e-320}, "give a number from 0.001"),
        ({"seed": 2**63 - 2, "n": 3}, "have seeds from 9223372036854775806 on, beyond 64 bits"),
        ({"stop_token_ids": [5, 2**20]}, "stop_token_ids has the token 1048576, and the model knows 1,048,576"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids has the token"),
        ({"logit_bias": {str(2**20): 1}}, "logit_bias has the token"),
        ({"logit_bias": {"\u0663": 1}}, "an object of at most 1,000 tokens' numbers"),
        ({"logit_bias": {"9" * 5000: 1}}, "an object of at most 1,000 tokens' numbers"),
        ({"chat_template_kwargs": {"a": [[]] * (2**18 + 1)}}, "holds too much: give at most 262,144 values"),
        ({"messages": [{"role": "user"}] * 100_001}, "hold too much: give at most 100,000 values"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}] * 100_000}]}, "hold too much"),
        ({"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 1000}, "of up to 128,000 tokens: give at most"),
        ({"moderation": {"model": "m"}}, "asks for OpenAI's own moderation"),
        ({"guided_choice": ["a"] * 5001}, "give at most 5,000 texts"),
        ({"guided_choice": ["a" * 10_001] * 5}, "of at most 50,000 characters together"),
        ({"guided_json": {"enum": ["a" * 9_999] * 6}}, "50,000 characters in all that is to be chosen among"),
        ({"guided_json": {"anyOf": [{"const": "a" * 9_999}] * 6}}, "50,000 characters in all that is to be chosen"),
        ({"stop_token_ids": list(range(1001))}, "give a list of at most 1,000 tokens' numbers"),
        (
            {"stop_token_ids": list(range(100)), "n": 128},
            "stop_token_ids are too many: give 78 at most",
        ),
        ({"bad_words": ["no"] * 100, "n": 128}, "bad_words are too many: give 78 at most for 128 answers"),
        ({"messages": [{"role": "user", "content": "a" * 400_000}], "prompt_logprobs": 20}, "prompt_logprobs are too"),
        ({"guided_regex": "a" * 10_001}, "give a regex of at most 10,000 characters"),
        ({"guided_grammar": "a" * 100_001}, "give a grammar of at most 100,000 characters"),
        ({"guided_json": {"enum": list(range(10_001))}}, "too large: give one of at most 10,000 parts"),
        ({"guided_json": {"pattern": "a" * 10_001}}, "too large: .* 10,000 in a text"),
        ({"guided_json": {"properties": {"a" * 10_001: {}}}}, "too large: .* 10,000 in a text"),
        ({"guided_json": {"description": "a" * 1_000_001}}, "too large: .* 1,000,000 characters"),
        ({"tools": [TOOL] * 1000}, "too large: give one of at most 10,000 parts"),
    ],
)
def test_what_is_wrong_with_a_field_is_told(fields, sentence):
    for backend in ("vllm", "server"):
        assert re.search(sentence, why(chat(**fields), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_people_read_of_a_schema_may_be_long_and_a_prompt_alone_may_be_scored(backend):
    tool = {"type": "function", "function": {"name": "ask", "description": "long " * 5_000, "parameters": {}}}
    for fields in ({"tools": [tool]}, {"guided_json": {"description": "long " * 5_000}}):
        if backend != "transformers" or "tools" not in fields:
            assert why(chat(**fields), backend) is None
    grammar = {"prompt": "One", "guided_grammar": "start: WORD\n%import  common.WORD"}
    scored = {"prompt": "One", "max_tokens": 0, "echo": True, "logprobs": 5}
    if backend != "transformers":
        assert refusal(COMPLETIONS, grammar, backend) is None and refusal(COMPLETIONS, scored, backend) is None
    assert "max_tokens = 0 asks for no answer" in refusal(COMPLETIONS, {"prompt": "One", "max_tokens": 0}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_changes_nothing_is_not_sent_and_whole_numbers_are(backend):
    body = {"prompt": "One", "suffix": "", "n": 2, "best_of": 2, "max_tokens": 3.0, "seed": -1.0, "verbosity": "low"}
    assert refusal(COMPLETIONS, body | {"verbosity": None}, backend) is None
    sent = as_sent(COMPLETIONS, body, backend)
    assert sent == {"prompt": "One", "n": 2, "max_tokens": 3, "seed": -1}
    assert all(type(each) in (int, str) for each in sent.values())
    assert "best_of = 1 is less than its n = 2" in refusal(
        COMPLETIONS, {"prompt": "One", "n": 2, "best_of": 1}, backend
    )


@pytest.mark.parametrize("vocabulary", [300, None])
def test_tokens_are_those_that_the_model_knows(vocabulary):
    def wrong(endpoint, body):
        return refusal(endpoint, body, "vllm", **({"vocabulary": vocabulary} if vocabulary else {}))

    known, none = (vocabulary or 2**20) - 1, vocabulary or 2**20
    for place in (lambda token: {"prompt": "a", "stop_token_ids": [1, token]},
                  lambda token: {"prompt": "a", "allowed_token_ids": [token]},
                  lambda token: {"prompt": "a", "logit_bias": {str(token): -1}},
                  lambda token: {"prompt": [1, token]}, lambda token: {"prompt": [[1], [token]]}):  # fmt: skip
        assert wrong(COMPLETIONS, place(known)) is None
        assert f"has the token {none}, and the model knows {none:,}" in wrong(COMPLETIONS, place(none))
    assert wrong(EMBEDDINGS, {"input": [[1], [none]]}) is not None


def test_a_request_asks_for_so_many_answers_at_most():
    assert why({"prompt": ["a"] * 16, "n": 128}, endpoint=COMPLETIONS) is None
    assert "asks for 2176 answers: give 2,048 at most" in why({"prompt": ["a"] * 17, "n": 128}, endpoint=COMPLETIONS)
    assert "asks for 2049 answers" in why({"input": ["a"] * 2049}, "transformers", EMBEDDINGS)
    assert why({"prompt": [1] * 5000, "n": 2}, endpoint=COMPLETIONS) is None, "one prompt, of tokens"


EXTREMES = [
    0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, 10**400, -(10**400),
    0.0, -0.0, 1e-320, 1e-46, 5e-324, 0.5, 1.0, 3.0, 1e6, 1e38, 1e308, float("inf"), float("-inf"), float("nan"), True,
    False, None, "", "5", "x" * 10_000, [], {}, [[]], [None], [2**63], [-1], ["a"] * 3000, {"a": 1}, {"5": 10**400},
    {"5": float("nan")}, {str(2**63): 1},
]  # fmt: skip


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_passes_is_what_any_engine_can_hold(endpoint, backend):
    for name in {*FIELDS[endpoint], *IGNORED, "guided_regex", "model", CONTENTS[endpoint]}:
        for value in [*EXTREMES, deep(90), deep(900)]:
            body = {CONTENTS[endpoint]: [{"role": "user", "content": "a"}] if endpoint == CHAT else "a", name: value}
            if refusal(endpoint, body, backend) is None:
                text = json.dumps(as_sent(endpoint, body, backend), allow_nan=False)
                numbers = [abs(float(each)) for each in re.findall(r"-?[0-9][-+.e0-9]*", text)]
                assert max(numbers, default=0) < 2**63 + 1


@pytest.mark.parametrize("best_of", [0, 129, 2.5])
def test_the_best_of_too_many_is_told(best_of):
    assert "give a whole number from 1 to 128" in why(chat(best_of=best_of), "server")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (image("https://example.org/a.png"), "an image at an address, and nothing is fetched"),
        (image("file:///etc/passwd"), "an image in a file, and none is read"),
        (image("/etc/passwd"), "an image in a file"),
        (image(None), "an image that is missing"),
        (image("data:image/png;base64,????"), "not base64"),
        (image("data:image/png;base64,"), "without any data"),
        (image("data:image/png;base64,R0lGODlh"), "does not begin as those do"),
        (image("data:image/svg+xml;base64,PHN2Zz4="), "of the type image/svg"),
        (image("data:text/html;base64,PHN2Zz4="), "of the type text/html"),
        (image("data:image/png,abc"), "whose data URL begins"),
        ({"type": "image_url", "image_url": {"url": PNG, "path": "/etc"}}, "has 'path', which is not known"),
        ({"image_url": {"url": PNG}}, "has 'image_url', which is not known"),
        ({"type": "image_url", "image_url": PNG, "uuid": "1"}, "has 'uuid'"),
        ({"type": "image_embeds", "image_embeds": PIXEL}, "content of type 'image_embeds'"),
        ({"type": "prompt_embeds", "data": PIXEL}, "content of type 'prompt_embeds'"),
        ({"type": "file", "file": {"file_id": "1"}}, "content of type 'file'"),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "exe"}}, "of the format 'exe'"),
        ({"type": "input_audio", "input_audio": "https://example.org/a.wav"}, "give an object of its data"),
        ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "a film at an address"),
        ({"type": "video_url", "video_url": {"url": data("video/mp4", b"v=0\r\no=- 1")}}, "does not begin as those do"),
        ({"type": "audio_url", "audio_url": {"url": data("audio/mpeg", b"#EXTM3U\n/x")}}, "does not begin as those do"),
        (sound("mp3", b"ffconcat version 1.0\nfile a.wav"), "does not begin as those do"),
        (sound("wav", b"RIFF\0\0\0\0AVI "), "does not begin as those do"),
        (sound("mp3", TAG + b"<?xml version"), "does not begin as those do"),
        (sound("mp3", TAG + TAG + b"#EXTM3U\n"), "does not begin as those do"),
        (sound("mp3", TAG[:-5] + b"\xff\xfb\x90"), "does not begin as those do"),
        (sound("mp3", b"ID3\4"), "does not begin as those do"),
        (sound("mp3", "\ufeff<MPD>".encode("utf-16-le")), "does not begin as those do"),
        (
            {"type": "video_url", "video_url": {"url": data("video/mp4", b"<!--ftyp--><MPD>")}},
            "does not begin as those",
        ),
        (image(data("image/png", b"\x89PNG\r\n\x1a\n")), "of a size that cannot be read"),
        (image(data("image/jpeg", b"\xff\xd8\xff\xd9")), "of a size that cannot be read"),
        ("text", "neither text nor an object"),
        ({"type": "text", "text": 5}, "is 5, not text"),
        ({"type": ["text"]}, "content of type"),
    ],
)
def test_what_is_wrong_with_a_part_of_a_message_is_told(part, sentence):
    assert sentence in why(chat(part))


def picture(form, width, height):
    """An image's header, or a whole one where Pillow makes it."""
    if form == "gif":  # Larger than its screen.
        return b"GIF89a" + struct.pack("<HH", 1, 1) + b"\x80\0\0" + bytes(6) + b"!\xfe\3abc\0," + struct.pack(
            "<HHHH", 0, 0, width, height)  # fmt: skip
    if form == "png":
        return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    if form == "jpeg":
        return (
            b"\xff\xd8\xff\xe0\0\4ab\xff\xff\xc2\0\x11\x08"
            + struct.pack(">HH", height, width)
            + bytes(10)
            + b"\xff\xda"
        )
    if form == "bmp":
        return b"BM" + bytes(12) + struct.pack("<Iii", 40, width, -height)
    return b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")


@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "webp", "bmp"])
def test_images_have_so_many_pixels_at_most_alone_and_together(form):
    def asked(*sizes):
        parts = [image(data(f"image/{form}", picture(form, *size))) for size in sizes]
        return why(chat(*parts)), hazard(CHAT, chat(*parts))

    assert asked((10_000, 5_000)) == (None, None)
    for wrong in asked((10_000, 5_001)):
        assert wrong.endswith("has an image of 50,010,000 pixels: give 50,000,000 at most")
    assert asked(*[(10_000, 5_000)] * 4) == (None, None)
    for wrong in asked(*[(10_000, 5_000)] * 4, (1, 1)):
        assert wrong.endswith("have images of 200,000,001 pixels: give 200,000,000 together at most")
    assert asked(*[(1, 1)] * 250) == (None, None)
    assert "have 251 images: give 250 at most" in asked(*[(1, 1)] * 251)[0]


def test_a_png_of_two_headers_has_the_pixels_of_the_larger():
    headers = [struct.pack(">I4sIIBBBBBI", 13, b"IHDR", *size, 8, 2, 0, 0, 0, 0) for size in ((1, 1), (9, 7))]
    for order in (headers, headers[::-1]):
        assert pixels_of(b"\x89PNG\r\n\x1a\n" + b"".join(order) + struct.pack(">I4s", 4, b"IDAT")) == 63


@pytest.mark.parametrize("options", [("png", {}), ("jpeg", {}), ("jpeg", {"progressive": True}), ("gif", {}),
                                     ("webp", {}), ("webp", {"lossless": True}), ("bmp", {})])  # fmt: skip
def test_an_image_has_the_pixels_that_pillow_finds(options):
    pillow = pytest.importorskip("PIL.Image")
    form, more = options
    kept = io.BytesIO()
    pillow.new("RGB", (67, 41), "red").save(kept, form, **more)
    assert pixels_of(kept.getvalue()) == 67 * 41
    for end in range(30):
        assert pixels_of(kept.getvalue()[:end]) in (0, 67 * 41)


def test_arguments_of_calls_that_nest_too_deeply_are_refused():
    def called(arguments):
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
        return why({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "transformers")

    assert called('{"a": 1}') is None and called("no JSON") is None
    for levels in (101, 5000, 200_000):
        assert called('{"a": ' + "[" * levels + "]" * levels + "}").endswith("nested too deeply")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5}, {"properties": {"a": {"type": "strin"}}}, {"items": [{}]}, {"required": "a"}, {"enum": 5},
        {"$defs": 1}, {"anyOf": []}, {"minLength": -1}, {"not": 5}, {"$anchor": "#a"},
        {"dependentRequired": {"a": [1]}}, {"format": 5}, {"prefixItems": [{"$ref": 5}]},
        {"additionalProperties": {"if": 5}}, {"definitions": {"a": {"type": "x"}}}, {"dependencies": {"a": ["b", 5]}},
        {"$vocabulary": 5}, {"contentSchema": 5}, {"unevaluatedItems": 5}, {"title": 5}, {"pattern": "("},
        {"type": ["string", "null"]}, {"x": {"type": 5}}, {"items": True, "prefixItems": [{}, False]},
    ],
)  # fmt: skip
def test_a_schema_is_one_where_jsonschema_finds_it_one(schema):
    import jsonschema

    kind = jsonschema.Draft202012Validator
    wrong = next(kind(kind.META_SCHEMA).iter_errors(schema), None)
    found = why(chat(guided_json=schema))
    assert (found is None) == (wrong is None)
    assert wrong is None or ("no JSON schema" in found and wrong.message[:50] in found)


def test_references_to_anchors_take_time_in_proportion():
    parts = {f"p{n}": {"$ref": "#zz"} for n in range(4000)}
    assert why(chat(guided_json={"properties": parts, "z": {"$anchor": "zz"}})) is None
    assert "nothing is there" in why(chat(guided_json={"properties": parts, "z": {"$anchor": "z"}}))


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft/2020-12/schema"])
def test_schemas_are_judged_in_time_in_proportion_whatever_they_list(draft):
    marked = {"$schema": f"{'http' if '04' in draft else 'https'}://json-schema.org/{draft}"}
    values = [{"a": n} for n in range(4900)]
    assert schema_problem({**marked, "enum": values}) is None
    if "04" in draft:
        assert "(at enum)" in schema_problem({**marked, "enum": [*values, {"a": 1}]})


def test_every_field_of_openai_s_own_types_is_passed_on_or_refused_knowingly():
    types = pytest.importorskip("openai.types")
    for endpoint, made in (
        (CHAT, types.chat.completion_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, types.completion_create_params.CompletionCreateParamsBase),
        (EMBEDDINGS, types.EmbeddingCreateParams),
    ):
        names = {*made.__annotations__, *([] if endpoint == EMBEDDINGS else ["stream"])}
        known = {*FIELDS[endpoint], *IGNORED, "model", CONTENTS[endpoint]}
        body = {CONTENTS[endpoint]: "a"} if endpoint != CHAT else chat()
        for name in names - known:
            assert "is not known" not in refusal(endpoint, {**body, name: "?"}, "vllm"), name


def test_models_are_the_jobs_and_its_adapters():
    names = {"base", "french", "german"}
    assert why(chat(model="french"), names=names) is None
    assert as_sent(CHAT, chat(model="french"), "vllm", {"french", "german"})["model"] == "french"
    assert "model" not in as_sent(CHAT, chat(model="base"), "vllm", {"french", "german"})
    sentence = why(chat(model="dutch"), names=names)
    told = (
        "the body's model = 'dutch' is neither the job's model nor one of its adapters: there are base, french, german"
    )
    assert sentence == told
    assert "names no adapter of this job" in why(chat(lora_request={"path": "/tmp/x"}))
    assert why(chat(model=["french"]), names=sorted(names)) is not None


# What makes an engine follow something, by where it stands: none may pass, whatever is beside it.
_WHERE = st.sampled_from([
    "https://example.org/x", "http://127.0.0.1/x", "file:///etc/passwd", "/etc/passwd", "../x", "s3://bucket/x",
    "ftp://example.org/x", "~/x", "data:text/plain,x", "HTTPS://EXAMPLE.ORG", "data:image/png;base64,/etc/passwd!",
])  # fmt: skip
_PLACES = {
    "image": lambda where: chat(image(where)),
    "bare image": lambda where: chat({"type": "image_url", "image_url": where}),
    "audio": lambda where: chat({"type": "audio_url", "audio_url": {"url": where}}),
    "video": lambda where: chat({"type": "video_url", "video_url": {"url": where}}),
    "sound": lambda where: chat({"type": "input_audio", "input_audio": {"data": where, "format": "wav"}}),
    "file": lambda where: chat({"type": "file", "file": {"file_data": where}}),
    "other part": lambda where: chat({"type": "image", "image": where}),
    "untyped part": lambda where: chat({"video_url": where}),
    "beside a text": lambda where: chat({"type": "text", "text": "a", "image_url": where}),
    "beside a role": lambda where: {"messages": [{"role": "user", "content": "a", "image": where}]},
    "schema": lambda where: chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": where}}}),
    "deep schema": lambda where: chat(guided_json={"properties": {"a": {"items": {"$ref": where}}}}),
    "schema in text": lambda where: chat(structured_outputs={"json": f'{{"$ref": "{where}"}}'}),
    "tool": lambda where: chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"$ref": where}}}]),
    "tool's server": lambda where: chat(tools=[{"type": "mcp", "server_url": where}]),
    "template": lambda where: chat(chat_template=where),
    "template's variable": lambda where: chat(chat_template_kwargs={"chat_template": where}),
    "adapter": lambda where: chat(lora_path=where),
    "adapter's name": lambda where: chat(model=where),
    "tensors": lambda where: {"prompt": "a", "prompt_embeds": where},
    "plug-in": lambda where: chat(logits_processors=[where]),
    "plug-in's arguments": lambda where: chat(vllm_xargs={"a": where}),
    "processor": lambda where: chat(mm_processor_kwargs={"a": where}),
    "other engine": lambda where: chat(kv_transfer_params={"remote_host": where}),
    "unknown": lambda where: chat(something_new={"url": where}),
    "prompt": lambda where: {"prompt": {"file": where}},
    "input": lambda where: {"input": [{"image": where}]},
}
_HARMLESS = st.fixed_dictionaries({}, optional={
    "n": st.integers(1, 4), "temperature": st.floats(0, 2), "user": st.text(), "seed": st.integers(0, 5),
    "max_tokens": st.integers(1, 9), "stop": st.just("x"),
})  # fmt: skip


@given(st.sampled_from(sorted(_PLACES)), _WHERE, _HARMLESS, st.sampled_from(BACKENDS))
def test_nothing_that_an_engine_might_follow_passes(place, where, beside, backend):
    body = {**beside, **_PLACES[place](where)}
    endpoint = next(endpoint for endpoint, contents in CONTENTS.items() if contents in body)
    sentence = refusal(endpoint, body, backend, {"base", "french"})
    assert sentence is not None and "\n" not in sentence and len(sentence) < 600


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | _WHERE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
_NAMED = sorted({*IGNORED, *(name for fields in FIELDS.values() for name in fields), "model", "structured_outputs"})


@settings(max_examples=300)
@given(st.sampled_from(ENDPOINTS), st.dictionaries(st.sampled_from(_NAMED) | st.text(), _JSON, max_size=4), _JSON,
       st.sampled_from(BACKENDS))  # fmt: skip
def test_any_json_is_told_or_sent_and_nothing_unknown_is_sent(endpoint, fields, contents, backend):
    body = {**fields, CONTENTS[endpoint]: contents}
    sentence = refusal(endpoint, body, backend)
    if sentence is None:
        sent = as_sent(endpoint, body, backend)
        assert set(sent) <= {*FIELDS[endpoint], CONTENTS[endpoint], "structured_outputs"}
        assert next(iter(sent)) == CONTENTS[endpoint] and refusal(endpoint, sent, backend) is None
    else:
        assert isinstance(sentence, str) and sentence


def test_a_text_may_name_any_address():
    assert why(chat({"type": "text", "text": "Summarise https://example.org and /etc/passwd"})) is None
    assert why({"prompt": "file:///etc/passwd"}, "transformers", COMPLETIONS) is None
    assert base64.b64decode(PIXEL)


def test_a_request_is_known_as_version_01_knew_it():
    body = {"messages": [], "max_tokens": 5, "temperature": 0, "stop": "x", "n": 1, "presence_penalty": 0}
    assert list(as_before(body).items()) == [
        ("messages", []), ("max_new_tokens", 5), ("temperature", 0), ("stop", ["x"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1}, {"min_tokens": 0}, {"bad_words": []}, {"logit_bias": {}}]
)
def test_what_turns_a_models_own_setting_off_is_sent(fields):
    body = chat(**fields)
    assert refusal(CHAT, body, "transformers") is None
    assert as_sent(CHAT, body, "transformers").items() >= fields.items()
    assert fields.keys() <= TURNING_OFF
