"""vLLM in process, asked in OpenAI's form; its models have random weights, and their text is noise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from vllm_forks import run

from drawn_requests import EACH, SCHEMAS, all_wrong, drawn_fields, drawn_schemas

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["river", "city"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost:1/i.png"}}]}]
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "objekt"}}}
TOOL = {"type": "function", "function": {"name": "place", "parameters": SCHEMA}}
GREEDY = {"prompt": "The river that flows through the city", "max_tokens": 12, "temperature": 0}
PREFIX = {"prompt": "The library keeps the context of a model on the worker. " * 8, "max_tokens": 2}
SEEDED = {"prompt": "The river flows through the city. " * 8, "max_tokens": 12, "seed": 7}

QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**HELLO, "max_tokens": 5}),
    "several": (CHAT, {**HELLO, "max_tokens": 5, "n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1}),
    "greedy": (COMPLETIONS, GREEDY),
    "adapted": (COMPLETIONS, {**GREEDY, "model": "other"}),
    "named": (COMPLETIONS, {**GREEDY, "model": "llama"}),
    "schema": (CHAT, {**HELLO, "max_tokens": 200, "response_format": AS_SCHEMA}),
    "choice": (CHAT, {**HELLO, "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}}),
    "regex": (CHAT, {**HELLO, "max_tokens": 20, "structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}),
    "streamed": (CHAT, {**HELLO, "max_tokens": 2, "stream": False}),
    "prefix": (COMPLETIONS, PREFIX),
    **{f"seeded {number}": (COMPLETIONS, SEEDED) for number in range(8)},
    "too long": (COMPLETIONS, {"prompt": "Paris " * 1000, "max_tokens": 5}),
    "no number": (COMPLETIONS, {**GREEDY, "max_tokens": "many"}),
    "no schema": (CHAT, {**HELLO, "response_format": NO_SCHEMA}),
    "unknown": (COMPLETIONS, {**GREEDY, "model": "othr"}),
    "address": (CHAT, {"messages": IMAGE}),
    "template": (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}),
    "no parser": (CHAT, {**HELLO, "tools": [TOOL], "tool_choice": "auto"}),
    "other endpoint": ("/v1/embeddings", {"input": "Paris"}),
}  # fmt: skip

DRAWN = [*drawn_schemas(SCHEMAS), *drawn_fields(EACH, ("logprobs", "n", "choices"))]
BOUND = ("schema", "choice", "regex")


def make_adapter(folder: Path, hidden_size: int) -> Path:
    """Make a LoRA adapter of random weights, large enough to change every answer."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(2):
        for name in ("q_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(4, hidden_size, generator=random)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(hidden_size, 4, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def found(vllm_python: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / "lora", 64)
    settings = {"adapters": {"other": str(adapter)}, "served_model_name": "llama"}
    settings |= {"max_num_seqs": 64, "max_num_batched_tokens": 64}  # So that prompts are read in parts.
    questions = {**QUESTIONS, **{line["custom_id"]: (line["url"], line["body"]) for line in DRAWN}}
    again = [(COMPLETIONS, PREFIX), (COMPLETIONS, SEEDED)]
    found = run(vllm_python, "answers", str(llama), list(questions.values()), settings, again)
    found["answers"] = dict(zip(questions, found["answers"], strict=True))
    return found  # type: ignore[no-any-return]


def test_answers_are_those_of_openai_s_api(found):
    answer = found["answers"]["chat"]
    assert answer["object"] == "chat.completion" and answer["model"] == "llama"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    several = found["answers"]["several"]["choices"]
    assert [each["index"] for each in several] == [0, 1, 2]
    assert all(len(token["top_logprobs"]) >= 2 for each in several for token in each["logprobs"]["content"])
    assert found["answers"]["streamed"]["object"] == "chat.completion"


def test_greedy_tokens_are_those_of_a_plain_loop(found, llama):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    read = tokenizer(GREEDY["prompt"], return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    written = model.generate(**read, max_new_tokens=GREEDY["max_tokens"], do_sample=False)[
        0, read["input_ids"].shape[1] :
    ]
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert found["answers"]["greedy"]["choices"][0]["text"].rstrip("\ufffd") == text.rstrip("\ufffd")


def test_a_request_names_its_adapter(found):
    base, named, adapted = (found["answers"][each] for each in ("greedy", "named", "adapted"))
    assert base["choices"] == named["choices"] and base["model"] == named["model"] == "llama"
    assert adapted["model"] == "other" and adapted["choices"][0]["text"] != base["choices"][0]["text"]
    assert found["answers"]["unknown"] == ["ItemRefused", "there is no model 'othr' here: did you mean other?"]


def test_answers_are_bound_to_schemas_expressions_and_choices(found):
    content = {
        each: found["answers"][each]["choices"][0]["message"]["content"] for each in ("schema", "choice", "regex")
    }
    jsonschema.validate(json.loads(content["schema"]), SCHEMA)
    assert content["choice"] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", content["regex"])


def test_drawn_requests_are_answered_as_openai_s_types_and_the_schemas_have_it(found):
    assert all_wrong(DRAWN, found["answers"]) == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no parser", "tool"),
        ("too long", "512 tokens"),
        ("no number", "max_tokens"),
        ("no schema", "objekt"),
        ("address", "nothing is fetched"),
        ("template", "chat_template"),
        ("other endpoint", "/v1/chat/completions and /v1/completions"),
    ],
)
def test_a_request_s_own_fault_is_refused_in_a_sentence(found, name, words):
    kind, said = found["answers"][name]
    assert kind == "ItemRefused" and words in said and "\n" not in said and "Traceback" not in said


def test_tokens_found_in_the_cache_are_told(found):
    assert found["again"][0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_seed_gives_one_text_however_its_prompt_is_read(found):
    """In parts of 64 tokens at most, which are the smaller the more requests are read beside it."""
    texts = {found["answers"][f"seeded {number}"]["choices"][0]["text"] for number in range(8)}
    assert texts == {found["again"][1]["choices"][0]["text"]}


def test_a_cancelled_request_ends_in_the_engine(found):
    assert (found["cancelled"], found["unfinished"]) == (["CancelledError"], 0)


def test_nothing_has_a_name_while_it_runs_and_nothing_is_left_when_it_is_closed(found):
    assert (found["names"], found["left"]) == ([], [])
    assert found["closed"] == ["ContextLost", "vLLM's engine was closed"]


def test_wrong_options_are_told_with_the_nearest_name(vllm_python):
    given = [
        {"max_model_len": 4096, "enforce-eager": True, "structured_outputs_config": {"backend": "auto"}},
        {"max_model_len": "4k", "enforce_eager": "true", "seed": "3", "runner": "pooling"},
        {"max_modle_len": 3},
        {"max_model_len": "long"},
        {"enforce_eager": "perhaps"},
        {"dtype": "float17"},
        {"structured_outputs_config": {"bakend": "auto"}},
        {"tool_call_parser": "hermess"},
        {"reasoning_parser": "qwen33"},
        {"model": "another"},
        {"port": 8000},
    ]  # fmt: skip
    told = run(vllm_python, "options", given)
    assert told[:2] == [None, None]
    assert [kind for kind, _ in told[2:]] == ["UsageError"] * 9
    expected = [
        "did you mean max_model_len?", "max_model_len cannot be 'long': it takes a whole number", "true or false",
        "bfloat16", "bakend", "did you mean hermes?", "did you mean qwen3?", "first parameter", "no option port",
    ]  # fmt: skip
    for (_, said), words in zip(told[2:], expected, strict=True):
        assert words in said
