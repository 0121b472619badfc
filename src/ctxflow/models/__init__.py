"""Ready-made contexts: models by transformers, by vLLM, or by any server that speaks OpenAI's API.

`generator`, `classifier`, `encoder` and `vllm_generator` give recipes for `@batch_app` and `@context_app`; what they
build are `TextGenerator`, `LabelClassifier`, `SentenceEncoder` and `VLLMGenerator`. `vllm_engine`, `server` and
`transformers_engine` give recipes for `@item_app`; what they build, `VLLMEngine`, `OpenAIServer` and
`TransformersEngine`, is an `OpenAIEngine`. Importing this package imports no model library: that happens where a
context is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxflow.models.contexts import (
    CLASSES,
    built_class,
    classifier,
    encoder,
    generator,
    server,
    transformers_engine,
    vllm_engine,
    vllm_generator,
)
from ctxflow.models.model_folder import locate_model
from ctxflow.models.openai_engine import OpenAIEngine
from ctxflow.models.results import (
    Classification,
    Generation,
    MissingPackageError,
    ModelNotFoundError,
    OutOfMemoryError,
    Sampling,
)
from ctxflow.models.weight_reading import read_ahead

if TYPE_CHECKING:
    from ctxflow.models.classify import LabelClassifier
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.generate import TextGenerator
    from ctxflow.models.openai_server import OpenAIServer
    from ctxflow.models.transformers_serving import TransformersEngine
    from ctxflow.models.vllm import VLLMGenerator
    from ctxflow.models.vllm_serving import VLLMEngine

__all__ = [
    "Classification", "Generation", "LabelClassifier", "MissingPackageError", "ModelNotFoundError", "OpenAIEngine",
    "OpenAIServer", "OutOfMemoryError", "Sampling", "SentenceEncoder", "TextGenerator", "TransformersEngine",
    "VLLMEngine", "VLLMGenerator", "classifier", "encoder", "generator", "locate_model", "read_ahead",
    "server", "transformers_engine", "vllm_engine", "vllm_generator",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return built_class(name)
