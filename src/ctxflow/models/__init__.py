"""Ready-made contexts: language models and sentence encoders by transformers, language models by vLLM.

`generator`, `classifier`, `encoder` and `vllm_generator` give recipes for `@batch_app` and `@context_app`; what they
build are `TextGenerator`, `LabelClassifier`, `SentenceEncoder` and `VLLMGenerator`. Importing this package imports no
model library: that happens where a context is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxflow.models.contexts import CLASSES, built_class, classifier, encoder, generator, vllm_generator
from ctxflow.models.model_folder import locate_model
from ctxflow.models.results import (
    Classification,
    Generation,
    MissingPackageError,
    ModelNotFoundError,
    OutOfMemoryError,
    Sampling,
)

if TYPE_CHECKING:
    from ctxflow.models.classify import LabelClassifier
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.generate import TextGenerator
    from ctxflow.models.vllm import VLLMGenerator

__all__ = [
    "Classification", "Generation", "LabelClassifier", "MissingPackageError", "ModelNotFoundError", "OutOfMemoryError",
    "Sampling", "SentenceEncoder", "TextGenerator", "VLLMGenerator", "classifier", "encoder", "generator",
    "locate_model", "vllm_generator",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return built_class(name)
