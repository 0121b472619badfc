"""What engines answer, as it is written: in OpenAI's form, parsed by its own package's types, and as columns."""

import json
import socket
import sys

import pyarrow.parquet
import pytest

from ctxflow.batch import bounded_validator
from ctxflow.batch.engine_answers import nested_columns, schema_missed
from ctxflow.batch.job import Job
from ctxflow.batch.ledger import row_digest
from ctxflow.batch.publish import publish
from ctxflow.batch.records import Held, openai_record, plain_record, tokens_of, truncated
from ctxflow.batch.row_items import Prepared, known_as
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS

pytest.importorskip("openai")
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 5}}
TOKEN = {"token": "Pa", "logprob": -0.5, "bytes": [80, 97]}
LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN, {"token": "Ro", "logprob": -2.0, "bytes": None}]}]}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def said(*messages, **more):
    """A chat's response as vLLM gives it, with all that it leaves empty."""
    choices = [
        {
            "index": number,
            "message": {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [], **each},
            "logprobs": None, "finish_reason": "stop", "stop_reason": None, "token_ids": None, **more,
        }
        for number, each in enumerate(messages)
    ]  # fmt: skip
    empty = dict.fromkeys(("service_tier", "system_fingerprint", "prompt_logprobs", "kv_transfer_params"))
    return {"id": "chatcmpl-x", "object": "chat.completion", "created": 5, "model": "/tmp/lm", "choices": choices,
            "usage": USAGE, **empty}  # fmt: skip


def row(endpoint, body, kept=None):
    return Prepared(3, 255, "a", ((endpoint, body),), kept or {}, 10)


def job(**choices):
    return Job(input="in", output="out", model="m", **choices)


PRICE = {"type": "object", "properties": {"price": {"maximum": 3}}, "required": ["price"]}
FORMS = {
    "a chat's": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PRICE}}},
    "vLLM's": {"structured_outputs": {"json": PRICE}},
    "as text": {"structured_outputs": {"json": json.dumps(PRICE)}},
    "llama-server's": {"json_schema": PRICE},
}


def test_without_jsonschema_nobody_can_tell_more_than_that_it_is_json(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    bounded_validator._read.cache_clear()
    assert schema_missed(FORMS["vLLM's"], said({"content": '{"price": 12.5}'})) is None
    assert "is no JSON" in schema_missed(FORMS["vLLM's"], said({"content": "12,5 EUR"}))
    stopped = schema_missed({**FORMS["vLLM's"], "stop": ","}, said({"content": '{"price": 12'}))
    assert stopped.endswith("one of the request's stop texts may have ended it")


@pytest.mark.parametrize("request_", FORMS.values(), ids=FORMS)
def test_an_answer_that_is_not_by_the_schema_is_none(request_):
    pytest.importorskip("jsonschema")

    def missed(content, **more):
        return schema_missed(request_, said({"content": '{"price": 2}'}, {"content": content}, **more))

    assert missed('{"price": 3}') is None
    assert missed('{"price": 12.5}').endswith("12.5 is greater than the maximum of 3 (at price)")
    assert missed("{}").endswith("'price' is a required property")
    assert missed('{"price": 1').startswith("the answer is no JSON, to which the request binds it: ")
    assert missed('{"price": 1', finish_reason="length") is None, "it says so itself"
    assert missed(None) is None and schema_missed({}, said({"content": "No."})) is None
    assert schema_missed(request_, {"choices": [{"text": "[]", "finish_reason": "eos_token"}]}) is not None


def text_of(text):
    return {"choices": [{"text": text, "finish_reason": "stop"}]}


def bound(**schema):
    return {"structured_outputs": {"json": {"type": "object", **schema}}}


def test_a_check_fetches_nothing():
    pytest.importorskip("jsonschema")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        at = f"http://127.0.0.1:{listener.getsockname()[1]}/schema"
        parts = {"bar": {"anyOf": [{"$id": at, "anyOf": [{"$ref": "#/a"}]}]}}
        asked = bound(properties={"p": {"$ref": "#/x/bar"}}, x=parts)
        assert schema_missed(asked, text_of('{"p": 1}')) is None
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    ("schema", "text", "missed"),
    [
        ({"properties": {"a": {"multipleOf": 0.01}}}, f'{{"a": {"9" * 401}}}', "a number beyond all bounds"),
        ({"properties": {"a": {"multipleOf": 0.01}}}, '{"a": 1e999}', "a number beyond all bounds"),
        ({"properties": {"a": {"pattern": r"^\p{L}+$"}}}, '{"a": "Ohm"}', None),
        ({"properties": {"a": {"$ref": "#none"}}}, '{"a": 1}', None),
        ({"properties": {"a": {"pattern": "^(a+)+[[:digit:]]$"}}}, f'{{"a": "{"a" * 40}7"}}', None),
        ({}, "[" * 100_000, "the answer is no JSON"),
    ],
)
def test_what_the_validator_cannot_judge_ends_no_job(schema, text, missed):
    pytest.importorskip("jsonschema")
    said_of_it = schema_missed(bound(**schema), text_of(text))
    assert said_of_it is None if missed is None else missed in said_of_it


