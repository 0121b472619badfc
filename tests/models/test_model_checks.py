"""What is wrong with a model's folder is told before anything loads it."""

import json
import zipfile

import pytest

from ctxflow.models.model_checks import files_problems, system_problem, why_not_loaded

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d" * 32 + "\nsize 98809\n"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
TRANSFORMER = [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]


def tensors(size, cut=0):
    """A file of safetensors with one tensor."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return (len(header).to_bytes(8, "little") + header + bytes(size))[: -cut or None]


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", b"x" * 100)
    return path.read_bytes()


def folder(tmp_path, **files):
    """A model's folder: a whole one but for these files, of which None is not there."""
    whole = {"config.json": "{}", "tokenizer.json": '{"model": {}}', "tokenizer_config.json": "{}"}
    tmp_path.mkdir(exist_ok=True)
    for name, content in {**whole, "model.safetensors": tensors(100), **files}.items():
        if content is not None:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


SHARDS = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}})
WHOLE = {
    "as it is": {},
    "shards": {"model.safetensors": None, "model.safetensors.index.json": SHARDS,
               "model-1-of-2.safetensors": tensors(5), "model-2-of-2.safetensors": tensors(7)},
    "pickled": {"model.safetensors": None, "pytorch_model.bin": b"\x80\x02old"},
    "an adapter's": {"model.safetensors": None, "adapter_config.json": "{}"},
    "a vocabulary alone": {"tokenizer.json": None, "vocab.txt": "a\nb"},
    "bytes as tokens": {"tokenizer.json": None, "tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'},
    "an encoder's parts": {"config.json": None, "model.safetensors": None, "tokenizer.json": None,
                           "modules.json": json.dumps(TRANSFORMER), "0_Transformer/model.safetensors": tensors(3),
                           "0_Transformer/tokenizer.json": "{}"},
    "an encoder without a transformer": {"tokenizer.json": None, "model.safetensors": None,
                                         "modules.json": '[{"type": "x.BoW", "path": ""}]'},
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_has_no_problem(tmp_path, name):
    model = folder(tmp_path, **WHOLE[name])
    assert list(files_problems("lm", model)) == []
    assert why_not_loaded("lm", model, ValueError("no\nmore")) == "no"
    assert why_not_loaded("lm", model, KeyError()) == "KeyError"
    assert why_not_loaded("lm", model, ArithmeticError("no")) is None


BROKEN = {
    "no weights": ({"model.safetensors": None}, "the model lm has no weights: there is no model.safetensors or"),
    "a shard is missing": (
        {"model.safetensors": None, "model.safetensors.index.json": SHARDS, "model-1-of-2.safetensors": tensors(5)},
        "the model lm lacks the weights model-2-of-2.safetensors in",
    ),
    "weights are a pointer": ({"model.safetensors": POINTER}, "model.safetensors is a pointer of Git LFS"),
    "weights are cut short": ({"model.safetensors": tensors(100, cut=1)}, "holds no weights, or is cut short"),
    "weights are empty": ({"model.safetensors": b""}, "model.safetensors is empty"),
    "weights are a page": ({"model.safetensors": "<!doctype html>" * 9}, "holds no weights, or is cut short"),
    "no tokenizer": ({"tokenizer.json": None}, "the model lm has no tokenizer: there is no tokenizer.json"),
    "no tokenizer of any kind": (
        {"tokenizer.json": None, "tokenizer_config.json": None}, "the model lm has no tokenizer",
    ),
    "the tokenizer is a pointer": ({"tokenizer.json": POINTER}, "tokenizer.json is a pointer of Git LFS"),
    "the tokenizer is cut short": ({"tokenizer.json": '{"model": {"vocab": {'}, "tokenizer.json is no JSON, or is cut"),
    "the configuration is none": ({"config.json": "<html>"}, "config.json is no JSON"),
    "an encoder's part": (
        {"modules.json": json.dumps(TRANSFORMER), "tokenizer.json": None, "0_Transformer/a": ""}, "has no tokenizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_or_broken_is_one_sentence(tmp_path, name):
    files, sentence = BROKEN[name]
    (problem,) = files_problems("lm", folder(tmp_path, **files))
    assert sentence in problem and "\n" not in problem
    assert why_not_loaded("lm", tmp_path, ArithmeticError()) == problem


def test_a_pickle_that_is_cut_short_is_told(tmp_path):
    data = zipped(tmp_path / "whole.zip")
    model = folder(tmp_path / "lm", **{"model.safetensors": None, "pytorch_model.bin": data})
    assert list(files_problems("lm", model)) == []
    (model / "pytorch_model.bin").write_bytes(data[:-30])
    assert "cut short" in next(files_problems("lm", model))


def test_engines_with_files_of_their_own_need_none_of_these(tmp_path):
    model = folder(tmp_path, **{"model.safetensors": None, "tokenizer.json": None, "model.gguf": b"GGUF"})
    assert list(files_problems("lm", model, weights=False, tokenizer=False)) == []
    (model / "model.gguf").write_text(POINTER)
    assert "pointer" in next(files_problems("lm", model, weights=False, tokenizer=False))


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"chat_template.jinja": REFUSES}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": REFUSES, "bos_token": {"content": "<s>"}})}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": REFUSES}]})}, True),
        ({"chat_template.json": json.dumps({"chat_template": REFUSES})}, True),
        ({"chat_template.jinja": CHAT}, False),
        ({"chat_template.jinja": CHAT, "tokenizer_config.json": json.dumps({"chat_template": REFUSES})}, False),
        ({"chat_template.jinja": "{{ raise_exception('always') }}"}, False),
        ({"chat_template.jinja": "{{ unheard_of(messages) }}"}, False),
        ({"chat_template.jinja": "{% generation %}"}, False),
        ({}, False),
    ],
)
def test_a_template_that_refuses_a_system_message_is_told(tmp_path, files, refused):
    said = system_problem("lm", folder(tmp_path, **files))
    expected = "the chat template of the model lm refuses the system message of --system (System role not supported)"
    assert (said or "").startswith(expected) if refused else said is None
