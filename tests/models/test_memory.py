from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from ctxflow.models.token_batches import GPU_BATCH_TOKENS, InternalBatches, _bytes_per_token
from ctxflow.models.transformers import LoadedModel

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
