"""Requests to /v1/responses are those to chats, and their answers are as OpenAI's package reads them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.batch.engine_answers import whole_body
from ctxflow.models.openai_engine import CHAT
from ctxflow.models.openai_requests import refusal
from ctxflow.models.openai_responses import RESPONSES, UntranslatableError, as_chat

pytest.importorskip("jsonschema")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "name": "weather", "description": "of a place", "parameters": SCHEMA, "strict": True}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TRANSLATED = [
    ({"input": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}),
    (
        {"input": [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}]}]},
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]}]},
    ),
    (
        {"instructions": "Use tools.", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"},
         "input": [
            {"role": "user", "content": "Rome and Oslo?"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sun"},
            {"role": "assistant", "type": "message", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "Sun.", "annotations": []}]}]},
        {"messages": [
            {"role": "system", "content": "Use tools."}, {"role": "user", "content": "Rome and Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
            {"role": "assistant", "content": [{"type": "text", "text": "Sun."}]}],
         "tools": [{"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}],
         "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    (
        {"input": "Hi", "max_output_tokens": 5, "temperature": 0, "top_p": 0.5, "reasoning": {"effort": "low"},
         "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
         "include": ["message.output_text.logprobs"], "top_logprobs": 2, "model": "gpt-4o", "store": False,
         "background": False, "truncation": "disabled", "previous_response_id": None, "n": 1},
        {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5,
         "reasoning_effort": "low", "logprobs": True, "top_logprobs": 2, "model": "gpt-4o", "store": False,
         "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    ),
    ({"input": "Hi", "text": {"format": {"type": "text"}, "verbosity": "medium"}},
     {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "text"}}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "chat"), TRANSLATED)
def test_a_request_becomes_one_to_chats(body, chat):
    assert as_chat(body) == chat
    assert refusal(CHAT, chat, "vllm") is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"previous_response_id": "resp_1"}, "is kept by OpenAI alone: write all of the conversation"),
        ({"conversation": "conv_1"}, "is kept by OpenAI alone"),
        ({"prompt": {"id": "pmpt_1"}}, "names a prompt that OpenAI keeps"),
        ({"background": True}, "is not supported: leave it out"),
        ({"truncation": "auto"}, "is not supported"),
        ({"n": 2}, "the body's n = 2 is not supported: leave it out"),
        ({"include": ["file_search_call.results"]}, "is not supported: give message.output_text.logprobs alone"),
        ({"top_logprobs": 3}, "needs include ="),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "give its effort alone"),
        ({"messages": []}, "is of chat completions"),
        ({"input": []}, "give text, or a list of items"),
        ({"input": 3}, "give text, or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference', which only OpenAI"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "has a file"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "an image that OpenAI keeps",
        ),
        ({"instructions": 3}, "not text"),
    ],
)
def test_what_chats_have_nothing_for_is_refused(more, said):
    with pytest.raises(UntranslatableError) as caught:
        as_chat({"input": "Hi", **more})
    assert said in str(caught.value)


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "file_search", "vector_store_ids": []}, "x"])
def test_tools_that_openai_runs_are_refused_by_the_checks_of_chats(tool):
    assert "only functions are known" in refusal(CHAT, as_chat({"input": "Hi", "tools": [tool]}), "vllm")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "format", "name", "effort", "text", "function"]), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
NAMES = ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "top_logprobs", "other"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), json_values))
def test_any_body_is_translated_or_refused(body):
    try:
        chat = as_chat(body)
    except UntranslatableError:
        return
    for backend in ("transformers", "vllm", "server"):
        refusal(CHAT, chat, backend)


def answered(message, request=None, ended="stop", **more):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": ended, **more}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    return whole_body(RESPONSES, {"choices": [choice], "usage": usage}, "a", 1000, "m", request or {})


def test_an_answer_is_a_response():
    body = answered({"content": "Paris.", "reasoning_content": "Well."})
    assert (body["id"], body["object"], body["status"], body["created_at"]) == ("resp_a", "response", "completed", 1000)
    thought, said = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Well."}]
    assert said["content"][0]["text"] == "Paris."
    assert body["usage"]["input_tokens"] == 7 and body["usage"]["input_tokens_details"]["cached_tokens"] == 4
    cut = answered({"content": "Par"}, ended="length")
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    [called] = answered({"content": None, "tool_calls": [call]}, as_chat({"input": "Hi", "tools": [TOOL]}))["output"]
    assert (called["type"], called["call_id"], called["name"]) == ("function_call", "c", "weather")


def test_openais_package_reads_it():
    responses = pytest.importorskip("openai.types.responses", reason="the package openai is not installed")
    told = {"content": [{"token": "P", "logprob": -0.5, "bytes": [80], "top_logprobs": []}]}
    request = as_chat({"input": "Hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}})
    found = responses.Response.model_validate(answered({"content": "Paris."}, request, logprobs=told), strict=True)
    assert found.output_text == "Paris." and found.usage.total_tokens == 9
    assert found.output[0].content[0].logprobs[0].token == "P"
    assert found.tools[0].name == found.tool_choice.name == "weather"
