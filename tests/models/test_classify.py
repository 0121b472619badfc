from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from ctxflow.models import LabelClassifier
from ctxflow.models.transformers import load_language_model

LABELS = ["SUPPORTED", "REFUTED", "NOT ENOUGH INFO"]
PROMPTS = [
    "Claim: Paris is in France. Verdict:",
    "a",
    "",
    "Evidence: the river flows through the city.\nClaim: it flows around it.\nVerdict:\n",
    "Which worker should take which batch? " * 5,
    "Grüße 🙂 Verdict:   ",
    "0 1 2 3",
]


def naive(loaded, prompts, labels, chat=False):
    """Each label's log-probability from a forward pass of its own over prompt and label."""
    rows = []
    for prompt in prompts:
        text = prompt.rstrip(" ")
        joint = "" if text.endswith("\n") or not text else " "
        before = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        row = {}
        for label in labels:
            whole = loaded.tokenizer(text + joint + label, add_special_tokens=False)["input_ids"]
            assert whole[: len(before)] == before  # so that this definition and the classifier's agree
            start = before or [loaded.tokenizer.bos_token_id]
            ids = start + whole[len(before) :]
            with torch.inference_mode():
                logs = torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0], dim=-1)
            row[label] = sum(float(logs[place - 1, ids[place]]) for place in range(len(start), len(ids)))
        rows.append(row)
    return rows


@pytest.fixture(scope="module", params=["shared cache", "sliding window", "absolute positions"])
def loaded(request, causal_lm, tmp_path_factory):
    """The tiny model, and two of other architectures with its tokenizer."""
    if request.param == "shared cache":
        return causal_lm
    size = {"vocab_size": len(causal_lm.tokenizer), "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if request.param == "sliding window":
            config = MistralConfig(
                **size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, sliding_window=4, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            model = MistralForCausalLM(config)
        else:
            model = GPT2LMHeadModel(GPT2Config(**size, n_embd=32, n_layer=2, n_head=2, n_positions=256))
    folder = tmp_path_factory.mktemp("other")
    model.save_pretrained(folder)
    causal_lm.tokenizer.save_pretrained(folder)
    return load_language_model(folder, dtype="float64", device="cpu")


@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_likelihoods_equal_a_naive_computation_whatever_the_batch_size(loaded, batch_size):
    classifier = LabelClassifier(loaded, labels=LABELS, max_batch_size=batch_size)
    assert classifier._shares_cache == (loaded.model.config.model_type != "mistral")
    answers = classifier.classify(PROMPTS)
    for answer, expected in zip(answers, naive(loaded, PROMPTS, LABELS), strict=True):
        assert answer.log_probabilities == pytest.approx(expected, abs=1e-9)
        assert answer.scores == answer.log_probabilities
        assert answer.label == max(expected, key=expected.get)
        assert sum(answer.probabilities.values()) == pytest.approx(1)


def test_both_ways_to_score_agree_on_labels_of_one_and_many_tokens(causal_lm):
    labels = ["a", "b", "REFUTED", "the longest of these labels, by far"]
    sharing = LabelClassifier(causal_lm, labels=labels)
    whole = LabelClassifier(causal_lm, labels=labels)
    whole._shares_cache = False
    for one, other in zip(sharing.classify(PROMPTS), whole.classify(PROMPTS), strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)


def test_length_normalised_scores_are_per_token(causal_lm):
    plain = LabelClassifier(causal_lm, labels=LABELS).classify(PROMPTS)
    normalised = LabelClassifier(causal_lm, labels=LABELS, length_normalised=True).classify(PROMPTS)
    sizes = {label: len(causal_lm.tokenizer("x: " + label)["input_ids"]) - 2 for label in LABELS}
    assert len(set(sizes.values())) > 1
    for one, other in zip(plain, normalised, strict=True):
        assert other.log_probabilities == one.log_probabilities
        if one.prompt_tokens > 1 and one is not plain[3]:
            expected = {label: one.log_probabilities[label] / sizes[label] for label in LABELS}
            assert other.scores == pytest.approx(expected)
        assert other.label == max(other.scores, key=other.scores.get)


def test_conversations_are_written_out_by_the_chat_template(causal_lm):
    conversation = [{"role": "user", "content": "Is Paris in France?"}]
    text = causal_lm.tokenizer.apply_chat_template([conversation], tokenize=False, add_generation_prompt=True)[0]
    (answer,) = LabelClassifier(causal_lm, labels=LABELS).classify_chat([conversation])
    assert answer.log_probabilities == pytest.approx(naive(causal_lm, [text], LABELS)[0], abs=1e-9)


def test_labels_of_a_call_go_before_the_classifiers_own(causal_lm):
    classifier = LabelClassifier(causal_lm, labels=LABELS)
    (answer,) = classifier.classify(["Is it?"], labels=["yes", "no"])
    assert set(answer.scores) == {"yes", "no"}


def test_a_prompt_that_is_too_long_keeps_its_end(causal_lm):
    long = "Numbers such as 0, 1, 2 appear in claims about people. " * 100
    ids = causal_lm.tokenizer(long.rstrip())["input_ids"]
    (answer,) = LabelClassifier(causal_lm, labels=["yes"], too_long="cut-start").classify([long])
    tokens = len(causal_lm.tokenizer(" yes")["input_ids"])
    assert (answer.prompt_tokens, answer.truncated) == (512 - tokens, True)
    (same,) = LabelClassifier(causal_lm, labels=["yes"], too_long="cut-start", max_input_tokens=60).classify([long])
    with torch.inference_mode():
        end = ids[-60:] + causal_lm.tokenizer(" yes")["input_ids"]
        logs = torch.log_softmax(causal_lm.model(torch.tensor([end])).logits[0], dim=-1)
    expected = sum(float(logs[place - 1, end[place]]) for place in range(60, len(end)))
    assert same.log_probabilities["yes"] == pytest.approx(expected, abs=1e-9)


def test_nothing_for_nothing(causal_lm):
    assert LabelClassifier(causal_lm, labels=LABELS).classify([]) == []
    assert LabelClassifier(causal_lm, labels=LABELS).classify_chat([]) == []


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "there are no labels to choose among: give labels="),
        ([], r"labels=\[\] leave no choice"),
        (["a", " "], "leave no choice: give texts that are distinct and not empty"),
        (["a", "a"], "leave no choice"),
        (["a", 3], r"labels\[1\] is an int, not a string"),
        ("yes", "labels is one str"),
    ],
)
def test_labels_that_make_no_sense_are_named(causal_lm, labels, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LabelClassifier(causal_lm).classify(["a"], labels=labels)


def test_a_prompt_that_is_no_text_is_named(causal_lm):
    with pytest.raises(TypeError, match=r"prompts\[1\] is a float, not a string"):
        LabelClassifier(causal_lm, labels=LABELS).classify(["a", 0.5])


def test_a_batch_that_does_not_fit_is_halved(causal_lm, monkeypatch):
    expected = LabelClassifier(causal_lm, labels=LABELS).classify(PROMPTS)
    forward = causal_lm.model.forward

    def small_memory(*args, **kwargs):
        if kwargs["input_ids"].shape[0] > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    classifier = LabelClassifier(causal_lm, labels=LABELS)
    monkeypatch.setattr(causal_lm.model, "forward", small_memory)
    for one, other in zip(classifier.classify(PROMPTS), expected, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)
