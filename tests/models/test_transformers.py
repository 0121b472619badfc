from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ctxflow.installing import how_to_install
from ctxflow.models.transformers import load_language_model, resolve_device, resolve_dtype


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
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
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
