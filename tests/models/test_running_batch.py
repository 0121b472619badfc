from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ctxflow.errors import ItemRefused
from ctxflow.models import TextGenerator, batch_limits, running_batch
from ctxflow.models.own_settings import OwnSettings
from ctxflow.models.padded_batches import PaddedBatches
from ctxflow.models.results import OutOfMemoryError, Sampling
from ctxflow.models.row_cache import Segments, Slots, TokenStep, Unsupported, make_store
from ctxflow.models.row_forward import RowsForward
from ctxflow.models.running_batch import RunningBatch, RunningRow
from ctxflow.models.transformers import InternalBatches

PROMPTS = [[5, 6, 7], [100], list(range(40, 90)), [9] * 17, [400, 3, 20, 60], list(range(200, 230)), [11, 12]]
LIMITS = [12, 1, 7, 20, 3, 16, 9]


def alone(loaded, prompt, limit):
    """What transformers writes for one prompt."""
    given = torch.tensor([prompt])
    out = loaded.model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=limit
    )
    return out[0, len(prompt) :].tolist()


def batch(loaded, tokens=10_000, rows=None, slots=False):
    running = RunningBatch(loaded, lambda: tokens, rows)
    if slots:
        running._store = Slots(loaded.device)
    return running


def rows_of(prompts=PROMPTS, limits=LIMITS, likely=None, **parameters):
    pairs = zip(prompts, limits, strict=True)
    return [RunningRow(prompt, Sampling(max_new_tokens=limit, **parameters), likely=likely) for prompt, limit in pairs]


