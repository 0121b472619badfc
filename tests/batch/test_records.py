import dataclasses
import datetime
import json
import socket

import numpy as np
import pytest

from ctxflow.batch.job import Job
from ctxflow.batch.records import dead_letter, error_line, line, nested, openai_record, plain_columns, plain_record
from ctxflow.batch.row_items import Prepared
from ctxflow.errors import CallCrashed, RemoteTraceback
from ctxflow.executors.futures import error_of
from ctxflow.rows.source import RowError
from ctxflow.scheduler.events import Failure

ANSWER = {"text": "Paris", "finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 2, "truncated": False}


def row(item, identifier="a", kept=None):
    return Prepared(3, 255, identifier, (item,), kept or {}, 10)


def job(**choices):
    return Job(input="in", output="out", **({"model": "m", **choices} if "function" not in choices else choices))


def test_openai_chat():
    record = openai_record(job(task="chat"), created=1000)(row({"messages": []}), ANSWER)
    assert record == {
        "id": "batch_req_00000000000000ff",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_00000000000000ff",
            "body": {
                "id": "chatcmpl-00000000000000ff",
                "object": "chat.completion",
                "created": 1000,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Paris"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
            },
        },
        "error": None,
    }


def test_a_line_is_one_to_all_who_split_lines():
    record = {"a\u2028": "one\u2028two\u2029three\x85four\x0bfive\x1c", "é": ["\u2028é"]}
    made = line(record).decode()
    assert len(made.splitlines()) == 1 and made.endswith("\n") and "é" in made
    assert json.loads(made) == record
    assert len(error_line({"message": "a\u2028b\ud800"}).decode().splitlines()) == 1


def test_properties_of_a_schema_are_columns():
    properties = {"price": {}, "text": {}, "reasoning": {}, "id": {}}
    asked = job(task="generate", keep=("id",), answer_schema=json.dumps({"properties": properties}))
    assert plain_columns(asked)[-4:] == ("price", "answer_text", "reasoning", "answer_id")
    record = plain_record(asked)

    def of(text, ended="stop"):
        choice = {"message": {"content": text, "reasoning_content": "well"}, "finish_reason": ended}
        return record(row({"prompt": "x"}, kept={"id": 7}), {"choices": [choice], "usage": {}})

    whole = of('{"price": 2, "text": "t", "reasoning": "r", "id": [1]}')
    assert (whole["price"], whole["answer_text"], whole["reasoning"], whole["answer_id"]) == (2, "t", "r", [1])
    assert (whole["id"], whole["answer_reasoning"]) == (7, "well")
    cut = of('{"price": 2, "te', "length")
    assert (cut["price"], cut["text"], cut["finish_reason"]) == (None, '{"price": 2, "te', "length")


def test_columns_that_only_some_answers_have_take_no_others_names():
    keep = ("reasoning", "answer_reasoning", "logprobs")
    schema = json.dumps({"properties": {"choices": {}, "tool_calls": {}}})
    asked = job(task="generate", keep=keep, answer_schema=schema)
    choice = {"message": {"content": '{"choices": [1]}', "reasoning_content": "well"}, "finish_reason": "stop"}
    answer = {"choices": [choice, choice], "usage": {}}
    made = plain_record(asked)(row({"prompt": "x"}, kept=dict.fromkeys(keep, "mine")), answer)
    assert {made[name] for name in keep} == {"mine"} and made["answer_answer_reasoning"] == "well"
    assert made["choices"] == [1] and len(made["answer_choices"]) == 2
    assert nested(asked) == ("answer_tool_calls", "answer_logprobs", "answer_choices")
    assert nested(job(function="a:b")) == ()


def test_openai_completions_and_embeddings():
    body = openai_record(job(task="chat"), 1)(row({"prompt": "x"}), ANSWER)["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Paris")
    answer = {"embeddings": [[1.0], [2.0]], "prompt_tokens": 4}
    body = openai_record(job(task="embed"), 1)(row({"input": ["a", "b"]}), answer)["response"]["body"]
    assert body == {
        "object": "list",
        "model": "m",
        "data": [{"object": "embedding", "index": n, "embedding": [n + 1.0]} for n in range(2)],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


def test_plain_records():
    make = plain_record(job(task="generate", id_column="name", keep=("k",)))
    assert make(row({"prompt": "x"}, kept={"k": 1}), ANSWER) == {"row": 3, "name": "a", "k": 1, **ANSWER}
    assert plain_record(job(task="embed"))(row({"input": "x"}, None), {"embeddings": [[1.0]]}) == {
        "row": 3,
        "embedding": [1.0],
    }
    assert plain_record(job(function="m:f"))(row(1, None), 5) == {"row": 3, "result": 5}
    with pytest.raises(ValueError, match="a column 'text' of their own"):
        plain_record(job(task="generate", keep=("text",)))


@dataclasses.dataclass
class Verdict:
    label: str


def test_lines_hold_what_can_be_said_in_json():
    value = {"a": np.float32(0.5), "b": np.arange(2), "c": Verdict("é"), "d": {2, 1}, "e": datetime.date(2026, 1, 2)}
    assert json.loads(line(value)) == {"a": 0.5, "b": [0, 1], "c": {"label": "é"}, "d": [1, 2], "e": "2026-01-02"}
    assert "é".encode() in line(value)
    assert json.loads(error_line({"a": "\ud800"})) == {"a": "\ud800"}
    assert line({"a": "one\ntwo\u2028"}).count(b"\n") == 1
    for bad in (float("nan"), float("inf"), object(), {1: {object()}}):
        with pytest.raises((ValueError, TypeError)):
            line({"a": bad})


def test_dead_letters_tell_what_the_worker_saw():
    error = CallCrashed("it died", "Traceback ...", "last words", "w1", "node7")
    letter = dead_letter(3, 255, "a", "in.jsonl, line 4", error)
    assert letter["error"] == {"code": "CallCrashed", "message": "it died"}
    assert (letter["row"], letter["place"], letter["worker"], letter["host"]) == (3, "in.jsonl, line 4", "w1", "node7")
    assert letter["traceback"] == "Traceback ..."
    raised = ValueError("no")
    raised.__cause__ = RemoteTraceback("File x, line 1")
    assert dead_letter(3, 255, None, "", raised)["traceback"] == "File x, line 1"


@pytest.mark.parametrize("traceback", ["", "File x, line 1"])
def test_dead_letters_of_what_the_app_raised_name_the_worker_and_its_host(traceback):
    there = Failure("exception", "ValueError", "no", traceback, worker="w1", host="node7")
    letter = dead_letter(3, 255, None, "", error_of(there, ValueError("no")))
    assert letter["error"]["code"] == "ValueError" and (letter["worker"], letter["host"]) == ("w1", "node7")
    here = error_of(dataclasses.replace(there, host=""), ValueError("no"))
    assert dead_letter(3, 255, None, "", here)["host"] == socket.gethostname()
    nobody = dead_letter(3, 255, None, "", RowError("no prompt"))
    assert (nobody["worker"], nobody["host"]) == ("", "")
