from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.models import OutOfMemoryError, TextGenerator, running_batch
from ctxflow.models.padded_batches import PaddedBatches, _Sampler
from ctxflow.models.results import Sampling, Uniforms
from ctxflow.models.running_batch import RunningRow
from ctxflow.models.transformers import InternalBatches

PROMPTS = [
    "The capital of France is",
    "a",
    "Twice two is",
    "",
    "Which worker should take which batch? " * 6,
    "Grüße aus Köln, 日本語も 🙂",
    "  leading and trailing spaces  ",
    "The river that flows through the city is longer than the one that flows around it.\n\n",
    "The capital of France is",
    "0 1 2 3 10 12 100 1850",
    "REFUTED",
    "When nobody can tell from the evidence, write NOT ENOUGH INFO",
]
NEW = 24


def plain_loop(loaded, prompts, max_new_tokens=NEW):
    """What transformers alone writes, one prompt at a time."""
    written = []
    for prompt in prompts:
        ids = loaded.tokenizer(prompt)["input_ids"] or [loaded.tokenizer.bos_token_id]
        out = loaded.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        written.append(out[0, len(ids) :].tolist())
    return written


def padded(loaded):
    """As for a model whose cache is not held by rows."""
    limits = InternalBatches(loaded, None, None, keeps_cache=True, cpu_tokens=4096)
    return PaddedBatches(loaded, limits)


def texts(loaded, rows):
    return [loaded.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


@pytest.fixture(scope="module")
def expected(causal_lm):
    return plain_loop(causal_lm, PROMPTS)


@pytest.mark.parametrize("batch_size", [1, 3, 8, None])
def test_greedy_output_equals_a_plain_loop_whatever_the_batch_size(causal_lm, expected, batch_size):
    generator = TextGenerator(causal_lm, max_batch_size=batch_size)
    if batch_size is None:
        generator._batch = padded(causal_lm)
    answers = generator.generate(PROMPTS, max_new_tokens=NEW)
    assert [answer.text for answer in answers] == texts(causal_lm, expected)
    assert [answer.completion_tokens for answer in answers] == [len(row) for row in expected]
    assert [answer.prompt_tokens for answer in answers] == [
        max(1, len(causal_lm.tokenizer(prompt)["input_ids"])) for prompt in PROMPTS
    ]


def test_answers_that_come_one_by_one_are_the_same_and_the_first_do_not_wait_for_the_last(causal_lm, expected):
    generator = TextGenerator(causal_lm, max_batch_tokens=200)
    whole, written = generator.generate(PROMPTS * 3, max_new_tokens=NEW), []
    step = generator._batch.step
    generator._batch.step = lambda: written.extend(step())
    answers = generator.generate_each(PROMPTS * 3, max_new_tokens=NEW)
    assert next(answers) == whole[0]
    assert len(written) < len(PROMPTS) and torch.is_grad_enabled()
    assert [answer.text for answer in answers] == (texts(causal_lm, expected) * 3)[1:]
    assert list(generator.chat_each(CONVERSATIONS, max_new_tokens=10)) == generator.chat(
        CONVERSATIONS, max_new_tokens=10
    )


def test_the_model_is_sensitive_enough_for_these_tests(causal_lm, expected):
    assert len({tuple(row) for row in expected}) == len(set(PROMPTS))
    assert all(len(set(row)) > 5 for row in expected)


def test_rows_that_end_early_end_alone(causal_lm, expected, monkeypatch):
    # Tokens that these rows write at different places become the ends of text.
    ends = [expected[0][4], expected[2][10], causal_lm.tokenizer.eos_token_id]
    monkeypatch.setattr(causal_lm.model.generation_config, "eos_token_id", ends)
    ended = plain_loop(causal_lm, PROMPTS)
    answers = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=NEW)
    assert [answer.text for answer in answers] == texts(causal_lm, ended)
    assert [answer.completion_tokens for answer in answers] == [len(row) for row in ended]
    reasons = ["stop" if row[-1] in ends else "length" for row in ended]
    assert [answer.finish_reason for answer in answers] == reasons
    assert set(reasons) == {"stop", "length"}


