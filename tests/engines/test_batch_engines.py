"""`ctxflow batch` with a real vLLM, in process and as a server: text, images, reasoning, variables and adapters."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from vllm_server import vllm_server

from ctxflow.testing.small_models import CHAT_TEMPLATE, make_adapter, make_image_lm
from waiting import patience

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 512,
    "reasoning_parser": "deepseek_r1",
    "structured_outputs_config": {"enable_in_reasoning": True},
}


def picture(red: int, green: int, blue: int) -> str:
    """An image of one colour as a data URL."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress((b"\0" + bytes([red, green, blue]) * 8) * 8)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return as_url(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def as_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def seen(url: str) -> dict[str, Any]:
    """A request about an image."""
    content = [{"type": "text", "text": "Which worker?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}


HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
ANSWERED = {
    "red": seen(picture(200, 0, 0)),
    "blue": seen(picture(0, 0, 200)),
    "hello": HELLO,
    "moody": {**HELLO, "chat_template_kwargs": {"mood": "Be short, and be sure of it. "}},
    "thought": {**HELLO, "max_tokens": 40, "structured_outputs": {"regex": "[ab]{3,6}</think>[cd]{3,6}"}},
}
DEAD = {
    "broken": (seen(as_url(b"\x89PNG\r\n\x1a\n" + bytes(30))), "image"),
    "cut off": (seen(picture(9, 9, 9)[:-9]), "base64"),
    "at an address": (seen("http://127.0.0.1:1/a.png"), "an image at an address, and nothing is fetched"),
    "in a file": (seen("file:///etc/hostname"), "an image in a file, and none is read"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_image_lm(tmp_path_factory.mktemp("pictures"), words=["<think>", "</think>"])
    (folder / "chat_template.jinja").write_text("{{ mood }}" + CHAT_TEMPLATE)
    return folder


def run(bodies: dict[str, Any], folder: Path, output: str, *words: str) -> tuple[dict, dict]:
    """Run a job; returns its results and dead letters' messages, by the requests' names."""
    lines = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in bodies.items()]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    form = output.rpartition(".")[2]
    options = [word for name, value in OPTIONS.items() for word in ("--engine-option", f"{name}={json.dumps(value)}")]
    command = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", output, "--gpus", "0"]
    command += ["--output-format", form, "--workers", "1", *options, *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience(600), check=False)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    read = [json.loads(line) for line in (folder / f"{output}.errors.jsonl").read_text().splitlines()]
    dead = {letter["custom_id"]: letter["error"]["message"] for letter in read}
    if form == "parquet":
        rows = pyarrow.parquet.read_table(folder / output).to_pylist()
    else:
        rows = [json.loads(line) for line in (folder / output).read_text().splitlines()]
    return {row["custom_id"]: row for row in rows}, dead


def said(row: dict[str, Any]) -> str:
    """All that a model wrote: reasoning, until it says that it ends."""
    return (row["reasoning"] or "") + row["text"]


def check(found: dict[str, Any], dead: dict[str, str]) -> None:
    assert said(found["red"]) != said(found["blue"]), "the answers depend on the images"
    assert found["moody"]["prompt_tokens"] > found["hello"]["prompt_tokens"], "and on the template's variables"
    thought = found["thought"]
    assert set(thought["reasoning"]) <= set("ab") and set(thought["text"]) <= set("cd") and thought["text"]
    for name, (_, words) in DEAD.items():
        assert words in dead[name] and "\n" not in dead[name] and "Traceback" not in dead[name], dead[name]


def test_a_model_in_vllm_reads_images_and_takes_adapters(engine_environment, belongings, model, tmp_path):
    bodies = {**ANSWERED, **{name: body for name, (body, _) in DEAD.items()}}
    bodies |= {"adapted": {**HELLO, "model": "other"}, "unknown": {**HELLO, "model": "othr"}}
    adapter = make_adapter(model, tmp_path / "adapter")
    words = ("--backend", "vllm", "--dtype", "float32", "--adapter", f"other={adapter}")
    found, dead = run(bodies, tmp_path, "out.jsonl", "-m", str(model), *words)
    check(found, dead)
    assert set(found) == {*ANSWERED, "adapted"} and set(dead) == {*DEAD, "unknown"}
    assert said(found["adapted"]) != said(found["hello"])
    assert "neither the job's model nor one of its adapters: there are" in dead["unknown"]
    belongings.none_left()


@pytest.mark.release
def test_a_server_reads_images_and_its_answers_fit_into_parquet(engine_environment, belongings, model, tmp_path):
    bodies = {**ANSWERED, **{name: body for name, (body, _) in DEAD.items()}}
    names = itertools.cycle(["small", "large"])  # Of one model, which is served once.
    bodies = {**{name: {**body, "model": next(names)} for name, body in bodies.items()}, "unknown": HELLO}
    server = f"{vllm_server(engine_environment, tmp_path)} --dtype float32"
    words = ("--named-model", f"small={model}", "--named-model", f"large={model}", "--backend", "server")
    found, dead = run(bodies, tmp_path, "out.parquet", *words, "--server-command", server)
    check(found, dead)
    assert set(found) == set(ANSWERED) and set(dead) == {*DEAD, "unknown"}
    assert "none of this job's: name small or large" in dead["unknown"]
    belongings.none_left()
