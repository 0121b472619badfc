"""Programs of the tests beside this, which run in the Python that has vLLM (vllm_forks.py).

Each starts an engine, asks it what several tests look at, and prints it as JSON in its last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waiting import eventually, eventually_async

SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 512, "dtype": "float32"}


async def asked(engine: Any, endpoint: str, body: Mapping[str, Any]) -> Any:
    """Return an answer, or the kind of the error and what it says."""
    try:
        return await engine.answer(endpoint, body)
    except Exception as error:
        return [type(error).__name__, str(error)]


def descendants() -> dict[int, str]:
    from ctxflow.host import linux

    found = {}
    for pid in linux.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
    return {pid: line for pid, line in found.items() if line and "resource_tracker" not in line}


def process(word: str) -> int:
    """Return the first process of this one whose name has the word in it."""
    return next(pid for pid, line in descendants().items() if word in line)


def segments() -> list[str]:
    """Return the names of shared memory that processes of this one have."""
    found = set()
    for pid in descendants():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found.update(line.split(None, 5)[5] for line in lines if "/dev/shm/" in line)
    return [path for path in found if os.path.exists(path)]


async def answers(model: str, questions: list[Any], settings: Mapping[str, Any], twice: list[Any]) -> Any:
    """Ask all at once, then some again one by one; then have a request aborted."""
    from ctxflow.models.vllm_serving import VLLMEngine

    engine = await VLLMEngine.start(model, **{**SMALL, **settings})
    found: dict[str, Any] = {"names": segments()}
    found["answers"] = await asyncio.gather(*(asked(engine, *question) for question in questions))
    found["again"] = [await asked(engine, *question) for question in twice]
    long = asyncio.create_task(
        engine.answer("/v1/completions", {"prompt": "It", "max_tokens": 400, "ignore_eos": True})
    )
    client = engine._processes.client
    await eventually_async(lambda: client.get_num_unfinished_requests() or long.done())
    long.cancel()
    found["cancelled"] = [type(each).__name__ for each in await asyncio.gather(long, return_exceptions=True)]
    found["unfinished"] = client.get_num_unfinished_requests()
    await engine.aclose()
    await engine.aclose()
    found["left"] = list(descendants().values())
    found["closed"] = await asked(engine, "/v1/completions", {"prompt": "It"})
    return found


async def fields(model: str, questions: list[Any], settings: Mapping[str, Any]) -> Any:
    """Answer as a worker of a batch job does; return bodies of responses."""
    from ctxflow.batch.engine_answers import whole_body
    from ctxflow.models.answering import respond
    from ctxflow.models.vllm_serving import VLLMEngine

    engine = await VLLMEngine.start(model, **{**SMALL, **settings})

    async def answered(name: str, url: str, body: Mapping[str, Any]) -> Any:
        try:
            return whole_body(url, await respond(engine, (url, body)), name, 1, "m")
        except Exception as error:
            return [type(error).__name__, str(error)]

    found = await asyncio.gather(*(answered(*question) for question in questions))
    await engine.aclose()
    return found


async def embeddings(models: list[Any], texts: list[str]) -> Any:
    from ctxflow.models.vllm_serving import VLLMEngine

    options = {name: value for name, value in SMALL.items() if name != "max_model_len"}
    found = []
    for model, settings in models:
        engine = await VLLMEngine.start(model, **{**options, **settings})
        answers = await asyncio.gather(*(asked(engine, "/v1/embeddings", {"input": text}) for text in texts))
        found.append([*answers, await asked(engine, "/v1/completions", {"prompt": "It"})])
        await engine.aclose()
    return found


async def deaths(model: str, prompts: list[str], cases: list[Any]) -> Any:
    """Have engines answer, then end or stop processes of theirs; return what requests, and later ones, were told."""
    from ctxflow.models.vllm_serving import VLLMEngine

    found = []
    for victims, settings in cases:
        engine = await VLLMEngine.start(model, **{**SMALL, **settings})
        workers = sum("Worker" in line for line in descendants().values())
        body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answers = [await engine.answer("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
        texts, names = [answer["choices"][0]["text"] for answer in answers], segments()
        body = {"max_tokens": 490, "ignore_eos": True}
        tasks = [asyncio.create_task(asked(engine, "/v1/completions", {**body, "prompt": f"{i}"})) for i in range(8)]
        unfinished = engine._processes.client.get_num_unfinished_requests
        # All at once there may never be: they end.
        await eventually_async(lambda: unfinished() or all(task.done() for task in tasks))  # noqa: B023
        assert not all(task.done() for task in tasks), [task.result() for task in tasks]
        for word, number in victims:
            os.kill(process(word), number)
        told = await asyncio.gather(*tasks)
        later = await asked(engine, "/v1/completions", {"prompt": "It"})
        seen = {"texts": texts, "workers": workers, "names": names, "left": list(descendants().values())}
        seen["method"] = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        found.append({"told": told, "later": later, **seen})
        await engine.aclose()
    return found


async def until_killed(model: str) -> None:
    """Answer requests for ever, and say so."""
    from ctxflow.models.vllm_serving import VLLMEngine

    engine = await VLLMEngine.start(model, **SMALL)
    body = {"prompt": "It", "max_tokens": 490, "ignore_eos": True}
    tasks = [asyncio.create_task(asked(engine, "/v1/completions", body)) for _ in range(4)]
    print("running", flush=True)
    await asyncio.gather(*tasks)
    await asyncio.sleep(600)


def generator(model: str, prompts: list[str], limits: list[int]) -> Any:
    import dataclasses

    from ctxflow import on_worker
    from ctxflow.errors import ContextLost
    from ctxflow.host.load_parts import LoadParts

    parts = LoadParts()
    parts.begin()
    on_worker.time_parts(parts)
    from ctxflow.models import VLLMGenerator

    options = {name: value for name, value in SMALL.items() if name not in ("dtype", "max_model_len")}
    commands = list[str]()
    sys.addaudithook(lambda event, given: commands.append(str(given[1])) if event == "subprocess.Popen" else None)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["VLLM_CACHE_ROOT"] = empty
        written = VLLMGenerator(model, dtype="float32", max_model_len=100, options=options)
    found: dict[str, Any] = {"parts": parts.end(), "commands": commands}
    found["answers"] = [dataclasses.asdict(each) for each in written.generate(prompts, max_new_tokens=limits)]
    long = [[{"role": "user", "content": "many words " * 80}]]
    chats = [[{"role": "user", "content": "Hi"}], *long]
    answer, error = written.chat(chats, max_new_tokens=8, on_error="return")
    found["parks"] = written.parks
    found["woken"] = []
    for sleeps in (False, True):  # On CPUs vLLM refuses `enable_sleep_mode`, but it sleeps if it is told to.
        written._engine.processes._sleeps = sleeps
        written.park()
        written.wake()
        found["woken"].append([dataclasses.asdict(each) for each in written.generate(prompts, max_new_tokens=limits)])
    found["chat"] = [dataclasses.asdict(answer), type(error).__name__]
    found["seeded"] = [
        [each.text for each in written.generate(["It", "It"], max_new_tokens=8, temperature=1.0, top_k=50, seed=[3, 4])]
        for _ in range(2)
    ]
    found["stopped"] = written.generate(prompts[:1], max_new_tokens=limits[0], stop=found["answers"][0]["text"][3:5])[
        0
    ].text

    def soon(number: int, pid: int) -> None:
        client = written._engine.processes.client
        eventually(client.get_num_unfinished_requests)
        os.kill(pid, number)

    many = ["It is so. "] * 64
    threading.Thread(target=soon, args=(signal.SIGINT, os.getpid())).start()
    try:
        while True:  # It may end before the signal comes.
            written.generate(many, max_new_tokens=60)
    except KeyboardInterrupt:
        found["interrupted"] = len(written.generate(prompts[:1], max_new_tokens=2))
    threading.Thread(target=soon, args=(signal.SIGKILL, process("EngineCore"))).start()
    found["lost"] = []
    while len(found["lost"]) < 2:
        try:
            written.generate(many, max_new_tokens=60)
        except ContextLost as lost:
            found["lost"].append(str(lost))
    written.close()
    written.close()
    found["left"] = list(descendants().values())
    return found


def options(given: list[Mapping[str, Any]]) -> Any:
    from ctxflow.models.vllm_options import check_vllm_options

    found = []
    for each in given:
        try:
            found.append(check_vllm_options(each))
        except Exception as error:
            found.append([type(error).__name__, str(error)])
    return found


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*json.loads(sys.argv[2]))
    print("\n" + json.dumps(asyncio.run(result) if asyncio.iscoroutine(result) else result), flush=True)
