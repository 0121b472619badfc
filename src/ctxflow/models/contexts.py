"""The ready-made contexts: functions decorated with `@context`, which give recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxflow.context import context

if TYPE_CHECKING:
    from ctxflow.models.classify import LabelClassifier
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.generate import TextGenerator
    from ctxflow.models.vllm import VLLMGenerator


@context
def generator(model: str, **settings: Any) -> TextGenerator:
    """A causal language model that writes text: builds a `TextGenerator`.

    It runs on the CPU or on a GPU that the worker has; `generator.options(gpus=1)(...)` asks for one.
    `generator.options(files={"model": FOLDER})()` stages the folder to the workers and loads it from there.

    :param model: a folder, `package:NAME` or a hub id, found where the context is built.
    :param settings: `dtype`, `device`, `max_batch_tokens` and the other parameters of `TextGenerator`.
    """
    from ctxflow.models import TextGenerator

    return TextGenerator(model, **settings)


@context
def classifier(model: str, **settings: Any) -> LabelClassifier:
    """A causal language model that chooses among labels: builds a `LabelClassifier`, like `generator`."""
    from ctxflow.models import LabelClassifier

    return LabelClassifier(model, **settings)


@context
def encoder(model: str, **settings: Any) -> SentenceEncoder:
    """A model that turns texts into vectors: builds a `SentenceEncoder`, like `generator`."""
    from ctxflow.models import SentenceEncoder

    return SentenceEncoder(model, **settings)


@context(gpus=1)
def vllm_generator(model: str, **settings: Any) -> VLLMGenerator:
    """A causal language model in vLLM: builds a `VLLMGenerator`, like `generator`.

    It asks for one GPU at least, and spreads the model over all that its worker has; `vllm_generator.options(gpus=4)`
    asks for four, and `tensor_parallel_size=1` leaves the others alone.
    """
    from ctxflow.models import VLLMGenerator

    return VLLMGenerator(model, **settings)