def test_an_answer_that_echoes_its_prompt_is_not_taken_for_no_json():
    assert schema_missed({**bound(), "echo": True}, text_of("Write JSON: {}")) is None


def test_any_object_is_one_and_a_list_is_none():
    pytest.importorskip("jsonschema")
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert schema_missed(asked, said({"content": "{}"})) is None
        assert "is not of type 'object'" in schema_missed(asked, said({"content": "[]"}))


CHATS = {
    "a text": said({"content": "Paris"}),
    "several": said({"content": "Paris"}, {"content": "Rome"}),
    "log probabilities": said({"content": "Paris"}, logprobs=LOGPROBS),
    "a call": said({"tool_calls": [CALL]}, finish_reason="tool_calls"),
    "reasoning": said({"content": "Paris", "reasoning": "It is in France."}),
    "reasoning, as others call it": said({"content": "Paris", "reasoning_content": "It is in France."}),
    "cut": {**said({"content": "Paris"}), "truncated": True, "original_prompt_tokens": 900},
    "the least that a server says": {"choices": [{"message": {"content": "Paris"}, "finish_reason": "length"}]},
}


@pytest.mark.parametrize("kind", CHATS)
def test_each_kind_of_answer_is_parsed_by_openais_types_and_carries_what_the_engine_said(kind):
    answer = CHATS[kind]
    line = Held().line(openai_record(job(task="chat"), 1000)(row(CHAT, {"messages": []}), answer))
    body = json.loads(line)["response"]["body"]
    found = ChatCompletion.model_validate(body, strict=True)
    assert (found.id, found.created, found.model) == ("chatcmpl-00000000000000ff", 1000, "m")
    assert len(found.choices) == len(answer["choices"]) and [each.index for each in found.choices] == [
        *range(len(found.choices))
    ]
    for choice, given in zip(found.choices, answer["choices"], strict=True):
        assert choice.message.content == given["message"].get("content")
        assert choice.finish_reason == given["finish_reason"]
    if "usage" in answer:
        assert found.usage.prompt_tokens_details.cached_tokens == 5
        assert tokens_of(answer) == found.usage.total_tokens == 11
    message = found.choices[0].message
    if kind == "log probabilities":
        assert found.choices[0].logprobs.content[0].top_logprobs[1].token == "Ro"
    if kind == "a call":
        assert message.tool_calls[0].function.name == "weather" and message.content is None
    else:
        assert message.tool_calls is None
    if kind.startswith("reasoning"):
        assert message.reasoning_content == "It is in France." and "reasoning" not in body["choices"][0]["message"]
    assert truncated(answer) is (kind == "cut") and body.get("original_prompt_tokens") == (
        900 if kind == "cut" else None
    )
    assert not any(value is None for name, value in body.items()), "what is empty is left out"


