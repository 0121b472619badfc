"""A real `vllm serve` as a server: it answers at a socket of its own, and its engine is killed while it works."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from engine_belongings import Belongings, kill
from vllm_server import vllm_server

from waiting import FOREVER, eventually_async, patience

pytest.importorskip("aiohttp")

from ctxflow.errors import ContextLost, ItemRefused
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS
from ctxflow.models.openai_server import OpenAIServer, start_server

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"}}


@pytest.mark.timeout(600)
def test_it_answers_until_its_engine_is_killed(
    engine_environment: Path, llama: Path, belongings: Belongings, tmp_path: Path
) -> None:
    command = f"{vllm_server(engine_environment, tmp_path)} --enforce-eager --max-model-len 512"

    async def main() -> None:
        options = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}
        # It is not given up for its silence: that its engine has died is what is noticed.
        engine = await start_server(command, model=llama, options=options, unresponsive_seconds=FOREVER)
        try:
            await answers(engine)
            await loses_what_is_in_flight(engine)
        finally:
            await engine.aclose()

    async def answers(engine: OpenAIServer) -> None:
        assert engine.models == (str(llama),)
        words = Path(f"/proc/{engine.pid}/cmdline").read_text()
        assert "--uds" in words and "--api-key" not in words
        body = {"messages": [{"role": "user", "content": "Which worker should take which batch? " * 10}], "n": 2}
        body |= {"max_tokens": 5, "min_tokens": 5, "seed": 1, "logprobs": True}
        first, second = [await engine.answer(CHAT, body) for _ in range(2)]
        assert [len(each["logprobs"]["content"]) for each in first["choices"]] == [5, 5]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0  # It tells them, since it was asked to.
        for endpoint, wrong, sentence in [
            (EMBEDDINGS, {"input": "a"}, "does not answer /v1/embeddings as it was started"),
            (COMPLETIONS, {"prompt": "word " * 3000}, "maximum context length is 512"),
            (COMPLETIONS, {"prompt": "a", "model": "another"}, "`another` does not exist"),
            (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "not a multimodal model"),
        ]:
            with pytest.raises(ItemRefused, match=sentence):
                await engine.answer(endpoint, wrong)

    async def loses_what_is_in_flight(engine: OpenAIServer) -> None:
        body = {"prompt": "Rivers", "max_tokens": 490, "ignore_eos": True}
        asked = [asyncio.ensure_future(engine.answer(COMPLETIONS, body)) for _ in range(64)]
        await eventually_async(lambda: engine._in_flight == len(asked))
        (core,) = belongings.of("EngineCore")
        kill(core)
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), patience())
        lost = [each for each in found if isinstance(each, BaseException)]
        assert lost and {type(each) for each in lost} == {ContextLost}
        assert "EngineCore" in str(lost[0]) or "EngineDeadError" in str(lost[0])

    asyncio.run(main())
    assert belongings.processes() == {} and belongings.sockets() == []
    assert [name for name in os.listdir(belongings.folder) if name.startswith("ctxflow-")] == []
