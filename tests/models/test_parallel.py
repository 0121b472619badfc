"""How a model is spread over a worker's GPUs, as far as that needs none."""

import pytest

from ctxflow.models.vllm import Parallelism, parallelism


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