def test_each_row_has_its_own_limit(causal_lm, expected):
    limits = [1 + 2 * row for row in range(len(PROMPTS))]
    answers = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=limits)
    cut = [row[:limit] for row, limit in zip(expected, limits, strict=True)]
    assert [answer.text for answer in answers] == texts(causal_lm, cut)
    assert [answer.completion_tokens for answer in answers] == limits


def test_stop_strings_end_a_row_where_they_appear(causal_lm, expected):
    free = texts(causal_lm, expected)
    stops = [[text[len(text) // 2 : len(text) // 2 + 3], "never written"] for text in free]
    answers = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=NEW, stop=stops)
    for answer, text, stop, row in zip(answers, free, stops, expected, strict=True):
        assert answer.text == text[: text.find(stop[0])]
        assert answer.finish_reason == "stop"
        # The tokens up to the one that completed the stop string, and no more.
        assert stop[0] in causal_lm.tokenizer.decode(row[: answer.completion_tokens])
        assert stop[0] not in causal_lm.tokenizer.decode(row[: answer.completion_tokens - 1])
    unstopped = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=NEW, stop="never written")
    assert [answer.text for answer in unstopped] == free


def test_nothing_for_nothing(causal_lm):
    generator = TextGenerator(causal_lm)
    assert generator.generate([]) == []
    assert generator.chat([]) == []


def test_a_prompt_that_is_too_long_keeps_its_end(causal_lm):
    long = "Numbers such as 0, 1, 2 appear in claims about people. " * 100
    (answer,) = TextGenerator(causal_lm, too_long="cut-start").generate([long], max_new_tokens=12)
    ids = causal_lm.tokenizer(long)["input_ids"]
    kept = causal_lm.model.config.max_position_embeddings - 12
    assert len(ids) > kept
    out = causal_lm.model.generate(
        input_ids=torch.tensor([ids[-kept:]]),
        attention_mask=torch.ones(1, kept, dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
    )
    assert answer.text == causal_lm.tokenizer.decode(out[0, kept:], skip_special_tokens=True)
    assert (answer.prompt_tokens, answer.truncated) == (kept, True)
    (short,) = TextGenerator(causal_lm, too_long="cut-start", max_input_tokens=20).generate([long], max_new_tokens=1)
    assert (short.prompt_tokens, short.truncated) == (20, True)


@pytest.mark.parametrize(
    ("prompts", "parameters", "message"),
    [
        (["a", 3], {}, r"prompts\[1\] is an int, not a string"),
        ("a", {}, "prompts is one str"),
        (["\udcff"], {}, r"prompts\[0\] is no valid Unicode"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        (["a"], {"max_new_tokens": 512}, "no room for any .* 512 are for max_new_tokens"),
        (["a"], {"max_tokens": 5}, "max_tokens is no generation parameter"),
    ],
)
def test_bad_input_says_what_is_wrong(causal_lm, prompts, parameters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TextGenerator(causal_lm).generate(prompts, **parameters)


CONVERSATIONS = [
    [{"role": "user", "content": "Is Paris in France?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Which river flows through the city?"},
        {"role": "assistant", "content": "The longer one."},
        {"role": "user", "content": "Why?"},
    ],
]


def test_chat_equals_a_plain_loop_over_the_chat_template(causal_lm):
    prompts = [
        causal_lm.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        for conversation in CONVERSATIONS
    ]
    answers = TextGenerator(causal_lm).chat(CONVERSATIONS, max_new_tokens=10)
    assert [answer.text for answer in answers] == texts(causal_lm, plain_loop(causal_lm, prompts, 10))


def test_chat_without_a_template_ends_where_the_user_would_speak(causal_lm):
    tokenizer = copy.deepcopy(causal_lm.tokenizer)
    tokenizer.chat_template = None
    plain = dataclasses.replace(causal_lm, tokenizer=tokenizer)
    turns = "User: Is Paris in France?\n\nAssistant:"
    (answer,) = TextGenerator(plain).chat(CONVERSATIONS[:1], max_new_tokens=10, stop="\n\nNobody:")
    assert answer == TextGenerator(plain).generate([turns], max_new_tokens=10)[0]


def test_sampling_depends_on_seed_and_prompt_and_on_nothing_else(causal_lm):
    parameters = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.95, "top_k": 100}
    whole = TextGenerator(causal_lm).generate(PROMPTS, seed=5, **parameters)
    alone = [TextGenerator(causal_lm).generate([prompt], seed=5, **parameters)[0] for prompt in PROMPTS]
    backwards = TextGenerator(causal_lm, max_batch_size=3).generate(PROMPTS[::-1], seed=5, **parameters)
    assert whole == alone == backwards[::-1]
    other = TextGenerator(causal_lm).generate(PROMPTS, seed=6, **parameters)
    assert all(a.text != b.text for a, b in zip(whole, other, strict=True))
    unseeded = [TextGenerator(causal_lm).generate(PROMPTS[:1], **parameters)[0].text for _ in range(3)]
    assert len(set(unseeded)) == 3


def test_greedy_and_sampled_rows_share_a_batch(causal_lm, expected):
    temperatures = [0.0 if row % 2 else 1.5 for row in range(len(PROMPTS))]
    answers = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=NEW, temperature=temperatures, seed=1)
    for answer, text, temperature in zip(answers, texts(causal_lm, expected), temperatures, strict=True):
        assert (answer.text == text) == (temperature == 0.0)


def test_one_candidate_is_the_greedy_one(causal_lm, expected):
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-9}):
        parameters = {"temperature": 0.8, **narrow}
        answers = TextGenerator(causal_lm).generate(PROMPTS, max_new_tokens=NEW, **parameters)
        assert [answer.text for answer in answers] == texts(causal_lm, expected)


