"""Items in flight in a real vLLM on the embedded engine: where it is killed it is built anew, and all are answered."""

from __future__ import annotations

import pytest
from engine_belongings import kill

from ctxflow import ContextExecutor, item_app
from ctxflow.models import vllm_engine

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.
SETTINGS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 512}


def test_items_survive_an_engine_that_is_killed(engine_environment, llama, belongings):
    @item_app(vllm_engine.options(gpus=0)(str(llama), **SETTINGS))
    async def ask(engine, prompt, tokens):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await engine.answer("/v1/completions", body)
        return answer["usage"]["completion_tokens"]

    limits = [5, *[200 + number for number in range(30)]]
    prompts = [f"The river number {number}" for number in range(len(limits))]
    with ContextExecutor(workers=1):
        results = iter(ask.map(prompts, limits))
        assert next(results) == limits[0]
        (core,) = belongings.of("VLLM::EngineCore")
        kill(core)
        assert list(results) == limits[1:]
    belongings.none_left()
