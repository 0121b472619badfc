"""Conversations for a small language model, as OpenAI's requests, and what a plain loop with transformers answers."""

import json
from pathlib import Path
from typing import Any

QUESTIONS = [
    "The capital of France is",
    "a",
    "Which worker should take which batch? " * 5,
    "Grüße aus Köln, 日本語も 🙂",
    "0 1 2 3 10 12 100 1850",
    "When nobody can tell from the evidence, write NOT ENOUGH INFO",
    "",
    "Rivers carry water from the mountains to the sea.",
]
NEW = 12
Answer = tuple[str, int, int, str]
"""The text, tokens of the prompt, tokens of the text, and why it ended."""


def limit(n: int) -> int:
    """How many tokens the n-th conversation may get."""
    return NEW - n % 3


def chat_requests() -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"q{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": limit(n),
            },
        }
        for n, question in enumerate(QUESTIONS)
    ]


def plain_answers(model_folder: Path) -> dict[str, Answer]:
    """What transformers alone writes in 64 bits, one conversation at a time, token by token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).eval()
    written = {}
    with torch.inference_mode():
        for n, question in enumerate(QUESTIONS):
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            new: list[int] = []
            while len(new) < limit(n) and (not new or new[-1] != tokenizer.eos_token_id):
                new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
            stopped = new[-1] == tokenizer.eos_token_id
            written[f"q{n}"] = (
                tokenizer.decode(new, skip_special_tokens=True), len(ids), len(new), "stop" if stopped else "length",
            )  # fmt: skip
    assert len({text for text, *_ in written.values()}) == len(QUESTIONS), "the model must be sensitive to its prompt"
    return written


def given_answers(output: Path) -> dict[str, Answer]:
    """What is in a batch's output."""
    found = {}
    for answer in map(json.loads, output.read_text().splitlines()):
        body = answer["response"]["body"]
        (choice,), usage = body["choices"], body["usage"]
        assert (choice["message"]["role"], body["object"]) == ("assistant", "chat.completion")
        found[answer["custom_id"]] = (
            choice["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"],
        )  # fmt: skip
    return found
