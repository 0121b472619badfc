from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import types

import pytest
import torch
from transformers import LlamaConfig

from ctxflow.errors import ItemRefused
from ctxflow.installing import how_to_install
from ctxflow.models import LabelClassifier, TextGenerator
from ctxflow.models.transformers import (
    CPU_RUNNING_TOKENS,
    GPU_BATCH_TOKENS,
    InternalBatches,
    LoadedModel,
    _bytes_per_token,
    copy_module,
    load_language_model,
    resolve_device,
    resolve_dtype,
)
from waiting import patience


def test_auto_keeps_the_saved_type_but_no_half_type_on_a_cpu():
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", torch.float32, cpu) == torch.float32
    assert resolve_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert resolve_dtype("auto", torch.float16, cpu) == torch.float32
    assert resolve_dtype("bfloat16", torch.float32, cpu) == torch.bfloat16


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float16), ((9, 0), torch.bfloat16)])
def test_auto_takes_float16_on_a_gpu_too_old_for_bfloat16(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.bfloat16, torch.device("cuda:0")) == expected


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


def test_a_device_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"device='cuda:1' is not here: torch .* sees 1 CUDA devices"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="device='gpu' is unknown: give auto, cpu, cuda"):
        resolve_device("gpu")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_are_loaded_in_the_type_asked_for(causal_lm_folder, dtype):
    assert load_language_model(causal_lm_folder, dtype=dtype, device="cpu").dtype == getattr(torch, dtype)


def test_an_unknown_type_is_named(causal_lm_folder):
    with pytest.raises(ValueError, match="dtype='int3' is unknown: give one of auto, float32"):
        load_language_model(causal_lm_folder, dtype="int3")


def test_a_folder_that_holds_something_else_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such architecture"}')
    with pytest.raises(ValueError, match="could not be loaded as an AutoModelForCausalLM: "):
        load_language_model(tmp_path, device="cpu")


