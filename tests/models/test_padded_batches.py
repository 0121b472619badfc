"""Rows that go through a model together, padded: what they are answered is what they are answered alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ctxflow.models import TextGenerator, running_batch
from ctxflow.models.own_settings import TURNED_OFF
from ctxflow.models.padded_batches import PaddedBatches
from ctxflow.models.reading import rotary_limit
from ctxflow.models.results import OutOfMemoryError, Sampling
from ctxflow.models.row_cache import Unsupported
from ctxflow.models.row_forward import RowsForward
from ctxflow.models.running_batch import RunningBatch, RunningRow, decoded
from ctxflow.models.transformers import InternalBatches

SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip


def made(loaded, kind, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings}, eos_token_id=None, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    return dataclasses.replace(loaded, model=model)


def padded(loaded):
    return PaddedBatches(loaded, InternalBatches(loaded, None, None, keeps_cache=True, cpu_tokens=4096))


def rows_of(lengths, limits, off=()):
    texts = [[(7 * number + 3 * place) % 500 for place in range(length)] for number, length in enumerate(lengths)]
    limits = zip(texts, limits, strict=True)
    return [RunningRow(text, Sampling(max_new_tokens=limit), off=off) for text, limit in limits]


def groups(batch, monkeypatch):
    """The numbers of rows that go through the model together, as they come."""
    seen, write = [], batch._write
    monkeypatch.setattr(batch, "_write", lambda rows: (seen.append(len(rows)), write(rows))[1])
    return seen


def written(rows, run):
    return [row.written for row in run(rows)]


def alone(loaded, rows):
    return [written([row], padded(loaded).run)[0] for row in rows]


LONGROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + number for number in range(8)],
        "original_max_position_embeddings": 32,
    },
}


def test_rows_of_longrope_do_not_turn_each_others_positions(causal_lm, monkeypatch):
    loaded = made(causal_lm, "Phi3", **LONGROPE)
    with pytest.raises(Unsupported, match="turns positions otherwise beyond 32 tokens"):
        RowsForward(loaded)
    batch = padded(loaded)
    seen = groups(batch, monkeypatch)
    # Short ones, some that together would go over the limit, one that crosses it, and long ones.
    lengths, limits = [5, 8, 28, 3, 20, 40, 50], [6, 9, 3, 28, 30, 10, 12]
    rows = rows_of(lengths, limits)
    assert written(rows, lambda those: batch.run(those, at_once=True)) == alone(loaded, rows_of(lengths, limits))
    assert len(seen) < len(rows)
    assert len({tuple(row.written) for row in rows}) == len(rows)


def test_a_model_of_longrope_that_stays_below_its_limit_runs_by_rows(causal_lm):
    short = made(causal_lm, "Phi3", **{**LONGROPE, "max_position_embeddings": 33})
    short.model.config.max_position_embeddings = 32
    assert isinstance(TextGenerator(short)._batch, RunningBatch)


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"full": {"rope_type": "longrope", "original_max_position_embeddings": 16}, "other": {}}, 16),
    ],
)
def test_what_turns_positions_by_the_longest_row_is_known(parameters, limit):
    class Config:
        rope_parameters = parameters
        max_position_embeddings = 64

    assert rotary_limit(Config()) == limit


def test_a_model_whose_rows_spoil_each_other_gets_each_alone(causal_lm):
    loaded = made(causal_lm, "Rwkv", attention_hidden_size=64, context_length=256)
    batch = padded(loaded)
    assert batch._companions == "none"
    lengths, limits = [5, 8, 5], [6, 4, 3]
    rows = rows_of(lengths, limits)
    assert written(rows, lambda those: batch.run(those, at_once=True)) == alone(loaded, rows_of(lengths, limits))


def test_a_model_that_does_not_heed_the_mask_gets_rows_of_one_length_together(causal_lm, monkeypatch):
    forward = causal_lm.model.forward

    def unmasked(*args, attention_mask=None, position_ids=None, **kwargs):
        return forward(*args, **kwargs)

    monkeypatch.setattr(causal_lm.model, "forward", unmasked)
    batch = padded(causal_lm)
    assert batch._companions == "equal"
    seen = groups(batch, monkeypatch)
    lengths, limits = [5, 8, 5, 3, 8, 5], [6, 9, 3, 6, 4, 6]
    rows = rows_of(lengths, limits)
    assert written(rows, lambda those: batch.run(those, at_once=True)) == alone(causal_lm, rows_of(lengths, limits))
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Bloom", "Mamba"])
def test_models_that_heed_the_mask_are_found_to_do_so(causal_lm, kind):
    sizes = {"Mistral": {"sliding_window": 8}, "Gemma2": {"head_dim": 16}, "Mamba": {"state_size": 4}}
    loaded = made(causal_lm, kind, **sizes.get(kind, {"n_layer": 2, "n_head": 4}))
    for dtype in (torch.float32, torch.bfloat16):
        assert padded(dataclasses.replace(loaded, model=loaded.model.to(dtype)))._companions == "any"


@pytest.mark.parametrize("leaves", [True, False], ids=["another program that leaves", "no room at all"])
def test_a_row_that_does_not_fit_alone_does_not_take_others_with_it(causal_lm, monkeypatch, leaves):
    monkeypatch.setattr(running_batch, "ALONE_SECONDS", float("inf") if leaves else 0.0)
    forward, batch = causal_lm.model.forward, padded(causal_lm)
    tries = 5 if leaves else 10**9

    def scarce(*args, **kwargs):
        nonlocal tries
        if tries and kwargs["input_ids"].shape[1] > 40:
            tries -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(causal_lm.model, "forward", scarce)
    rows = rows_of([5, 50, 7, 60, 9], [8] * 5)
    for row in rows:
        batch.add(row)
    ended = []
    while not batch.idle:
        ended += batch.step()
    assert sorted(map(rows.index, ended)) == [0, 1, 2, 3, 4]
    unfit = [not leaves and number in (1, 3) for number in range(5)]
    assert [isinstance(row.error, OutOfMemoryError) for row in rows] == unfit
    those = [row for row in rows if row.error is None]
    assert all(len(row.written) == 8 and row.finish_reason == "length" for row in those)


def stepped(loaded, rows, monkeypatch):
    """What rows that enter a batch at once are answered, and the numbers of those written together."""
    batch = padded(loaded)
    seen = groups(batch, monkeypatch)
    for row in rows:
        batch.add(row)
    ended = []
    while not batch.idle:
        ended += batch.step()
    return ended, seen


def test_rows_without_a_limit_are_written_in_stretches(causal_lm, monkeypatch):
    loaded = made(causal_lm, "Mamba", state_size=4)
    rows = rows_of([9], [8])
    [free], text = written(rows, padded(loaded).run), rows[0].prompt
    stop = decoded(loaded.tokenizer, free[2:6])  # Across the end of the first stretch.

    def asked(likely):
        samplings = [
            Sampling(max_new_tokens=20, temperature=1.5, seed=4),
            Sampling(max_new_tokens=20, stop=[stop]),
            Sampling(max_new_tokens=3),
        ]
        return [RunningRow(text, sampling, likely=likely) for sampling in samplings]

    whole, parts = asked(None), asked(4)
    stepped(loaded, whole, monkeypatch)
    ended, seen = stepped(loaded, parts, monkeypatch)
    assert ended[0] is parts[2]  # The shortest waits for no other's end.
    assert len(seen) > 2
    assert [row.written for row in parts] == [row.written for row in whole]
    assert [(len(row.written), row.finish_reason) for row in parts] == [(20, "length"), (6, "stop"), (3, "length")]


def test_rows_are_written_in_one_where_settings_count_from_the_beginning(causal_lm, monkeypatch):
    monkeypatch.setattr(causal_lm.model.generation_config, "min_new_tokens", 6)
    row = RunningRow([1, 2, 3], Sampling(max_new_tokens=12), likely=4)
    _, seen = stepped(causal_lm, [row], monkeypatch)
    assert seen == [1]
    assert len(row.written) >= 6


def test_a_row_may_turn_the_models_own_settings_off(causal_lm, monkeypatch):
    lengths, limits = [5, 8, 11], [12, 12, 12]
    plain = written(rows_of(lengths, limits), padded(causal_lm).run)
    for name, value in (("repetition_penalty", 1.8), ("min_new_tokens", 12), ("bad_words_ids", [[plain[0][0]]])):
        monkeypatch.setattr(causal_lm.model.generation_config, name, value)
    batch = padded(causal_lm)
    own, off = rows_of(lengths, limits), rows_of(lengths, limits, off=TURNED_OFF)
    list(batch.run([row for pair in zip(own, off, strict=True) for row in pair], at_once=True))
    assert [row.written for row in off] == plain
    assert own[0].written != plain[0]