def reference_token(logits, row, draw):
    """Which token the draw picks, by the definitions of temperature, top_k and top_p, in numpy."""
    probabilities = np.exp((logits - logits.max()) / row.temperature)
    order = np.argsort(-logits, kind="stable")
    kept = order[: row.top_k or len(order)]
    within = probabilities[kept] / probabilities[kept].sum()
    enough = int(np.searchsorted(np.cumsum(within), row.top_p)) + 1 if row.top_p < 1 else len(kept)
    allowed = np.zeros(len(logits))
    allowed[kept[:enough]] = probabilities[kept[:enough]]
    sums = np.cumsum(allowed)
    return int(np.searchsorted(sums, draw * sums[-1], side="right")), sums / sums[-1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.2, 3),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 12),
)
def test_the_draw_picks_the_token_that_the_definitions_give(seed, temperature, top_p, top_k):
    logits = np.random.default_rng(seed).normal(scale=2, size=(3, 10)).astype(np.float32)
    rows = [
        Sampling(max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        Sampling(max_new_tokens=1, temperature=1.0, seed=seed),
        Sampling(max_new_tokens=1),
    ]
    written = [RunningRow([number], row) for number, row in enumerate(rows)]
    sampler = _Sampler(written, width=1, device=torch.device("cpu"))
    scores = sampler(torch.zeros(3, 1, dtype=torch.long), torch.from_numpy(logits))
    for number in (0, 1):
        draw = Uniforms(rows[number], [number])[0]
        token, sums = reference_token(logits[number], rows[number], draw)
        # In float32 a draw within rounding of a boundary may fall on its other side.
        if np.abs(sums - draw).min() > 1e-5:
            assert int(scores[number].argmax()) == token
        assert int(torch.isfinite(scores[number]).sum()) == 1
    assert torch.equal(scores[2], torch.from_numpy(logits[2]))


@pytest.mark.parametrize("padded", [False, True], ids=["running", "padded"])
def test_an_error_at_a_rows_own_stop_string_is_raised(causal_lm, monkeypatch, padded):
    def planted(*given):
        raise RuntimeError("planted")

    generator = TextGenerator(causal_lm)
    if padded:
        limits = InternalBatches(causal_lm, None, None, keeps_cache=True, cpu_tokens=4096)
        generator._batch = PaddedBatches(causal_lm, limits)
    monkeypatch.setattr(running_batch, "decoded", planted)
    with pytest.raises(RuntimeError, match="planted"):
        generator.generate(["a", "b"], max_new_tokens=3, stop=["never"])


def test_a_draw_of_zero_picks_no_token_that_was_ruled_out():
    row = Sampling(max_new_tokens=1, temperature=1.0, top_k=2, seed=0)
    running = RunningRow([1], row)
    running.draws = [0.0]
    sampler = _Sampler([running], width=1, device=torch.device("cpu"))
    scores = sampler(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[-5.0, 2.0, 1.0]]))
    assert int(scores.argmax()) == 1