@pytest.fixture(scope="module")
def expected(causal_lm):
    return [alone(causal_lm, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("slots", [False, True], ids=["segments", "slots"])
@pytest.mark.parametrize(("tokens", "rows"), [(10_000, None), (120, None), (1, None), (10_000, 2), (400, 3)])
def test_rows_get_what_they_get_alone_however_few_run_together(causal_lm, expected, tokens, rows, slots):
    running = batch(causal_lm, tokens, rows, slots)
    running._prompt_tokens = 30
    assert [row.written for row in running.run(rows_of())] == expected
    assert running.idle


@pytest.mark.parametrize("slots", [False, True], ids=["segments", "slots"])
@pytest.mark.parametrize(("tokens", "likely"), [(10_000, 1), (90, 3), (1, 2), (400, 50)])
def test_rows_whose_room_grows_get_what_they_get_alone(causal_lm, expected, tokens, likely, slots):
    running = batch(causal_lm, tokens, None, slots)
    rows = rows_of(likely=likely)
    assert [row.room - len(row.prompt) for row in rows] == [min(likely, limit) for limit in LIMITS]
    assert [row.written for row in running.run(rows)] == expected
    assert running.idle


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_rows_that_come_and_go_at_any_time_do_not_matter_to_the_others(causal_lm, expected, seed):
    chance = random.Random(seed)
    running = batch(causal_lm, chance.choice([80, 150, 1000]), slots=chance.random() < 0.5)
    left, going, gone = list(zip(rows_of(), expected, strict=True)), [], []
    chance.shuffle(left)
    while left or not running.idle:
        if left and chance.random() < 0.5:
            going.append(left.pop())
            running.add(going[-1][0])
        if going and chance.random() < 0.1:
            row, _ = going.pop(chance.randrange(len(going)))
            running.remove(row)
            gone.append(row)
        running.step()
    assert all(row.written == written and row.ended for row, written in going)
    assert all(len(row.written) <= row.sampling.max_new_tokens for row in gone)


def test_callers_share_the_batch_and_one_that_stops_asking_leaves_the_others_alone(causal_lm, expected):
    running = batch(causal_lm)
    first, second, third = (running.run(rows_of()) for _ in range(3))
    assert next(second).written == expected[0]
    assert [row.written for row in first] == expected
    second.close()
    assert running.idle
    assert [row.written for row in third] == expected


def test_drawn_tokens_depend_on_the_rows_own_numbers_alone(causal_lm):
    parameters = {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "seed": 4}
    whole = [row.written for row in batch(causal_lm).run(rows_of(**parameters))]
    few = [row.written for row in batch(causal_lm, rows=2, slots=True).run(rows_of(**parameters))]
    plain = TextGenerator(causal_lm)
    limits = InternalBatches(causal_lm, None, None, keeps_cache=True, cpu_tokens=4096)
    plain._batch = PaddedBatches(causal_lm, limits)  # The same numbers give the same tokens.
    texts = [causal_lm.tokenizer.decode(prompt) for prompt in PROMPTS[2:4]]
    generator = TextGenerator(causal_lm)
    assert isinstance(generator._batch, RunningBatch)
    assert generator.generate(texts, max_new_tokens=15, **parameters) == plain.generate(
        texts, max_new_tokens=15, **parameters
    )
    assert whole == few


def test_what_does_not_fit_waits_and_the_limit_is_remembered(causal_lm, expected, monkeypatch):
    monkeypatch.setattr(running_batch, "ALONE_SECONDS", 0.0)
    running, failed = batch(causal_lm), []

    def scarce(store, going, prompts):
        if len(going) + len(prompts) > 3:
            failed.append(len(going))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return inner(store, going, prompts)

    inner = running._forward
    monkeypatch.setattr(running, "_forward", scarce)
    running._prompt_tokens = 60
    assert [row.written for row in running.run(rows_of())] == expected
    times = len(failed)
    assert 0 < times < 4
    assert [row.written for row in running.run(rows_of())] == expected
    assert len(failed) < 2 * times

    def nothing(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(running, "_forward", nothing)
    with pytest.raises(OutOfMemoryError, match="one prompt alone does not fit"):
        list(running.run(rows_of()))
    assert running.idle


OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore lines")


def shapes(store):
    return {tuple(kept.shape[:1] + kept.shape[2:3]) for kept in (*store._keys.values(), *store._values.values())}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_out_of_memory_where_room_is_made_ends_nobody_who_is_there(causal_lm, expected, seed):
    """At any allocation of a store's, also between two layers, and where a setting keeps a row's tokens."""
    chance = random.Random(seed)
    running = batch(causal_lm, slots=True)
    rate, left = chance.choice([0.05, 0.3, 0.8]), chance.randint(1, 6)
    inner, stored, entered = torch.Tensor.new_zeros, running._store.enter, running._settings.enter
    entering = False  # In the pass a row that is alone ends, as before.

    def store(*given):
        nonlocal entering
        entering = bool(running._rows)
        try:
            stored(*given)
        finally:
            entering = False

    def scarce(*given, **named):
        nonlocal left
        if left and entering and chance.random() < rate:
            left -= 1
            raise OUT_OF_MEMORY
        return inner(*given, **named)

    def enter(row):
        nonlocal left
        if left and running._rows and chance.random() < rate / 4:
            left -= 1
            raise OUT_OF_MEMORY
        entered(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", scarce)
        patch.setattr(running._store, "enter", store)
        patch.setattr(running._settings, "enter", enter)
        rows = rows_of()
        for row in rows:
            running.add(row)
        while not running.idle:
            running.step()
            assert len(shapes(running._store)) <= 1, "slots of all layers are alike"
    assert [row.error for row in rows] == [None] * len(rows)
    assert [row.written for row in rows] == expected


def test_a_row_for_which_there_is_no_room_though_it_is_alone_ends_alone(causal_lm, expected, monkeypatch):
    monkeypatch.setattr(running_batch, "ALONE_SECONDS", 0.0)
    running = batch(causal_lm, rows=1, slots=True)
    inner = running._store.enter

    def scarce(capacity, budget):
        if capacity > 40:
            raise OUT_OF_MEMORY
        inner(capacity, budget)

    monkeypatch.setattr(running._store, "enter", scarce)
    rows, ended = rows_of(), []
    for row in rows:
        running.add(row)
    while not running.idle:
        ended += running.step()
    assert sorted(map(rows.index, ended)) == list(range(len(rows)))
    fits = [row.capacity <= 40 for row in rows]
    assert set(fits) == {True, False}
    assert [row.error is None for row in rows] == fits
    assert all(row.written == those for row, those, fit in zip(rows, expected, fits, strict=True) if fit)
    assert {str(row.error).split(": ")[0] for row in rows if row.error} == {
        "one prompt alone does not fit in the device's memory"
    }


@pytest.mark.parametrize("where", ["in the store", "in the pass"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_queue_outlives_a_program_that_takes_the_memory_for_a_while(causal_lm, expected, monkeypatch, where, leaves):
    monkeypatch.setattr(running_batch, "ALONE_SECONDS", float("inf") if leaves else 0.0)
    running, left = batch(causal_lm, slots=True), 15 if leaves else 10**9
    inner = running._store.enter if where == "in the store" else running._forward

    def scarce(*given):
        nonlocal left
        if left:
            left -= 1
            raise OUT_OF_MEMORY
        return inner(*given)

    monkeypatch.setattr(*((running._store, "enter") if where == "in the store" else (running, "_forward")), scarce)
    rows = rows_of()
    for row in rows:
        running.add(row)
    while not running.idle:
        failed = [row for row in running.step() if row.error is not None]
        assert len(failed) <= 1, "the others may find room in the next step"
    assert [row.error is None for row in rows] == [leaves] * len(rows)
    assert not leaves or [row.written for row in rows] == expected


@pytest.mark.parametrize("limits", [[4], [4, 4, 4, 4, 300]], ids=["alike", "of mixed lengths"])
def test_a_ceiling_settles_below_what_does_not_fit(causal_lm, monkeypatch, limits):
    """For 600 steps, in a store that takes as much of each row as of the longest."""
    monkeypatch.setattr(batch_limits, "_KNOWN", 2)
    monkeypatch.setattr(batch_limits, "_FIRST_WAIT", 4)
    running, chance, failed = batch(causal_lm, slots=True), random.Random(1), 0
    size, grain = causal_lm.model.config.vocab_size, Slots.GRAIN

    def scarce(store, going, prompts):
        nonlocal failed
        rows = len(going) + len(prompts)
        if rows * -(-max(row.room for row in running._rows) // grain) * grain > 2000:
            failed += 1
            raise OUT_OF_MEMORY
        return torch.zeros(rows, size)

    monkeypatch.setattr(running, "_forward", scarce)
    for _ in range(600):
        while len(running._waiting) < 40:
            running.add(RunningRow([5, 6, 7], Sampling(max_new_tokens=chance.choice(limits))))
        running.step()
    assert 0 < failed < 15, "each try of more waits for longer"


def test_a_ceiling_that_a_neighbour_lowered_rises_while_rows_come_without_end(causal_lm, monkeypatch):
    monkeypatch.setattr(batch_limits, "_KNOWN", 2)
    monkeypatch.setattr(batch_limits, "_FIRST_WAIT", 4)
    running, together, most = batch(causal_lm, 400), 0, 2

    def scarce(store, going, prompts):
        nonlocal together
        together = len(going) + len(prompts)
        if together > most:
            raise OUT_OF_MEMORY
        return inner(store, going, prompts)

    def step():
        while len(running._waiting) < 12:
            running.add(RunningRow([5, 6, 7], Sampling(max_new_tokens=37)))
        running.step()
        return together

    inner = running._forward
    monkeypatch.setattr(running, "_forward", scarce)
    beside = [step() for _ in range(20)]
    assert 10 in beside and beside[-1] <= 3
    most = 10
    assert any(step() == 10 for _ in range(400))


def test_logprobs_are_the_models_own(causal_lm):
    row = RunningRow(PROMPTS[0], Sampling(max_new_tokens=4, temperature=1.0, seed=1), top=3)
    list(batch(causal_lm).run([row, *rows_of()]))
    with torch.inference_mode():
        logs = torch.log_softmax(causal_lm.model(torch.tensor([PROMPTS[0] + row.written])).logits[0].float(), -1)
    for place, (own, best) in enumerate(row.logprobs):
        at = logs[len(PROMPTS[0]) - 1 + place]
        assert own == pytest.approx(float(at[row.written[place]]), abs=1e-4)
        assert [token for token, _ in best] == at.topk(3).indices.tolist()
    assert len(row.logprobs) == 4


def test_generation_settings_of_the_model_hold(causal_lm, monkeypatch):
    monkeypatch.setattr(causal_lm.model.generation_config, "repetition_penalty", 1.5)
    monkeypatch.setattr(causal_lm.model.generation_config, "no_repeat_ngram_size", 2)
    those = [alone(causal_lm, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert [row.written for row in batch(causal_lm).run(rows_of())] == those
    monkeypatch.setattr(causal_lm.model.generation_config, "min_new_tokens", 3)
    with pytest.raises(Unsupported, match="min_new_tokens"):
        batch(causal_lm)
    assert isinstance(TextGenerator(causal_lm)._batch, PaddedBatches)


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip


def made(loaded, kind, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings}, eos_token_id=None, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    return dataclasses.replace(loaded, model=model)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 24}),
        ("Phi3", {"pad_token_id": 0}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
        ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
        ("GPTNeoX", {}),
    ],
)
@pytest.mark.parametrize("slots", [False, True], ids=["segments", "slots"])
def test_models_with_grouped_heads_experts_or_learned_positions_run_so_too(causal_lm, kind, more, slots):
    loaded = made(causal_lm, kind, **more)
    running = batch(loaded, slots=slots)
    running._ends = frozenset()
    those = [alone(loaded, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert [row.written for row in running.run(rows_of())] == those


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding_window"),
        ("Gemma2", {"head_dim": 16}, "sliding_attention"),
        ("Bloom", {"n_layer": 2, "n_head": 4}, "takes no positions"),
        ("Mamba", {"state_size": 4}, "layers of linear_attention|takes no positions"),
    ],
)
def test_models_whose_cache_is_not_held_so_are_told_and_still_answer(causal_lm, kind, more, why):
    loaded = made(causal_lm, kind, **more)
    with pytest.raises(Unsupported, match=why):
        RowsForward(loaded)
    generator = TextGenerator(loaded)
    assert isinstance(generator._batch, PaddedBatches)
    assert [each.completion_tokens for each in generator.generate(["a b c", "d"], max_new_tokens=[4, 2])] == [4, 2]


def test_bfloat16_is_near_what_the_model_gives_alone(causal_lm):
    half = dataclasses.replace(causal_lm, model=copy.deepcopy(causal_lm.model).to(torch.bfloat16))
    found = batch(half)._forward
    store = make_store(half.device, half.dtype)
    store.enter(60, 60)
    scores = found(store, [], [PROMPTS[2]])[0].float()
    with torch.inference_mode():
        plain = half.model(torch.tensor([PROMPTS[2]])).logits[0, -1].float()
    assert float((scores - plain).norm() / plain.norm()) < 0.05


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_stores_give_each_row_its_own_keys_whoever_enters_and_leaves(data, dtype):
    """Against attention written out over lists, for rows of any lengths."""
    heads, size = 2, 4
    stores = [Segments(dtype), Slots(torch.device("cpu"))]
    held: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    room: list[int] = []
    for number in range(data.draw(st.integers(1, 12))):
        fresh = data.draw(st.lists(st.integers(1, 6), max_size=2))
        going = len(held)
        for length in fresh:
            room.append(length + data.draw(st.integers(1, 12)))
            for store in stores:
                store.enter(room[-1], 100)
        lengths = [len(row) + 1 for row in held]
        if not lengths and not fresh:
            continue
        torch.manual_seed(number)
        count = len(lengths) + sum(fresh)
        query, key, value = (torch.randn(count, n, size, dtype=torch.float64).to(dtype) for n in (4, heads, heads))
        held += [[] for _ in fresh]
        owners = [*range(going), *(going + row for row, length in enumerate(fresh) for _ in range(length))]
        wanted = []
        for place, owner in enumerate(owners):
            held[owner].append((key[place], value[place]))
            k, v = (torch.stack(each).repeat_interleave(2, 1).double() for each in zip(*held[owner], strict=True))
            weights = torch.softmax((query[place].double()[None] * k).sum(-1) * 0.3, 0)
            wanted.append((weights[..., None] * v).sum(0))
        for store in stores:
            store.begin(TokenStep(lengths, fresh))
            found = store.attend(0, query, key, value, 0.3)
            tolerance = 1e-9 if dtype == torch.float64 else 0.05
            torch.testing.assert_close(found.double(), torch.stack(wanted), atol=tolerance, rtol=tolerance)
        gone = [row for row in range(len(held)) if len(held[row]) >= room[row] or data.draw(st.booleans())]
        for row in reversed(gone):
            for store in stores:
                store.leave(row)
            for each in (held, room):
                last = each.pop()
                if row < len(each):
                    each[row] = last


@settings(max_examples=60, deadline=None)
@given(data=st.data(), budget=st.integers(64, 3000))
def test_slots_never_take_more_than_the_budget_but_for_a_row_alone(data, budget):
    store, rows = Slots(torch.device("cpu")), []
    for _ in range(data.draw(st.integers(1, 30))):
        capacity = data.draw(st.integers(1, 2000))
        if not rows or store.size(capacity) <= budget:
            store.enter(capacity, budget)
            rows.append(capacity)
            assert store._slots * store._length <= max(budget, store._rounded(capacity))
            assert store._slots >= len(rows) and store._length >= max(rows)
        elif data.draw(st.booleans()):
            number = data.draw(st.integers(0, len(rows) - 1))
            store.leave(number)
            last = rows.pop()
            rows[number : number + 1] = [last] if number < len(rows) else []


def test_settings_are_those_of_transformers_own_processors_while_rows_come_and_go(causal_lm, monkeypatch):
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 7]}
    for name, value in settings.items():
        monkeypatch.setattr(causal_lm.model.generation_config, name, value)
    own, chance, rows = OwnSettings(causal_lm), random.Random(1), []
    plain = [
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.SuppressTokensLogitsProcessor([3, 7]),
    ]
    torch.manual_seed(0)
    for _ in range(60):
        for _ in range(chance.randrange(3)):
            prompt = [chance.randrange(40) for _ in range(chance.randrange(1, 60))]
            rows.append(RunningRow(prompt, Sampling(), off=["repetition_penalty"] * (chance.random() < 0.3)))
            own.enter(rows[-1])
        if not rows:
            continue
        scores = 5 * torch.randn(len(rows), 40)
        wanted = []
        for number, row in enumerate(rows):
            ids, found = torch.tensor([[*row.prompt, *row.written]]), scores[number : number + 1]
            for each in plain[1:] if row.off else plain:
                found = each(ids, found)
            wanted.append(found)
        assert torch.equal(own(scores.clone(), rows), torch.cat(wanted))
        for row in rows:
            row.written.append(chance.randrange(40))
        if chance.random() < 0.5:
            number = chance.randrange(len(rows))
            own.leave(number)
            last = rows.pop()
            rows[number : number + 1] = [last] if number < len(rows) else []


def test_a_lone_long_row_takes_one_slot():
    store = Slots(torch.device("cpu"))
    store.enter(8000, 9000)
    assert store._slots == 1


@pytest.mark.parametrize("slots", [False, True], ids=["segments", "slots"])
def test_a_row_that_overflowed_ends_alone_and_leaves_nothing_to_the_next(causal_lm, expected, slots):
    running = batch(causal_lm, slots=slots)
    stays, overflows = rows_of([PROMPTS[3], PROMPTS[2]], [20, 30])
    for row in (stays, overflows):
        running.add(row)
    running.step()
    for kept in (*running._store._keys.values(), *running._store._values.values()):
        place = kept[1] if slots else kept[:, stays.capacity : stays.capacity + overflows.capacity]
        with torch.inference_mode():
            place.fill_(float("inf"))
    assert running.step() == [overflows]
    assert isinstance(overflows.error, ItemRefused) and "are not finite numbers in float64" in str(overflows.error)
    [shorter] = rows_of(PROMPTS[:1], LIMITS[:1])
    running.add(shorter)
    while not running.idle:
        running.step()
    assert (shorter.written, stays.written) == (expected[0], expected[3])
