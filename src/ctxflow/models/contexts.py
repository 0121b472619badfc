"""The ready-made contexts: functions decorated with `@context`, which give recipes.

What they build imports torch, transformers or vLLM, and so is imported where a context is built (`built_class`). Their
module's name is part of what identifies a context in resume files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ctxflow.context import context
from ctxflow.models.results import MissingPackageError

if TYPE_CHECKING:
    from ctxflow.models.classify import LabelClassifier
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.generate import TextGenerator
    from ctxflow.models.vllm import VLLMGenerator

CLASSES = {
    "LabelClassifier": "ctxflow.models.classify",
    "SentenceEncoder": "ctxflow.models.encode",
    "TextGenerator": "ctxflow.models.generate",
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


@context
def generator(model: str, **settings: Any) -> TextGenerator:
    """Build a `TextGenerator`: a causal language model that writes text.

    It runs on the CPU or on a GPU that the worker has; `generator.options(gpus=1)(...)` asks for one.
    `generator.options(files={"model": FOLDER})()` stages the folder to the workers and loads it from there.

    :param model: a folder, `package:NAME` or a hub id, found where the context is built.
    :param settings: `dtype`, `device`, `max_batch_tokens` and the other parameters of `TextGenerator`.
    """
    built: TextGenerator = built_class("TextGenerator")(model, **settings)
    return built


@context
def classifier(model: str, **settings: Any) -> LabelClassifier:
    """Build a `LabelClassifier`, like `generator`: a causal language model that chooses among labels."""
    built: LabelClassifier = built_class("LabelClassifier")(model, **settings)
    return built


@context
def encoder(model: str, **settings: Any) -> SentenceEncoder:
    """Build a `SentenceEncoder`, like `generator`: a model that turns texts into vectors."""
    built: SentenceEncoder = built_class("SentenceEncoder")(model, **settings)
    return built


@context(gpus=1)
def vllm_generator(model: str, **settings: Any) -> VLLMGenerator:
    """Build a `VLLMGenerator`, like `generator`: a causal language model in vLLM.

    It asks for one GPU at least, and spreads the model over all that its worker has; `vllm_generator.options(gpus=4)`
    asks for four, and `tensor_parallel_size=1` leaves the others alone.
    """
    built: VLLMGenerator = built_class("VLLMGenerator")(model, **settings)
    return built
