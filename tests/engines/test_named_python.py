"""The Python that has vLLM runs library processes of a driver that has none."""

from __future__ import annotations

import os

from ctxflow import ContextExecutor, batch_app, context


@context
def library(model: str) -> dict[str, str]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import sys

    import torch
    import vllm

    engine = vllm.LLM(model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28)
    return {"python": sys.executable, "torch": torch.__version__, "vllm": vllm.__version__, "engine": engine}


def test_a_real_engine_answers_in_the_python_that_is_named(engine_environment, llama, tmp_path):
    @batch_app(library(str(llama)))
    def answer(library, prompts):
        import vllm

        parameters = vllm.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        answers = library["engine"].generate(prompts, parameters, use_tqdm=False)
        return [(len(each.outputs[0].token_ids), library["python"], library["torch"]) for each in answers]

    with ContextExecutor(workers=1):
        found = list(answer.map(["Is it true?", "Which worker?", "And now?"]))
    assert found == [(8, str(engine_environment), "2.13.0+cpu")] * 3