def test_nothing_is_said_while_loading(causal_lm_folder, capfd):
    load_language_model(causal_lm_folder, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_the_public_names_need_no_model_library():
    program = (
        "import sys\n"
        "from ctxflow.models import Classification, Generation, encoder, generator, locate_model\n"
        "generator('some/model', dtype='float32')\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'vllm'} & set(sys.modules), sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: generator('some/model').build()\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("MissingPackageError torch and transformers (")
    assert process.stdout.rstrip().endswith(how_to_install("torch", extra="transformers"))


def test_the_small_model_is_the_same_each_time(causal_lm_folder, tmp_path):
    from ctxflow.testing.small_models import make_causal_lm

    again = make_causal_lm(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (causal_lm_folder / name).read_bytes()
    other = make_causal_lm(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="hidden_size=20 is no multiple of 16"):
        make_causal_lm(tmp_path, hidden_size=20)


GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """The memory figures of a GPU, which can be set: bytes free, reserved by torch, and allocated of these."""
    figures = {"free": 0, "reserved": 0, "allocated": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (figures["free"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: figures["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: figures["allocated"])
    return figures


class Model:
    """SmolLM2-1.7B's configuration without its weights."""

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        vocab_size=49152,
    )
    dtype = torch.bfloat16


def sizes(rows, tokens, max_batch_tokens=None, max_batch_size=None):
    """How many rows each internal batch had."""
    loaded = LoadedModel("model", None, Model(), None, torch.device("cuda:0"))
    workload = InternalBatches(loaded, max_batch_tokens, max_batch_size, keeps_cache=True, cpu_tokens=1)
    seen = []
    workload.run([tokens] * rows, lambda numbers: [seen.append(len(numbers))] * len(numbers))
    return seen


def test_the_cache_of_a_token_is_counted_over_all_layers():
    kept = 2 * 24 * 32 * 64 * 2  # keys and values, layers, heads, head size, bytes
    with_cache = _bytes_per_token(Model.config, 2, keeps_cache=True)
    without = _bytes_per_token(Model.config, 2, keeps_cache=False)
    assert kept <= with_cache - without <= 1.1 * kept
    assert _bytes_per_token(object(), 2, keeps_cache=True) > 0


def test_batches_on_a_gpu_are_as_large_as_its_free_memory_allows(gpu):
    gpu.update(free=5 * GIB)
    small = sizes(rows=100, tokens=512)
    gpu.update(free=10 * GIB)
    assert max(sizes(rows=100, tokens=512)) == pytest.approx(2 * max(small), abs=1)
    gpu.update(free=5 * GIB, reserved=20 * GIB, allocated=15 * GIB)
    assert max(sizes(rows=100, tokens=512)) == pytest.approx(2 * max(small), abs=1)
    assert max(small) * 512 * _bytes_per_token(Model.config, 2, keeps_cache=True) < 5 * GIB


def test_batches_have_a_greatest_size_and_a_least(gpu):
    gpu.update(free=70 * GIB)
    assert max(sizes(rows=1000, tokens=512)) == GPU_BATCH_TOKENS // 512
    gpu.update(free=0)
    assert sizes(rows=3, tokens=512) == [1, 1, 1]


def test_chosen_limits_go_before_free_memory(gpu):
    gpu.update(free=70 * GIB)
    assert sizes(rows=5, tokens=512) == [5]
    assert sizes(rows=5, tokens=512, max_batch_tokens=1024) == [2, 2, 1]
    assert sizes(rows=5, tokens=512, max_batch_size=4) == [4, 1]


@pytest.fixture
def cudnn_attention():
    """Whether torch may choose it, as it does by default."""
    if not hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        pytest.skip("this torch is older than that attention")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_no_attention_that_is_planned_for_each_shape_runs_on_a_gpu(cudnn_attention, device):
    LoadedModel("model", None, Model(), None, torch.device(device))
    assert cudnn_attention() == (device == "cpu"), "what a process without a model on a GPU does is left alone"


def test_a_running_batch_on_a_cpu_counts_half_types_as_they_are_kept():
    def tokens(dtype):
        model = types.SimpleNamespace(config=Model.config, dtype=dtype)
        loaded = LoadedModel("model", None, model, None, torch.device("cpu"))
        return InternalBatches(loaded, None, None, keeps_cache=True, cpu_tokens=CPU_RUNNING_TOKENS).most_tokens()

    assert tokens(torch.bfloat16) == tokens(torch.float32) < CPU_RUNNING_TOKENS


def with_tokens_beyond_its_embeddings(loaded):
    """As of a finetune whose tokenizer got a token for padding, and whose model was not resized."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["[BEYOND]"])
    assert tokenizer.pad_token_id >= loaded.known_tokens
    return dataclasses.replace(loaded, tokenizer=tokenizer)


def test_rows_are_padded_with_a_token_that_the_model_knows(causal_lm):
    loaded = with_tokens_beyond_its_embeddings(causal_lm)
    assert loaded.pad_id == causal_lm.tokenizer.eos_token_id
    loaded.tokenizer.eos_token = "[BEYOND]"
    assert loaded.pad_id == 0


def test_tokens_that_the_model_does_not_know_are_told(causal_lm):
    loaded = with_tokens_beyond_its_embeddings(causal_lm)
    with pytest.raises(
        ItemRefused, match=r"prompts\[1\] has the token \d+ \('\[BEYOND\]'\), but the model knows only 512"
    ):
        TextGenerator(loaded).generate(["a", "b [BEYOND] c"], max_new_tokens=2)
    with pytest.raises(ItemRefused, match=r"prompts\[0\] has the token"):
        LabelClassifier(loaded, labels=["x", "y"]).classify(["b [BEYOND] c"])


def test_a_module_is_copied_whole_and_tied_weights_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    model[1].register_buffer("strided", torch.arange(12.0).reshape(3, 4).t())
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    copy_module(model, torch.device("cpu"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert (value.data_ptr() == places[name]) == (name == "1.strided")
    assert model[2].weight is model[0].weight
    assert isinstance(model[0].weight, torch.nn.Parameter) and not model[0].weight.requires_grad