def test_sampled_tokens_are_distributed_as_the_model_says(causal_lm):
    draws = 3000
    answers = TextGenerator(causal_lm, max_batch_size=500).generate(
        ["The river"] * draws, max_new_tokens=1, temperature=2.0, seed=list(range(draws))
    )
    ids = torch.tensor([causal_lm.tokenizer("The river")["input_ids"]])
    with torch.inference_mode():
        probabilities = torch.softmax(causal_lm.model(ids).logits[0, -1] / 2.0, dim=-1)
    for token in probabilities.topk(5).indices.tolist():
        text = causal_lm.tokenizer.decode([token], skip_special_tokens=True)
        same = [i for i in range(len(probabilities)) if causal_lm.tokenizer.decode([i]) == text]
        share = float(probabilities[same].sum())
        seen = sum(answer.text == text for answer in answers) / draws
        assert abs(seen - share) < 4 * (share * (1 - share) / draws) ** 0.5


def test_a_batch_that_does_not_fit_is_halved_and_the_limit_remembered(causal_lm, expected, monkeypatch):
    sizes = []
    forward = causal_lm.model.forward

    def small_memory(*args, **kwargs):
        rows = kwargs["input_ids"].shape[0]
        sizes.append(rows)
        if rows > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(causal_lm.model, "forward", small_memory)
    generator = TextGenerator(causal_lm)
    generator._batch = padded(causal_lm)
    failures = []
    for _ in range(2):
        sizes.clear()
        answers = generator.generate(PROMPTS, max_new_tokens=4)
        assert [answer.text for answer in answers] == texts(causal_lm, [row[:4] for row in expected])
        failures.append(sum(rows > 3 for rows in sizes))
    assert failures[0] > failures[1]

    def no_memory(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(causal_lm.model, "forward", no_memory)
    with pytest.raises(OutOfMemoryError, match="one prompt alone does not fit"):
        generator.generate(PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("limit", [{"max_batch_tokens": 0}, {"max_batch_size": 1.5}])
def test_a_limit_that_makes_no_sense_is_named(causal_lm, limit):
    with pytest.raises(ValueError, match="give a whole number of 1 or more"):
        TextGenerator(causal_lm, **limit)


def test_dropping_the_generator_frees_the_model(causal_lm_folder):
    generator = TextGenerator(causal_lm_folder, device="cpu")
    generator.generate(PROMPTS[:3], max_new_tokens=3, temperature=1.0, stop="x")
    watched = weakref.ref(generator.loaded.model), weakref.ref(generator.loaded.tokenizer)
    weights = weakref.ref(next(generator.loaded.model.parameters()))
    del generator
    gc.collect()
    assert weights() is None
    assert [reference() for reference in watched] == [None, None]


def test_close_frees_the_model_and_may_be_repeated(causal_lm_folder):
    generator = TextGenerator(causal_lm_folder, device="cpu")
    weights = weakref.ref(next(generator.loaded.model.parameters()))
    generator.close()
    generator.close()
    assert weights() is None