def test_completions_and_embeddings_are_parsed_by_openais_types():
    logprobs = {"tokens": ["Pa"], "token_logprobs": [-0.5], "top_logprobs": [{"Pa": -0.5}], "text_offset": [0]}
    choices = [
        {"index": 1, "text": "Rome", "finish_reason": "length", "logprobs": None},
        {"index": 0, "text": "Paris", "finish_reason": "stop", "logprobs": logprobs, "stop_reason": "\n"},
    ]
    answer = {"choices": choices, "usage": USAGE, "timings": {"ms": 5}}
    record = openai_record(job(task="chat"), 1000)(row(COMPLETIONS, {"prompt": "x", "model": "french"}), answer)
    found = Completion.model_validate(record["response"]["body"], strict=True)
    assert [each.text for each in found.choices] == ["Paris", "Rome"] and found.model == "french"
    assert found.choices[0].logprobs.token_logprobs == [-0.5] and "timings" not in record["response"]["body"]
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    answer = {"object": "list", "data": data, "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}}
    record = openai_record(job(task="embed"), 1000)(row(EMBEDDINGS, {"input": ["a", "b"]}), answer)
    found = CreateEmbeddingResponse.model_validate(record["response"]["body"], strict=True)
    assert [each.embedding for each in found.data] == [[1.0], [2.0]] and found.usage.total_tokens == 4
    record = plain_record(job(task="embed"))(row(EMBEDDINGS, {"input": "a"}), {**answer, "data": data[1:]})
    assert record["embedding"] == [1.0]


def test_plain_results_have_columns_for_what_only_some_answers_have():
    make = plain_record(job(task="chat", keep=("reasoning",), id_column="id"))
    asked = row(CHAT, {"messages": []}, {"reasoning": "mine"})
    first = {"row": 3, "id": "a", "reasoning": "mine", "text": "Paris", "finish_reason": "stop"}
    first |= {"prompt_tokens": 7, "completion_tokens": 4, "truncated": False}
    assert make(asked, CHATS["a text"]) == first
    assert make(asked, CHATS["reasoning"]) == {**first, "answer_reasoning": "It is in France."}
    assert make(asked, CHATS["log probabilities"]) == {**first, "logprobs": LOGPROBS}
    called = make(asked, CHATS["a call"])
    assert (called["text"], called["finish_reason"], called["tool_calls"]) == ("", "tool_calls", [CALL])
    several = make(asked, CHATS["several"])
    assert [each["message"]["content"] for each in several["choices"]] == ["Paris", "Rome"]
    cut = plain_record(job(task="chat", too_long="cut-end"))(asked, CHATS["cut"])
    assert (cut["truncated"], cut["original_prompt_tokens"]) == (True, 900)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_nested_columns_are_json_in_files_of_columns(tmp_path, form):
    make = plain_record(job(task="chat"))
    rows, output = tmp_path / "rows.jsonl", tmp_path / f"out.{form}"
    rows.write_bytes(b"".join(Held().line(make(row(CHAT, {"messages": []}), answer)) for answer in CHATS.values()))
    publish(form, rows, output, nested=nested_columns(()))
    if form == "csv":
        import csv

        found = list(csv.DictReader(output.read_text().splitlines()))
    else:
        table = pyarrow.parquet.read_table(output)
        assert {str(table.schema.field(name).type) for name in ("tool_calls", "logprobs", "choices")} == {"string"}
        found = table.to_pylist()
    by_kind = dict(zip(CHATS, found, strict=True))
    assert json.loads(by_kind["a call"]["tool_calls"]) == [CALL] and not by_kind["a text"]["tool_calls"]
    assert json.loads(by_kind["log probabilities"]["logprobs"]) == LOGPROBS
    for choice in json.loads(by_kind["several"]["choices"]):
        ChatCompletion.model_validate({"id": "a", "object": "chat.completion", "created": 1, "model": "m",
                                       "choices": [choice]}, strict=True)  # fmt: skip
    assert by_kind["reasoning"]["reasoning"] == "It is in France."


def test_a_row_is_known_as_an_earlier_ctxflow_knew_it():
    asked = ({"messages": [{"role": "user", "content": "é"}], "max_new_tokens": 5, "stop": ["x"]},)
    now = ((CHAT, {"messages": [{"role": "user", "content": "é"}], "max_tokens": 5, "stop": ["x"]}),)
    assert row_digest(known_as(now), {}) == row_digest(asked, {})
    assert known_as(("text",)) == ("text",) and known_as(({"input": "a"},)) == ({"input": "a"},)
