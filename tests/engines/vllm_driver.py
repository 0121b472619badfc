"""A program that asks a real vLLM for answers to numbered rows, and goes on where it was stopped.

    vllm_driver.py MODEL ROWS WORKERS RESUME

It prints the number of each row that is answered. Tests kill it and what it starts, and ask what it asks.
"""

from __future__ import annotations

import sys

from ctxflow import ContextExecutor, item_app
from ctxflow.models import vllm_engine

WINDOW = 8
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 256}


def asking(model):
    """The app that has a row answered: its number, the engine's text, and how many tokens that has."""

    @item_app(vllm_engine.options(gpus=0, concurrency=WINDOW)(str(model), **ENGINE))
    async def ask(engine, number, tokens):
        body = {
            "prompt": f"Is it true that {number} holds?",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await engine.answer("/v1/completions", body)
        return number, answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    return ask


def tokens_of(number):
    """How long a row's answer is."""
    return 40 + 37 * number % 160


def main(model, rows, workers, resume):
    ask = asking(model)
    numbers = range(int(rows))
    with ContextExecutor(workers=int(workers)):
        answers = ask.map(numbers, [tokens_of(number) for number in numbers], resume=resume, order="completed")
        for number, _ in answers:
            sys.stdout.write(f"{number}\n")  # In one piece, whenever it is killed: `print` writes two.
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
