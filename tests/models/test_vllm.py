"""vLLM needs a GPU, so here its module is replaced by one that writes down what it is asked."""

from __future__ import annotations

import sys
import types

import pytest

from ctxflow.models import Generation, MissingPackageError, VLLMGenerator, vllm_generator
from ctxflow.models.results import InputTooLong
from ctxflow.models.vllm import Parallelism, parallelism


class RecordedLLM:
    def __init__(self, **arguments):
        self.arguments = arguments
        self.calls = []

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append((prompts, sampling_params))
        assert not use_tqdm
        return [
            types.SimpleNamespace(
                outputs=[
                    types.SimpleNamespace(
                        text=f"answer {number}",
                        token_ids=(1, 2, 3)[: parameters.max_tokens],
                        finish_reason="length" if parameters.max_tokens < 3 else "stop",
                    )
                ]
            )
            for number, parameters in enumerate(sampling_params)
        ]


@pytest.fixture
def vllm(monkeypatch):
    module = types.SimpleNamespace(LLM=RecordedLLM, SamplingParams=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_a_model_is_spread_over_the_gpus_of_its_worker(vllm, causal_lm_folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CTXFLOW_PIPELINE_PARALLEL", "2")

    def sizes(**given):
        arguments = VLLMGenerator(causal_lm_folder, **given)._llm.arguments
        return arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]

    assert sizes() == (2, 2)
    assert sizes(tensor_parallel_size=1) == (1, 1)
    assert sizes(tensor_parallel_size=1, pipeline_parallel_size=4) == (1, 4)


def test_prompts_and_parameters_reach_vllm_row_by_row(vllm, causal_lm_folder):
    generator = VLLMGenerator(
        causal_lm_folder, dtype="bfloat16", max_model_len=40, too_long="cut-start", options={"enforce_eager": True}
    )
    assert generator._llm.arguments == {
        "model": str(causal_lm_folder.resolve()),
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 40,
        "enforce_eager": True,
    }
    long = "Numbers such as 0, 1, 2 appear in claims. " * 20
    answers = generator.generate(
        ["Paris", long], max_new_tokens=[2, 8], temperature=[0, 0.7], top_k=5, seed=3, stop="x"
    )
    ((prompts, parameters),) = generator._llm.calls
    paris, numbers = (generator.tokenizer(text)["input_ids"] for text in ("Paris", long))
    assert prompts == [{"prompt_token_ids": paris}, {"prompt_token_ids": numbers[-32:]}]
    assert [vars(row) for row in parameters] == [
        {"max_tokens": 2, "temperature": 0.0, "top_p": 1.0, "seed": 3, "stop": ["x"], "top_k": 5},
        {"max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "seed": 3, "stop": ["x"], "top_k": 5},
    ]
    assert answers == [
        Generation("answer 0", len(paris), 2, "length"),
        Generation("answer 1", 32, 3, "stop", truncated=True, original_prompt_tokens=len(numbers)),
    ]


def test_what_is_too_long_is_refused_before_vllm_sees_anything(vllm, causal_lm_folder):
    generator = VLLMGenerator(causal_lm_folder, max_model_len=40)
    with pytest.raises(InputTooLong, match=r"prompts\[1\] has \d+ tokens, but 32 fit"):
        generator.generate(["Paris", "many words " * 40], max_new_tokens=8)
    assert generator._llm.calls == []
    long = [[{"role": "user", "content": "many words " * 40}]]
    answer, error = generator.chat([[{"role": "user", "content": "Hi"}], *long], max_new_tokens=8, on_error="return")
    assert answer.text == "answer 0" and isinstance(error, InputTooLong)
    assert generator.chat(long, max_new_tokens=8, on_error="return")[0].limit == 32


def test_conversations_are_written_out_as_for_transformers(vllm, causal_lm_folder):
    generator = VLLMGenerator(causal_lm_folder)
    generator.chat([[{"role": "user", "content": "Hi"}]], max_new_tokens=4)
    ((prompts, parameters),) = generator._llm.calls
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [{"prompt_token_ids": generator.tokenizer(text)["input_ids"]}]
    assert "top_k" not in vars(parameters[0])
    assert generator.generate([]) == []
    generator.close()


def test_without_vllm_the_extra_is_named(monkeypatch, causal_lm_folder):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"vllm .*pip install .*\[vllm\]'?"):
        vllm_generator(str(causal_lm_folder)).build()


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
