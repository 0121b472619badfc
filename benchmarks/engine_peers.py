"""Engines alone: one program for each, given all requests at once; run in a Python that has the engine.

    engine_peers.py KIND MODEL ROWS [--dtype NAME] [--options JSON] [--batch N] [--command WORDS]

ROWS is a file of JSON lines with `prompt` and `max_new_tokens`. The last line of JSON that is printed is an object:
`seconds` from the first request to the last answer, with the engine started, `tokens` that were written in that time,
and the `texts`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
Answers = tuple[float, list[int], list[str]]
"""Seconds, and of each row the tokens that were written, and the text."""


def in_vllm(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Answers:
    """`LLM.generate`, of all prompts at once or of one batch after the other."""
    import vllm

    engine = vllm.LLM(asked.model, dtype=asked.dtype, **json.loads(asked.options))
    parameters = [vllm.SamplingParams(temperature=0, max_tokens=row["max_new_tokens"]) for row in rows]
    prompts = [row["prompt"] for row in rows]
    size = asked.batch or len(rows)
    found = []
    began = time.perf_counter()
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        found += engine.generate(prompts[part], parameters[part], use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, [len(each.outputs[0].token_ids) for each in found], [each.outputs[0].text for each in found]


def in_server(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Answers:
    """A server of OpenAI's API, asked by openai's own asynchronous client, all requests at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(model=asked.model, port=port) for word in shlex.split(asked.command)]
    with _started(words) as process:
        _await_health(f"http://127.0.0.1:{port}/health", process)
        return asyncio.run(_ask(f"http://127.0.0.1:{port}/v1", asked.model, rows))


@contextlib.contextmanager
def _started(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server with all that it starts, ended afterwards; what it says goes to our standard error."""
    with subprocess.Popen(words, stdout=sys.stderr, start_new_session=True) as process:
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def _await_health(address: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit status {process.returncode} before it answered")
        if time.monotonic() > until:
            raise SystemExit(f"the server did not answer within {START_SECONDS:.0f} s")
        time.sleep(0.2)


async def _ask(address: str, model: str, rows: list[dict[str, Any]]) -> Answers:
    import httpx
    import openai

    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http = httpx.AsyncClient(limits=unlimited, timeout=None)
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, http_client=http) as client:

        async def one(row: dict[str, Any]) -> Any:
            return await client.completions.create(
                model=model, prompt=row["prompt"], max_tokens=row["max_new_tokens"], temperature=0
            )

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, rows))
        seconds = time.perf_counter() - began
    return seconds, [each.usage.completion_tokens for each in answers], [each.choices[0].text for each in answers]


def in_own_batching(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Answers:
    """transformers' continuous batching, all requests at once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(
        asked.model, dtype=getattr(torch, asked.dtype), attn_implementation="sdpa"
    ).to(device)
    generation = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=max(row["max_new_tokens"] for row in rows),
    )  # fmt: skip
    # Without a number of blocks it takes most of the free memory.
    wanted = sum(-(-(len(tokenizer(row["prompt"])["input_ids"]) + row["max_new_tokens"]) // 256) for row in rows)
    sizes = {"num_blocks": max(64, wanted), "max_requests_per_batch": 64} | json.loads(asked.options)
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**sizes)
    )
    ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    found: dict[str, list[int]] = {}
    manager.start()
    began = time.perf_counter()
    for number, row in enumerate(rows):
        manager.add_request(ids[number], request_id=str(number), max_new_tokens=row["max_new_tokens"])
    while len(found) < len(rows):
        answer = manager.get_result(timeout=0.1)
        if answer is not None and answer.is_finished():
            found[answer.request_id] = list(answer.generated_tokens)
        elif answer is None and not manager.is_running():
            raise SystemExit("transformers' continuous batching ended before all rows were answered")
    seconds = time.perf_counter() - began
    manager.stop(block=True)
    written = [found[str(number)] for number in range(len(rows))]
    return seconds, [len(each) for each in written], tokenizer.batch_decode(written, skip_special_tokens=True)


def in_text_generator(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Answers:
    """The `TextGenerator` of whichever ctxflow PYTHONPATH names, in this process, given all rows at once."""
    from ctxflow.models import TextGenerator

    generator = TextGenerator(asked.model, dtype=asked.dtype)
    began = time.perf_counter()
    found = generator.generate(
        [row["prompt"] for row in rows], max_new_tokens=[row["max_new_tokens"] for row in rows], temperature=0
    )
    seconds = time.perf_counter() - began
    return seconds, [each.completion_tokens for each in found], [each.text for each in found]


def in_plain_loop(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Answers:
    """`model.generate` on padded batches of rows of like limits, each to its longest answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype)).to(device)
    order = sorted(range(len(rows)), key=lambda number: rows[number]["max_new_tokens"])
    texts, counts = [""] * len(rows), [0] * len(rows)
    size = asked.batch or 8
    began = time.perf_counter()
    for start in range(0, len(rows), size):
        part = order[start : start + size]
        inputs = tokenizer([rows[number]["prompt"] for number in part], padding=True, return_tensors="pt").to(device)
        inputs.pop("token_type_ids", None)
        most = max(rows[number]["max_new_tokens"] for number in part)
        written = model.generate(**inputs, do_sample=False, max_new_tokens=most)
        for number, row in zip(part, written[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            own = row[: rows[number]["max_new_tokens"]]
            texts[number], counts[number] = tokenizer.decode(own, skip_special_tokens=True), len(own)
    return time.perf_counter() - began, counts, texts


KINDS: dict[str, Callable[[argparse.Namespace, list[dict[str, Any]]], Answers]] = {
    "vllm": in_vllm,
    "server": in_server,
    "own-batching": in_own_batching,
    "text-generator": in_text_generator,
    "plain-loop": in_plain_loop,
}


def main() -> None:
    """Run one and print what it took."""
    parser = argparse.ArgumentParser(description="One engine alone, given all requests at once.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--options", default="{}", help="further arguments of the engine, as JSON")
    parser.add_argument("--batch", type=int, default=0, help="rows of a batch; all at once by default")
    parser.add_argument("--command", default="", help="of a server, with {model} and {port}")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.rows.read_text().splitlines()]
    seconds, tokens, texts = KINDS[asked.kind](asked, rows)
    print()
    print(json.dumps({"seconds": seconds, "tokens": sum(tokens), "counts": tokens, "texts": texts}), flush=True)


if __name__ == "__main__":
    main()
