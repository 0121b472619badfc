"""The ready-made contexts: functions decorated with `@context`, which give recipes.

What they build imports torch, transformers, vLLM or an HTTP client, and so is imported where a context is built
(`built_class`). Their module's name is part of what identifies a context in resume files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.context import context
from ctxflow.models.results import MissingPackageError
from ctxflow.models.weight_reading import read_ahead

if TYPE_CHECKING:
    from ctxflow.models.classify import LabelClassifier
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.generate import TextGenerator
    from ctxflow.models.openai_server import OpenAIServer
    from ctxflow.models.transformers_serving import TransformersEngine
    from ctxflow.models.vllm import VLLMGenerator
    from ctxflow.models.vllm_serving import VLLMEngine

CLASSES = {
    "LabelClassifier": "ctxflow.models.classify",
    "OpenAIServer": "ctxflow.models.openai_server",
    "SentenceEncoder": "ctxflow.models.encode",
    "TextGenerator": "ctxflow.models.generate",
    "TransformersEngine": "ctxflow.models.transformers_serving",
    "VLLMEngine": "ctxflow.models.vllm_serving",
    "VLLMGenerator": "ctxflow.models.vllm",
}
"""What is built, and the module that is imported for it."""


def built_class(name: str) -> Any:
    """Return one of `CLASSES`.

    :raises MissingPackageError: if the libraries that it needs are not installed, saying how to install them.
    """
    try:
        return getattr(importlib.import_module(CLASSES[name]), name)
    except MissingPackageError:
        raise
    except ImportError as error:
        raise MissingPackageError.about("torch", "transformers", extra="transformers", why=error) from error


@context(preload=["ctxflow.models.generate"])
def generator(model: str, **settings: Any) -> TextGenerator:
    """Build a `TextGenerator`: a causal language model that writes text.

    It runs on the CPU or on a GPU that the worker has; `generator.options(gpus=1)(...)` asks for one.
    `generator.options(files={"model": FOLDER})()` stages the folder to the workers and loads it from there.

    :param model: a folder, `package:NAME` or a hub id, found where the context is built.
    :param settings: `dtype`, `device`, `max_batch_tokens` and the other parameters of `TextGenerator`.
    """
    read_ahead(model)
    built: TextGenerator = built_class("TextGenerator")(model, **settings)
    return built


@context(preload=["ctxflow.models.classify"])
def classifier(model: str, **settings: Any) -> LabelClassifier:
    """Build a `LabelClassifier`, like `generator`: a causal language model that chooses among labels."""
    read_ahead(model)
    built: LabelClassifier = built_class("LabelClassifier")(model, **settings)
    return built


@context(preload=["ctxflow.models.encode", "sentence_transformers"])
def encoder(model: str, **settings: Any) -> SentenceEncoder:
    """Build a `SentenceEncoder`, like `generator`: a model that turns texts into vectors."""
    read_ahead(model)
    built: SentenceEncoder = built_class("SentenceEncoder")(model, **settings)
    return built


@context(preload=["asyncio", "ctxflow.models.transformers_serving"])
async def transformers_engine(model: str, **settings: Any) -> TransformersEngine:
    """Build a `TransformersEngine`, like `generator`: an `OpenAIEngine` by transformers, for item apps.

    :param settings: `dtype`, `device`, `too_long` and the other parameters of `TransformersEngine`.
    """
    import asyncio  # Here: this is imported where nothing is built, too.

    read_ahead(model)
    built: TransformersEngine = await asyncio.to_thread(built_class("TransformersEngine"), model, **settings)
    return built


@context(gpus=1, preload=["vllm.v1.engine.async_llm", "ctxflow.models.vllm"])
def vllm_generator(model: str, **settings: Any) -> VLLMGenerator:
    """Build a `VLLMGenerator`, like `generator`: a causal language model in vLLM.

    It asks for one GPU at least, and spreads the model over all that its worker has; `vllm_generator.options(gpus=4)`
    asks for four, and `tensor_parallel_size=1` leaves the others alone.
    """
    read_ahead(model)
    built: VLLMGenerator = built_class("VLLMGenerator")(model, **settings)
    return built


@context(gpus=1, preload=["asyncio", "vllm.v1.engine.async_llm", "ctxflow.models.vllm_serving"])
async def vllm_engine(model: str, **settings: Any) -> VLLMEngine:
    """Build a `VLLMEngine`, for item apps: any model that vLLM has for text or embeddings, asked in OpenAI's form.

    It asks for one GPU at least, and spreads the model over all that its worker has, as `vllm_generator` does.

    :param model: a folder, `package:NAME` or a hub id, found where the context is built.
    :param settings: `adapters`, `silent_seconds`, `options` and the other parameters of `VLLMEngine.start`, and any
        option of vLLM's, by its name as of `vllm serve`.

    >>> vllm_engine("my/model", dtype="bfloat16", max_model_len=4096).gpus
    1
    """
    read_ahead(model)
    built: VLLMEngine = await built_class("VLLMEngine").start(model, **settings)
    return built


@context
async def server(
    command: str | Sequence[str],
    *,
    model: str | os.PathLike[str] | None = None,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    socket: str | None = None,
    port: str | None = None,
    key: str | None = None,
    health: str | None = None,
    env: Mapping[str, str] | None = None,
    unresponsive_seconds: float = 60.0,
) -> OpenAIServer:
    """Start a server that speaks OpenAI's API: `vllm serve`, llama.cpp's `llama-server`, SGLang, TGI, or any other.

    It is a child of the library process, and is ended with all that it started, whoever dies first. What is built is an
    `OpenAIEngine`: an item app awaits `answer(endpoint, body)`. Only this user's processes can reach it: at a UNIX
    socket where it can listen at one, or at a port of this machine with a key that is on no command line; a process
    that listens there in its place is found out before anything is sent. Give the recipe `gpus=` and `load_timeout=` as
    it needs. This needs the extra `server`.

    :param command: as in a shell, or in words. {model}, {socket}, {port}, {key_file} and {folder} (a directory of its
        own) are filled in. For the servers above, leave out where it listens, and its key: what they need is added.
    :param model: a path, `package:NAME` or a hub id that the server fetches itself.
        `server.options(files={"model": FILE})("llama-server")` stages a file or folder to the workers.
    :param kind: "llama-server", "vllm", "sglang" or "tgi" where the command's program does not tell; "other" if it is
        none of them.
    :param options: further options by name: {"ctx_size": 4096} becomes `--ctx-size 4096`, True the option alone, False
        `--no-...`, a list several words, a dict JSON.
    :param socket: of another server, the options with which it listens at a UNIX socket: "--uds {socket}".
    :param port: or those with which it listens at a port: "--host 127.0.0.1 --port {port}".
    :param key: how it gets its key: the name of an environment variable, or "--api-key-file {key_file}".
    :param health: the path that answers 200 once it can serve; "/health" by default.
    :param env: environment variables for it alone.
    :param unresponsive_seconds: how long it may neither answer at `health` nor run, while requests are in flight,
        before it is given up; 5 or more. Long prompts and compiling do not count: servers answer there meanwhile, and
        one that computes is waited for ten times as long.
    :raises UsageError: for a command that cannot be started, or not safely, saying what to write.
    :raises ServerFailed: if it ends before it can serve, with the last lines that it printed.

    >>> server("llama-server -c 8192", model="model.gguf")
    <context server('llama-server -c 8192', model='model.gguf')>
    """
    from ctxflow.models.openai_server import start_server

    if model is not None:
        read_ahead(model)
    return await start_server(
        command, model=model, kind=kind, options=options, socket=socket, port=port, key=key, health=health, env=env,
        unresponsive_seconds=unresponsive_seconds,
    )  # fmt: skip
