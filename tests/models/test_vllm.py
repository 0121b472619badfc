"""What is ctxflow's own about vLLM; what vLLM does is tested in tests/engines."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from ctxflow.models import MissingPackageError, vllm_engine, vllm_generator
from ctxflow.models.vllm import Parallelism, parallelism, spread
from ctxflow.models.vllm_options import check_vllm_options


def test_a_model_is_spread_over_the_gpus_of_its_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CTXFLOW_PIPELINE_PARALLEL", "2")

    def sizes(**given):
        return tuple(spread(given).values())

    assert sizes() == sizes(tensor_parallel_size=None) == (2, 2)
    assert sizes(tensor_parallel_size=1) == (1, 1)
    assert sizes(tensor_parallel_size=1, pipeline_parallel_size=4) == (1, 4)


def test_without_vllm_the_extra_is_named(monkeypatch, causal_lm_folder):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"vllm .*pip install .*\[vllm\]'?"):
        vllm_generator(str(causal_lm_folder)).build()
    with pytest.raises(MissingPackageError, match=r"\[vllm\]"):
        asyncio.run(vllm_engine(str(causal_lm_folder)).build_async(contextlib.AsyncExitStack()))
    with pytest.raises(MissingPackageError, match=r"\[vllm\]"):
        check_vllm_options({"max_model_len": 4096})


@pytest.mark.parametrize(
    ("devices", "variables", "expected"),
    [
        ("", {}, (1, 1)),
        ("0", {}, (1, 1)),
        ("0,1,2,3", {}, (4, 1)),
        ("0,1,2,3,4,5", {}, (4, 1)),
        ("0,1,2,3", {"CTXFLOW_TENSOR_PARALLEL": "2"}, (2, 1)),
        ("0,1,2,3,4,5,6,7", {"CTXFLOW_PIPELINE_PARALLEL": "2"}, (4, 2)),
        ("0,1,2,3,4,5", {"CTXFLOW_TENSOR_PARALLEL": "2", "CTXFLOW_PIPELINE_PARALLEL": "3"}, (2, 3)),
    ],
)
def test_a_tier_says_how(devices, variables, expected):
    assert parallelism({"CUDA_VISIBLE_DEVICES": devices, **variables}) == Parallelism(*expected)


@pytest.mark.parametrize(
    "variables",
    [
        {"CTXFLOW_TENSOR_PARALLEL": "0"},
        {"CTXFLOW_TENSOR_PARALLEL": "two"},
        {"CTXFLOW_PIPELINE_PARALLEL": "-1"},
        {"CTXFLOW_PIPELINE_PARALLEL": "3"},
    ],
    ids=str,
)
def test_nonsense_is_named(variables):
    with pytest.raises(ValueError, match=next(iter(variables))):
        parallelism({"CUDA_VISIBLE_DEVICES": "0,1", **variables})
