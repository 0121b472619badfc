"""llama.cpp's server, the real one, with a GGUF of random weights: asked, killed at work, and started wrongly."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from llama_program import WHY_NOT, find_llama_server
from waiting import eventually_async, patience

pytest.importorskip("aiohttp")
pytest.importorskip("gguf")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxflow import ContextExecutor, item_app
from ctxflow.batch.engine_answers import whole_body
from ctxflow.batch.engine_checks import engine_problems
from ctxflow.batch.job import Job
from ctxflow.errors import ContextLost, ItemRefused, UsageError
from ctxflow.models import openai_server, server
from ctxflow.models.answering import respond
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS
from ctxflow.models.openai_requests import as_sent
from ctxflow.models.openai_server import start_server
from ctxflow.models.server_command import read_command
from ctxflow.models.server_dialects import in_dialect
from ctxflow.models.server_options import check_options
from ctxflow.models.server_process import ServerFailed
from ctxflow.testing.small_models import make_gguf

HI = [{"role": "user", "content": "Which worker should take which batch?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"}}
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["SUPPORTED", "REFUTED"]}, "sure": {"type": "boolean"}},
    "required": ["verdict", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    found = find_llama_server(tmp_path_factory.mktemp("program"))
    if found is None:
        pytest.skip(WHY_NOT)
    return found


@pytest.fixture(scope="module")
def model(causal_lm_folder, tmp_path_factory):
    return str(make_gguf(causal_lm_folder, tmp_path_factory.mktemp("gguf") / "random.gguf"))


def serving(program, model, ask, more="-np 4 -c 2048", **settings):
    """Run `ask` with a server, which is ended then, and return what it returns."""

    async def main():
        server = await start_server(f"{program} --threads 1 {more}", model=model, **settings)
        try:
            return await ask(server)
        finally:
            pids = server._process.note_family()
            await server.aclose()
            assert not os.path.exists(server._scratch.path)
            assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    return asyncio.run(main())


@pytest.mark.parametrize("socket_option", [None, ""], ids=["socket", "port"])
def test_it_answers_as_transformers_does(program, model, causal_lm_folder, socket_option):
    prompts = ["The library keeps the context", "Rivers carry water", "Which worker", "1850 and 1999"]

    async def ask(server):
        bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]
        return server.models, await asyncio.gather(*(server.answer(COMPLETIONS, body) for body in bodies))

    models, answers = serving(program, model, ask, socket=socket_option)
    assert models == (model,)
    tokenizer = AutoTokenizer.from_pretrained(causal_lm_folder)
    plain = AutoModelForCausalLM.from_pretrained(causal_lm_folder, dtype=torch.float32)
    alike = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        expected = plain.generate(**ids, max_new_tokens=12, do_sample=False)[0][ids["input_ids"].shape[1] :]
        assert answer["usage"]["prompt_tokens"] == ids["input_ids"].shape[1]
        text = tokenizer.decode(expected, skip_special_tokens=True)
        alike += answer["choices"][0]["text"] == text
    assert alike >= 3  # Its sums have another order.


def test_chats_choices_log_probabilities_schemas_and_cached_prefixes(program, model):
    async def ask(server):
        chat = {"messages": HI, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        answer = await server.answer(CHAT, chat)
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert answer["usage"]["completion_tokens"] == 6
        assert tokens and all(len(each["top_logprobs"]) == 2 for each in tokens)  # Parts of a character are one.
        assert (await server.answer(CHAT, chat))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        several = await server.answer(CHAT, {"messages": HI, "max_tokens": 6, "n": 3, "seed": 1})
        assert [each["index"] for each in several["choices"]] == [0, 1, 2]
        strict = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
        bodies = [{"messages": HI, "response_format": strict, "max_tokens": 200, "seed": seed} for seed in range(4)]
        for each in await asyncio.gather(*(server.answer(CHAT, body) for body in bodies)):
            found = json.loads(each["choices"][0]["message"]["content"])
            assert set(found) == {"verdict", "sure"} and found["verdict"] in ("SUPPORTED", "REFUTED")
        grammar = {"prompt": "Yes or no?", "grammar": 'root ::= "yes" | "no"', "max_tokens": 8}
        assert (await server.answer(COMPLETIONS, grammar))["choices"][0]["text"] in ("yes", "no")

    serving(program, model, ask)


def test_drawn_requests_are_answered_and_the_call_of_a_tool_that_it_passes_over_is_missed(program, model):
    pytest.importorskip("openai")
    from drawn_requests import EACH, drawn_fields, wrong_with

    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}

    async def ask(server):
        body = {"messages": HI, "max_tokens": 100, "tools": [tool], "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            try:
                answer = await respond(server, (CHAT, {**body, "tool_choice": choice}))
            except ItemRefused as refused:
                assert "the answer calls no tool, as tool_choice = " in str(refused)
            else:
                assert answer["choices"][0]["message"]["tool_calls"]
        assert (await respond(server, (CHAT, {**body, "tool_choice": "none"})))["choices"]
        for line in drawn_fields(EACH, ("logprobs", "n", "choices")):
            url = line["url"]
            sent = in_dialect("llama-server", url, as_sent(url, line["body"], "server"))
            written = whole_body(url, await respond(server, (url, sent)), line["custom_id"], 1, "m")
            assert wrong_with(line, written) is None, line

    serving(program, model, ask)


def test_what_it_cannot_answer_is_refused_in_a_sentence(program, model):
    async def ask(server):
        for endpoint, body, sentence in [
            (EMBEDDINGS, {"input": "a"}, "does not support embeddings"),
            (COMPLETIONS, {"max_tokens": 3}, "'prompt' not found"),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "exceeds the available context size"),
            (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "must be number"),
            (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image input is not supported"),
            (COMPLETIONS, {"prompt": "a", "model": "another"}, f"serves {model}, and not the model 'another'"),
        ]:
            with pytest.raises(ItemRefused, match=sentence):
                await server.answer(endpoint, body)
        assert (await server.answer(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": model}))["choices"]

    serving(program, model, ask)


def test_embeddings(program, model):
    async def ask(server):
        answer = await server.answer(EMBEDDINGS, {"input": ["Rivers carry water", "to the sea"]})
        vectors = [each["embedding"] for each in answer["data"]]
        assert [len(vector) for vector in vectors] == [64, 64] and vectors[0] != vectors[1]

    serving(program, model, ask, "-c 512 --embeddings --pooling mean")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_killed_with_requests_in_flight_it_is_a_lost_context(program, model, number):
    async def ask(server):
        body = {"prompt": "Rivers", "max_tokens": 100_000, "ignore_eos": True, "n_predict": -1}
        asked = [asyncio.ensure_future(server.answer(COMPLETIONS, body)) for _ in range(6)]
        await eventually_async(lambda: server._in_flight == 6)
        os.kill(server.pid, number)
        done, _ = await asyncio.wait(asked, timeout=patience())
        assert len(done) == 6
        lost = [each.exception() for each in asked if each.exception()]
        assert lost and {type(each) for each in lost} == {ContextLost}
        assert all(f"was killed by {number.name}" in str(each) for each in lost)

    serving(program, model, ask, "-np 4 -c 2048 --context-shift")


@pytest.mark.parametrize(
    ("more", "given", "sentence"),
    [
        ("--no-such-option 1", True, "ended with exit status 1 before.*invalid argument: --no-such-option"),
        ("-c many", True, "ended with exit status 1 before"),
        ("", False, r"(?s)ended with exit status 1 before.*failed to load model.*nowhere.gguf"),
    ],
)
def test_a_wrong_option_or_file_is_told_with_its_last_lines(program, model, more, given, sentence):
    async def ask(server):
        raise AssertionError("it started")

    with pytest.raises(ServerFailed, match=f"(?s){sentence}"):
        serving(program, model if given else "/nowhere.gguf", ask, more)


def test_options_that_its_program_does_not_have_are_refused_before_it_starts(program):
    check_options(read_command(f"{program} -c 4096 --temp -1", model="x", options={"ctx_size": 1, "jinja": False}))
    wrong = [({"ctx_sise": 1}, "no option --ctx-sise: did you mean --ctx-size?"), ({"Q": 1}, "-Q")]
    for words, (options, sentence) in itertools.product(["", " -m {model}"], wrong):
        with pytest.raises(UsageError, match=sentence):
            check_options(read_command(f"{program}{words}", model="x", options=options))
    check_options(read_command("/no/such/llama-server --whatever"))  # It is not here: the worker will tell.
    choices = {"input": "in", "output": "out", "model": "x", "backend": "server", "server_command": f"{program} -c 1"}
    assert list(engine_problems(Job(**choices))) == []
    [sentence] = engine_problems(Job(**choices, engine_options={"ctx_sise": 1}))
    assert sentence == "llama-server has no option --ctx-sise: did you mean --ctx-size?"


def test_a_port_that_was_taken_meanwhile_is_told(program, model, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(openai_server, "free_port", lambda: port)

        async def ask(server):
            raise AssertionError("it started")

        with pytest.raises(ServerFailed, match=f"port {port} .* was taken|couldn't bind HTTP server socket"):
            serving(program, model, ask, socket="")


def test_as_a_context_whose_file_is_staged(program, model):
    recipe = server.options(files={"model": model}, load_timeout=120)(f"{program} --threads 1 -c 1024 -np 2")

    @item_app(recipe)
    async def ask(engine, prompt):
        answer = await engine.answer(COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
        return answer["usage"]["completion_tokens"]

    with ContextExecutor(workers=1):
        assert list(ask.map(["Rivers", "carry", "water", "to the sea"])) == [4, 4, 4, 4]


def test_its_command_line_has_no_key(program, model):
    async def ask(server):
        words = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        assert b"127.0.0.1" in words and not any(b"key" in word for word in words)
        with pytest.raises(Exception, match="401"):
            import urllib.request

            urllib.request.urlopen(f"http://127.0.0.1:{server._port}/v1/models").read()

    serving(program, model, ask, socket="")
