"""What is ctxflow's own about vLLM; what vLLM does is tested in tests/engines."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.declarations import payload_of
from ctxflow.models import MissingPackageError, vllm_engine, vllm_generator
from ctxflow.models.vllm import Parallelism, parallelism, spread
from ctxflow.models.vllm_options import check_vllm_options, memory_share
from ctxflow.scheduler.events import PERVASIVE
from ctxflow.topology import machine


def test_a_model_is_spread_over_the_gpus_of_its_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CTXFLOW_PIPELINE_PARALLEL", "2")

    def sizes(**given):
        return tuple(spread(given).values())

    assert sizes() == sizes(tensor_parallel_size=None) == (2, 2)
    assert sizes(tensor_parallel_size=1) == (1, 1)
    assert sizes(tensor_parallel_size=1, pipeline_parallel_size=4) == (1, 4)


@given(
    gpus=st.integers(1, 16),
    data=st.none() | st.integers(1, 16),
    pipeline=st.none() | st.integers(1, 16),
    context=st.none() | st.integers(1, 4),
    text=st.booleans(),
)
def test_a_model_asks_for_no_more_gpus_than_there_are_as_far_as_it_may_choose(gpus, data, pipeline, context, text):
    def plain(number):
        return str(number) if text and number else number

    options = {"data_parallel_size": plain(data), "pipeline_parallel_size": plain(pipeline)}
    options["prefill_context_parallel_size"] = plain(context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        found = spread(options)
    asked = (data or 1) * (context or 1) * (pipeline or 1)
    assert found["pipeline_parallel_size"] == (plain(pipeline) or 1)
    tensor, each = found["tensor_parallel_size"], gpus // asked
    assert tensor & (tensor - 1) == 0
    assert tensor == 1 if each < 2 else tensor <= each < 2 * tensor


def test_replicas_of_other_machines_take_no_gpus_here(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    found = spread({"data_parallel_size": 16, "data_parallel_size_local": 2})
    assert found == {"tensor_parallel_size": 4, "pipeline_parallel_size": 1}
    monkeypatch.setenv("CTXFLOW_TENSOR_PARALLEL", "8")
    with pytest.raises(ValueError, match=r"CTXFLOW_TENSOR_PARALLEL .* each of the worker's replicas has 4 GPUs"):
        spread({"data_parallel_size": 2})


def test_stages_beside_a_tiers_own_spread_need_as_many_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CTXFLOW_TENSOR_PARALLEL", "2")
    assert spread({"pipeline_parallel_size": 2}) == {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(ValueError, match=r"CTXFLOW_TENSOR_PARALLEL times pipeline_parallel_size is 8, .* has 4 GPUs"):
        spread({"pipeline_parallel_size": 4})


@pytest.mark.parametrize(
    ("devices", "declared", "options", "expected"),
    [
        ([80, 80], "32000000000", {}, 0.4),
        ([80], "26666666667", {}, 0.3333),  # Three of these fit on one.
        ([80, 40], "20000000000", {}, 0.5),
        ([80], "76000000000", {}, None),  # Which nobody shares it with: some is taken by the driver.
        ([80], "160000000000", {}, None),
        ([80], "", {}, None),
        ([None], "32000000000", {}, None),
        ([80, None], "32000000000", {}, None),
        ([], "32000000000", {}, None),
        ([80], "32000000000", {"gpu_memory_utilization": 0.7}, None),
        ([80], "32000000000", {"kv_cache_memory_bytes": "8G"}, None),
    ],
)
def test_vllm_takes_what_the_context_declares_unless_it_is_told(monkeypatch, devices, declared, options, expected):
    found = [machine.Device(str(number), memory=size and size * 10**9) for number, size in enumerate(devices)]
    monkeypatch.setattr(machine, "cuda_devices", lambda environment: found)
    monkeypatch.setenv(machine.GPU_MEMORY, declared)
    assert memory_share(options) == ({} if expected is None else {"gpu_memory_utilization": expected})


def test_a_library_process_is_told_what_its_context_declares():
    recipe = vllm_engine.options(gpu_memory="40GB")("a/model")
    assert payload_of(recipe, PERVASIVE).environment[machine.GPU_MEMORY] == str(recipe.gpu_memory)
    own = vllm_engine.options(gpu_memory="40GB", env={machine.GPU_MEMORY: "1"})("a/model")
    assert payload_of(own, PERVASIVE).environment == {machine.GPU_MEMORY: "1"}
    assert payload_of(vllm_engine("a/model"), PERVASIVE).environment == {}


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
