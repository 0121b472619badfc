"""What goes to an engine of requests of OpenAI's form, and what does not, whatever else is in them."""

import base64
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        chat(sound("wav", b"RIFF\0\0\0\0WAVE"), sound("mp3", b"ID3\4"), sound("mp3", b"\xff\xfb\x90")),
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
    assert "leave it out" in why({"input": "One", "encoding_format": "base64"}, "vllm", EMBEDDINGS)
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
        ({"logit_bias": {"five": 1}}, "an object of tokens' numbers"),
        ({"stream": True}, "stream = True is not supported: leave it out"),
        ({"stream_options": {"include_usage": True}}, "is for answers that are streamed"),
        ({"functions": []}, "write tools"),
        ({"audio": {"voice": "alloy"}}, "asks for speech"),
        ({"temprature": 1}, "not known, and nothing is passed on unknown"),
        ({"stop": "\ud800"}, "the body's stop is no valid Unicode: character 0"),
    ],
)
def test_what_is_wrong_with_a_field_is_told(fields, sentence):
    import re

    for backend in ("vllm", "server"):
        assert re.search(sentence, why(chat(**fields), backend))


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
        ("text", "neither text nor an object"),
        ({"type": "text", "text": 5}, "is 5, not text"),
        ({"type": ["text"]}, "content of type"),
    ],
)
def test_what_is_wrong_with_a_part_of_a_message_is_told(part, sentence):
    assert sentence in why(chat(part))


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
